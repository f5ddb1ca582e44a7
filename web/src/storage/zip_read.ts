// zip_read.ts: a zip archive from anywhere: nothing is unpacked before its whole directory has been checked.
//
// Refused by name: paths that leave the folder, links, encryption, other methods than stored and deflate, entries
// that overlap or are there twice, sizes that cannot be. Unpacking stops at the size that the directory says.
import { crc32 } from "./crc32.ts";
import { DAMAGED, show, StorageError } from "./errors.ts";
import type { Bytes } from "./files.ts";

export interface ZipEntry {
  readonly path: string;
  readonly bytes: number;
  readonly packed: number;
  readonly crc: number;
  readonly method: number;
  readonly start: number;
}

const MAX_ENTRIES = 20_000;
const MAX_DIRECTORY = 16 << 20;
const [MAX_NAME, MAX_DEPTH] = [255, 8];
const [ENDING, ENDING64, LOCATOR, CENTRAL, LOCAL] = [0x06054b50, 0x06064b50, 0x07064b50, 0x02014b50, 0x04034b50];
const [STORED, DEFLATED] = [0, 8];
const MOST_RATIO = 1032; // of deflate
const SPREAD = 65_535 + 22; // where the ending may begin, from the file's end

const view = (bytes: Bytes): DataView => new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);

class Zip {
  readonly #blob: Blob;
  readonly #source: string;

  constructor(blob: Blob, source: string) {
    this.#blob = blob;
    this.#source = source;
  }

  fail(what: string, hint = DAMAGED): StorageError {
    return new StorageError(`${this.#source} ${what}`, hint);
  }

  async #bytes(from: number, count: number): Promise<Bytes> {
    const bytes = new Uint8Array(await this.#blob.slice(from, from + count).arrayBuffer());
    if (from < 0 || bytes.length !== count) throw this.fail(`is cut off: ${count} bytes at ${from} are wanted, it has ${this.#blob.size}`);
    return bytes;
  }

  /** Where the directory lies, and how many entries it has. */
  async #directory(): Promise<{ entries: number; bytes: number; at: number }> {
    const from = Math.max(0, this.#blob.size - SPREAD);
    const tail = await this.#bytes(from, this.#blob.size - from);
    const look = view(tail);
    let end = tail.length - 22;
    while (end >= 0 && !(look.getUint32(end, true) === ENDING && end + 22 + look.getUint16(end + 20, true) === tail.length)) end--;
    if (end < 0) throw this.fail("is no zip archive: it has no directory at its end", "choose a file that was downloaded here or exported by posttrainllm");
    let [entries, bytes, at] = [look.getUint16(end + 10, true), look.getUint32(end + 12, true), look.getUint32(end + 16, true)];
    let stop = from + end;
    if (stop >= 20) {
      const locator = view(await this.#bytes(stop - 20, 20));
      if (locator.getUint32(0, true) === LOCATOR) {
        stop = this.#safe(locator.getBigUint64(8, true));
        const wide = view(await this.#bytes(stop, 56));
        if (wide.getUint32(0, true) !== ENDING64) throw this.fail("has a directory that does not hold together");
        [entries, bytes, at] = [wide.getBigUint64(32, true), wide.getBigUint64(40, true), wide.getBigUint64(48, true)]
          .map((value) => this.#safe(value)) as [number, number, number];
      }
    }
    if (entries > MAX_ENTRIES || bytes > MAX_DIRECTORY) throw this.fail(`has ${entries} entries, over the limit of ${MAX_ENTRIES}`);
    if (at + bytes !== stop) throw this.fail("has a directory that does not lie at its end");
    return { entries, bytes, at };
  }

  #safe(value: bigint): number {
    if (value > BigInt(this.#blob.size) && value > BigInt(Number.MAX_SAFE_INTEGER)) throw this.fail(`has a size of ${value} bytes`);
    return Number(value);
  }

  async entries(): Promise<ZipEntry[]> {
    const { entries, bytes, at } = await this.#directory();
    const content = await this.#bytes(at, bytes);
    const look = view(content);
    const found: ZipEntry[] = [];
    let next = 0;
    for (let n = 0; n < entries; n++) {
      if (next + 46 > bytes || look.getUint32(next, true) !== CENTRAL) throw this.fail(`has a directory that breaks off at entry ${n + 1}`);
      const [name, extra, comment] = [28, 30, 32].map((field) => look.getUint16(next + field, true)) as [number, number, number];
      const end = next + 46 + name + extra + comment;
      if (end > bytes) throw this.fail(`has a directory that breaks off at entry ${n + 1}`);
      const entry = this.#entry(content.subarray(next, end), name, extra, at);
      if (entry !== null) found.push(entry);
      next = end;
    }
    if (next !== bytes) throw this.fail("has a directory with more in it than its entries");
    this.#checkTogether(found, at);
    return found;
  }

  #entry(header: Bytes, nameLength: number, extraLength: number, directoryAt: number): ZipEntry | null {
    const look = view(header);
    const path = this.#path(header.subarray(46, 46 + nameLength));
    const [flags, method, mode] = [look.getUint16(8, true), look.getUint16(10, true), look.getUint32(38, true) >>> 16];
    let [packed, bytes, start] = [look.getUint32(20, true), look.getUint32(24, true), look.getUint32(42, true)];
    const wide = view(this.#extra64(header.subarray(46 + nameLength, 46 + nameLength + extraLength)));
    let at = 0;
    const widened = (value: number): number => {
      if (value !== 0xffffffff || at + 8 > wide.byteLength) return value;
      at += 8;
      return this.#safe(wide.getBigUint64(at - 8, true));
    };
    bytes = widened(bytes);
    packed = widened(packed);
    start = widened(start);
    if (![0, 0o100000, 0o040000, 0o120000].includes(mode & 0o170000)) throw this.fail(`holds ${show(path)}, which is no file`, "pack the files themselves");
    if ((mode & 0o170000) === 0o120000) throw this.fail(`holds the link ${show(path)}`, "pack the files themselves");
    if (flags & 1) throw this.fail(`is encrypted: ${show(path)}`, "pack it without a password");
    if (path.endsWith("/")) return null;
    if (method !== STORED && method !== DEFLATED) throw this.fail(`packs ${show(path)} with method ${method}`, "pack it as zip with deflate");
    if (method === STORED ? packed !== bytes : bytes > packed * MOST_RATIO) {
      throw this.fail(`says that ${show(path)} has ${bytes} bytes, packed into ${packed}: that cannot be`);
    }
    if (start + 30 + packed > directoryAt) throw this.fail(`has ${show(path)} beyond its directory`);
    return { path, bytes, packed, crc: look.getUint32(16, true), method, start };
  }

  #extra64(extra: Bytes): Bytes {
    const look = view(extra);
    for (let at = 0; at + 4 <= extra.length; at += 4 + look.getUint16(at + 2, true)) {
      if (look.getUint16(at, true) === 1) return extra.subarray(at + 4, at + 4 + look.getUint16(at + 2, true));
    }
    return new Uint8Array(0);
  }

  #path(name: Bytes): string {
    let path = "";
    try {
      path = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(name);
    } catch {
      throw this.fail("holds a name that is not UTF-8");
    }
    const parts = path.replace(/\/$/, "").split("/");
    const long = parts.length > MAX_DEPTH || parts.some((part) => new TextEncoder().encode(part).length > MAX_NAME);
    if (long || /[\\:\p{C}]/u.test(path) || parts.some((part) => part === "" || part === "." || part === "..")) {
      throw this.fail(`holds the name ${show(path)}, which leads out of its folder or is none`);
    }
    return path;
  }

  #checkTogether(entries: readonly ZipEntry[], end: number): void {
    const names = new Set<string>();
    for (const { path } of entries) {
      if (names.has(path.toLowerCase())) throw this.fail(`holds ${show(path)} twice`);
      names.add(path.toLowerCase());
    }
    for (const name of names) {
      for (let at = name.indexOf("/"); at > 0; at = name.indexOf("/", at + 1)) {
        if (names.has(name.slice(0, at))) throw this.fail(`holds ${show(name.slice(0, at))} as a file and as a folder`);
      }
    }
    let [stop, last] = [end, ""];
    for (const entry of [...entries].sort((a, b) => b.start - a.start)) {
      const taken = entry.start + 30 + new TextEncoder().encode(entry.path).length + entry.packed;
      if (taken > stop) throw this.fail(`has entries that overlap: ${show(entry.path)} and ${show(last)}`);
      [stop, last] = [entry.start, entry.path];
    }
  }

  /** The content of an entry in pieces; ends with an error unless size and check sum are as the directory says. */
  async *content(entry: ZipEntry): AsyncGenerator<Bytes> {
    const header = view(await this.#bytes(entry.start, 30));
    const nameLength = header.getUint16(26, true);
    const name = new TextDecoder().decode(await this.#bytes(entry.start + 30, nameLength));
    if (header.getUint32(0, true) !== LOCAL || name !== entry.path) throw this.fail(`names ${show(entry.path)} in its directory, and another file where it lies`);
    const from = entry.start + 30 + nameLength + header.getUint16(28, true);
    const packed = this.#blob.slice(from, from + entry.packed);
    let stream = packed.stream() as ReadableStream<Bytes>;
    if (entry.method === DEFLATED) stream = stream.pipeThrough(new DecompressionStream("deflate-raw") as ReadableWritablePair<Bytes, Bytes>);
    const reader = stream.getReader();
    let [bytes, crc] = [0, 0];
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        bytes += value.length;
        if (bytes > entry.bytes) break;
        crc = crc32(value, crc);
        yield value;
      }
    } catch (error) {
      if (error instanceof StorageError) throw error;
      throw this.fail(`cannot be unpacked: ${show(entry.path)} is damaged`);
    } finally {
      await reader.cancel().catch(() => undefined);
    }
    if (bytes !== entry.bytes) throw this.fail(`says that ${show(entry.path)} has ${entry.bytes} bytes, and it has ${bytes > entry.bytes ? "more" : bytes}`);
    if (crc !== entry.crc) throw this.fail(`is damaged: the check sum of ${show(entry.path)} differs`);
  }
}

export type { Zip };

/** Opens an archive and checks its directory. Throws a StorageError that names the archive and the entry. */
export async function openZip(blob: Blob, source: string): Promise<{ zip: Zip; entries: ZipEntry[] }> {
  const zip = new Zip(blob, source);
  return { zip, entries: await zip.entries() };
}
