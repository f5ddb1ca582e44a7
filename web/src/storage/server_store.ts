// server_store.ts: the runs in the folder that `posttrainllm play` serves: those of the terminal, and of tabs that save there.
//
// A tab that writes a run holds it by a connection that stays open; the server refuses everybody else meanwhile.
import type { Settings } from "../runtime/tables.ts";
import { checkpointFolders, identityOf, readState } from "./checkpoint.ts";
import type { CorpusIdentity } from "./checkpoint.ts";
import { fromToml, presetOf, toToml } from "./config.ts";
import { StorageError, writeError } from "./errors.ts";
import type { Files } from "./files.ts";
import { formsOf } from "./forms.ts";
import { RunHandle } from "./run_handle.ts";
import type { Surroundings } from "./run_handle.ts";
import { checkName, freeName, nextName, plainName } from "./run_name.ts";
import type { RunStore, RunText, Undo, Usage } from "./run_store.ts";
import type { RunSummary } from "./run_summary.ts";
import { runFiles, unpackRun } from "./run_zip.ts";
import { ServerFiles } from "./server_files.ts";
import type { Api, Hold } from "./server_files.ts";
import { utf8 } from "./text_forms.ts";
import { zipOf } from "./zip_write.ts";

interface Row {
  readonly name: string;
  readonly preset: string | null;
  readonly state: RunSummary["state"];
  readonly step: number;
  readonly steps: number | null;
  readonly loss: number | null;
  readonly best_val_loss: number | null;
  readonly bytes: number;
  readonly modified: string | null;
}

interface Listing {
  readonly runs: readonly Row[];
  readonly free: number | null;
}

const summary = (row: Row): RunSummary => ({
  name: row.name, preset: row.preset, state: row.state, step: row.step, steps: row.steps, checkpoint: null, loss: row.loss,
  bestValLoss: row.best_val_loss, bytes: row.bytes, modified: row.modified === null ? null : Date.parse(row.modified),
  problem: row.state === "damaged" ? "its files do not hold together: posttrainllm runs show says more" : null,
});

export class ServerStore implements RunStore {
  readonly place = "server";
  readonly lasting = true;
  readonly #api: Api;
  readonly #around: Surroundings;
  readonly #root: URL;

  constructor(api: Api, root: string | URL, around: Surroundings) {
    this.#api = api;
    this.#root = new URL(root);
    this.#around = around;
  }

  #listing(): Promise<Listing> {
    return this.#api.json("GET", "runs") as unknown as Promise<Listing>;
  }

  async list(): Promise<RunSummary[]> {
    return (await this.#listing()).runs.map(summary);
  }

  /**
   * Tells a page of every change of the list until it is told to stop. A page that nobody sees lets its connection go:
   * a browser has six for all tabs of one server.
   */
  watch(changed: (runs: RunSummary[]) => void): () => void {
    let events: EventSource | null = null;
    const follow = (): void => {
      events?.close();
      events = document.hidden ? null : new EventSource(new URL("api/events", this.#root));
      events?.addEventListener("runs", (event) => {
        changed((JSON.parse((event as MessageEvent<string>).data) as readonly Row[]).map(summary));
      });
    };
    document.addEventListener("visibilitychange", follow);
    follow();
    return () => {
      document.removeEventListener("visibilitychange", follow);
      events?.close();
    };
  }

  async create(name: string | undefined, settings: Settings, text: RunText): Promise<RunHandle> {
    const { tables } = this.#around;
    const { names, bundled_corpus: bundled } = formsOf(tables);
    const corpus = await identityOf(text.name, text.text);
    const called = await this.#claim(name, presetOf(tables, settings));
    const files = new ServerFiles(this.#api, called);
    const release = await this.#hold(files, called);
    try {
      if (corpus.sha256 !== bundled.sha256) await files.write(names.corpus, [text.text]);
      await files.write(names.run_config, [utf8(toToml(tables, settings))]);
    } catch (error) {
      release();
      await this.#api.ask("DELETE", `runs/${encodeURIComponent(called)}`).catch(() => undefined);
      throw writeError(`create run ${called}`, error);
    }
    return new RunHandle(called, files, settings, corpus, this.#around, release);
  }

  /** Makes the folder of a run; without a name it is the next that is free, also when another one takes it meanwhile. */
  async #claim(name: string | undefined, base: string): Promise<string> {
    if (name !== undefined) checkName(name, formsOf(this.#around.tables).max_name_bytes);
    for (let tries = 0; ; tries++) {
      const called = name ?? nextName(base, new Set((await this.list()).map((run) => run.name)));
      try {
        await this.#api.json("POST", "runs", { name: called });
        return called;
      } catch (error) {
        if (name !== undefined || tries >= 5) throw error;
      }
    }
  }

  async open(name: string, mode: "read" | "write" = "read"): Promise<RunHandle> {
    const { tables } = this.#around;
    const files = new ServerFiles(this.#api, name);
    const release = mode === "write" ? await this.#hold(files, name) : (): void => undefined;
    try {
      const { run_config: config } = formsOf(tables).names;
      const settings = fromToml(tables, new TextDecoder().decode(await files.read(config)), `${name}/${config}`);
      return new RunHandle(name, files, settings, await this.#identity(files), this.#around, release);
    } catch (error) {
      release();
      throw error;
    }
  }

  async #identity(files: ServerFiles): Promise<CorpusIdentity | null> {
    const newest = [...(await checkpointFolders(files)).values()].at(-1);
    return newest === undefined ? null : (await readState(files, newest, this.#around.tables)).corpus;
  }

  /** Holds a run until it is given back; the files take it again when the server has been away. */
  async #hold(files: ServerFiles, name: string): Promise<() => void> {
    const hold = new ServerHold(new URL(`api/runs/${encodeURIComponent(name)}/hold`, this.#root), name);
    await hold.take();
    files.hold = hold;
    return () => {
      files.hold = null;
      hold.release();
    };
  }

  async rename(name: string, to: string): Promise<void> {
    checkName(to, formsOf(this.#around.tables).max_name_bytes);
    await this.#api.json("POST", `runs/${encodeURIComponent(name)}/rename`, { name: to });
  }

  async remove(name: string): Promise<Undo> {
    const { id } = await this.#api.json("DELETE", `runs/${encodeURIComponent(name)}`);
    return async () => String((await this.#api.json("POST", `runs/${encodeURIComponent(name)}/restore`, { id }))["name"]);
  }

  async usage(): Promise<Usage> {
    const { runs, free } = await this.#listing();
    const bytes = runs.reduce((sum, run) => sum + run.bytes, 0);
    return { bytes, quota: free === null ? null : bytes + free, persisted: null };
  }

  async exportZip(name: string): Promise<Blob> {
    return zipOf(await runFiles(new ServerFiles(this.#api, name), name));
  }

  async importZip(file: Blob, fileName: string): Promise<string> {
    const room = (await this.#listing()).free ?? Infinity;
    return this.arriving(fileName.replace(/\.zip$/i, ""), async (files, name) =>
      (await unpackRun(file, fileName, files, this.#around.tables, room)) ?? name);
  }

  /** A run that is put together by `fill`, which may name it; nothing is left when that fails. */
  async arriving(wanted: string, fill: (files: Files, name: string) => Promise<string>): Promise<string> {
    const { max_name_bytes: most } = formsOf(this.#around.tables);
    const taken = new Set((await this.list()).map((run) => run.name));
    const plain = plainName(wanted, most);
    const called = await this.#claim(freeName(plain, taken), plain);
    try {
      const name = plainName(await fill(new ServerFiles(this.#api, called), called), most);
      if (name === called || taken.has(name)) return called;
      await this.rename(called, name);
      return name;
    } catch (error) {
      await this.#api.ask("DELETE", `runs/${encodeURIComponent(called)}`).catch(() => undefined);
      throw writeError(`open ${wanted}`, error);
    }
  }
}

class ServerHold implements Hold {
  readonly #address: URL;
  readonly #name: string;
  #connection = new AbortController();
  #token: string | null = null;

  constructor(address: URL, name: string) {
    this.#address = address;
    this.#name = name;
  }

  get token(): string | null {
    return this.#token;
  }

  async take(): Promise<void> {
    const connection = (this.#connection = new AbortController());
    const response = await fetch(this.#address, { signal: connection.signal, cache: "no-store" }).catch(() => null);
    if (response === null) throw new StorageError("the playground's server does not answer", "is `posttrainllm play` still running? nothing is lost here");
    if (!response.ok || response.body === null) {
      const told = await response.json().catch(() => ({})) as { error?: string; hint?: string };
      const gone = response.status === 404 ? "when it was deleted, bring it back on the Runs page" : "";
      throw new StorageError(told.error ?? `run ${this.#name} cannot be opened: the server says ${response.status}`, told.hint || gone);
    }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let told = "";
    while (!told.includes("\n\n")) {
      const { done, value } = await reader.read();
      if (done) throw new StorageError(`run ${this.#name} cannot be opened: the server hung up`);
      told += value;
    }
    this.#token = (JSON.parse(/^data: (.*)$/m.exec(told)?.[1] ?? "{}") as { token?: string }).token ?? null;
    void this.#keep(reader, connection);
  }

  /** Reads the connection so that it stays open; its end is the end of the hold. */
  async #keep(reader: ReadableStreamDefaultReader<string>, connection: AbortController): Promise<void> {
    try {
      while (!(await reader.read()).done);
    } catch {
      // the run was given back, or the server ended
    }
    if (connection === this.#connection) this.#token = null;
  }

  release(): void {
    this.#token = null;
    this.#connection.abort();
  }
}
