// judge.ts: what a run came to; every figure and every word is the control module's and Python's.
import type { Statistics } from "../runtime/statistics.ts";
import type { Settings } from "../runtime/tables.ts";
import { breath } from "./breath.ts";
import { decode } from "./generate.ts";
import type { CountingLine, Verdict } from "./protocol.ts";
import type { Corpus } from "./text.ts";

const encoder = new TextEncoder();

export class Judge {
  readonly #statistics: Statistics;
  readonly #corpus: Corpus;
  readonly #counting: readonly CountingLine[];

  constructor(statistics: Statistics, corpus: Corpus, counting: readonly CountingLine[]) {
    this.#statistics = statistics;
    this.#corpus = corpus;
    this.#counting = counting;
  }

  /** Null when `goOn` says so meanwhile. */
  async verdict(
    texts: readonly string[], valLoss: number | null, best: number | null, preset: string, settings: Settings, goOn: () => boolean,
  ): Promise<Verdict | null> {
    const { train, val } = this.#corpus;
    const judged = {
      texts: texts.map((text) => encoder.encode(text)), train, val, valLoss, bestValLoss: best, counting: this.#counting, preset, settings,
    };
    const found = await unhurried(this.#statistics.verdict(judged), goOn);
    if (found === null) return null;
    const { position, length } = found.copy;
    return { ...found, valLoss, counting: this.#counting, copied: decode(train.subarray(position, position + length)) };
  }
}

/** The result of a generator that takes long, with messages let in after every piece; null when `goOn` says so. */
export async function unhurried<T>(work: Generator<number, T>, goOn: () => boolean = () => true): Promise<T | null> {
  for (;;) {
    const { done, value } = work.next();
    if (done) return value;
    await breath();
    if (!goOn()) return null;
  }
}
