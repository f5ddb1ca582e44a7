// samples.ts: what a run's model writes: along the way, always from the same random numbers, so that one
// sample is seen to change; and for the verdict (training/samples.py).
import type { Engine } from "../runtime/engine.ts";
import { number } from "../runtime/program.ts";
import type { Settings } from "../runtime/tables.ts";
import { decode, encode, writeTokens } from "./generate.ts";
import type { SampleLine, SamplingChoice } from "./protocol.ts";
import type { Site } from "./site.ts";
import type { Corpus } from "./text.ts";

const samplingOf = (settings: Settings): SamplingChoice => ({
  temperature: number(settings, "sampling.temperature"),
  topK: number(settings, "sampling.top_k"),
  topP: number(settings, "sampling.top_p"),
  repetitionPenalty: number(settings, "sampling.repetition_penalty"),
  repetitionWindow: number(settings, "sampling.repetition_window"),
});

export class Samples {
  readonly #engine: Engine;
  readonly #site: Site;
  readonly #settings: Settings;
  readonly #corpus: Corpus;
  #next = 0;

  constructor(engine: Engine, site: Site, settings: Settings, corpus: Corpus) {
    this.#engine = engine;
    this.#site = site;
    this.#settings = settings;
    this.#corpus = corpus;
  }

  /** The setting, else the beginning of the validation text. */
  get prompt(): number[] {
    const given = String(this.#settings["training.sample_prompt"] ?? "");
    if (given) return encode(given);
    const text = this.#corpus.val.length ? this.#corpus.val : this.#corpus.train;
    const length = Math.floor(number(this.#settings, "model.n_ctx") / this.#site.prompt_divisor);
    return Array.from(text.subarray(0, Math.max(1, length)));
  }

  /** Whether there is time for one more look at the sample: looks may take a small share of all time. */
  glimpseIsDue(): boolean {
    return performance.now() >= this.#next && number(this.#settings, "training.sample_tokens") > 0;
  }

  /** Null when `goOn` says so meanwhile, or none is wanted. */
  async along(step: number, glimpse: boolean, goOn: () => Promise<boolean>): Promise<SampleLine | null> {
    if (number(this.#settings, "training.sample_tokens") === 0) return null;
    const began = performance.now();
    const text = await this.#write("sample", 0, goOn);
    const took = performance.now() - began;
    const { share, least_s: least } = this.#site.glimpse;
    this.#next = performance.now() + Math.max(took / share, 1000 * least);
    if (text === null) return null;
    return { step, prompt: decode(this.prompt), text, ...(glimpse ? { glimpse } : {}) };
  }

  /** The texts that a verdict reads; null when `goOn` says so meanwhile. */
  async forVerdict(goOn: (done: number, of: number) => Promise<boolean>): Promise<string[] | null> {
    const count = number(this.#settings, "training.sample_tokens") ? number(this.#settings, "training.verdict_samples") : 0;
    const texts: string[] = [];
    for (let n = 0; n < count; n++) {
      const text = (await goOn(n, count)) ? await this.#write("verdict", n, () => goOn(n, count)) : null;
      if (text === null) return null;
      texts.push(text);
    }
    return texts;
  }

  async #write(purpose: string, n: number, goOn: () => Promise<boolean>): Promise<string | null> {
    const written: number[] = [];
    const seed = this.#engine.control.stream(`${purpose} ${this.#settings["training.seed"]} ${n}`);
    const how = {
      prompt: this.prompt,
      context: number(this.#settings, "model.n_ctx"),
      tokens: number(this.#settings, "training.sample_tokens"),
      sampling: samplingOf(this.#settings),
      candidates: 0,
      seed,
    };
    for await (const { token } of writeTokens(this.#engine, this.#site, how)) {
      written.push(token);
      if (!(await goOn())) return null;
    }
    return decode(written);
  }
}
