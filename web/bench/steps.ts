// steps.ts: node steps.ts ASSETS REQUEST: first losses and the time of training steps of one engine, as one
// JSON object; bench/gpu/run_dawn.py asks for it.
import { openSync, readFileSync, readSync } from "node:fs";
import { nodeHost } from "../src/runtime/host_node.ts";
import type { Engine, Tensors } from "../src/runtime/engine.ts";
import { Plan, product } from "../src/runtime/plan.ts";
import { programSet } from "../src/runtime/program.ts";
import { readTables } from "../src/runtime/tables.ts";
import type { EngineName, Settings } from "../src/runtime/tables.ts";
import { trainStep } from "../src/runtime/training.ts";
import { openWasm } from "../src/runtime/wasm.ts";
import { openWebGPU, WebGPUEngine } from "../src/runtime/webgpu.ts";
import { dawn } from "../test/webgpu_dawn.ts";

interface Request {
  readonly engine: EngineName;
  readonly settings: Settings;
  readonly threads: number;
  /** One byte a token. */
  readonly text: string;
  /** First values of all parameters, one behind the other; without it, they are drawn. */
  readonly weights: string | null;
  /** Steps whose losses are wanted, before anything is timed. */
  readonly losses: number;
  /** Steps that are timed together, batches of them, and milliseconds after which no further one begins. */
  readonly steps: number;
  readonly repeats: number;
  readonly most: number;
}

const [assets = "", file = ""] = process.argv.slice(2);
const request = JSON.parse(readFileSync(file, "utf8")) as Request;
const { settings } = request;
const host = nodeHost(assets);
const tables = readTables(new TextDecoder().decode(await host.read("posttrainllm.json")));
const text = new Uint8Array(readFileSync(request.text));
const set = programSet(tables, settings, "training", undefined, request.engine);

/** Tensors of a file, read one by one. */
function weightsOf(path: string): Tensors {
  const found: Tensors = new Map();
  const descriptor = openSync(path, "r");
  for (const [name, { place }] of new Plan(tables, set).layout) {
    const values = new Float32Array(product(place.shape));
    readSync(descriptor, values);
    found.set(name, values);
  }
  return found;
}

async function open(): Promise<Engine> {
  if (request.engine === "webgpu") return openWebGPU(tables, set, { host, gpu: dawn() });
  return openWasm({ host, tables, set, threads: request.threads });
}

const lap = (since: number): number => performance.now() - since;
const began = performance.now();
const engine = await open();
const opened = lap(began);
if (request.weights === null) await engine.initialize(settings["training.seed"] as number);
else await engine.load(weightsOf(request.weights));
const loaded = performance.now();
let step = 1;
const losses: number[] = [];
await trainStep(engine, settings, text, step++);
losses.push(...(await engine.results()).map((result) => result.loss));
const first = lap(loaded);
for (; step <= request.losses; step++) await trainStep(engine, settings, text, step);
losses.push(...(await engine.results()).map((result) => result.loss));

const [times, hostTimes]: [number[], number[]] = [[], []];
const start = performance.now();
let loss = losses.at(-1);
for (let repeat = -2; repeat < request.repeats && (repeat < 3 || lap(start) < request.most); repeat++) {
  const from = performance.now();
  for (let k = 0; k < request.steps; k++) await trainStep(engine, settings, text, step++);
  const middle = performance.now();
  loss = (await engine.results()).at(-1)?.loss;
  if (repeat < 0) continue; // warm-up
  times.push(lap(from) / request.steps);
  hostTimes.push((middle - from) / request.steps);
}
const dispatches = engine instanceof WebGPUEngine ? engine.dispatches : 0;
console.log(
  JSON.stringify({
    info: { ...engine.info, node: process.versions.node, v8: process.versions.v8 },
    open_ms: opened, first_step_ms: first, losses, loss, times, host_times: hostTimes, bytes: engine.bytes, dispatches,
    resident: process.memoryUsage().rss,
  }),
);
await engine.close();
