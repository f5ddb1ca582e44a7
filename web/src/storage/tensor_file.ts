// tensor_file.ts: the safetensors format: eight bytes of header length, a JSON header, then the tensors' bytes.
//
// The TypeScript side of formats/tensor_file.py: the same bytes written, the same refusals. Nothing is
// allocated before the whole header has been checked against the size of the file.
import { DAMAGED, show, showBytes, StorageError } from "./errors.ts";
import type { Bytes, Files } from "./files.ts";
import { fromHalf } from "./half.ts";
import { readObject } from "./text_forms.ts";

const MAX_HEADER_BYTES = 8 << 20; // a GPT-2 of 1,024 layers needs 2
const MAX_DIMS = 8;
const SIZES: Readonly<Record<string, number>> = {
  BOOL: 1, U8: 1, I8: 1, F8_E4M3: 1, F8_E5M2: 1, U16: 2, I16: 2, F16: 2, BF16: 2, U32: 4, I32: 4, F32: 4, U64: 8, I64: 8, F64: 8,
};

export interface Entry {
  readonly name: string;
  readonly dtype: string;
  readonly shape: readonly number[];
  /** From the beginning of the file. */
  readonly start: number;
  readonly bytes: number;
}

/** A part of a file, as it lies there. */
export type Source = (from: number, to: number) => Promise<Bytes>;

export const sourceOf = (files: Files, path: string): Source => (from, to) => files.read(path, from, to);

export interface Tensor {
  readonly shape: readonly number[];
  readonly values: Float32Array | BigInt64Array;
}

/** The file's bytes in pieces: header, then one piece a tensor, without copies. `metadata` stands beside transformers' "pt". */
export function* tensorFile(tensors: ReadonlyMap<string, Tensor>, metadata: Readonly<Record<string, string>> = {}): Generator<Bytes> {
  const header: Record<string, unknown> = { __metadata__: { format: "pt", ...metadata } };
  let end = 0;
  for (const [name, { shape, values }] of tensors) {
    const begin = end;
    end += values.byteLength;
    header[name] = { dtype: values instanceof Float32Array ? "F32" : "I64", shape, data_offsets: [begin, end] };
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const padded = new Uint8Array(8 + Math.ceil(text.length / 8) * 8).fill(0x20);
  new DataView(padded.buffer).setBigUint64(0, BigInt(padded.length - 8), true);
  padded.set(text, 8);
  yield padded;
  for (const { values } of tensors.values()) yield bytesOf(values);
}

/** The same memory as bytes; engines give memory that may be shared between threads, which files do not take. */
function bytesOf(values: Float32Array | BigInt64Array): Bytes {
  const bytes = new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
  return bytes.buffer instanceof ArrayBuffer ? (bytes as Bytes) : new Uint8Array(bytes);
}

/** What tensors a file holds; each name, dtype, shape and offset has been checked. Throws a StorageError. */
export async function readHeader(read: Source, size: number, source: string): Promise<{ entries: Map<string, Entry>; metadata: Readonly<Record<string, unknown>> }> {
  const first = size < 8 ? new Uint8Array(0) : await read(0, 8);
  const length = size < 8 ? 8n : new DataView(first.buffer, first.byteOffset).getBigUint64(0, true);
  if (size < 8 || length > BigInt(size - 8)) {
    throw new StorageError(`${source} is cut off: it has ${size} bytes and its header alone should have ${length}`, DAMAGED);
  }
  if (length > BigInt(MAX_HEADER_BYTES)) {
    throw new StorageError(
      `${source}: a header of ${showBytes(Number(length))} is over the limit of ${showBytes(MAX_HEADER_BYTES)}`, DAMAGED,
    );
  }
  const data = 8 + Number(length);
  const { __metadata__: metadata, ...header } = readObject(await read(8, data), `the header of ${source}`);
  const entries = new Map(Object.entries(header).map(([name, value]) => [name, entryOf(name, value, data, source)]));
  checkLayout([...entries.values()], data, size, source);
  return { entries, metadata: typeof metadata === "object" && metadata !== null ? (metadata as Record<string, unknown>) : {} };
}

function entryOf(name: string, value: unknown, data: number, source: string): Entry {
  const place = `${source}: tensor ${show(name)}`;
  const { dtype, shape, data_offsets: offsets, ...rest } = (value ?? {}) as Record<string, unknown>;
  if (dtype === undefined || shape === undefined || offsets === undefined || Object.keys(rest).length > 0) {
    throw new StorageError(`${place} must have dtype, shape and data_offsets, got ${show(value)}`, DAMAGED);
  }
  const width = typeof dtype === "string" && Object.hasOwn(SIZES, dtype) ? SIZES[dtype] : undefined;
  if (width === undefined) {
    throw new StorageError(`${place} has the unknown dtype ${show(dtype)}`, `known are: ${Object.keys(SIZES).join(", ")}`);
  }
  if (!areSizes(shape) || shape.length > MAX_DIMS) {
    throw new StorageError(`${place}: shape must be a list of at most ${MAX_DIMS} sizes, got ${show(shape)}`, DAMAGED);
  }
  if (!areSizes(offsets) || offsets.length !== 2) {
    throw new StorageError(`${place}: data_offsets must be two positions, got ${show(offsets)}`, DAMAGED);
  }
  const [begin, end] = offsets as [number, number];
  if (shape.reduce((all, n) => all * n, width) !== end - begin) {
    throw new StorageError(`${place}: ${dtype} of shape ${show(shape)} does not fill data_offsets ${show(offsets)}`, DAMAGED);
  }
  return { name, dtype: dtype as string, shape, start: data + begin, bytes: end - begin };
}

const areSizes = (value: unknown): value is number[] =>
  Array.isArray(value) && value.every((size) => Number.isSafeInteger(size) && size >= 0);

/** Refuses tensors that overlap, leave holes, or do not end where the file ends. */
function checkLayout(entries: Entry[], data: number, size: number, source: string): void {
  let position = data;
  for (const entry of entries.sort((a, b) => a.start - b.start || a.bytes - b.bytes)) {
    if (entry.start !== position) {
      const what = entry.start < position ? "overlaps the one before it" : "follows a hole";
      throw new StorageError(`${source}: tensor ${show(entry.name)} at byte ${entry.start} ${what}`, DAMAGED);
    }
    position += entry.bytes;
  }
  if (position !== size) {
    const what = size < position ? "is cut off" : "has bytes that belong to no tensor";
    throw new StorageError(`${source} ${what}: ${size} bytes, and its tensors end at ${position}`, DAMAGED);
  }
}

/** A tensor as float32; half precision is widened exactly. Throws a StorageError for another dtype, NaN or infinity. */
export async function readFloats(read: Source, entry: Entry, source: string): Promise<Float32Array> {
  const place = `${source}: tensor ${show(entry.name)}`;
  if (!["F32", "F16", "BF16"].includes(entry.dtype)) {
    throw new StorageError(`${place} is ${entry.dtype}, wanted F32, F16 or BF16`, "convert the model to float32 and save it again");
  }
  const bytes = await read(entry.start, entry.start + entry.bytes);
  if (bytes.length !== entry.bytes) throw new StorageError(`${source} ended while tensor ${show(entry.name)} was read`, DAMAGED);
  const own = bytes.byteOffset === 0 ? bytes : bytes.slice(); // aligned
  const values = entry.dtype === "F32" ? new Float32Array(own.buffer, 0, own.length / 4) : widened(own, entry.dtype === "F16");
  checkFinite(values, place);
  return values;
}

/** Throws a StorageError for values that are not finite. */
export function checkFinite(values: Float32Array, place: string): void {
  for (const value of values) {
    if (!Number.isFinite(value)) {
      const kind = Number.isNaN(value) ? "NaN" : "infinite";
      throw new StorageError(`${place} holds ${kind} values`, "the model cannot be used: take an earlier checkpoint");
    }
  }
}

function widened(bytes: Bytes, half: boolean): Float32Array {
  const words = new Uint16Array(bytes.buffer, 0, bytes.length / 2);
  if (!half) {
    const bits = new Uint32Array(words.length); // bfloat16 is the upper half of a float32
    words.forEach((word, i) => (bits[i] = word << 16));
    return new Float32Array(bits.buffer);
  }
  return Float32Array.from(words, fromHalf);
}
