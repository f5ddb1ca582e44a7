// tables.ts: the types of posttrainllm.json, which Python writes (export_web.py): op table, programs,
// presets, schema. TypeScript repeats none of it. Read next: program.ts.

/** An integer times a product of dims: [3, ["C"]] is 3*C. */
export type Extent = readonly [times: number, dims: readonly string[]];
export type Shape = readonly Extent[];
export type Dims = Readonly<Record<string, number>>;
export type Dtype = "f32" | "i32";
export type Role = "param" | "grad" | "moment" | "state" | "input" | "saved" | "scratch" | "output";

export interface Operand {
  readonly name: string;
  readonly shape: Shape;
  /** The shape under the attribute `transposed`, where the op has one. */
  readonly transposed: Shape | null;
  readonly mode: "read" | "write" | "accumulate" | "update";
  readonly dtype: Dtype;
  readonly optional: boolean;
}

export interface Op {
  readonly name: string;
  readonly outputs: readonly Operand[];
  readonly inputs: readonly Operand[];
  readonly sizes: readonly string[];
  readonly attrs: readonly string[];
}

/** The end of a range of layers: an offset, counted from the last layer or from 0. */
export type Bound = readonly [fromLast: boolean, offset: number];

export interface BufferJson {
  readonly name: string;
  readonly shape: Shape;
  readonly role: Role;
  readonly dtype: Dtype;
  readonly layers: readonly [Bound, Bound] | null;
  readonly init: string | null;
  readonly decay: boolean;
}

export interface CallJson {
  readonly op: string;
  readonly outputs: readonly string[];
  readonly inputs: readonly (string | null)[];
  /** Numbers, names of dims, and in programs of posttrainllm.json names of settings. */
  readonly attrs: Readonly<Record<string, number | string>>;
}

export interface LayerBlockJson {
  readonly layers: readonly [Bound, Bound];
  readonly reverse: boolean;
  readonly body: readonly CallJson[];
}

export interface RowBlockJson {
  readonly rows: Extent;
  readonly total: Extent;
  readonly body: readonly CallJson[];
}

export type ItemJson = CallJson | LayerBlockJson | RowBlockJson;

export interface ProgramJson {
  readonly format: number;
  readonly name: string;
  readonly buffers: readonly BufferJson[];
  readonly items: readonly ItemJson[];
}

/** A setting's value by its name, "model.n_embd". */
export type Settings = Readonly<Record<string, number | string | boolean | null | readonly string[]>>;

export interface Tables {
  readonly format: number;
  readonly version: string;
  readonly ops: readonly Op[];
  readonly accumulate: Readonly<Record<"write" | "add" | "beta" | "chunk", number>>;
  /** The ending of an operand that is the window of rows of the current chunk. */
  readonly rows: string;
  readonly scalars: readonly string[];
  readonly clip: readonly string[];
  readonly plan: {
    readonly align: number;
    readonly parts: readonly [decayed: string, plain: string];
    readonly arenas: Readonly<Record<string, string>>;
    readonly chunk_bytes: number;
    readonly chunk_rows: number;
    /** The MLP's width over the model's where no setting says it. */
    readonly inner_ratio: number;
  };
  readonly control: { readonly inits: readonly string[]; readonly schedules: readonly string[] };
  readonly wasm: {
    readonly pages: Readonly<Record<"wasm32" | "wasm64", number>>;
    readonly builds: Readonly<Record<string, string>>;
  };
  readonly webgpu: {
    /** A hash of the kernels. */
    readonly kernels: string;
    /** What the first use of an adapter is held to: so many steps of a preset, relative limits. */
    readonly check: { readonly preset: string; readonly steps: number; readonly loss: number; readonly grad_norm: number };
  };
  /** Programs by engine (with the fused ops that it has), activation and head ("gelu_new/tied"), and name. */
  readonly programs: Readonly<Record<EngineName, Readonly<Record<string, Readonly<Record<string, ProgramJson>>>>>>;
  /** Batch and length of the programs of a set: a setting's name, "batch" or a number. */
  readonly sets: Readonly<Record<string, Readonly<Record<string, readonly [Size, Size]>>>>;
  readonly presets: Readonly<Record<string, { readonly summary: string; readonly settings: Settings }>>;
  /** The words of warnings and verdicts (training/writing.py), filled in by statistics.ts. */
  readonly writing: {
    /** Names of the counting lines: guessing first. */
    readonly lines: readonly string[];
    readonly most_shown: number;
    readonly sentences: Readonly<Record<string, string>>;
    /** Keys of sentences, by the control module's codes. */
    readonly warnings: readonly (string | null)[];
    readonly actions: readonly { readonly name: string; readonly text: string }[];
  };
  readonly schema: {
    readonly default_preset: string;
    readonly settings: Readonly<Record<string, SettingField>>;
    readonly presets: Readonly<Record<string, { readonly summary: string; readonly parameters: number }>>;
  };
}

/** What a setting takes. */
export interface SettingField {
  readonly kind: "integer" | "number" | "boolean" | "text" | "texts" | "choice";
  readonly default: Settings[string];
  readonly from_preset: boolean;
  readonly low: number | null;
  /** Of a text: its most characters. */
  readonly high: number | null;
  readonly choices: readonly string[];
  readonly help: string;
}

export type Size = number | string;

/** Engines that run in a browser and in node. */
export type EngineName = "wasm" | "webgpu";

/** The version of posttrainllm.json and of programs that this code reads. */
export const FORMAT = 1;

/**
 * The tables from their JSON. What links and files ask for by name has its own entries alone: no "constructor".
 * Throws a ProgramError for another format version.
 */
export function readTables(text: string): Tables {
  const tables = JSON.parse(text) as Tables;
  if (tables.format !== FORMAT) {
    throw new ProgramError(`posttrainllm.json has format ${tables.format}, this version reads ${FORMAT}`);
  }
  for (const named of [tables.presets, tables.schema.settings, tables.schema.presets]) Object.setPrototypeOf(named, null);
  return tables;
}

/** A program or plan that does not hold together. */
export class ProgramError extends Error {
  override name = "ProgramError";
}
