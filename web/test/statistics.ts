// statistics.ts: node statistics.ts ASSETS JOB: answers the questions of a job with runtime/statistics.ts
// and prints them as JSON, for comparison with Python (tests/test_statistics_web.py).
import { readFileSync } from "node:fs";
import { nodeHost } from "../src/runtime/host_node.ts";
import { finish, Statistics } from "../src/runtime/statistics.ts";
import type { CountingLine, Judged, Tokens } from "../src/runtime/statistics.ts";
import { readTables } from "../src/runtime/tables.ts";
import type { Settings } from "../src/runtime/tables.ts";
import { bytes, fill, ratio } from "../src/runtime/words.ts";
import type { Values } from "../src/runtime/words.ts";

/** Texts are files' names; wide tokens are two bytes each. */
interface Job {
  readonly counting: readonly { readonly train: string; readonly val: string; readonly wide: boolean; readonly vocabulary: number }[];
  readonly splits: readonly { readonly text: string; readonly fraction: number }[];
  readonly windows: readonly (readonly [nVal: number, wanted: number, nCtx: number])[];
  readonly standings: readonly { readonly loss: number | null; readonly lines: readonly CountingLine[] }[];
  readonly before: readonly { readonly preset: string; readonly parameters: number; readonly bytes: number; readonly tokens: number }[];
  readonly verdicts: readonly (Pick<Judged, "valLoss" | "bestValLoss" | "counting" | "preset"> & {
    readonly nan: boolean;
    readonly texts: readonly string[];
    readonly train: string;
    readonly val: string;
    readonly steps: number;
  })[];
  readonly sentences: readonly (readonly [sentence: string, values: Values])[];
  readonly numbers: readonly number[];
  readonly sizes: readonly number[];
}

const [assets = "", file = ""] = process.argv.slice(2);
const host = nodeHost(assets);
const tables = readTables(new TextDecoder().decode(await host.read("posttrainllm.json")));
const module = await WebAssembly.compile(await host.read("posttrain-control.wasm"));
const statistics = new Statistics(module, tables);
const job = JSON.parse(readFileSync(file, "utf8")) as Job;

const text = (name: string): Uint8Array => new Uint8Array(readFileSync(name));
const tokens = (name: string, wide: boolean): Tokens => (wide ? new Uint16Array(text(name).buffer) : text(name));
const settings = (preset: string): Settings => tables.presets[preset]?.settings ?? {};

const progress: number[] = [];
const answers = {
  counting: job.counting.map(({ train, val, wide, vocabulary }) =>
    finish(statistics.counting(tokens(train, wide), tokens(val, wide), vocabulary), (done) => progress.push(done)),
  ),
  progress,
  splits: job.splits.map(({ text: name, fraction }) => statistics.split(text(name), fraction)),
  windows: job.windows.map((given) => statistics.validationOffsets(...given)),
  standings: job.standings.map(({ loss, lines }) => statistics.standing(loss ?? NaN, lines)),
  before: job.before.map((given) => statistics.beforeTraining(settings(given.preset), given.parameters, given)),
  verdicts: job.verdicts.map((given) =>
    finish(
      statistics.verdict({
        ...given,
        valLoss: given.nan ? NaN : given.valLoss,
        texts: given.texts.map(text),
        train: text(given.train),
        val: text(given.val),
        settings: { ...settings(given.preset), "training.steps": given.steps },
      }),
    ),
  ),
  sentences: job.sentences.map(([sentence, values]) => fill(sentence, values)),
  ratios: job.numbers.map(ratio),
  bytes: job.sizes.map(bytes),
};
console.log(JSON.stringify(answers));
