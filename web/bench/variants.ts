// variants.ts: node variants.ts ASSETS SETTINGS: GPU time of every variant of every piece of work of a training
// step, by timestamps, as one JSON object: what the preferences of dispatch.json are judged by.
import { readFileSync } from "node:fs";
import { nodeHost } from "../src/runtime/host_node.ts";
import { programSet } from "../src/runtime/program.ts";
import { readTables } from "../src/runtime/tables.ts";
import type { Settings } from "../src/runtime/tables.ts";
import { openWebGPU } from "../src/runtime/webgpu.ts";
import type { WebGPUEngine } from "../src/runtime/webgpu.ts";
import { APART } from "../src/runtime/webgpu_dispatch.ts";
import type { Work } from "../src/runtime/webgpu_work.ts";
import { dawn } from "../test/webgpu_dawn.ts";

const TURNS = 20; // of the same work in one pass
const PASSES = 3;

const [assets = "", file = ""] = process.argv.slice(2);
const settings = JSON.parse(readFileSync(file, "utf8")) as Settings;
const host = nodeHost(assets);
const tables = readTables(new TextDecoder().decode(await host.read("posttrainllm.json")));
const all = programSet(tables, settings, "training", undefined, "webgpu");
const gpu = dawn(["disable-dawn-features=timestamp_quantization"]); // browsers round to 0.1 ms
const engine = await openWebGPU(tables, all, { host, gpu });
await engine.initialize(1);
const { device, recorder } = engine;
const { table } = recorder;
const queries = device.device.createQuerySet({ type: "timestamp", count: 2 });
const [resolved, readable] = [512 | 4, 1 | 8].map((usage) => device.device.createBuffer({ size: 16, usage })) as [GPUBuffer, GPUBuffer];

/** Microseconds of one turn: the least of a few passes. */
async function microseconds(one: WebGPUEngine, work: Work): Promise<number> {
  const recording = await recorder.recordWorks([work]);
  let least = Infinity;
  for (let pass = 0; pass < PASSES; pass++) {
    const encoder = one.device.device.createCommandEncoder();
    const compute = encoder.beginComputePass({
      timestampWrites: { querySet: queries, beginningOfPassWriteIndex: 0, endOfPassWriteIndex: 1 },
    });
    for (let turn = 0; turn < TURNS; turn++) recorder.encode(compute, recording, 0, recording.pipelines.length);
    compute.end();
    encoder.resolveQuerySet(queries, 0, 2, resolved, 0);
    encoder.copyBufferToBuffer(resolved, 0, readable, 0, 16);
    one.device.queue.submit([encoder.finish()]);
    await one.device.settled(readable.mapAsync(1));
    const [begin = 0n, end = 0n] = new BigUint64Array(readable.getMappedRange());
    readable.unmap();
    least = Math.min(least, Number(end - begin) / 1000 / TURNS);
  }
  recorder.forget(recording);
  return least;
}

const found: Record<string, { count: number; chosen: string; times: Record<string, number> }> = {};
const chosen = ["gradients", "update"].flatMap((name) => table.merge(engine.plan.bind(name)).map((work) => work.key));
for (const rule of table.rules) table.preferred.set(rule.op, APART);
const works = ["gradients", "update"].flatMap((name) => table.merge(engine.plan.bind(name)));
table.preferred.clear();
works.push(...["gradients", "update"].flatMap((name) => table.works.merged(engine.plan.bind(name), table.rules, (work) => table.candidates(work).length > 0)));
for (const work of works) {
  if (found[work.key] !== undefined) continue;
  const variants = table.candidates(work);
  const row = { count: chosen.filter((key) => key === work.key).length, chosen: variants[0] ?? "", times: {} as Record<string, number> };
  for (const variant of variants) {
    table.preferred.set(work.op, variant);
    try {
      row.times[variant] = await microseconds(engine, work);
    } catch (error) {
      row.times[variant] = NaN;
      device.check();
      console.error(String(error));
    }
  }
  table.preferred.clear();
  found[work.key] = row;
}
console.log(JSON.stringify(found));
await engine.close();
