// tinygpt_layout.ts: what stands where in a .tinygpt file, from the table that Python exported (formats/tinygpt_layout.py):
//
//     "TGPT", u32 version, u32 N, N bytes of JSON, i32 step, tensors; little endian, nothing aligned, no check sum
//
// A linear weight is stored (in, out), as GPT-2 has it, although the manifest declares (out, in). Query, key and
// value are three tensors there and one of ours, side by side in its columns.
import type { Settings, Tables } from "../runtime/tables.ts";
import { formsOf } from "./forms.ts";
import { count } from "./parameters.ts";
import type { Shapes } from "./parameters.ts";

export type Dtype = "fp32" | "fp16" | "int4";

export interface TinyForm {
  readonly magic: string;
  readonly versions: readonly number[];
  readonly block: number;
  readonly fixed: Settings;
  readonly sizes: Readonly<Record<string, string>>;
  readonly training: Readonly<Record<string, string>>;
  readonly gentler: number;
  readonly tensors: readonly TensorRow[];
  readonly block_tensors: readonly TensorRow[];
}

type TensorRow = readonly [name: string, ours: string, part: number | null, turned: boolean];

/** One tensor of a file: `part` is its third of our columns; null is all of it. */
export interface TinyTensor {
  readonly name: string;
  readonly ours: string;
  readonly part: number | null;
  readonly shape: readonly number[];
  /** As the manifest declares it. */
  readonly declared: readonly number[];
  readonly size: number;
}

export const tinyForm = (tables: Tables): TinyForm => (formsOf(tables) as unknown as { readonly tinygpt: TinyForm }).tinygpt;

/** The tensors of a model in the order of the file. */
export function tinyTensors(tables: Tables, shapes: Shapes, layers: number): TinyTensor[] {
  const { tensors, block_tensors: inBlock } = tinyForm(tables);
  const one = ([name, ours, part, turned]: TensorRow, layer: number): TinyTensor => {
    const place = ours.replace("h.0.", `h.${layer}.`);
    const whole = shapes.get(place) ?? [];
    const shape = part === null ? whole : [...whole.slice(0, -1), (whole.at(-1) ?? 0) / 3];
    return {
      name: name.replace("blocks.0.", `blocks.${layer}.`), ours: place, part, shape,
      declared: turned ? [...shape].reverse() : shape, size: count(shape),
    };
  };
  const found = tensors.map((row) => one(row, 0));
  for (let layer = 0; layer < layers; layer++) found.push(...inBlock.map((row) => one(row, layer)));
  return found;
}

/** How long everything behind the header is. */
export function stateBytes(tensors: readonly TinyTensor[], dtype: Dtype, block: number): number {
  const each = (of: (tensor: TinyTensor) => number): number => tensors.reduce((sum, tensor) => sum + of(tensor), 4);
  if (dtype === "int4") return each(({ size }) => Math.ceil(size / block) * (2 + block / 2));
  return each(({ size }) => size * (dtype === "fp32" ? 12 : 2));
}

/** Copies between a tensor of the file and its columns in ours. */
export function columns(ours: Float32Array, tensor: TinyTensor, theirs: Float32Array, into: "ours" | "theirs"): void {
  if (tensor.part === null) {
    if (into === "ours") ours.set(theirs);
    else theirs.set(ours);
    return;
  }
  const width = tensor.shape.at(-1) ?? 0;
  for (let row = 0, at = 0; at < tensor.size; row++, at += width) {
    const place = row * 3 * width + tensor.part * width;
    if (into === "ours") ours.set(theirs.subarray(at, at + width), place);
    else theirs.set(ours.subarray(place, place + width), at);
  }
}
