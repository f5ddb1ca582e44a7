// opfs.ts: folders in the browser's own file system (OPFS), in pages and in workers.
//
// A worker writes through a sync access handle, which every browser with OPFS has; a page through a
// writable stream, which goes to a copy and takes the name when it is closed, or, where there are none
// (Safari before 26), through a worker of its own (opfs_writer.ts).
// Every path is followed from the top: a person can clear the storage of a page that is open, and no handle
// into it leads anywhere then, while what is written afterwards makes its folders anew.
import type { Bytes, Chunks, FileEntry, Files, Shelf } from "./files.ts";
import { joined, missing } from "./files.ts";

/** What the DOM library lacks: sync handles are for workers, entries of a folder are newer. */
interface SyncHandle {
  write(data: Bytes, options: { at: number }): number;
  truncate(size: number): void;
  flush(): void;
  close(): void;
}
type FileHandle = FileSystemFileHandle & { createSyncAccessHandle?(): Promise<SyncHandle> };
type Folder = FileSystemDirectoryHandle & { entries(): AsyncIterable<[string, FileSystemHandle]> };

/** Null for what is not there; any other error goes on. */
function orNull(error: unknown): null {
  if (error instanceof DOMException && error.name === "NotFoundError") return null;
  throw error;
}

const RUNS = "runs";

/** A folder below `runs`. When it is not there and not to be made, `orNull` takes the error. */
async function folderAt(parts: readonly string[], create: boolean): Promise<Folder> {
  let folder = (await navigator.storage.getDirectory()) as Folder;
  for (const part of [RUNS, ...parts]) folder = (await folder.getDirectoryHandle(part, { create })) as Folder;
  return folder;
}

class OpfsFiles implements Files {
  readonly #name: string;

  constructor(name: string) {
    this.#name = name;
  }

  async #folder(path: string, create: boolean): Promise<[Folder, string]> {
    const parts = path.split("/");
    const name = parts.pop() ?? "";
    return [await folderAt([this.#name, ...parts], create), name];
  }

  async #file(path: string): Promise<File | null> {
    const [folder, name] = (await this.#folder(path, false).catch(orNull)) ?? [null, ""];
    const handle = await folder?.getFileHandle(name).catch(orNull);
    return (await handle?.getFile().catch(orNull)) ?? null;
  }

  async list(): Promise<FileEntry[]> {
    const found: FileEntry[] = [];
    const walk = async (folder: Folder, before: string): Promise<void> => {
      for await (const [name, handle] of folder.entries()) {
        const path = before + name;
        if (handle.kind === "directory") await walk(handle as Folder, `${path}/`);
        else {
          const file = await (handle as FileSystemFileHandle).getFile().catch(() => null); // removed meanwhile
          if (file !== null) found.push({ path, bytes: file.size, modified: file.lastModified });
        }
      }
    };
    const top = await folderAt([this.#name], false).catch(orNull);
    if (top !== null) await walk(top, "");
    return found;
  }

  async size(path: string): Promise<number | null> {
    return (await this.#file(path))?.size ?? null;
  }

  async read(path: string, from = 0, to?: number): Promise<Bytes> {
    return new Uint8Array(await (await this.blob(path)).slice(from, to).arrayBuffer());
  }

  async blob(path: string): Promise<Blob> {
    const file = await this.#file(path);
    if (file === null) throw missing(path);
    return file;
  }

  async write(path: string, content: Chunks): Promise<void> {
    await this.#put(path, 0, content);
  }

  async append(path: string, at: number, content: Bytes): Promise<void> {
    await this.#put(path, at, [content]);
  }

  async #put(path: string, start: number, content: Chunks): Promise<void> {
    const inWorker = typeof document === "undefined";
    if (!inWorker && !("createWritable" in FileSystemFileHandle.prototype)) {
      return writeFromWorker([RUNS, this.#name, ...path.split("/")], start, await joined(content));
    }
    const [folder, name] = await this.#folder(path, true);
    const handle = (await folder.getFileHandle(name, { create: true })) as FileHandle;
    return inWorker && handle.createSyncAccessHandle !== undefined ? putSync(handle, start, content) : putStream(handle, start, content);
  }

  async remove(path: string): Promise<void> {
    const [folder, name] = (await this.#folder(path, false).catch(orNull)) ?? [null, ""];
    await folder?.removeEntry(name, { recursive: true }).catch(orNull);
  }
}

/** Cuts a file to `start` bytes and writes behind them; in workers alone. */
export async function putSync(handle: FileSystemFileHandle, start: number, content: Chunks): Promise<void> {
  const file = await (handle as Required<FileHandle>).createSyncAccessHandle();
  try {
    file.truncate(start);
    let at = start;
    for await (const piece of content) {
      const written = file.write(piece, { at });
      if (written !== piece.length) throw new DOMException("the storage took a part of a file", "QuotaExceededError");
      at += written;
    }
    file.flush();
  } finally {
    file.close();
  }
}

async function putStream(handle: FileSystemFileHandle, start: number, content: Chunks): Promise<void> {
  const stream = await handle.createWritable({ keepExistingData: start > 0 });
  try {
    await stream.truncate(start);
    await stream.seek(start);
    for await (const piece of content) await stream.write(piece);
    await stream.close();
  } catch (error) {
    await stream.abort().catch(() => undefined);
    throw error;
  }
}

/** What a page asks of opfs_writer.ts: the path from the root of the origin's file system. */
export interface WriteOrder {
  readonly id: number;
  readonly path: readonly string[];
  readonly start: number;
  readonly content: Bytes;
}

/** What it answers. */
export interface WriteAnswer {
  readonly id: number;
  readonly error: { readonly name: string; readonly message: string } | null;
}

let writer: Worker | undefined;
let orders = 0;
const waiting = new Map<number, (error: Error | null) => void>();

function startWriter(): Worker {
  const worker = new Worker(new URL("./opfs_writer.ts", import.meta.url), { type: "module", name: "storage" });
  const answer = (id: number, error: Error | null): void => {
    waiting.get(id)?.(error);
    waiting.delete(id);
  };
  worker.onmessage = ({ data: { id, error } }: MessageEvent<WriteAnswer>) => answer(id, error && new DOMException(error.message, error.name));
  worker.onerror = (event) => {
    if (writer === worker) writer = undefined; // the next order starts another one
    worker.terminate();
    for (const id of [...waiting.keys()]) answer(id, new Error(event.message || "the storage worker did not start"));
  };
  return worker;
}

function writeFromWorker(path: readonly string[], start: number, content: Bytes): Promise<void> {
  writer ??= startWriter();
  const order: WriteOrder = { id: ++orders, path, start, content };
  return new Promise((done, failed) => {
    waiting.set(order.id, (error) => (error === null ? done() : failed(error)));
    writer?.postMessage(order);
  });
}

class OpfsShelf implements Shelf {
  async names(): Promise<string[]> {
    const found: string[] = [];
    const top = await folderAt([], false).catch(orNull);
    if (top !== null) for await (const [name, handle] of top.entries()) if (handle.kind === "directory") found.push(name);
    return found;
  }

  async create(name: string): Promise<Files> {
    await folderAt([name], true);
    return new OpfsFiles(name);
  }

  async open(name: string): Promise<Files> {
    if ((await folderAt([name], false).catch(orNull)) === null) throw missing(name);
    return new OpfsFiles(name);
  }

  async delete(name: string): Promise<void> {
    const top = await folderAt([], false).catch(orNull);
    await top?.removeEntry(name, { recursive: true }).catch(orNull);
  }
}

/** The folder `runs` of this origin; null where a browser gives a page no file system. */
export async function openOpfs(): Promise<Shelf | null> {
  const storage = (globalThis.navigator as Navigator | undefined)?.storage as StorageManager | undefined;
  if (storage?.getDirectory === undefined) return null;
  try {
    await folderAt([], true);
    return new OpfsShelf();
  } catch {
    return null; // private windows of some browsers
  }
}
