// engine.ts: what an engine is to the page and to node, and what those that run programs share.
//
// The TypeScript side of engines/base.py: inputs in, one run a program, results out. Everything that
// may take a while is asynchronous, because one of the engines is a GPU. Read next: wasm.ts.
import { Control, DRAWN } from "./control.ts";
import { bindExtent } from "./program.ts";
import { Plan, product } from "./plan.ts";
import type { ArenaKind, BoundCall, Place } from "./plan.ts";
import type { ProgramSet } from "./program.ts";
import type { Dims, Tables } from "./tables.ts";

/** Token ids and the ids that follow them, `rows` x `time` each; a target of -1 is not trained. */
export interface Batch {
  readonly tokens: Int32Array;
  readonly targets: Int32Array;
  readonly rows: number;
  readonly time: number;
}

/** What changes from update to update: the learning rate and 1 - beta^t of both moments. */
export interface StepScalars {
  readonly lr: number;
  readonly correction1: number;
  readonly correction2: number;
}

/** The step's loss in nats per token, the gradients' norm before clipping, whether all was finite. */
export interface StepResult {
  readonly loss: number;
  readonly gradNorm: number;
  readonly finite: boolean;
}

export type Tensors = Map<string, Float32Array>;

/** Everything that training changes, by parameter name. */
export interface State {
  readonly params: Tensors;
  readonly m: Tensors;
  readonly v: Tensors;
}

export interface Engine {
  readonly name: string;
  /** What runs: build, threads, adapter; goes into records. */
  readonly info: Readonly<Record<string, string | number>>;
  /** All memory, taken once. */
  readonly bytes: number;
  /** Random numbers, schedule and sampling, large enough for this model. */
  readonly control: Control;
  /** First values from a seed; clears moments and the non-finite flag. */
  initialize(seed: number): Promise<void>;
  load(params: Tensors, m?: Tensors, v?: Tensors): Promise<void>;
  state(): Promise<State>;
  /** Loss and gradients of one micro-batch; unless `first`, added to what is there. */
  gradients(batch: Batch, invCount: number, first: boolean): Promise<void>;
  update(scalars: StepScalars): Promise<void>;
  /** Results of the updates since the last time, in order; without `wait`, those that are there already. */
  results(wait?: boolean): Promise<StepResult[]>;
  /** Mean loss of a batch in nats per token. */
  loss(batch: Batch): Promise<number>;
  /** Logits (rows, time, vocabulary). */
  logits(tokens: Int32Array, rows: number, time: number): Promise<Float32Array>;
  /** Start the cache with prompts, right-padded to `time`; logits (rows, vocabulary) of the last token of each. */
  prefill(tokens: Int32Array, rows: number, time: number, lengths?: Int32Array): Promise<Float32Array>;
  /** Take one token a row on; logits (rows, vocabulary). */
  decode(tokens: Int32Array): Promise<Float32Array>;
  close(): Promise<void>;
}

/** An engine that cannot run here, or no longer. */
export class EngineError extends Error {
  override name = "EngineError";
}

/** The engine broke while it ran (a trap, a lost thread or device): its memory must not be used any more. */
export class EngineLost extends EngineError {
  override name = "EngineLost";
}

/** An engine that runs programs. A subclass brings memory and the run. */
export abstract class ProgramEngine implements Engine {
  abstract readonly name: string;
  abstract readonly info: Readonly<Record<string, string | number>>;
  abstract readonly bytes: number;
  readonly plan: Plan;
  readonly tables: Tables;
  readonly control: Control;
  readonly #prepared = new Map<string, unknown>();
  readonly #scalars: Float32Array;
  #results: StepResult[] = [];
  #positions = new Int32Array(0);

  constructor(tables: Tables, set: ProgramSet, controlModule: WebAssembly.Module) {
    this.tables = tables;
    this.plan = new Plan(tables, set);
    this.#scalars = new Float32Array(tables.scalars.length);
    const all = Object.values(set.dims);
    const largest = (extent: string[]): number => Math.max(...all.map((dims) => bindExtent([1, extent], dims)));
    this.control = new Control(controlModule, tables, { vocabulary: largest(["V"]), tokens: largest(["B", "T"]) });
  }

  /** Copies values into a place. */
  abstract write(place: Place, values: Float32Array | Int32Array): void;
  /** A copy of a place's content. */
  abstract read(place: Place): Promise<Float32Array>;
  /** Turns bound calls into whatever `run` takes, maybe by a promise. */
  protected abstract prepare(calls: BoundCall[]): unknown;
  /** Gives back what was prepared and is not run again. */
  protected forget(_prepared: unknown): void {}
  /** Runs prepared calls; what is written or read afterwards comes after them. */
  protected abstract run(prepared: unknown): void | Promise<void>;
  abstract close(): Promise<void>;

  /** Runs a program of the set, prepared once for each choice of dims. */
  protected async runProgram(name: string, smaller: Dims = {}): Promise<void> {
    const key = `${name} ${JSON.stringify(smaller)}`;
    let prepared = this.#prepared.get(key);
    if (prepared === undefined) prepared = await this.prepare(this.plan.bind(name, smaller));
    this.#prepared.delete(key); // to the end: the first is what was not used for longest
    this.#prepared.set(key, prepared);
    if (this.#prepared.size > KEPT) {
      const [oldest = ""] = this.#prepared.keys();
      this.forget(this.#prepared.get(oldest));
      this.#prepared.delete(oldest);
    }
    await this.run(prepared);
  }

  #input(program: string, name: string, values: Int32Array): void {
    const place = this.plan.places.get(program)?.get(name);
    if (place !== undefined) this.write({ ...place, shape: [values.length] }, values);
  }

  #dim(program: string, letter: string): number {
    const dims = this.plan.dims[program];
    if (dims === undefined) throw new EngineError(`the ${this.name} engine was set up without the program '${program}'`);
    return bindExtent([1, [letter]], dims);
  }

  #setBatch(program: string, batch: Batch): void {
    const [rows, time] = [this.#dim(program, "B"), this.#dim(program, "T")];
    if (batch.rows !== rows || batch.time !== time || batch.targets.length !== rows * time) {
      throw new EngineError(`a batch of ${batch.rows} x ${batch.time} is not the planned ${rows} x ${time}`);
    }
    const vocabulary = this.#dim(program, "V");
    const wrong = batch.targets.find((target) => target >= vocabulary);
    if (wrong !== undefined) throw new EngineError(`targets must lie in 0 .. ${vocabulary - 1}, or be -1; got ${wrong}`);
    const positions = columns(rows, time);
    this.#setTokens(program, batch.tokens, rows, time, positions);
    this.#input(program, "targets", batch.targets);
    if (!this.plan.places.get(program)?.has("token_index.rows")) return;
    for (const [index, ids] of [["token_index", batch.tokens], ["position_index", positions]] as const) {
      const found = this.control.tokenIndex(ids);
      for (const part of ["rows", "starts", "order"] as const) this.#input(program, `${index}.${part}`, found[part]);
    }
  }

  /** Tokens (rows, time) at positions; every row is one segment. */
  #setTokens(program: string, tokens: Int32Array, rows: number, time: number, positions: Int32Array): void {
    const [most, longest, vocabulary] = [this.#dim(program, "B"), this.#dim(program, "T"), this.#dim(program, "V")];
    if (!(rows > 0 && rows <= most && time > 0 && time <= longest) || tokens.length !== rows * time) {
      throw new EngineError(`${tokens.length} tokens as ${rows} x ${time} do not fit the planned ${most} x ${longest}`);
    }
    const wrong = tokens.find((token) => token < 0 || token >= vocabulary);
    if (wrong !== undefined) throw new EngineError(`token ids must lie in 0 .. ${vocabulary - 1}, got ${wrong}`);
    this.#input(program, "tokens", tokens);
    this.#input(program, "positions", positions);
    this.#input(program, "segment_start", new Int32Array(tokens.length));
  }

  protected setScalars(slots: Readonly<Record<string, number>>): void {
    for (const [slot, value] of Object.entries(slots)) this.#scalars[this.tables.scalars.indexOf(slot)] = value;
    this.write({ region: "in.scalars", offset: 0, shape: [this.#scalars.length] }, this.#scalars);
  }

  async initialize(seed: number): Promise<void> {
    const layers = this.#dim(Object.keys(this.plan.programs)[0] ?? "", "L");
    for (const [name, { init, place }] of this.plan.layout) {
      const count = product(place.shape);
      for (let start = 0; start < count; start += DRAWN) {
        const values = new Float32Array(Math.min(DRAWN, count - start));
        this.control.initialValues(values, seed, name, init, layers, start);
        this.write({ ...place, offset: place.offset + start, shape: [values.length] }, values);
        await this.written(4 * values.length);
      }
    }
    await this.fresh();
    for (const kind of MOMENTS) this.#zero(kind);
  }

  /** Told of so many bytes that were written; an engine that copies them later may wait here. */
  protected async written(_bytes: number): Promise<void> {}

  /** New weights: no flag, and nothing of what was trained before. */
  protected async fresh(): Promise<void> {
    if (this.plan.regions.has("state.clip")) this.zero("state.clip");
    this.#results = [];
  }

  /** Fills a region with zeros. */
  protected zero(region: string): void {
    const { elements } = this.plan.region(region);
    for (let offset = 0; offset < elements; offset += DRAWN) {
      const count = Math.min(DRAWN, elements - offset);
      this.write({ region, offset, shape: [count] }, new Float32Array(count));
    }
  }

  #zero(kind: ArenaKind): void {
    for (const part of this.tables.plan.parts) if (this.plan.regions.has(`${kind}.${part}`)) this.zero(`${kind}.${part}`);
  }

  async load(params: Tensors, m?: Tensors, v?: Tensors): Promise<void> {
    const given = ([["param", params], ["adam.m", m], ["adam.v", v]] as const).filter(([kind]) => this.#has(kind));
    for (const [, tensors] of given) if (tensors !== undefined) this.#check(tensors); // before anything is written
    for (const [kind, tensors] of given) {
      if (tensors === undefined) this.#zero(kind);
      else {
        for (const [name, values] of tensors) {
          this.write(this.plan.tensor(kind, name), values);
          await this.written(values.byteLength);
        }
      }
    }
    await this.fresh();
  }

  #has(kind: ArenaKind): boolean {
    return this.plan.regions.has(`${kind}.${this.tables.plan.parts[0]}`);
  }

  #check(tensors: Tensors): void {
    for (const name of new Set([...tensors.keys(), ...this.plan.layout.keys()])) {
      const [values, parameter] = [tensors.get(name), this.plan.layout.get(name)];
      if (values === undefined || parameter === undefined) {
        throw new EngineError(`the tensors do not fit the model: '${name}' is missing or unexpected`);
      }
      const { shape } = parameter.place;
      if (values.length !== product(shape)) {
        throw new EngineError(`'${name}' has ${values.length} numbers but the model has ${shape.join(" x ")}`);
      }
    }
  }

  async state(): Promise<State> {
    const read = async (kind: ArenaKind): Promise<Tensors> => (this.#has(kind) ? this.readTensors(kind) : new Map());
    return { params: await read("param"), m: await read("adam.m"), v: await read("adam.v") };
  }

  /** Copies of all tensors of a kind. */
  protected async readTensors(kind: ArenaKind): Promise<Tensors> {
    const found: Tensors = new Map();
    for (const name of this.plan.layout.keys()) found.set(name, await this.read(this.plan.tensor(kind, name)));
    return found;
  }

  async gradients(batch: Batch, invCount: number, first: boolean): Promise<void> {
    this.#setBatch("gradients", batch);
    this.setScalars({ inv_count: invCount, beta: first ? 0 : 1 });
    await this.runProgram("gradients");
  }

  async update(scalars: StepScalars): Promise<void> {
    this.setScalars({ ...scalars });
    await this.runProgram("update");
    const clip = await this.read({ region: "state.clip", offset: 0, shape: [this.tables.clip.length] });
    this.#results.push(this.resultOf(clip, await this.#readLoss()));
  }

  /** A step's result from the clip buffer and the loss. */
  protected resultOf(clip: Float32Array, loss: number): StepResult {
    const slot = (name: string): number => clip[this.tables.clip.indexOf(name)] ?? NaN;
    return { loss, gradNorm: slot("norm"), finite: slot("nonfinite") === 0 && Number.isFinite(loss) };
  }

  async results(_wait = true): Promise<StepResult[]> {
    const taken = this.#results;
    this.#results = [];
    return taken;
  }

  async #readLoss(): Promise<number> {
    return (await this.read({ region: "out.loss", offset: 0, shape: [1] }))[0] ?? NaN;
  }

  async loss(batch: Batch): Promise<number> {
    this.#setBatch("loss", batch);
    const trained = batch.targets.reduce((count, target) => count + (target >= 0 ? 1 : 0), 0);
    this.setScalars({ inv_count: 1 / Math.max(1, trained), beta: 0 });
    await this.runProgram("loss");
    return this.#readLoss();
  }

  async logits(tokens: Int32Array, rows: number, time: number): Promise<Float32Array> {
    this.#setTokens("logits", tokens, rows, time, columns(rows, time));
    await this.runProgram("logits", { B: rows, T: time });
    return this.read({ region: "out.logits", offset: 0, shape: [rows, time, this.#dim("logits", "V")] });
  }

  async prefill(tokens: Int32Array, rows: number, time: number, lengths?: Int32Array): Promise<Float32Array> {
    this.#setTokens("prefill", tokens, rows, time, columns(rows, time));
    const filled = lengths?.slice() ?? new Int32Array(rows).fill(time);
    if (filled.length !== rows || filled.some((length) => length < 1 || length > time)) {
      throw new EngineError(`prompts of ${rows} x ${time} tokens need ${rows} lengths in 1 .. ${time}`);
    }
    this.#positions = filled;
    this.#input("prefill", "last", filled.map((length, row) => row * time + length - 1));
    await this.runProgram("prefill", { B: rows, T: time });
    return this.read({ region: "out.next_logits", offset: 0, shape: [rows, this.#dim("prefill", "V")] });
  }

  /**
   * What every head of a layer looked at, (heads, time, time): a row for each token, its sum 1, nothing ahead of it. The kernels compute
   * it: attention over rows of the identity as values gives the probabilities, as many columns at a time as a head is wide.
   */
  async attention(tokens: Int32Array, layer: number): Promise<Float32Array> {
    const time = tokens.length;
    const [width, heads] = [this.#dim("inspect", "C"), this.#dim("inspect", "H")];
    const size = width / heads;
    this.#setTokens("inspect", tokens, 1, time, columns(1, time));
    await this.runProgram("inspect", { B: 1, T: time });
    const qkv = await this.read({ region: `out.h.${layer}.attn.qkv`, offset: 0, shape: [time, 3 * width] });
    const found = new Float32Array(heads * time * time);
    for (let first = 0; first < time; first += size) {
      for (let t = 0; t < time; t++) {
        for (let at = 0; at < width; at++) qkv[(3 * t + 2) * width + at] = Number(t === first + (at % size));
      }
      this.write({ region: "in.given.qkv", offset: 0, shape: [time, 3 * width] }, qkv);
      await this.runProgram("attention", { B: 1, T: time });
      const out = await this.read({ region: "out.given.out", offset: 0, shape: [time, width] });
      for (let head = 0; head < heads; head++) {
        for (let t = 0; t < time; t++) {
          const columns = out.subarray(t * width + head * size, t * width + head * size + Math.min(size, time - first));
          found.set(columns, (head * time + t) * time + first);
        }
      }
    }
    return found;
  }

  async decode(tokens: Int32Array): Promise<Float32Array> {
    const rows = tokens.length;
    const room = this.#dim("decode", "S");
    if (this.#positions.length !== rows || this.#positions.some((position) => position >= room)) {
      throw new EngineError(`decode needs a prefill of ${rows} prompts and room in the cache of ${room} tokens`);
    }
    this.#setTokens("decode", tokens, rows, 1, this.#positions);
    this.#input("decode", "last", Int32Array.from({ length: rows }, (_, row) => row));
    await this.runProgram("decode", { B: rows });
    this.#positions = this.#positions.map((position) => position + 1);
    return this.read({ region: "out.next_logits", offset: 0, shape: [rows, this.#dim("decode", "V")] });
  }
}

/** Programs that stay prepared, prompts of different lengths among them. */
const KEPT = 48;

const MOMENTS: readonly ArenaKind[] = ["adam.m", "adam.v"];

/** 0 .. time-1, once a row. */
function columns(rows: number, time: number): Int32Array {
  return Int32Array.from({ length: rows * time }, (_, index) => index % time);
}
