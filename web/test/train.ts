// train.ts: node train.ts ASSETS JOB: trains as the job says and prints what came out as JSON, for
// comparison with Python (tests/test_web_runtime.py).
import { readFileSync } from "node:fs";
import { nodeHost } from "../src/runtime/host_node.ts";
import { programSet } from "../src/runtime/program.ts";
import { readTables } from "../src/runtime/tables.ts";
import { dawn } from "./webgpu_dawn.ts";
import { train } from "./training_job.ts";
import type { Job } from "./training_job.ts";

const [assets, file] = process.argv.slice(2);
const host = nodeHost(assets ?? "");
const tables = readTables(new TextDecoder().decode(await host.read("posttrainllm.json")));
const job = JSON.parse(readFileSync(file ?? "", "utf8")) as Job & { text: string };
const text = new Uint8Array(readFileSync(job.text));
const set = programSet(tables, job.settings, "training", undefined, job.engine);
console.log(JSON.stringify(await train(host, tables, set, job, text, job.engine === "webgpu" ? dawn() : undefined)));
