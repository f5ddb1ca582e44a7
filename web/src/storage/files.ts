// files.ts: what the storage of runs asks of a place that holds files: a shelf of folders, one a run.
//
// What this is: the interface, and a shelf in memory for pages that are given no storage (plain http,
// some private windows) and for tests. The others are opfs.ts and server_files.ts.
// What this is not: knowledge of what stands in the files. Read next: run_handle.ts.
import { StorageError } from "./errors.ts";

export type Bytes = Uint8Array<ArrayBuffer>;
export type Chunks = Iterable<Bytes> | AsyncIterable<Bytes>;

export interface FileEntry {
  /** Below the folder, with "/" between the parts. */
  readonly path: string;
  readonly bytes: number;
  /** Milliseconds since 1970. */
  readonly modified: number;
}

/** The files of one folder, by path. Nothing here is atomic but what says so. */
export interface Files {
  /** Files of a checkpoint appear together, when its mark has been written. */
  readonly gathers?: boolean;
  list(): Promise<FileEntry[]>;
  /** Null when there is no such file. */
  size(path: string): Promise<number | null>;
  /** Throws a StorageError when there is no such file. */
  read(path: string, from?: number, to?: number): Promise<Bytes>;
  /** The file as it is now, read only where it is asked. */
  blob(path: string): Promise<Blob>;
  /** A whole file; its folders are made. After a failure nothing has the name, or half of a file has. */
  write(path: string, content: Chunks): Promise<void>;
  /** Cut a file to `at` bytes and write there; makes it when there is none. */
  append(path: string, at: number, content: Bytes): Promise<void>;
  /** A file, or a folder with all below it; missing is fine. */
  remove(path: string): Promise<void>;
}

export interface Shelf {
  names(): Promise<string[]>;
  /** Throws when the name is there. */
  create(name: string): Promise<Files>;
  /** Throws when it is not. */
  open(name: string): Promise<Files>;
  delete(name: string): Promise<void>;
}

export const missing = (path: string): StorageError => new StorageError(`there is no ${path}`);

class MemoryFiles implements Files {
  readonly #files = new Map<string, { content: Bytes; modified: number }>();

  #set(path: string, content: Bytes): void {
    this.#files.set(path, { content, modified: Date.now() });
  }

  async list(): Promise<FileEntry[]> {
    return [...this.#files].map(([path, { content, modified }]) => ({ path, bytes: content.length, modified }));
  }

  async size(path: string): Promise<number | null> {
    return this.#files.get(path)?.content.length ?? null;
  }

  async read(path: string, from = 0, to?: number): Promise<Bytes> {
    const found = this.#files.get(path);
    if (found === undefined) throw missing(path);
    return found.content.slice(from, to);
  }

  async blob(path: string): Promise<Blob> {
    return new Blob([await this.read(path)]);
  }

  async write(path: string, content: Chunks): Promise<void> {
    this.#set(path, await joined(content));
  }

  async append(path: string, at: number, content: Bytes): Promise<void> {
    const before = this.#files.get(path)?.content.subarray(0, at) ?? new Uint8Array(0);
    this.#set(path, await joined([before, content]));
  }

  async remove(path: string): Promise<void> {
    for (const name of [...this.#files.keys()]) {
      if (name === path || name.startsWith(`${path}/`)) this.#files.delete(name);
    }
  }
}

/** Folders that live as long as the page. */
export class MemoryShelf implements Shelf {
  readonly #folders = new Map<string, Files>();

  async names(): Promise<string[]> {
    return [...this.#folders.keys()];
  }

  async create(name: string): Promise<Files> {
    if (this.#folders.has(name)) throw new StorageError(`there is a folder ${name} already`);
    const files = new MemoryFiles();
    this.#folders.set(name, files);
    return files;
  }

  async open(name: string): Promise<Files> {
    const files = this.#folders.get(name);
    if (files === undefined) throw missing(name);
    return files;
  }

  async delete(name: string): Promise<void> {
    this.#folders.delete(name);
  }
}

/** All pieces in one array. */
export async function joined(content: Chunks): Promise<Bytes> {
  const pieces: Bytes[] = [];
  for await (const piece of content) pieces.push(piece);
  const all = new Uint8Array(pieces.reduce((sum, piece) => sum + piece.length, 0));
  let at = 0;
  for (const piece of pieces) {
    all.set(piece, at);
    at += piece.length;
  }
  return all;
}

/** A blob piece by piece. */
export async function* piecesOf(blob: Blob, piece = 1 << 22): AsyncGenerator<Bytes> {
  for (let at = 0; at < blob.size; at += piece) {
    yield new Uint8Array(await blob.slice(at, at + piece).arrayBuffer());
  }
}
