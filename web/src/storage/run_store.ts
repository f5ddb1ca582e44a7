// run_store.ts: the runs of a place: listed, made, opened, renamed, removed, taken in and given out as one file.
//
// What this is: the interface that pages and workers use, and the store in this browser. A folder's own name
// never changes, because OPFS cannot rename folders everywhere: what a person calls a run, and that it was
// removed, stands in `.tab.json` beside it, one small file written in one piece.
// What this is not: what stands in a run (run_handle.ts). The store behind `posttrainllm play` is server_store.ts.
import type { Settings } from "../runtime/tables.ts";
import { checkpointFolders, identityOf, readState } from "./checkpoint.ts";
import type { CorpusIdentity } from "./checkpoint.ts";
import { fromToml, presetOf, toToml } from "./config.ts";
import { StorageError, writeError } from "./errors.ts";
import type { Bytes, Files, Shelf } from "./files.ts";
import { formsOf } from "./forms.ts";
import { askToKeep } from "./keep.ts";
import { heldLocks, takeLock, withLock } from "./locks.ts";
import type { Release } from "./locks.ts";
import { RunHandle } from "./run_handle.ts";
import type { Surroundings } from "./run_handle.ts";
import { checkName, freeName, nextName, plainName } from "./run_name.ts";
import { summaryOf } from "./run_summary.ts";
import type { RunSummary } from "./run_summary.ts";
import { runFiles, unpackRun } from "./run_zip.ts";
import { readObject, utf8, writeJson } from "./text_forms.ts";
import { zipOf } from "./zip_write.ts";

/** The text of a new run; one that the site brings along is not kept again. */
export interface RunText {
  readonly name: string;
  readonly text: Bytes;
  readonly bundled: boolean;
}

export interface Usage {
  readonly bytes: number;
  readonly quota: number | null;
  /** Whether the browser keeps it when it runs out of room; null where that is no question. */
  readonly persisted: boolean | null;
}

/** Brings back what was removed; the name it has then. */
export type Undo = () => Promise<string>;

export interface RunStore {
  readonly place: "tab" | "server";
  /** Whether runs are still there after the page is closed. */
  readonly lasting: boolean;
  list(): Promise<RunSummary[]>;
  /** Holds the run until it is closed; without a name it is "small-001" or the next. */
  create(name: string | undefined, settings: Settings, text: RunText): Promise<RunHandle>;
  /** "write" holds the run until it is closed; throws a StorageError when another tab does. */
  open(name: string, mode?: "read" | "write"): Promise<RunHandle>;
  rename(name: string, to: string): Promise<void>;
  remove(name: string): Promise<Undo>;
  usage(): Promise<Usage>;
  exportZip(name: string): Promise<Blob>;
  /** The name that the run has here. */
  importZip(file: Blob, fileName: string): Promise<string>;
  /** A run that is put together by `fill`, which may name it; nothing is left when that fails. */
  arriving(wanted: string, fill: (files: Files, name: string) => Promise<string>): Promise<string>;
}

interface Mark {
  readonly name: string;
  /** When it was removed, in milliseconds since 1970; null when it is there. */
  readonly removed: number | null;
  /** Not all of it has arrived. */
  readonly arriving: boolean;
}

interface Kept extends Mark {
  readonly folder: string;
  readonly files: Files;
}

const MARK = ".tab.json";
const KEPT_MS = 24 * 3600 * 1000; // how long a removed run can come back
const CHANGES = "posttrainllm:runs"; // the lock for names
const lockKey = (folder: string): string => `posttrainllm:run:${folder}`;

export class BrowserStore implements RunStore {
  readonly place = "tab";
  readonly lasting: boolean;
  readonly #shelf: Shelf;
  readonly #around: Surroundings;

  constructor(shelf: Shelf, around: Surroundings, lasting: boolean) {
    this.#shelf = shelf;
    this.#around = around;
    this.lasting = lasting;
  }

  async list(): Promise<RunSummary[]> {
    const locked = await heldLocks();
    const found: RunSummary[] = [];
    for (const kept of await this.#all()) {
      if (kept.removed !== null || kept.arriving) continue;
      found.push(await summaryOf(kept.name, kept.files, this.#around.tables, locked.has(lockKey(kept.folder))));
    }
    return found.sort((a, b) => (b.modified ?? 0) - (a.modified ?? 0) || (a.name < b.name ? -1 : 1));
  }

  async create(name: string | undefined, settings: Settings, text: RunText): Promise<RunHandle> {
    const { tables } = this.#around;
    const { names, max_name_bytes: most, bundled_corpus: bundled } = formsOf(tables);
    if (name !== undefined) checkName(name, most);
    const corpus = await identityOf(text.name, text.text);
    const { folder, files, called } = await withLock(CHANGES, async () => {
      const taken = await this.#names();
      if (name !== undefined && taken.has(name)) {
        throw new StorageError(`there is a run ${name} already`, "go on with it, or give another name");
      }
      return this.#claim(name ?? nextName(presetOf(tables, settings), taken), false);
    });
    const release = await this.#lock(folder, called);
    try {
      if (corpus.sha256 !== bundled.sha256) await files.write(names.corpus, [text.text]);
      await files.write(names.run_config, [utf8(toToml(tables, settings))]);
    } catch (error) {
      await this.#shelf.delete(folder).catch(() => undefined);
      release();
      throw writeError(`create run ${called}`, error);
    }
    void askToKeep();
    return new RunHandle(called, files, settings, corpus, this.#around, release);
  }

  async open(name: string, mode: "read" | "write" = "read"): Promise<RunHandle> {
    const { folder, files } = await this.#find(name);
    const release = mode === "write" ? await this.#lock(folder, name) : (): void => undefined;
    try {
      const { run_config: config } = formsOf(this.#around.tables).names;
      const settings = fromToml(this.#around.tables, new TextDecoder().decode(await files.read(config)), `${name}/${config}`);
      return new RunHandle(name, files, settings, await this.#identity(files), this.#around, release);
    } catch (error) {
      release();
      throw error;
    }
  }

  /** Which text a run was trained on: the newest checkpoint says it, or the text that it keeps. */
  async #identity(files: Files): Promise<CorpusIdentity | null> {
    const { tables } = this.#around;
    for (const folder of [...(await checkpointFolders(files)).values()].reverse()) {
      const state = await readState(files, folder, tables).catch(() => null);
      if (state !== null) return state.corpus;
    }
    const { corpus } = formsOf(tables).names;
    return (await files.size(corpus)) === null ? null : identityOf(corpus, await files.read(corpus));
  }

  async rename(name: string, to: string): Promise<void> {
    checkName(to, formsOf(this.#around.tables).max_name_bytes);
    await withLock(CHANGES, async () => {
      const kept = await this.#find(name);
      if (to !== name && (await this.#names()).has(to)) throw new StorageError(`there is a run ${to} already`, "give another name");
      await this.#mark(kept.files, { name: to, removed: null, arriving: false }).catch((error: unknown) => {
        throw writeError(`rename run ${name}`, error);
      });
    });
  }

  async remove(name: string): Promise<Undo> {
    const { folder, files } = await this.#find(name);
    const release = await this.#lock(folder, name);
    try {
      await this.#mark(files, { name, removed: Date.now(), arriving: false });
    } catch {
      await this.#shelf.delete(folder); // a browser that is full has no room to remember it, and deleting is to make some
    } finally {
      release();
    }
    return () => this.#restore(folder);
  }

  async #restore(folder: string): Promise<string> {
    return withLock(CHANGES, async () => {
      const kept = (await this.#all()).find((one) => one.folder === folder);
      if (kept === undefined) throw new StorageError("this run is gone for good", "its room was freed, or the browser was too full to remember it");
      const name = freeName(kept.name, await this.#names());
      await this.#mark(kept.files, { name, removed: null, arriving: false });
      return name;
    });
  }

  /** Runs that were removed and can come back, the last one first. */
  async removed(): Promise<{ id: string; name: string; bytes: number; restore: Undo }[]> {
    const gone = (await this.#all()).filter((kept) => kept.removed !== null);
    gone.sort((a, b) => (b.removed ?? 0) - (a.removed ?? 0));
    return Promise.all(gone.map(async ({ name, folder, files }) => {
      const bytes = (await files.list()).reduce((sum, file) => sum + file.bytes, 0);
      return { id: folder, name, bytes, restore: () => this.#restore(folder) };
    }));
  }

  /** Frees the room of what was removed longer ago than a time, and of what never arrived. */
  async purge(olderThanMs = KEPT_MS): Promise<void> {
    const locked = await heldLocks();
    for (const { folder, removed, arriving } of await this.#all()) {
      const old = removed !== null && Date.now() - removed >= olderThanMs;
      if ((old || arriving) && !locked.has(lockKey(folder))) await this.#shelf.delete(folder);
    }
  }

  async usage(): Promise<Usage> {
    let bytes = 0;
    for (const { files } of await this.#all()) for (const file of await files.list()) bytes += file.bytes;
    const storage = this.lasting ? (navigator.storage as StorageManager | undefined) : undefined; // only https has it
    const quota = (await storage?.estimate?.().catch(() => null))?.quota ?? null;
    return { bytes, quota, persisted: (await storage?.persisted?.().catch(() => null)) ?? null };
  }

  async exportZip(name: string): Promise<Blob> {
    const { files } = await this.#find(name);
    return zipOf(await runFiles(files, name));
  }

  async importZip(file: Blob, fileName: string): Promise<string> {
    return this.arriving(fileName.replace(/\.zip$/i, "").slice(0, 60), async (files, name) => {
      const { quota, bytes } = await this.usage();
      return unpackRun(file, fileName, files, this.#around.tables, quota === null ? Infinity : quota - bytes).then((given) => given ?? name);
    });
  }

  /** A run that is put together by `fill` and is there at once when all of it is; `fill` may name it. */
  async arriving(wanted: string, fill: (files: Files, name: string) => Promise<string>): Promise<string> {
    const { max_name_bytes: most } = formsOf(this.#around.tables);
    const { folder, files } = await withLock(CHANGES, () => this.#claim(plainName(wanted, most), true));
    const release = await this.#lock(folder, wanted);
    try {
      const name = plainName(await fill(files, wanted), most);
      return await withLock(CHANGES, async () => {
        const called = freeName(name, await this.#names());
        await this.#mark(files, { name: called, removed: null, arriving: false });
        return called;
      });
    } catch (error) {
      await this.#shelf.delete(folder).catch(() => undefined);
      throw writeError(`open ${wanted}`, error);
    } finally {
      release();
      void askToKeep();
    }
  }

  async #lock(folder: string, name: string): Promise<Release> {
    const release = await takeLock(lockKey(folder));
    if (release === null) {
      throw new StorageError(`run ${name} is open on the Train page, here or in another tab`, "go on there, or leave it there first");
    }
    return release;
  }

  /** A new folder for a name; its own name may differ. */
  async #claim(called: string, arriving: boolean): Promise<{ folder: string; files: Files; called: string }> {
    const folder = freeName(called, new Set(await this.#shelf.names()));
    try {
      const files = await this.#shelf.create(folder);
      await this.#mark(files, { name: called, removed: null, arriving });
      return { folder, files, called };
    } catch (error) {
      await this.#shelf.delete(folder).catch(() => undefined);
      throw writeError(`create run ${called}`, error);
    }
  }

  async #mark(files: Files, mark: Mark): Promise<void> {
    await files.write(MARK, [utf8(writeJson(mark))]);
  }

  async #all(): Promise<Kept[]> {
    const found: Kept[] = [];
    for (const folder of await this.#shelf.names()) {
      const files = await this.#shelf.open(folder).catch(() => null);
      if (files === null) continue; // another tab has just freed its room
      let mark: Mark = { name: folder, removed: null, arriving: false };
      try {
        if ((await files.size(MARK)) !== null) mark = { ...mark, ...readObject(await files.read(MARK), MARK) };
      } catch {
        // half-written when the tab died: the folder's own name will do
      }
      found.push({ ...mark, folder, files });
    }
    return found;
  }

  async #names(): Promise<Set<string>> {
    return new Set((await this.#all()).filter((kept) => kept.removed === null && !kept.arriving).map((kept) => kept.name));
  }

  async #find(name: string): Promise<Kept> {
    const found = (await this.#all()).find((kept) => kept.name === name && kept.removed === null && !kept.arriving);
    if (found === undefined) throw new StorageError(`there is no run ${name} in this browser`, "it was removed, or is kept in another browser");
    return found;
  }
}

/** Bytes that the browser still gives this page; null when it does not say. */
export async function roomInBrowser(): Promise<number | null> {
  const storage = (globalThis.navigator as Navigator | undefined)?.storage as StorageManager | undefined;
  const found = await storage?.estimate?.().catch(() => undefined);
  return found?.quota === undefined || found.usage === undefined ? null : found.quota - found.usage;
}
