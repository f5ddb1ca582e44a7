// control.ts: the control plane: initial values, order of the data, schedule, sampling.
//
// All of it is computed by the control module (kernels/cpp/control.cpp), bit for bit what control.py
// computes; here are only pointers. Its memory is made once, for the largest request.
import type { Settings, Tables } from "./tables.ts";
import { number } from "./program.ts";

interface Exports {
  readonly __heap_base: WebAssembly.Global;
  control_initial_values(out: number, seed: bigint, stream: bigint, start: bigint, count: bigint, kind: number, nLayer: number): void;
  control_stream_id(name: number, length: bigint): bigint;
  control_batch_offsets(out: number, seed: bigint, step: bigint, first: bigint, rows: bigint, low: bigint, high: bigint): void;
  control_token_index(rows: number, starts: number, order: number, ids: number, n: bigint): void;
  control_learning_rate(step: bigint, steps: bigint, kind: number, peak: number, warmup: bigint, ratio: number, decay: number): number;
  control_bias_corrections(out: number, step: bigint, beta1: number, beta2: number): void;
  control_penalize(out: number, logits: number, vocabulary: bigint, recent: number, count: bigint, penalty: number): void;
  control_sample(
    probability: number, weights: number, order: number, logits: number, vocabulary: bigint,
    seed: bigint, position: bigint, temperature: number, topK: bigint, topP: number,
  ): bigint;
}

/** Which positions use which row of a table; what embedding_backward_weight is given. */
export interface TokenIndex {
  readonly rows: Int32Array;
  readonly starts: Int32Array;
  readonly order: Int32Array;
}

export interface Sampling {
  readonly temperature: number;
  readonly topK: number;
  readonly topP: number;
}

/** Most tokens that a repetition penalty looks at: the largest `sampling.repetition_window`. */
const RECENT = 1 << 14;

/** Elements of a parameter, and rows of a batch, that are drawn at a time. */
export const DRAWN = 1 << 16;

export class Control {
  readonly #tables: Tables;
  readonly #call: Exports;
  readonly #memory: WebAssembly.Memory;
  readonly #start: number;

  /** `most`: the largest vocabulary that is sampled from and the largest batch that is indexed. */
  constructor(module: WebAssembly.Module, tables: Tables, most: { vocabulary: number; tokens: number }) {
    const bytes = Math.max(8 + 16 * most.vocabulary + 4 * RECENT, 16 * most.tokens, 8 * DRAWN);
    const instance = (pages: number): [WebAssembly.Memory, Exports] => {
      const memory = new WebAssembly.Memory({ initial: pages, maximum: pages });
      return [memory, new WebAssembly.Instance(module, { env: { memory } }).exports as unknown as Exports];
    };
    const page = 1 << 16;
    const [, probe] = instance(64);
    this.#start = Math.ceil((probe.__heap_base.value as number) / 64) * 64;
    [this.#memory, this.#call] = instance(Math.ceil((this.#start + bytes) / page));
    this.#tables = tables;
  }

  /** Elements start .. start + out.length of a parameter's first values. */
  initialValues(out: Float32Array, seed: number, name: string, init: string, nLayer: number, start: number): void {
    const kind = this.#tables.control.inits.indexOf(init);
    const stream = this.stream(name);
    for (let done = 0; done < out.length; done += DRAWN) {
      const count = Math.min(DRAWN, out.length - done);
      this.#call.control_initial_values(
        this.#start, BigInt(seed), stream, BigInt(start + done), BigInt(count), kind, nLayer,
      );
      out.set(new Float32Array(this.#memory.buffer, this.#start, count), done);
    }
  }

  /** The number of a stream of random numbers; also a seed of its own for each name (control.stream_id). */
  stream(name: string): bigint {
    const text = new TextEncoder().encode(name);
    new Uint8Array(this.#memory.buffer, this.#start, text.length).set(text);
    return this.#call.control_stream_id(this.#start, BigInt(text.length));
  }

  /** Where the rows of a step's batch start in the text: uniform in [low, high). */
  batchOffsets(seed: number, step: number, rows: number, low: number, high: number): number[] {
    if (low >= high) throw new RangeError("no window fits into the text: use a larger text or a smaller context");
    const offsets: number[] = [];
    for (let first = 0; first < rows; first += DRAWN) {
      const count = Math.min(DRAWN, rows - first);
      this.#call.control_batch_offsets(
        this.#start, BigInt(seed), BigInt(step), BigInt(first), BigInt(count), BigInt(low), BigInt(high),
      );
      for (const offset of new BigInt64Array(this.#memory.buffer, this.#start, count)) offsets.push(Number(offset));
    }
    return offsets;
  }

  /** The result lies in the module's memory: it holds until the next call. */
  tokenIndex(ids: Int32Array): TokenIndex {
    const n = ids.length;
    const part = (k: number): Int32Array => new Int32Array(this.#memory.buffer, this.#start + 4 * n * k, n);
    const [rows, starts, order, given] = [part(0), part(1), part(2), part(3)];
    given.set(ids);
    this.#call.control_token_index(rows.byteOffset, starts.byteOffset, order.byteOffset, given.byteOffset, BigInt(n));
    return { rows, starts, order };
  }

  /** Learning rate of a step, counted from 1, under the settings of a run. */
  learningRate(step: number, settings: Settings): number {
    const of = (name: string): number => number(settings, name);
    return this.#call.control_learning_rate(
      BigInt(step),
      BigInt(of("training.steps")),
      this.#tables.control.schedules.indexOf(String(settings["schedule.kind"])),
      of("schedule.learning_rate"),
      BigInt(of("schedule.warmup_steps")),
      of("schedule.final_ratio"),
      of("schedule.decay_fraction"),
    );
  }

  /** What AdamW divides its moments by. */
  biasCorrections(step: number, settings: Settings): [number, number] {
    const [beta1, beta2] = [number(settings, "optimizer.beta1"), number(settings, "optimizer.beta2")];
    this.#call.control_bias_corrections(this.#start, BigInt(step), beta1, beta2);
    const [first, second] = new Float64Array(this.#memory.buffer, this.#start, 2);
    return [first ?? NaN, second ?? NaN];
  }

  /**
   * Logits in which the tokens of `recent` (the last ones; at most RECENT of them count) are less likely. The result lies in the
   * module's memory: it holds until the next call, and may be handed to `sample`.
   */
  penalize(logits: Float32Array, recent: Int32Array, penalty: number): Float32Array {
    const n = logits.length;
    const tokens = recent.subarray(-RECENT);
    const [out, given, last] = [this.#start, this.#start + 4 * n, this.#start + 8 * n];
    new Float32Array(this.#memory.buffer, given, n).set(logits);
    new Int32Array(this.#memory.buffer, last, tokens.length).set(tokens);
    this.#call.control_penalize(out, given, BigInt(n), last, BigInt(tokens.length), penalty);
    return new Float32Array(this.#memory.buffer, out, n);
  }

  /** The next token and its probability among those it was chosen from. Throws a RangeError when a logit is not finite. */
  sample(
    logits: Float32Array, seed: number | bigint, position: number, how: Sampling,
  ): { token: number; probability: number } {
    const n = logits.length;
    const weights = this.#start + 8;
    const order = weights + 8 * n;
    const given = order + 4 * n;
    new Float32Array(this.#memory.buffer, given, n).set(logits);
    const token = this.#call.control_sample(
      this.#start, weights, order, given, BigInt(n), BigInt(seed), BigInt(position),
      how.temperature, BigInt(how.topK), how.topP,
    );
    if (token < 0n) throw new RangeError("the logits are not finite numbers");
    const [probability] = new Float64Array(this.#memory.buffer, this.#start, 1);
    return { token: Number(token), probability: probability ?? NaN };
  }

  /** The probabilities (vocabulary) that the last call of `sample` chose by; it must have had a temperature above 0. */
  probabilities(vocabulary: number, chosen: { token: number; probability: number }): Float64Array {
    const weights = new Float64Array(this.#memory.buffer, this.#start + 8, vocabulary);
    const total = (weights[chosen.token] ?? NaN) / chosen.probability;
    return weights.map((weight) => weight / total);
  }
}
