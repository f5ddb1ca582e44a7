// zip_write.ts: a zip archive of files as they are, without compression: weights do not get smaller.
//
// APPNOTE 6.3.3, with its 64-bit records where a size or a place needs them. The result is a Blob of pieces: large
// files stay where they are until somebody reads it.
import { crc32 } from "./crc32.ts";
import { piecesOf } from "./files.ts";
import type { Bytes } from "./files.ts";

export interface ZipFile {
  readonly path: string;
  readonly content: Blob;
  /** Milliseconds since 1970. */
  readonly modified: number;
}

const WIDE = 0xffffffff; // in a 32-bit field: the 64-bit record says it
const UTF8 = 1 << 11;
const REGULAR = 0o100644 * 0x10000; // a plain file, readable by all

/** `limit`: from which size on the 64-bit records say it; lower ones are for tests. */
export async function zipOf(files: Iterable<ZipFile>, limit = WIDE): Promise<Blob> {
  const parts: (Bytes | Blob)[] = [];
  const directory: Bytes[] = [];
  let at = 0;
  for (const { path, content, modified } of files) {
    let crc = 0;
    for await (const piece of piecesOf(content)) crc = crc32(piece, crc);
    const name = new TextEncoder().encode(path);
    const fields = { name, crc, size: content.size, stamp: dosTime(new Date(modified)) };
    const local = localHeader(fields, limit);
    directory.push(centralHeader(fields, at, limit));
    parts.push(local, content);
    at += local.length + content.size;
  }
  const bytes = directory.reduce((sum, header) => sum + header.length, 0);
  return new Blob([...parts, ...directory, ending(directory.length, bytes, at, limit)], { type: "application/zip" });
}

interface Fields {
  readonly name: Uint8Array;
  readonly crc: number;
  readonly size: number;
  readonly stamp: number;
}

type Field = readonly [bytes: 2 | 4 | 8, value: number];

function record(fields: readonly Field[], ...rest: Uint8Array[]): Bytes {
  const head = fields.reduce((sum, [bytes]) => sum + bytes, 0);
  const all = new Uint8Array(head + rest.reduce((sum, part) => sum + part.length, 0));
  const view = new DataView(all.buffer);
  let at = 0;
  for (const [bytes, value] of fields) {
    if (bytes === 2) view.setUint16(at, value, true);
    else if (bytes === 4) view.setUint32(at, value, true);
    else view.setBigUint64(at, BigInt(value), true);
    at += bytes;
  }
  for (const part of rest) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}

const narrow = (value: number, limit: number): number => (value >= limit ? WIDE : value);
const extra = (values: readonly number[]): Bytes =>
  values.length === 0 ? new Uint8Array(0) : record([[2, 1], [2, 8 * values.length], ...values.map((value): Field => [8, value])]);

function localHeader({ name, crc, size, stamp }: Fields, limit: number): Bytes {
  const more = extra(size >= limit ? [size, size] : []);
  return record(
    [[4, 0x04034b50], [2, size >= limit ? 45 : 20], [2, UTF8], [2, 0], [4, stamp], [4, crc], [4, narrow(size, limit)], [4, narrow(size, limit)],
      [2, name.length], [2, more.length]],
    name, more,
  );
}

function centralHeader({ name, crc, size, stamp }: Fields, at: number, limit: number): Bytes {
  const more = extra([...(size >= limit ? [size, size] : []), ...(at >= limit ? [at] : [])]);
  return record(
    [[4, 0x02014b50], [2, 0x0300 + 45], [2, more.length > 0 ? 45 : 20], [2, UTF8], [2, 0], [4, stamp], [4, crc], [4, narrow(size, limit)],
      [4, narrow(size, limit)], [2, name.length], [2, more.length], [2, 0], [2, 0], [2, 0], [4, REGULAR], [4, narrow(at, limit)]],
    name, more,
  );
}

function ending(entries: number, bytes: number, at: number, limit: number): Bytes {
  const short = record([[4, 0x06054b50], [2, 0], [2, 0], [2, Math.min(entries, 0xffff)], [2, Math.min(entries, 0xffff)],
    [4, narrow(bytes, limit)], [4, narrow(at, limit)], [2, 0]]);
  if (at < limit && bytes < limit && entries < 0xffff) return short;
  return record(
    [[4, 0x06064b50], [8, 44], [2, 45], [2, 45], [4, 0], [4, 0], [8, entries], [8, entries], [8, bytes], [8, at],
      [4, 0x07064b50], [4, 0], [8, at + bytes], [4, 1]],
    short,
  );
}

/** MS-DOS date and time, which begin in 1980 and count two seconds. */
function dosTime(date: Date): number {
  const day = ((Math.max(1980, date.getFullYear()) - 1980) << 9) | ((date.getMonth() + 1) << 5) | date.getDate();
  const time = (date.getHours() << 11) | (date.getMinutes() << 5) | (date.getSeconds() >> 1);
  return ((day << 16) | time) >>> 0;
}
