// writer.ts: writes with one model at a time, which stays open for the next text.
import { EngineLost } from "../runtime/engine.ts";
import type { Engine, Tensors } from "../runtime/engine.ts";
import { number } from "../runtime/program.ts";
import type { Settings } from "../runtime/tables.ts";
import { modelOf } from "../storage/model_config.ts";
import { Breathing } from "./breath.ts";
import type { WasmEngine } from "../runtime/wasm.ts";
import { openInspection, openWriting } from "./engines.ts";
import { encode, windowStart, writeTokens } from "./generate.ts";
import type { Library } from "./library.ts";
import type { FromWorker, ModelSource, ToWorker, WrittenToken } from "./protocol.ts";
import { readQuantised } from "./quantised.ts";
import { openRuns } from "./runs.ts";
import { Refused } from "./refusal.ts";

const SHOWN = 12; // candidates that are told with each token
const GAP_MS = 40; // between two messages: text should flow

type AskedText = Extract<ToWorker, { kind: "write" }>;
type AskedLook = Extract<ToWorker, { kind: "attend" }>;

interface Open {
  readonly key: string;
  readonly engine: Engine;
  readonly settings: Settings;
  readonly params: Tensors;
}

export class Writer {
  readonly #library: Library;
  readonly #post: (message: FromWorker) => void;
  #open: Promise<Open> | null = null;
  #inside: { readonly key: string; readonly engine: WasmEngine } | null = null;
  #key = "";
  #turn = 0;
  #look = 0;
  #last: Promise<unknown> = Promise.resolve();

  constructor(library: Library, post: (message: FromWorker) => void) {
    this.#library = library;
    this.#post = post;
  }

  /** Ends what is being written now, at the next token. */
  stop(): void {
    this.#turn++;
  }

  write(asked: AskedText): Promise<void> {
    const [turn, began] = [++this.#turn, performance.now()];
    return this.#afterTheLast(async () => {
      if (turn !== this.#turn) return;
      const opening = this.#model(asked.model);
      try {
        await this.#write(asked, turn, began, await opening);
      } catch (error) {
        if (error instanceof EngineLost) this.#forget(opening); // the next text opens another one
        if (turn === this.#turn) throw error;
      }
    });
  }

  /** One after another: an engine keeps one text at a time, and is closed for another model only when nobody uses it. */
  #afterTheLast(work: () => Promise<void>): Promise<void> {
    const mine = this.#last.then(work);
    this.#last = mine.catch(() => {});
    return mine;
  }

  async #write(asked: AskedText, turn: number, began: number, { engine, settings, params }: Open): Promise<void> {
    if (turn !== this.#turn) return;
    const context = number(settings, "model.n_ctx");
    this.#post({
      kind: "model", id: asked.id, context, info: engine.info,
      parameters: [...params.values()].reduce((sum, values) => sum + values.length, 0),
      layers: number(settings, "model.n_layer"), heads: number(settings, "model.n_head"),
    });
    const site = await this.#library.site();
    const stops = asked.stop.filter((text) => text !== "").map(encode);
    const longest = Math.max(0, ...stops.map((stop) => stop.length));
    const prompt = encode(asked.prompt);
    const how = { prompt, context, seed: asked.seed, tokens: asked.tokens, sampling: asked.sampling, candidates: SHOWN };
    const breathing = new Breathing(GAP_MS);
    let waiting: WrittenToken[] = [];
    let tail: number[] = [];
    let [count, firstMs, sent, start] = [0, 0, 0, performance.now()];
    let why: "length" | "stop" | "stopped" = "length";
    const send = (): void => {
      if (waiting.length === 0) return;
      const perSecond = count > 1 ? (count - 1) / ((performance.now() - start) / 1000) : 0;
      this.#post({ kind: "written", id: asked.id, tokens: waiting, firstMs, perSecond });
      waiting = [];
      sent = performance.now();
    };
    for await (const token of writeTokens(engine, site, how)) {
      if (turn !== this.#turn) {
        why = "stopped";
        break;
      }
      if (count++ === 0) {
        firstMs = performance.now() - began;
        start = performance.now();
      }
      waiting.push(token);
      tail = longest ? [...tail, token.token].slice(-longest) : tail;
      if (stops.some((stop) => endsWith(tail, stop))) {
        why = "stop";
        break;
      }
      if (count === 1 || performance.now() - sent > GAP_MS) send();
      await breathing.now();
    }
    send();
    this.#post({ kind: "write-ended", id: asked.id, why });
  }

  /** What the heads of a layer looked at before they chose the token behind `tokens`; of several questions in a row, the last one counts. */
  attend(asked: AskedLook): Promise<void> {
    const look = ++this.#look;
    return this.#afterTheLast(async () => {
      if (look === this.#look) await this.#attend(asked);
    });
  }

  async #attend(asked: AskedLook): Promise<void> {
    const { settings, params, key } = await this.#model(asked.model);
    if (this.#inside?.key !== key) {
      const before = this.#inside;
      this.#inside = null;
      await before?.engine.close();
      const tables = await this.#library.tables();
      const engine = await openInspection({ host: this.#library.host, tables, notice: () => {} }, settings);
      await engine.load(params);
      this.#inside = { key, engine };
    }
    const context = number(settings, "model.n_ctx");
    const first = windowStart(await this.#library.site(), context, asked.prompt, asked.tokens.length);
    const window = Int32Array.from(asked.tokens.slice(first));
    const all = await this.#inside.engine.attention(window, asked.layer);
    const [time, heads] = [window.length, number(settings, "model.n_head")];
    const weights = new Float32Array(heads * time);
    for (let head = 0; head < heads; head++) {
      const last = (head * time + time - 1) * time;
      weights.set(all.subarray(last, last + time), head * time);
    }
    this.#post({ kind: "attention", id: asked.id, attention: { layer: asked.layer, heads, first, weights } });
  }

  #forget(opened: Promise<Open>): void {
    if (this.#open === opened) this.#open = null;
  }

  #model(source: ModelSource): Promise<Open> {
    const key = JSON.stringify(source);
    if (this.#open === null || key !== this.#key) {
      const before = this.#open;
      this.#key = key;
      const opening = this.#load(source, key, before);
      this.#open = opening;
      opening.catch(() => this.#forget(opening));
    }
    return this.#open;
  }

  async #load(source: ModelSource, key: string, before: Promise<Open> | null): Promise<Open> {
    await before?.then(({ engine }) => engine.close()).catch(() => {});
    const tables = await this.#library.tables();
    const found = source.kind === "bundled" ? await this.#bundled(source.name) : await this.#ofRun(source);
    const place = { host: this.#library.host, tables, notice: (message: string) => this.#post({ kind: "notice", message }) };
    const engine = await openWriting(place, found.settings);
    await engine.load(found.params);
    return { key, engine, ...found };
  }

  async #bundled(name: string): Promise<{ settings: Settings; params: Tensors }> {
    const tables = await this.#library.tables();
    const file = await this.#library.read(`models/${name}.safetensors`);
    const { config, params } = await readQuantised(file, name);
    const preset = tables.schema.default_preset;
    return { settings: { preset, ...tables.presets[preset]?.settings, ...modelOf(config, tables) }, params };
  }

  async #ofRun(source: Extract<ModelSource, { kind: "run" }>): Promise<{ settings: Settings; params: Tensors }> {
    const store = await openRuns(this.#library, source.place, () => {});
    const run = await store.open(source.name);
    const found = await run.latest();
    if (found === null) throw new Refused(`run ${source.name} has no snapshot yet`, "train it for a minute, or pause it");
    return { settings: run.settings, params: found.state.params };
  }
}

function endsWith(tail: readonly number[], stop: readonly number[]): boolean {
  const from = tail.length - stop.length;
  return from >= 0 && stop.every((token, k) => tail[from + k] === token);
}
