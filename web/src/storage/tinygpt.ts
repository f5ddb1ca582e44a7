// tinygpt.ts: reading and writing .tinygpt files (formats/tinygpt.py): versions 1 and 2, fp32 with AdamW's moments,
// fp16 and int4; written are fp32 and fp16. Every size is held against the file before memory is taken.
import type { State, Tensors } from "../runtime/engine.ts";
import type { Settings, Tables } from "../runtime/tables.ts";
import { DAMAGED, show, showBytes, StorageError } from "./errors.ts";
import type { Bytes } from "./files.ts";
import { count, parameterShapes } from "./parameters.ts";
import { foreignSettings } from "./foreign.ts";
import { fromHalf, toHalf } from "./half.ts";
import { checkFinite } from "./tensor_file.ts";
import { readObject, utf8 } from "./text_forms.ts";
import type { Json } from "./text_forms.ts";
import { columns, stateBytes, tinyForm, tinyTensors } from "./tinygpt_layout.ts";
import type { Dtype, TinyTensor } from "./tinygpt_layout.ts";
import type { MetricLine, SampleLine } from "./run_handle.ts";

const MAX_HEADER = 16 << 20;
const [PREFIX, STEP] = [12, 4];

export interface TinyModel {
  readonly settings: Settings;
  readonly step: number;
  readonly dtype: Dtype;
  readonly params: Tensors;
  /** Null where the file has none. */
  readonly moments: { readonly m: Tensors; readonly v: Tensors } | null;
  /** The losses of the header as lines of metrics, as far as they are what they should be. */
  readonly history: readonly Json[];
}

/** Reads a file. Throws a StorageError, in one line that names the file, the field and the value. */
export async function readTinygpt(blob: Blob, tables: Tables, source: string): Promise<TinyModel> {
  const part = async (from: number, size: number): Promise<Bytes> => new Uint8Array(await blob.slice(from, from + size).arrayBuffer());
  const prefix = await part(0, PREFIX);
  const form = tinyForm(tables);
  const magic = new TextDecoder().decode(prefix.subarray(0, 4));
  if (prefix.length < PREFIX || magic !== form.magic) {
    throw new StorageError(`${source} is no .tinygpt file: it begins with ${show(magic)}, wanted ${show(form.magic)}`, DAMAGED);
  }
  const look = new DataView(prefix.buffer);
  const [version, length] = [look.getUint32(4, true), look.getUint32(8, true)];
  if (!form.versions.includes(version)) throw new StorageError(`${source} has version ${version}; this page reads ${form.versions.join(" and ")}`);
  if (length > blob.size - PREFIX) {
    throw new StorageError(`${source} is cut off: it has ${blob.size} bytes and its header alone should have ${length}`, DAMAGED);
  }
  if (length > MAX_HEADER) {
    throw new StorageError(`${source}: a header of ${showBytes(length)} is over the limit of ${showBytes(MAX_HEADER)}`, DAMAGED);
  }
  const header = readObject(await part(PREFIX, length), `the header of ${source}`);
  const config = modelOf(header, tables, source);
  const settings = foreignSettings(tables, config.model, config.training, source);
  const shapes = parameterShapes(tables, settings);
  const tensors = tinyTensors(tables, shapes, settings["model.n_layer"] as number);
  const { dtype, block } = storageOf(header, form.block, source);
  const start = PREFIX + length;
  checkSizes(header, tensors, dtype, block, source, blob.size - start);
  const state = await part(start, blob.size - start);
  const step = new DataView(state.buffer).getInt32(0, true);
  if (step < 0) throw new StorageError(`${source}: step is ${step}, wanted 0 or more`, DAMAGED);
  const fresh = (): Tensors => new Map([...shapes].map(([name, shape]) => [name, new Float32Array(count(shape))]));
  const sets = dtype === "fp32" ? [fresh(), fresh(), fresh()] as const : [fresh()] as const;
  fill(state, tensors, sets, dtype, block, source);
  const [params, m, v] = sets;
  const steps = Math.max(step, settings["training.steps"] as number);
  return {
    settings: { ...settings, "training.steps": Math.max(1, steps) }, step, dtype, params,
    moments: m !== undefined && v !== undefined ? { m, v } : null, history: historyOf(header, step),
  };
}

function modelOf(header: Json, tables: Tables, source: string): { model: Settings; training: Json } {
  const { config } = header;
  if (typeof config !== "object" || config === null || Array.isArray(config)) {
    throw new StorageError(`${source}: config must be an object, got ${show(config)}`, DAMAGED);
  }
  const given = config as Record<string, unknown>;
  for (const [name, value] of Object.entries(given)) {
    // later builds of the original have variants of the model
    if (value && (name.startsWith("use") || name === "slidingWindow")) {
      throw new StorageError(`${source}: config.${name.slice(0, 40)} is ${show(value)}, and this page computes plain GPT-2 only`, "this variant of the format cannot be loaded");
    }
  }
  const model: Record<string, Settings[string]> = { ...tinyForm(tables).fixed };
  for (const [theirs, ours] of Object.entries(tinyForm(tables).sizes)) {
    const value = given[theirs];
    if (typeof value !== "number" || !Number.isSafeInteger(value)) {
      throw new StorageError(`${source}: config.${theirs} must be a whole number, got ${show(value)}`, DAMAGED);
    }
    model[ours] = value;
  }
  const { dMlp: inner } = given;
  const usual = tables.plan.inner_ratio * (model["model.n_embd"] as number);
  model["model.n_inner"] = inner == null || inner === usual ? null : (inner as number);
  return { model, training: given };
}

function storageOf(header: Json, usual: number, source: string): { dtype: Dtype; block: number } {
  const named = header["weightDtype"] as string | null | undefined;
  const moments = header["includesOptimizerState"] ?? (named == null || named === "fp32");
  const dtype = (named || (moments ? "fp32" : "fp16")) as Dtype;
  if (!["fp32", "fp16", "int4"].includes(dtype)) {
    throw new StorageError(`${source}: weightDtype is ${show(dtype)}, wanted one of fp32, fp16, int4`, "this variant of the format cannot be loaded");
  }
  if (moments !== (dtype === "fp32")) throw new StorageError(`${source}: includesOptimizerState is ${show(moments)}, and weightDtype is ${show(dtype)}`, DAMAGED);
  const block = header["int4BlockSize"] ?? usual;
  if (typeof block !== "number" || block % 2 || !(block >= 2 && block <= 65_536)) {
    throw new StorageError(`${source}: int4BlockSize must be an even number from 2 to 65536, got ${show(block)}`, DAMAGED);
  }
  return { dtype, block };
}

/** Holds what the header says about sizes against its config and against the file. */
function checkSizes(header: Json, tensors: readonly TinyTensor[], dtype: Dtype, block: number, source: string, left: number): void {
  const wanted = stateBytes(tensors, dtype, block);
  if ((header["stateByteLength"] ?? wanted) !== wanted) {
    throw new StorageError(`${source}: stateByteLength is ${show(header["stateByteLength"])}, and its config as ${dtype} takes ${wanted}`, DAMAGED);
  }
  if (left !== wanted) {
    const what = left < wanted ? "is cut off" : "has bytes that belong to no tensor";
    throw new StorageError(`${source} ${what}: ${left} bytes follow its header, and its config as ${dtype} takes ${wanted}`, DAMAGED);
  }
  const blocks = dtype === "int4" ? (wanted - STEP) / (2 + block / 2) : 0;
  for (const [name, bytes] of [["int4ScalesBytes", 2 * blocks], ["int4PackedBytes", (block / 2) * blocks]] as const) {
    if (dtype === "int4" && (header[name] ?? bytes) !== bytes) {
      throw new StorageError(`${source}: ${name} is ${show(header[name])}, and its config takes ${bytes}`, DAMAGED);
    }
  }
  checkManifest(header["manifest"], tensors, source);
}

function checkManifest(manifest: unknown, tensors: readonly TinyTensor[], source: string): void {
  if (manifest === undefined) return;
  if (!Array.isArray(manifest)) throw new StorageError(`${source}: manifest must be a list, got ${show(manifest)}`, DAMAGED);
  let offset = 0;
  for (const [number, tensor] of tensors.entries()) {
    const entry = manifest[number] as { name?: unknown; shape?: unknown; floatOffset?: unknown } | undefined;
    if (entry?.name !== tensor.name) throw new StorageError(`${source}: manifest entry ${number} must be ${show(tensor.name)}, got ${show(entry)}`, DAMAGED);
    const shape = JSON.stringify(entry.shape);
    if (shape !== JSON.stringify(tensor.declared) && shape !== JSON.stringify(tensor.shape)) {
      throw new StorageError(`${source}: the manifest gives ${show(tensor.name)} the shape ${show(entry.shape)}, and its config ${show(tensor.declared)}`, DAMAGED);
    }
    if ((entry.floatOffset ?? offset) !== offset) {
      throw new StorageError(`${source}: the manifest gives ${show(tensor.name)} the floatOffset ${show(entry.floatOffset)}, and the tensors before it end at ${offset}`, DAMAGED);
    }
    offset += tensor.size;
  }
  if (manifest.length > tensors.length) throw new StorageError(`${source}: the manifest has ${manifest.length} tensors, wanted ${tensors.length}`, DAMAGED);
}

/** All tensors behind the step into arrays of our shapes: weights, means and squares. */
function fill(
  state: Bytes, tensors: readonly TinyTensor[], sets: readonly Tensors[], dtype: Dtype, block: number, source: string,
): void {
  let at = STEP;
  const take = (bytes: number): DataView => new DataView(state.buffer, (at += bytes) - bytes, bytes);
  const blocks = ({ size }: TinyTensor): number => Math.ceil(size / block);
  const halves = (many: number): Float32Array => {
    const view = take(2 * many);
    return Float32Array.from({ length: many }, (_, i) => fromHalf(view.getUint16(2 * i, true)));
  };
  const scales = dtype === "int4" ? tensors.map((tensor) => halves(blocks(tensor))) : [];
  const nibbles = (tensor: TinyTensor, scale: Float32Array): Float32Array => {
    const view = take(blocks(tensor) * (block / 2));
    return Float32Array.from({ length: tensor.size }, (_, i) =>
      (((view.getUint8(i >> 1) >> (i & 1 ? 4 : 0)) & 15) - 8) * (scale[Math.floor(i / block)] ?? 0));
  };
  const floats = (many: number): Float32Array => {
    const view = take(4 * many);
    return Float32Array.from({ length: many }, (_, i) => view.getFloat32(4 * i, true));
  };
  for (const [number, tensor] of tensors.entries()) {
    for (const [place, values] of sets.entries()) {
      const what = `${source}: tensor ${show(tensor.name)}`;
      const read = dtype === "fp32" ? floats(tensor.size) : dtype === "fp16" ? halves(tensor.size) : nibbles(tensor, scales[number]!);
      checkFinite(read, what);
      if (place === 2 && read.some((value) => value < 0)) throw new StorageError(`${what} has a negative mean square`, DAMAGED);
      columns(values.get(tensor.ours)!, tensor, read, "ours");
    }
  }
}

function historyOf(header: Json, until: number): Json[] {
  const found: Json[] = [];
  let last = 0;
  for (const entry of Array.isArray(header["lossHistory"]) ? (header["lossHistory"] as unknown[]) : []) {
    const { step, train, val } = (entry ?? {}) as { step?: unknown; train?: unknown; val?: unknown };
    if (typeof step !== "number" || !Number.isInteger(step) || step <= last || step > until || typeof train !== "number") continue;
    last = step;
    found.push({ step, loss: train, val_loss: typeof val === "number" ? val : null, lr: null, grad_norm: null, tokens_per_second: null, elapsed_s: null });
  }
  return found;
}

/** What a .tinygpt file cannot say about a model, such as its form of GELU: one sentence each. */
export function notInTinygpt(tables: Tables, settings: Settings): string[] {
  return Object.entries(tinyForm(tables).fixed)
    .filter(([key, wanted]) => settings[key] !== wanted)
    .map(([key, wanted]) => `${key} is ${show(settings[key])}, and a .tinygpt model has ${show(wanted)}`);
}

/** What is told about a run beside its weights. */
export interface TinyAbout {
  readonly step: number;
  readonly metrics: readonly MetricLine[];
  readonly samples: readonly SampleLine[];
}

const MOST_HISTORY = 2000;
const MOST_SAMPLE = 2000;

/** A new file of the newest version, in pieces. Throws a StorageError for a weight that float16 has no number for. */
export function* tinygptFile(tables: Tables, settings: Settings, state: State, about: TinyAbout, dtype: "fp32" | "fp16"): Generator<Bytes> {
  const form = tinyForm(tables);
  const tensors = tinyTensors(tables, parameterShapes(tables, settings), settings["model.n_layer"] as number);
  const header = utf8(JSON.stringify(headerOf(tables, settings, tensors, about, dtype)));
  const prefix = new Uint8Array(PREFIX);
  prefix.set(new TextEncoder().encode(form.magic));
  new DataView(prefix.buffer).setUint32(4, form.versions.at(-1) ?? 0, true);
  new DataView(prefix.buffer).setUint32(8, header.length, true);
  yield prefix;
  yield header;
  yield new Uint8Array(Int32Array.of(about.step).buffer);
  for (const tensor of tensors) {
    for (const values of dtype === "fp32" ? [state.params, state.m, state.v] : [state.params]) {
      const theirs = new Float32Array(tensor.size);
      const ours = values.get(tensor.ours);
      if (ours !== undefined) columns(ours, tensor, theirs, "theirs");
      yield dtype === "fp32" ? new Uint8Array(theirs.buffer) : toHalf(theirs, `tensor ${show(tensor.name)}`);
    }
  }
}

function headerOf(tables: Tables, settings: Settings, tensors: readonly TinyTensor[], about: TinyAbout, dtype: "fp32" | "fp16"): Json {
  const form = tinyForm(tables);
  const named = (map: Readonly<Record<string, string>>): Json => Object.fromEntries(Object.entries(map).map(([theirs, ours]) => [theirs, settings[ours]]));
  const lines = about.metrics.filter((line) => line.step <= about.step);
  const history = lines.filter((line) => line.val_loss !== null || line === lines.at(-1))
    .map((line) => ({ step: line.step, train: line.loss, val: line.val_loss }));
  const best = history.reduce<{ loss: number; step: number } | null>(
    (least, { step, val }) => (val !== null && val < (least?.loss ?? Infinity) ? { loss: val, step } : least), null);
  const sample = about.samples.at(-1);
  let offset = 0;
  return {
    version: form.versions.at(-1),
    savedAt: new Date().toISOString(),
    config: {
      ...named(form.sizes),
      dMlp: settings["model.n_inner"] ?? tables.plan.inner_ratio * (settings["model.n_embd"] as number),
      ...named(form.training),
      backend: settings["engine.name"] === "webgpu" ? "webgpu" : "wasm",
    },
    manifest: tensors.map(({ name, declared, size }) => ({ name, shape: declared, floatOffset: (offset += size) - size })),
    includesOptimizerState: dtype === "fp32",
    stateByteLength: stateBytes(tensors, dtype, form.block),
    lossHistory: history.slice(-MOST_HISTORY),
    finalLoss: history.at(-1) ?? null,
    sample: sample === undefined ? "" : (sample.prompt + sample.text).slice(0, MOST_SAMPLE),
    bestVal: best,
    ...(dtype === "fp32" ? {} : { weightDtype: dtype }),
  };
}
