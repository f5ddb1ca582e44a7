// webgpu_soak.ts: node webgpu_soak.ts ASSETS JOB TEXT: a long run on the GPU: memory and speed at its beginning and at its end.
import { readFileSync } from "node:fs";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { nodeHost } from "../src/runtime/host_node.ts";
import { readTables } from "../src/runtime/tables.ts";
import type { Settings } from "../src/runtime/tables.ts";
import { trainStep } from "../src/runtime/training.ts";
import { createWebGPUEngine } from "../src/runtime/webgpu.ts";
import { dawn } from "./webgpu_dawn.ts";

const [assets = "", job = "", file = ""] = process.argv.slice(2);
const { settings, steps } = JSON.parse(readFileSync(job, "utf8")) as { settings: Settings; steps: number };
const text = new Uint8Array(readFileSync(file));
const host = nodeHost(assets);
const tables = readTables(new TextDecoder().decode(await host.read("posttrainllm.json")));
const engine = await createWebGPUEngine(tables, settings, { host, gpu: dawn() });
await engine.initialize(1);

setFlagsFromString("--expose-gc");
const collect = runInNewContext("gc") as () => void;
const marks = [10, 10 + Math.floor((steps - 10) / 4), steps - Math.floor((steps - 10) / 4), steps];
const at: number[] = [];
const [bytes, resident, heap]: [number[], number[], number[]] = [[], [], []];
let last = NaN;
for (let step = 1; step <= steps; step++) {
  await trainStep(engine, settings, text, step);
  if (marks.includes(step)) {
    for (const { loss } of await engine.results()) last = loss;
    collect();
    at.push(performance.now());
    bytes.push(engine.bytes);
    const { rss, heapUsed } = process.memoryUsage();
    resident.push(rss);
    heap.push(heapUsed);
  }
}
const speed = (k: number): number => (1000 * ((marks[k + 1] ?? 0) - (marks[k] ?? 0))) / ((at[k + 1] ?? 0) - (at[k] ?? 0));
console.log(JSON.stringify({ bytes, resident, heap, early: speed(0), late: speed(2), loss: last }));
await engine.close();
