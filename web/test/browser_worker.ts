// browser_worker.ts: the tests' jobs inside a Web Worker; tests/browser.py starts it from an empty page.
import { probeFeatures } from "../src/runtime/features.ts";
import { browserHost } from "../src/runtime/host_browser.ts";
import { programSet } from "../src/runtime/program.ts";
import { readTables } from "../src/runtime/tables.ts";
import type { Settings } from "../src/runtime/tables.ts";
import type { Build } from "../src/runtime/wasm.ts";
import { describeAdapter, GpuDevice } from "../src/runtime/webgpu.ts";
import { checkOps } from "../src/checks/wasm_ops.ts";
import type { Vectors } from "../src/checks/vectors.ts";
import { train } from "./training_job.ts";
import type { Job } from "./training_job.ts";
import { checkGpuOps } from "../src/checks/webgpu_ops.ts";
import { checkedTwice, loseDevice } from "./webgpu_trouble.ts";

type Work =
  | { readonly kind: "features" }
  | { readonly kind: "train"; readonly job: Job }
  | { readonly kind: "ops"; readonly builds: Build[] }
  | { readonly kind: "webgpu-ops" }
  | { readonly kind: "adapter" }
  | { readonly kind: "check" }
  | { readonly kind: "lose"; readonly settings: Settings; readonly after: number };

const host = browserHost(new URL("/assets/", self.location.href));
const file = async (path: string): Promise<ArrayBuffer> => (await fetch(path)).arrayBuffer();

async function perform(work: Work): Promise<unknown> {
  if (work.kind === "features") return probeFeatures();
  if (work.kind === "adapter") return describeAdapter();
  const tables = readTables(new TextDecoder().decode(await host.read("posttrainllm.json")));
  if (work.kind === "train") {
    const text = new Uint8Array(await file("/data/train.bin"));
    return train(host, tables, programSet(tables, work.job.settings, "training", undefined, work.job.engine), work.job, text);
  }
  if (work.kind === "check") return checkedTwice(host, tables);
  if (work.kind === "lose") {
    return loseDevice(tables, { host }, work.settings, new Uint8Array(await file("/data/train.bin")), work.after);
  }
  const vectors = JSON.parse(new TextDecoder().decode(await file("/data/cases.json"))) as Vectors;
  const data = await file("/data/data.bin");
  if (work.kind === "webgpu-ops") {
    const device = await GpuDevice.open(host);
    const report = await checkGpuOps(tables, device, vectors, data);
    device.close();
    return report;
  }
  const faults: string[] = [];
  for (const build of work.builds) faults.push(...(await checkOps(host, tables, build, vectors, data)).faults);
  return { cases: vectors.cases.length, faults };
}

self.onmessage = (event: MessageEvent<Work>) => {
  perform(event.data).then(
    (value) => self.postMessage({ value }),
    (error: unknown) => self.postMessage({ error: error instanceof Error ? `${error.name}: ${error.message}` : String(error) }),
  );
};
