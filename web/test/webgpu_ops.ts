// webgpu_ops.ts: node webgpu_ops.ts ASSETS VECTORS: checks/webgpu_ops.ts in node; prints its report as JSON.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { nodeHost } from "../src/runtime/host_node.ts";
import { readTables } from "../src/runtime/tables.ts";
import { GpuDevice } from "../src/runtime/webgpu_device.ts";
import type { Vectors } from "../src/checks/vectors.ts";
import { dawn } from "./webgpu_dawn.ts";
import { checkGpuOps } from "../src/checks/webgpu_ops.ts";

const [assets = "", folder = ""] = process.argv.slice(2);
const tables = readTables(readFileSync(join(assets, "posttrainllm.json"), "utf8"));
const vectors = JSON.parse(readFileSync(join(folder, "cases.json"), "utf8")) as Vectors;
const data = new Uint8Array(readFileSync(join(folder, "data.bin"))).buffer;
const device = await GpuDevice.open(nodeHost(assets), { gpu: dawn() });
const report = await checkGpuOps(tables, device, vectors, data);
console.log(JSON.stringify({ ...report, adapter: device.report }));
device.close();
