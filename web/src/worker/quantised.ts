// quantised.ts: a whole model in one small file, weights as int8 with a scale for each output
// (formats/quantised.py says what stands where): weight = float32(int8) * scale.
import type { Tensors } from "../runtime/engine.ts";
import { readFloats, readHeader } from "../storage/tensor_file.ts";
import { readObject, utf8 } from "../storage/text_forms.ts";
import type { Json } from "../storage/text_forms.ts";
import { Refused } from "./refusal.ts";

type Bytes = Uint8Array<ArrayBuffer>;

const FORMAT = "1";
const SCALE = ".scale";

export interface Quantised {
  /** A GPT-2's config.json. */
  readonly config: Json;
  readonly params: Tensors;
}

/** Reads a model. Throws Refused or a StorageError for a file that is none, or is damaged. */
export async function readQuantised(file: Bytes, name: string): Promise<Quantised> {
  const read = async (from: number, to: number): Promise<Bytes> => file.subarray(from, to);
  const { entries, metadata } = await readHeader(read, file.length, name);
  if (metadata["format_version"] !== FORMAT || typeof metadata["config"] !== "string") {
    throw new Refused(`${name} has format_version ${String(metadata["format_version"])}; this version reads ${FORMAT}`, "reload the page");
  }
  const params: Tensors = new Map();
  for (const entry of entries.values()) {
    if (entry.name.endsWith(SCALE)) continue;
    const scale = entries.get(entry.name + SCALE);
    if (entry.dtype !== "I8" || scale === undefined) {
      params.set(entry.name, await readFloats(read, entry, name));
      continue;
    }
    const [rows = 0, columns = 0] = entry.shape;
    const values = new Int8Array(file.buffer, file.byteOffset + entry.start, entry.bytes);
    params.set(entry.name, widened(values, await readFloats(read, scale, name), rows, columns, scale.shape[0] === 1));
  }
  return { config: readObject(utf8(metadata["config"]), `the config of ${name}`), params };
}

/** Shapes: values (rows, columns); scales (columns) where they are shared by a column, else (rows). */
function widened(values: Int8Array, scales: Float32Array, rows: number, columns: number, byColumn: boolean): Float32Array {
  const wide = new Float32Array(values.length);
  for (let row = 0, at = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++, at++) wide[at] = (values[at] ?? 0) * (scales[byColumn ? column : row] ?? NaN);
  }
  return wide;
}
