// checkpoint.ts: one checkpoint folder, file by file as Python writes it (runs/checkpoint.py), and back.
//
//     checkpoints/step-000500/
//       config.json  generation_config.json  model.safetensors  tokenizer.json  tokenizer_config.json
//       optimizer.safetensors  trainer_state.json      what resume needs
//       hashes.json                                    written last: SHA-256 and size of the others
//
// There is no rename of folders in a browser's storage, so hashes.json itself is the mark that a checkpoint
// is whole: a folder without one that matches is never used. Read next: run_handle.ts.
import type { State, Tensors } from "../runtime/engine.ts";
import type { Settings, Tables } from "../runtime/tables.ts";
import { checkFormat, fromSections, toSections } from "./config.ts";
import { DAMAGED, show, StorageError } from "./errors.ts";
import type { Bytes, Chunks, Files } from "./files.ts";
import { piecesOf } from "./files.ts";
import { filled, formsOf } from "./forms.ts";
import { checkTensors, count, parameters, parameterShapes, storedName } from "./parameters.ts";
import type { Shapes } from "./parameters.ts";
import { hashOf } from "./sha256.ts";
import { checkFinite, readFloats, readHeader, sourceOf, tensorFile } from "./tensor_file.ts";
import type { Tensor } from "./tensor_file.ts";
import { Float, readObject, utf8, writeJson } from "./text_forms.ts";
import type { Json } from "./text_forms.ts";

/** Which text a run was trained on. */
export interface CorpusIdentity {
  readonly name: string;
  readonly sha256: string;
  readonly bytes: number;
}

/** What a snapshot says beside the tensors. */
export interface SnapshotFacts {
  readonly step: number;
  readonly engine: string;
  readonly engineInfo: Readonly<Record<string, string | number>>;
  readonly threads: number;
  readonly valLoss: number | null;
  readonly bestValLoss: number | null;
  readonly elapsedS: number;
}

/** trainer_state.json as far as a tab asks for it; `settings` is its configuration. */
export interface TrainerState extends SnapshotFacts {
  readonly seed: number;
  readonly corpus: CorpusIdentity | null;
  readonly tokenizer: string;
  readonly savedAt: string;
  readonly settings: Settings;
}

export interface Checkpoint {
  readonly path: string;
  readonly step: number;
  /** Moments are zero where the file has none: a model that was never trained further. */
  readonly state: State;
  readonly trainerState: TrainerState;
}

const STEP = /^checkpoints\/step-(\d{6,12})\//;
const sorted = <T>(map: ReadonlyMap<string, T>): [string, T][] => [...map].sort(([a], [b]) => (a < b ? -1 : 1));

export const folderOf = (step: number): string => `checkpoints/step-${String(step).padStart(6, "0")}`;

/** Folders of checkpoints by step, oldest first; nothing in them has been checked yet. */
export async function checkpointFolders(files: Files): Promise<Map<number, string>> {
  const found = new Map<number, string>();
  for (const { path } of await files.list()) {
    const match = STEP.exec(path);
    if (match?.[1] !== undefined) found.set(Number(match[1]), path.slice(0, match[0].length - 1));
  }
  return new Map([...found].sort(([a], [b]) => a - b));
}

/** An upper bound of what one checkpoint takes (runs/checkpoint_folder.py). */
export function checkpointBytes(tables: Tables, settings: Settings): number {
  const shapes = parameterShapes(tables, settings);
  return 12 * parameters(shapes) + 480 * shapes.size + 128 * formsOf(tables).tokenizer.n_vocab + (32 << 10);
}

/** Writes a checkpoint; its mark comes last. Throws a StorageError for values that are not finite; nothing is written then. */
export async function writeCheckpoint(
  files: Files, tables: Tables, settings: Settings, corpus: CorpusIdentity | null, state: State, facts: SnapshotFacts,
): Promise<void> {
  const { names, tensors, documents } = formsOf(tables);
  const shapes = parameterShapes(tables, settings);
  const parts = [["", state.params], [tensors.mean, state.m], [tensors.square, state.v]] as const;
  for (const [prefix, values] of parts) {
    checkTensors(shapes, values, "the tensor");
    for (const [name, numbers] of values) checkFinite(numbers, `${prefix}${name}`);
  }
  const folder = folderOf(facts.step);
  await files.remove(`${folder}/${names.hashes}`); // from here on the folder is no checkpoint
  const texts = Object.entries(documents).map(([name, template]): [string, Bytes] =>
    [name, typeof template === "string" ? utf8(template) : json(filled(template, tables, settings))]);
  texts.push([names.state, json(stateDocument(tables, settings, corpus, facts))]);
  const contents: [string, () => Chunks][] = texts.map(([name, text]) => [name, () => [text]]);
  contents.push([names.weights, () => tensorFile(weightsOf(tables, shapes, state.params))]);
  contents.push([names.optimizer, () => tensorFile(momentsOf(tables, shapes, state, facts.step))]);
  const hashes: Record<string, { sha256: string; bytes: number }> = {};
  for (const [name, content] of contents) {
    hashes[name] = await hashOf(content());
    await files.write(`${folder}/${name}`, content());
  }
  const mark = { format_version: formsOf(tables).formats.hashes, files: hashes };
  await files.write(`${folder}/${names.hashes}`, [json(mark)]);
}

/** Gives a checkpoint that is whole other facts: the validation loss that was measured after it was saved. */
export async function restateCheckpoint(
  files: Files, tables: Tables, settings: Settings, corpus: CorpusIdentity | null, facts: SnapshotFacts,
): Promise<void> {
  const { names } = formsOf(tables);
  const folder = folderOf(facts.step);
  const mark = readObject(await readSmall(files, `${folder}/${names.hashes}`), `${folder}/${names.hashes}`);
  const state = json(stateDocument(tables, settings, corpus, facts));
  const hashes = { ...(mark["files"] as Json), [names.state]: await hashOf([state]) };
  await files.write(`${folder}/${names.state}`, [state]);
  await files.write(`${folder}/${names.hashes}`, [json({ ...mark, files: hashes })]);
}

const json = (value: unknown): Bytes => utf8(`${writeJson(value, 2)}\n`);

/** The tensors of model.safetensors, in the order of their names. */
export function weightsOf(tables: Tables, shapes: Shapes, params: Tensors): Map<string, Tensor> {
  return new Map(sorted(params).map(([name, values]) => [storedName(tables, name), { shape: shapes.get(name) ?? [], values }]));
}

function momentsOf(tables: Tables, shapes: Shapes, state: State, step: number): Map<string, Tensor> {
  const { mean, square } = formsOf(tables).tensors;
  const found = new Map<string, Tensor>([["step", { shape: [1], values: BigInt64Array.of(BigInt(step)) }]]);
  for (const [prefix, values] of [[mean, state.m], [square, state.v]] as const) {
    for (const [name, numbers] of sorted(values)) found.set(prefix + name, { shape: shapes.get(name) ?? [], values: numbers });
  }
  return found;
}

function stateDocument(tables: Tables, settings: Settings, corpus: CorpusIdentity | null, facts: SnapshotFacts): Json {
  const float = (value: number | null): Float | null => (value === null ? null : new Float(value));
  return {
    format_version: formsOf(tables).formats.trainer_state,
    step: facts.step,
    seed: settings["training.seed"],
    engine: facts.engine,
    engine_info: facts.engineInfo,
    threads: facts.threads,
    corpus,
    tokenizer: formsOf(tables).tokenizer.fingerprint,
    val_loss: float(facts.valLoss),
    best_val_loss: float(facts.bestValLoss),
    numbers: {},
    elapsed_s: new Float(facts.elapsedS),
    created_by: `posttrainllm ${tables.version}`,
    saved_at: new Date().toISOString().replace(/\.\d+Z$/, "+00:00"),
    config: toSections(tables, settings),
  };
}

/** Holds a checkpoint against its hashes. Throws a StorageError that names the file; `contents` false compares sizes only. */
export async function verify(files: Files, folder: string, tables: Tables, contents = true): Promise<void> {
  const { names, formats } = formsOf(tables);
  const source = `${folder}/${names.hashes}`;
  if ((await files.size(source)) === null) throw new StorageError(`${folder} is not complete: it has no ${names.hashes}`, DAMAGED);
  const document = readObject(await readSmall(files, source), source);
  checkFormat(document["format_version"], formats.hashes, source);
  const listed = document["files"] as Record<string, { sha256?: unknown; bytes?: unknown } | null> | null;
  if (typeof listed !== "object" || listed === null) throw new StorageError(`${source}: files must be an object, got ${show(listed)}`, DAMAGED);
  for (const name of [names.config, names.weights, names.state]) {
    if (!Object.hasOwn(listed, name)) throw new StorageError(`${source} does not list ${name}`, DAMAGED);
  }
  for (const [name, wanted] of Object.entries(listed)) {
    if (typeof wanted?.sha256 !== "string" || typeof wanted.bytes !== "number" || /[/\\:]/.test(name)) {
      throw new StorageError(`${source}: ${show(name)} must have sha256 and bytes, got ${show(wanted)}`, DAMAGED);
    }
    const path = `${folder}/${name}`;
    const size = await files.size(path);
    if (size === null) throw new StorageError(`${folder} has no ${name}`, DAMAGED);
    if (size !== wanted.bytes) throw new StorageError(`${path} has ${size} bytes and was written with ${wanted.bytes}`, DAMAGED);
    if (contents && (await hashOf(piecesOf(await files.blob(path)))).sha256 !== wanted.sha256) {
      throw new StorageError(`${path} has changed since it was written: its hash differs`, DAMAGED);
    }
  }
}

const MAX_JSON_BYTES = 16 << 20;

/** A file that should be small. */
async function readSmall(files: Files, path: string): Promise<Bytes> {
  const size = await files.size(path);
  if ((size ?? 0) > MAX_JSON_BYTES) throw new StorageError(`${path} has ${size} bytes, too many for its kind`, DAMAGED);
  return files.read(path);
}

/** Reads trainer_state.json. Throws a StorageError that names the field. */
export async function readState(files: Files, folder: string, tables: Tables): Promise<TrainerState> {
  const source = `${folder}/${formsOf(tables).names.state}`;
  const found = readObject(await readSmall(files, source), source);
  checkFormat(found["format_version"], formsOf(tables).formats.trainer_state, source);
  const number = (name: string, value: unknown, whole = false): number => {
    if (typeof value === "number" && value >= 0 && (!whole || Number.isSafeInteger(value))) return value;
    throw new StorageError(`${source}: ${name} must be a ${whole ? "whole " : ""}number from 0 on, got ${show(value)}`, DAMAGED);
  };
  const loss = (name: string): number | null => (found[name] == null ? null : number(name, found[name]));
  const corpus = found["corpus"] as CorpusIdentity | null | undefined;
  if (corpus != null && !(typeof corpus.name === "string" && /^[0-9a-f]{64}$/.test(corpus.sha256))) {
    throw new StorageError(`${source}: corpus must have name and sha256, got ${show(corpus)}`, DAMAGED);
  }
  const info = found["engine_info"];
  return {
    step: number("step", found["step"], true),
    seed: number("seed", found["seed"], true),
    engine: String(found["engine"]),
    engineInfo: (typeof info === "object" && info !== null ? info : {}) as TrainerState["engineInfo"],
    threads: number("threads", found["threads"], true),
    corpus: corpus ?? null,
    tokenizer: String(found["tokenizer"]),
    valLoss: loss("val_loss"),
    bestValLoss: loss("best_val_loss"),
    elapsedS: number("elapsed_s", found["elapsed_s"]),
    savedAt: String(found["saved_at"]),
    settings: fromSections(tables, found["config"], source),
  };
}

/** Reads a checkpoint whose hashes hold. Throws a StorageError that names the file, the field and the value. */
export async function readCheckpoint(files: Files, folder: string, tables: Tables): Promise<Checkpoint> {
  const { names, tensors, tokenizer } = formsOf(tables);
  const trainerState = await readState(files, folder, tables);
  if (trainerState.tokenizer !== tokenizer.fingerprint) {
    throw new StorageError(
      `${folder}/${names.state}: tokenizer is ${show(trainerState.tokenizer)}, and this page reads text as bytes`,
      "models with another vocabulary run in the terminal: posttrainllm generate",
    );
  }
  const shapes = parameterShapes(tables, trainerState.settings);
  const params = await readTensors(files, `${folder}/${names.weights}`, shapes, (name) => storedName(tables, name), []);
  const optimizer = `${folder}/${names.optimizer}`;
  const zeros = (): Tensors => new Map([...shapes].map(([name, shape]) => [name, new Float32Array(count(shape))]));
  const trained = (await files.size(optimizer)) !== null;
  const moments = async (prefix: string, other: string): Promise<Tensors> =>
    trained ? readTensors(files, optimizer, shapes, (name) => prefix + name, ["step", other]) : zeros();
  if (trained) await checkStep(files, optimizer, trainerState.step);
  const [m, v] = [await moments(tensors.mean, tensors.square), await moments(tensors.square, tensors.mean)];
  for (const [name, values] of v) {
    if (values.some((value) => value < 0)) throw new StorageError(`${optimizer}: tensor ${tensors.square}${name} holds negative values`, DAMAGED);
  }
  return { path: folder, step: trainerState.step, state: { params, m, v }, trainerState };
}

async function checkStep(files: Files, path: string, step: number): Promise<void> {
  const read = sourceOf(files, path);
  const entry = (await readHeader(read, (await files.size(path)) ?? 0, path)).entries.get("step");
  if (entry?.dtype !== "I64" || entry.bytes !== 8) throw new StorageError(`${path} lacks the tensor step, one I64`, DAMAGED);
  const found = new DataView((await read(entry.start, entry.start + 8)).slice().buffer).getBigInt64(0, true);
  if (found !== BigInt(step)) throw new StorageError(`${path} is of step ${found}, and its folder of step ${step}`, DAMAGED);
}

/** Tensors of a file under the names of the parameters; `others` are beginnings of names that may stand there too. */
async function readTensors(
  files: Files, path: string, shapes: Shapes, stored: (name: string) => string, others: readonly string[],
): Promise<Tensors> {
  const read = sourceOf(files, path);
  const { entries } = await readHeader(read, (await files.size(path)) ?? 0, path);
  const wanted = new Set([...shapes.keys()].map(stored));
  const unknown = [...entries.keys()].find((name) => !wanted.has(name) && !others.some((other) => name.startsWith(other)));
  if (unknown !== undefined) throw new StorageError(`${path} holds the unknown tensor ${show(unknown)}`, DAMAGED);
  const found: Tensors = new Map();
  for (const [name, shape] of shapes) {
    const entry = entries.get(stored(name));
    if (entry === undefined) throw new StorageError(`${path} lacks the tensor ${stored(name)}`, DAMAGED);
    if (entry.shape.join() !== shape.join()) {
      throw new StorageError(`${path}: tensor ${stored(name)} is ${show(entry.shape)}, wanted ${show(shape)}`, DAMAGED);
    }
    found.set(name, await readFloats(read, entry, path));
  }
  return found;
}

/** What identifies a text. */
export async function identityOf(name: string, text: Bytes): Promise<CorpusIdentity> {
  return { name, ...(await hashOf([text])) };
}
