// ops.ts: node ops.ts ASSETS VECTORS BUILD...: checks/wasm_ops.ts in node; prints the faults as JSON.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { nodeHost } from "../src/runtime/host_node.ts";
import { readTables } from "../src/runtime/tables.ts";
import type { Build } from "../src/runtime/wasm.ts";
import { checkOps } from "../src/checks/wasm_ops.ts";
import type { Vectors } from "../src/checks/vectors.ts";

const [assets = "", folder = "", ...builds] = process.argv.slice(2);
const host = nodeHost(assets);
const tables = readTables(readFileSync(join(assets, "posttrainllm.json"), "utf8"));
const vectors = JSON.parse(readFileSync(join(folder, "cases.json"), "utf8")) as Vectors;
const data = new Uint8Array(readFileSync(join(folder, "data.bin"))).buffer;
const faults: string[] = [];
for (const build of builds) faults.push(...(await checkOps(host, tables, build as Build, vectors, data)).faults);
console.log(JSON.stringify({ cases: vectors.cases.length, faults }));
