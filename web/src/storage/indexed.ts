// indexed.ts: folders in IndexedDB, for pages that are given no file system: plain http in a class room, some private
// windows. Page and workers see the same files, as they do in OPFS.
//
// A file is one value, written in one piece; sizes and times stand beside the contents, so that a list reads no file.
import { joined, missing } from "./files.ts";
import type { Bytes, Chunks, FileEntry, Files, Shelf } from "./files.ts";

interface Entry {
  readonly bytes: number;
  readonly modified: number;
}

const [DATABASE, ENTRIES, CONTENTS] = ["posttrainllm-runs", "entries", "contents"];
let opened: Promise<IDBDatabase> | undefined;

function database(): Promise<IDBDatabase> {
  opened ??= new Promise((done, failed) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => [ENTRIES, CONTENTS].forEach((name) => request.result.createObjectStore(name));
    request.onerror = () => failed(request.error);
    request.onsuccess = () => {
      request.result.onclose = () => (opened = undefined); // a person cleared it: the next one makes it anew
      request.result.onversionchange = () => request.result.close();
      done(request.result);
    };
  });
  opened.catch(() => (opened = undefined));
  return opened;
}

/** One transaction: all of it, or nothing. `work` gives what to return when it is done. */
async function within<T>(mode: IDBTransactionMode, work: (entries: IDBObjectStore, contents: IDBObjectStore) => () => T): Promise<T> {
  const transaction = (await database()).transaction([ENTRIES, CONTENTS], mode);
  return new Promise((done, failed) => {
    const result = work(transaction.objectStore(ENTRIES), transaction.objectStore(CONTENTS));
    transaction.oncomplete = () => done(result());
    transaction.onabort = () => failed(transaction.error ?? new Error("the browser closed its database"));
  });
}

/** All keys that begin with a text. */
const below = (start: string): IDBKeyRange => IDBKeyRange.bound(start, `${start}\uffff`);
/** The key of a folder, and what those of its files begin with. */
const rootOf = (folder: string): string => `${folder}/`;

class IndexedFiles implements Files {
  readonly #root: string;
  #last: { readonly path: string; readonly entry: Entry; readonly content: Bytes } | null = null;

  constructor(folder: string) {
    this.#root = rootOf(folder);
  }

  async list(): Promise<FileEntry[]> {
    const [keys, entries] = await within("readonly", (store) => {
      const [names, values] = [store.getAllKeys(below(this.#root)), store.getAll(below(this.#root))];
      return () => [names.result as string[], values.result as Entry[]] as const;
    });
    const found = keys.map((key, k) => ({ path: key.slice(this.#root.length), bytes: entries[k]?.bytes ?? 0, modified: entries[k]?.modified ?? 0 }));
    return found.filter(({ path }) => path !== "");
  }

  #entry(path: string): Promise<Entry | undefined> {
    return within("readonly", (store) => {
      const found = store.get(this.#root + path);
      return () => found.result as Entry | undefined;
    });
  }

  async size(path: string): Promise<number | null> {
    return (await this.#entry(path))?.bytes ?? null;
  }

  async read(path: string, from = 0, to?: number): Promise<Bytes> {
    return (await this.#content(path)).slice(from, to);
  }

  /** A file that is read part by part is fetched once. */
  async #content(path: string): Promise<Bytes> {
    const entry = await this.#entry(path);
    if (entry === undefined) throw missing(path);
    const known = this.#last;
    if (known?.path === path && known.entry.modified === entry.modified && known.entry.bytes === entry.bytes) return known.content;
    const content = await within("readonly", (_, store) => {
      const found = store.get(this.#root + path);
      return () => found.result as Bytes | undefined;
    });
    if (content === undefined) throw missing(path);
    this.#last = { path, entry, content };
    return content;
  }

  async blob(path: string): Promise<Blob> {
    return new Blob([await this.read(path)]);
  }

  async write(path: string, content: Chunks): Promise<void> {
    await this.#put(path, 0, await joined(content));
  }

  append(path: string, at: number, content: Bytes): Promise<void> {
    return this.#put(path, at, content);
  }

  async #put(path: string, at: number, content: Bytes): Promise<void> {
    this.#last = null;
    const key = this.#root + path;
    await within("readwrite", (entries, contents) => {
      const keep = (before: Bytes): void => {
        const all = new Uint8Array(before.length + content.length);
        all.set(before);
        all.set(content, before.length);
        contents.put(all, key);
        entries.put({ bytes: all.length, modified: Date.now() } satisfies Entry, key);
      };
      entries.put({ bytes: 0, modified: Date.now() } satisfies Entry, this.#root); // the folder, should it have been cleared
      if (at === 0) keep(new Uint8Array(0));
      else {
        const found = contents.get(key);
        found.onsuccess = () => keep(((found.result as Bytes | undefined) ?? new Uint8Array(0)).subarray(0, at));
      }
      return () => undefined;
    });
  }

  async remove(path: string): Promise<void> {
    await removed([this.#root + path, below(`${this.#root}${path}/`)]);
  }
}

async function removed(what: readonly (string | IDBKeyRange)[]): Promise<void> {
  await within("readwrite", (entries, contents) => {
    for (const keys of what) for (const store of [entries, contents]) store.delete(keys);
    return () => undefined;
  });
}

class IndexedShelf implements Shelf {
  async names(): Promise<string[]> {
    const keys = await within("readonly", (store) => {
      const found = store.getAllKeys();
      return () => found.result as string[];
    });
    return keys.filter((key) => key.endsWith("/")).map((key) => key.slice(0, -1));
  }

  async create(name: string): Promise<Files> {
    await within("readwrite", (entries) => {
      entries.put({ bytes: 0, modified: Date.now() } satisfies Entry, rootOf(name));
      return () => undefined;
    });
    return new IndexedFiles(name);
  }

  async open(name: string): Promise<Files> {
    if (!(await this.names()).includes(name)) throw missing(name);
    return new IndexedFiles(name);
  }

  async delete(name: string): Promise<void> {
    await removed([below(rootOf(name))]);
  }
}

/** Folders in IndexedDB; null where a browser gives a page none. */
export async function openIndexed(): Promise<Shelf | null> {
  try {
    await database();
    return new IndexedShelf();
  } catch {
    return null;
  }
}
