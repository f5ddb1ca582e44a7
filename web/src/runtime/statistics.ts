// statistics.ts: what counting reaches on a text, how like it written text is, and what to make of both.
//
// All of it is computed by the control module (kernels/cpp/statistics.h), the twin of text/counting.py,
// text/likeness.py, text/corpus.py and training/writing.py; the words come from posttrainllm.json. Here are only pointers.
// What takes long is a generator: it yields the share that is done, 0 to 1, after every piece of text, so that a worker can
// show it, look for messages or give up; `finish` runs one through. Each uses memory of its own, which goes with it.
import type { Settings, Tables } from "./tables.ts";
import { number } from "./program.ts";
import { bytes, fill, ratio } from "./words.ts";

/** Tokens of a text: bytes, or ids of a vocabulary of up to 65,536. */
export type Tokens = Uint8Array | Uint16Array;

export interface CountingLine {
  readonly name: string;
  /** Nats a token. */
  readonly loss: number;
}

/** Something to try next: a name for a button, its words, and the values in them. */
export interface Action {
  readonly name: string;
  readonly text: string;
  readonly values: Readonly<Record<string, number | string>>;
}

export interface Verdict {
  /** The findings, as the terminal says them. */
  readonly lines: readonly string[];
  readonly actions: readonly Action[];
  readonly standing: string | null;
  readonly words: Words;
  readonly copy: Copy;
  /** What unseen text of the same sizes gets; null when the validation part is too short. */
  readonly unseen: { readonly words: Words; readonly copy: Copy } | null;
}

export interface Words {
  readonly written: number;
  readonly known: number;
}

export interface Copy {
  readonly length: number;
  readonly position: number;
}

export interface Judged {
  /** What the model wrote, without prompts, in bytes. */
  readonly texts: readonly Uint8Array[];
  readonly train: Uint8Array;
  readonly val: Uint8Array;
  readonly valLoss: number | null;
  readonly bestValLoss: number | null;
  readonly counting: readonly CountingLine[];
  readonly preset: string;
  readonly settings: Settings;
}

type Call = Readonly<Record<string, (...given: readonly (number | bigint)[]) => number | bigint>>;

/** Bytes of a text that are copied into the module's memory at a time. */
const PIECE = 1 << 20;
const PAGE = 1 << 16;
const SMALL = 64 * PAGE;

/** The module with memory of its own, of `bytes` beside a piece of text and a few small numbers. */
class Room {
  readonly call: Call;
  readonly memory: WebAssembly.Memory;
  /** Where the state is, a piece of text, and 2 kB for small results. */
  readonly state: number;
  readonly piece: number;
  readonly small: number;

  constructor(module: WebAssembly.Module, heap: number, size: number) {
    const pages = Math.ceil((heap + 2048 + size + PIECE) / PAGE);
    this.memory = new WebAssembly.Memory({ initial: pages, maximum: pages });
    this.call = new WebAssembly.Instance(module, { env: { memory: this.memory } }).exports as unknown as Call;
    this.small = Math.ceil(heap / 64) * 64;
    this.state = this.small + 1024;
    this.piece = pages * PAGE - PIECE;
  }

  run(name: string, ...given: readonly (number | bigint)[]): number {
    const call = this.call[name];
    if (!call) throw new RangeError(`the control module has no ${name}: build the kernels again`);
    return Number(call(...given));
  }

  put(part: Tokens, at = this.piece): void {
    new Uint8Array(this.memory.buffer, at, part.byteLength).set(new Uint8Array(part.buffer, part.byteOffset, part.byteLength));
  }

  numbers(count: number): number[] {
    return [...new BigUint64Array(this.memory.buffer, this.small, count)].map(Number);
  }
}

export class Statistics {
  readonly #module: WebAssembly.Module;
  readonly #tables: Tables;
  readonly #heap: number;
  readonly #facts: Room;

  /** `module`: posttrain-control.wasm. */
  constructor(module: WebAssembly.Module, tables: Tables) {
    const memory = new WebAssembly.Memory({ initial: SMALL / PAGE, maximum: SMALL / PAGE });
    const { __heap_base: heap } = new WebAssembly.Instance(module, { env: { memory } }).exports;
    this.#heap = (heap as WebAssembly.Global).value as number;
    this.#module = module;
    this.#tables = tables;
    this.#facts = this.#room(0);
  }

  #room(size: number): Room {
    return new Room(this.#module, this.#heap, size);
  }

  /** Where the validation part of a text starts. */
  split(text: Uint8Array, valFraction: number): number {
    const facts = this.#facts;
    const near = facts.run("corpus_split_near", BigInt(text.length), valFraction);
    facts.put(text.subarray(near, near + 4));
    return facts.run("corpus_split", facts.piece, BigInt(text.length), valFraction);
  }

  /** Where the fixed validation windows start: `wanted` of them, or all for 0. */
  validationOffsets(nVal: number, wanted: number, nCtx: number): number[] {
    const given = [BigInt(nVal), BigInt(wanted), BigInt(nCtx)];
    const room = this.#room(8 * this.#facts.run("corpus_validation_offsets", 0, ...given));
    const count = room.run("corpus_validation_offsets", room.state, ...given);
    return [...new BigInt64Array(room.memory.buffer, room.state, count)].map(Number);
  }

  /** Guessing and the losses of the counting tables. With no validation part the training part is the measure. */
  *counting(train: Tokens, val: Tokens, vocabulary: number): Generator<number, CountingLine[]> {
    const [names, width] = [this.#tables.writing.lines, train.BYTES_PER_ELEMENT];
    const parts = [this.#runs(val.length > 0 ? val : train, 1), this.#runs(train, 0)] as const;
    const [nVal, nTrain] = parts.map((runs) => runs.reduce((sum, run) => sum + run.length, 0)) as [number, number];
    const room = this.#room(this.#facts.run("counting_bytes", BigInt(nVal), width));
    room.run("counting_begin", room.state, BigInt(nVal), width);
    let done = 0;
    for (const [part, runs] of parts.entries()) {
      for (const run of runs) {
        for (const [at, piece] of pieces(run)) {
          room.put(piece);
          const read = part === 0 ? "counting_validation" : "counting_train";
          room.run(read, room.state, room.piece, BigInt(piece.length), at === 0 ? 1 : 0);
          yield (done += piece.length) / (nVal + nTrain);
        }
      }
    }
    const lines = [{ name: names[0] ?? "", loss: room.run("counting_guessing", BigInt(vocabulary)) }];
    names.slice(1).forEach((name, n) => {
      const loss = room.run("counting_loss", room.state, n + 1);
      if (loss >= 0) lines.push({ name, loss });
    });
    return lines;
  }

  #runs(part: Tokens, validation: number): Tokens[] {
    const facts = this.#facts;
    const count = facts.run("counting_runs", facts.small + 8, facts.small, BigInt(part.length), validation);
    const [length = 0, ...starts] = facts.numbers(count + 1);
    return starts.map((start) => part.subarray(start, start + length));
  }

  /** How far a layer's tensors moved, compared with their size: |after - before| / |before| over all of them. */
  movement(tensors: Iterable<readonly [after: Float32Array, before: Float32Array]>): number {
    const facts = this.#facts;
    const most = PIECE / 8; // numbers of both in a piece
    new Float64Array(facts.memory.buffer, facts.small, 2).fill(0);
    const [given, was] = [facts.piece, facts.piece + PIECE / 2].map((at) => new Float32Array(facts.memory.buffer, at, most)) as [Float32Array, Float32Array];
    for (const [after, before] of tensors) {
      for (let at = 0; at < after.length; at += most) {
        const part = after.subarray(at, at + most);
        given.set(part);
        was.set(before.subarray(at, at + most));
        facts.run("movement_add", facts.small, given.byteOffset, was.byteOffset, BigInt(part.length));
      }
    }
    return facts.run("movement_ratio", facts.small);
  }

  /** Where a loss stands among the lines: "below triples (2.05)". */
  standing(loss: number, lines: readonly CountingLine[]): string {
    const { sentences } = this.#tables.writing;
    const at = this.#withLines("counting_standing", loss, lines);
    const line = lines[at % lines.length];
    if (at < 0 || !line) return sentences["not_a_number"] ?? "";
    return fill(sentences[at < lines.length ? "below" : "above"] ?? "", { line: this.line(line) });
  }

  /** A line with its loss, as in a sentence: "triples (2.05)". */
  line(line: CountingLine): string {
    return fill(this.#tables.writing.sentences["line"] ?? "", { name: line.name, loss: line.loss });
  }

  #withLines(name: string, loss: number, lines: readonly CountingLine[]): number {
    const facts = this.#facts;
    new Float64Array(facts.memory.buffer, facts.small, lines.length).set(lines.map((line) => line.loss));
    return facts.run(name, loss, facts.small, BigInt(lines.length));
  }

  /** Before step 0: passes over the text, bytes a parameter, and a warning when a model can only memorise it. */
  beforeTraining(settings: Settings, parameters: number, train: { bytes: number; tokens: number }): {
    readonly epochs: number;
    readonly bytesPerParameter: number;
    readonly warning: string | null;
  } {
    const { warnings, sentences } = this.#tables.writing;
    const of = (name: string): bigint => BigInt(number(settings, name));
    const epochs = this.#facts.run(
      "writing_epochs",
      of("data.batch_size"), of("data.accumulation"), of("model.n_ctx"), of("training.steps"), BigInt(train.tokens),
    );
    const key = warnings[this.#facts.run("writing_warning", BigInt(parameters), BigInt(train.bytes), epochs)];
    const enough = bytes(this.#facts.run("writing_enough", BigInt(parameters)));
    const bytesPerParameter = train.bytes / parameters;
    const warning = key ? fill(sentences[key] ?? "", { ratio: ratio(bytesPerParameter), epochs, enough }) : null;
    return { epochs, bytesPerParameter, warning };
  }

  /** Judge a model and what it wrote, as the terminal does at the end of a run. */
  *verdict(judged: Judged): Generator<number, Verdict> {
    const unseen = this.#unseen(judged);
    const groups = [judged.texts, unseen] as const;
    const words = this.#words(groups);
    const copies = groups.map((texts) => this.#copies(texts));
    const total = judged.train.length + judged.val.length;
    let done = 0;
    for (const [part, text] of [judged.train, judged.val].entries()) {
      for (const [, piece] of pieces(text)) {
        words.put(piece);
        words.run("likeness_words_read", words.state, words.piece, BigInt(piece.length), part);
        if (part === 0) {
          for (const copy of copies) {
            copy.put(piece);
            copy.run("likeness_copy_read", copy.state, copy.piece, BigInt(piece.length));
          }
        }
        yield (done += piece.length) / total;
      }
      words.run("likeness_words_end", words.state, part);
    }
    const counted = (group: number, parts: number): Words => {
      words.run("likeness_words_count", words.state, words.small, group, parts);
      const [written = 0, known = 0] = words.numbers(2);
      return { written, known };
    };
    const [copy, unseenCopy] = copies.map((room): Copy => {
      room.run("likeness_copy_longest", room.state, room.small);
      const [length = 0, position = 0] = room.numbers(2);
      return { length, position };
    }) as [Copy, Copy];
    const reference = unseen.length > 0 ? { words: counted(1, 1), copy: unseenCopy } : null;
    const standing = judged.valLoss === null ? null : this.standing(judged.valLoss, judged.counting);
    const actions = this.#actions(judged, copy, reference?.copy ?? null);
    const found = { standing, words: counted(0, 3), copy, unseen: reference, actions };
    return { ...found, lines: this.#lines(judged, found) };
  }

  /** Pieces of the validation part of the samples' sizes. */
  #unseen(judged: Judged): Uint8Array[] {
    const sizes = judged.texts.map((text) => text.length);
    const room = this.#room(16 * sizes.length);
    const given = new BigUint64Array(room.memory.buffer, room.state, 2 * sizes.length);
    given.set(sizes.map(BigInt));
    const starts = room.state + 8 * sizes.length;
    const found = room.run("likeness_unseen", starts, room.state, BigInt(sizes.length), BigInt(judged.val.length));
    if (!found) return [];
    return sizes.map((size, i) => {
      const start = Number(given[sizes.length + i]);
      return judged.val.subarray(start, start + size);
    });
  }

  #words(groups: readonly (readonly Uint8Array[])[]): Room {
    const size = BigInt(groups.flat().reduce((sum, text) => sum + text.length, 0));
    const room = this.#room(this.#facts.run("likeness_words_bytes", size) + longest(groups.flat()));
    const at = room.state + this.#facts.run("likeness_words_bytes", size);
    room.run("likeness_words_begin", room.state, size);
    groups.forEach((texts, group) => {
      for (const text of texts) {
        room.put(text, at);
        room.run("likeness_words_written", room.state, at, BigInt(text.length), group);
      }
    });
    return room;
  }

  #copies(texts: readonly Uint8Array[]): Room {
    const size = [BigInt(texts.reduce((sum, text) => sum + text.length, 0)), BigInt(texts.length)] as const;
    const room = this.#room(this.#facts.run("likeness_copy_bytes", ...size) + longest(texts));
    const at = room.state + this.#facts.run("likeness_copy_bytes", ...size);
    room.run("likeness_copy_begin", room.state, ...size);
    for (const text of texts) {
      room.put(text, at);
      room.run("likeness_copy_written", room.state, at, BigInt(text.length));
    }
    return room;
  }

  #actions(judged: Judged, copy: Copy, unseenCopy: Copy | null): Action[] {
    const { actions } = this.#tables.writing;
    const { valLoss: loss, bestValLoss: best, counting, settings } = judged;
    const facts = this.#facts;
    const [codes, losses, lines] = [facts.small, facts.small + 16, facts.small + 32];
    new Float64Array(facts.memory.buffer, losses, 2).set([loss ?? NaN, best ?? NaN]);
    new Float64Array(facts.memory.buffer, lines, counting.length).set(counting.map((line) => line.loss));
    const measured = loss === null ? 0 : best === null ? 1 : 3;
    const larger = this.#larger(judged);
    const count = facts.run(
      "writing_actions", codes, losses, measured, lines, BigInt(counting.length),
      BigInt(copy.length), BigInt(unseenCopy?.length ?? -1), larger === null ? 0 : 1,
    );
    const found = [...new Uint32Array(facts.memory.buffer, codes, count)];
    const ahead = loss === null ? undefined : counting[this.#withLines("writing_ahead", loss, counting)];
    const steps = number(settings, "training.steps");
    const values = {
      loss: loss ?? NaN, best: best ?? NaN, n_bytes: copy.length, steps, total: 2 * steps,
      line: ahead ? this.line(ahead) : "", preset: larger ?? "",
    };
    return found.map((code) => {
      const { name, text } = actions[code] ?? { name: "", text: "" };
      return { name, text: fill(text, values), values };
    });
  }

  #larger(judged: Judged): string | null {
    const presets = Object.entries(this.#tables.presets);
    const at = presets.findIndex(([name]) => name === judged.preset);
    if (at < 0) return null;
    const room = this.#room(24 * presets.length);
    const columns = ["model.n_vocab", "model.n_layer", "model.n_embd"].map((setting, i) => {
      const place = room.state + 8 * presets.length * i;
      const column = presets.map(([, preset]) => BigInt(number(preset.settings, setting)));
      new BigUint64Array(room.memory.buffer, place, presets.length).set(column);
      return place;
    });
    const found = room.run("writing_larger", ...columns, BigInt(presets.length), BigInt(at), BigInt(judged.train.length));
    return presets[found]?.[0] ?? null;
  }

  #lines(judged: Judged, found: Omit<Verdict, "lines">): string[] {
    const { sentences, most_shown: most } = this.#tables.writing;
    const say = (key: string, values = {}): string => fill(sentences[key] ?? "", values);
    const percent = (words: Words): number => (100 * words.known) / words.written;
    const { words, copy, unseen, standing } = found;
    const loss = standing === null ? say("no_val_loss") : say("val_loss", { loss: judged.valLoss ?? NaN, standing });
    let real = words.written ? say("words", { percent: percent(words), n_words: words.written }) : say("no_words");
    if (unseen?.words.written) real += say("unseen_words", { percent: percent(unseen.words) });
    const text = new TextDecoder().decode(judged.train.subarray(copy.position, copy.position + copy.length));
    const letters = [...text];
    const piece = JSON.stringify(letters.length <= most ? text : letters.slice(0, most - 3).join("") + "...");
    let copied = copy.length ? say("copy", { n_bytes: copy.length, piece }) : say("no_copy");
    if (unseen) copied += say("unseen_copy", { n_bytes: unseen.copy.length });
    const lines = judged.counting.map((line) => this.line(line)).join(", ");
    return [loss, say("counting", { lines }), real, copied];
  }
}

/** Run a generator to its end and return its result. */
export function finish<T>(work: Generator<number, T>, progress: (done: number) => void = () => undefined): T {
  for (;;) {
    const step = work.next();
    if (step.done) return step.value;
    progress(step.value);
  }
}

function* pieces<T extends Tokens>(text: T): Generator<[at: number, piece: T]> {
  const size = PIECE / text.BYTES_PER_ELEMENT;
  for (let at = 0; at < text.length; at += size) yield [at, text.subarray(at, at + size) as T];
}

function longest(texts: readonly Uint8Array[]): number {
  return texts.reduce((most, text) => Math.max(most, text.length), 0);
}
