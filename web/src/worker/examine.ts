// examine.ts: what is known of a run before its first step, and how fast this device is.
import { Plan, product } from "../runtime/plan.ts";
import { number, programSet } from "../runtime/program.ts";
import type { Settings, Tables } from "../runtime/tables.ts";
import { windows } from "../runtime/training.ts";
import { bytes as showBytes } from "../runtime/words.ts";
import { Breathing } from "./breath.ts";
import { chooseEngine, openTraining, tokensPerStep } from "./engines.ts";
import type { Choice } from "./engines.ts";
import type { Library } from "./library.ts";
import type { EngineChoice, Facts, Speed, TextSource } from "./protocol.ts";
import { Refused } from "./refusal.ts";
import { check, settingsOf } from "./settings.ts";
import { siteOf } from "./site.ts";
import { checkLength } from "./text.ts";
import type { Corpus } from "./text.ts";

const PAGE = 1 << 16;

export interface Examined {
  readonly facts: Facts;
  readonly corpus: Corpus;
  readonly choice: Choice;
}

/** Throws Refused for what cannot be trained; null when `goOn` says so meanwhile. */
export async function examine(
  library: Library, settings: Settings, source: TextSource, engine: EngineChoice, goOn: () => boolean = () => true,
): Promise<Examined | null> {
  const tables = await library.tables();
  const [wrong] = check(tables, settings);
  if (wrong !== undefined) throw new Refused(wrong.message, wrong.hint);
  const corpus = await library.corpus(source, settings);
  checkLength(corpus, number(settings, "model.n_ctx"), number(settings, "data.val_fraction"));
  const choice = await chooseEngine({ host: library.host, tables }, engine);
  const plan = new Plan(tables, programSet(tables, settings, "training"));
  const parameters = [...plan.layout.values()].reduce((sum, { place }) => sum + product(place.shape), 0);
  const { bytes } = plan;
  checkRoom(tables, parameters, bytes, choice);
  const lines = await library.lines(corpus, settings, goOn);
  if (lines === null) return null;
  const statistics = await library.statistics();
  const before = statistics.beforeTraining(settings, parameters, { bytes: corpus.train.length, tokens: corpus.train.length });
  const facts: Facts = {
    parameters, bytes, lines,
    tokensPerStep: tokensPerStep(settings),
    trainBytes: corpus.train.length,
    valBytes: corpus.val.length,
    epochs: before.epochs,
    bytesPerParameter: before.bytesPerParameter,
    warning: before.warning,
    notices: corpus.notices,
    textName: corpus.name,
    engine: choice.engine,
    reason: choice.reason,
  };
  return { facts, corpus, choice };
}

/** Refuses a model that no memory of this browser holds, and names the largest preset that fits. */
function checkRoom(tables: Tables, parameters: number, bytes: number, choice: Choice): void {
  const { max_parameters: most } = siteOf(tables);
  if (parameters > most) throw new Refused(`a model of ${parameters.toLocaleString("en-US")} parameters is over the limit`, "lower its width or its layers");
  if (choice.engine !== "wasm") return;
  const pages = Math.max(...Object.values(tables.wasm.pages));
  const device = (navigator as { deviceMemory?: number }).deviceMemory;
  const limit = Math.min(pages * PAGE, device !== undefined && device < 8 ? device * 2 ** 30 : Infinity);
  if (bytes <= limit) return;
  const fitting = Object.entries(tables.presets).filter(([name, preset]) => {
    return new Plan(tables, programSet(tables, { preset: name, ...preset.settings }, "training")).bytes <= limit;
  });
  throw new Refused(
    `this model needs ${showBytes(bytes)} of memory, and WebAssembly may take ${showBytes(limit)} on this device`,
    `the largest preset that fits is ${fitting.at(-1)?.[0] ?? "none"}`,
  );
}

/** Times the gradients of a small preset; they change nothing. */
export async function probe(library: Library, notice: (message: string) => void): Promise<Speed> {
  const tables = await library.tables();
  const choice = await chooseEngine({ host: library.host, tables }, "auto");
  const { preset, least_ms: least } = siteOf(tables).probe[choice.engine];
  const settings = settingsOf(tables, preset, {});
  const engine = await openTraining({ host: library.host, tables, notice }, settings, choice, number(settings, "engine.threads"), () => {});
  try {
    await engine.initialize(number(settings, "training.seed"));
    const [rows, context] = [number(settings, "data.batch_size"), number(settings, "model.n_ctx")];
    const batch = windows(new Uint8Array(context + 1), Array.from({ length: rows }, () => 0), context);
    const breathing = new Breathing(20);
    const times: number[] = [];
    const began = performance.now();
    while (times.length < 3 || performance.now() - began < least) {
      const start = performance.now();
      await engine.gradients(batch, 1, true);
      await engine.update({ lr: 0, correction1: 1, correction2: 1 });
      while ((await engine.results()).length === 0) await breathing.now();
      times.push(performance.now() - start);
      await breathing.now();
    }
    times.sort((a, b) => a - b);
    return {
      engine: choice.engine,
      reason: choice.reason,
      adapter: choice.adapter,
      preset,
      msPerStep: times[Math.floor(times.length / 2)] ?? NaN,
      threads: Number(engine.info["threads"] ?? 1),
    };
  } finally {
    await engine.close();
  }
}
