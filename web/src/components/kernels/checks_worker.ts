// checks_worker.ts: the checks of the /kernels page, in a worker of their own: every op on every engine that this browser
// has, on cases whose references Python computed in float64, and then some steps of WebGPU against WebAssembly.
import type { Vectors } from "../../checks/vectors.ts";
import { checkOps } from "../../checks/wasm_ops.ts";
import { checkGpuOps } from "../../checks/webgpu_ops.ts";
import type { Engine } from "../../runtime/engine.ts";
import { probeFeatures } from "../../runtime/features.ts";
import { browserHost } from "../../runtime/host_browser.ts";
import type { Host } from "../../runtime/host.ts";
import { number, programSet } from "../../runtime/program.ts";
import { Statistics } from "../../runtime/statistics.ts";
import { readTables } from "../../runtime/tables.ts";
import type { Settings, Tables } from "../../runtime/tables.ts";
import { trainStep } from "../../runtime/training.ts";
import { openWasm } from "../../runtime/wasm.ts";
import type { Build } from "../../runtime/wasm.ts";
import { createWebGPUEngine, describeAdapter, GpuDevice } from "../../runtime/webgpu.ts";
import { formsOf } from "../../storage/forms.ts";
import { FORMAT, parityPassed, passed } from "./report.ts";
import type { EngineOps, FromChecks, Machine, Parity, ToChecks } from "./report.ts";

/** What op_vectors.py --page wrote. */
interface PageVectors extends Vectors {
  readonly cases: (Vectors["cases"][number] & { readonly limits: Readonly<Record<"wasm" | "webgpu", number>> })[];
  readonly parity: {
    readonly preset: string;
    readonly steps: number;
    readonly settings: Settings;
    readonly early_steps: number;
    readonly limits: readonly [early: number, later: number];
  };
}

const BREATH_MS = 50; // between two messages of progress

const tell = (message: FromChecks): void => self.postMessage(message);
const text = (bytes: Uint8Array): string => new TextDecoder().decode(bytes);

/** Progress that does not flood the page. */
function stage(name: string): (done: number, of: number) => Promise<void> {
  let last = -Infinity;
  return async (done, of) => {
    const now = performance.now();
    if (now - last < BREATH_MS && done < of) return;
    last = now;
    tell({ kind: "stage", name, done, of });
    await new Promise((again) => setTimeout(again, 0));
  };
}

async function machineOf(): Promise<Machine> {
  const { userAgent, hardwareConcurrency } = navigator;
  const memory = (navigator as { deviceMemory?: number }).deviceMemory;
  return {
    browser: userAgent, processors: hardwareConcurrency, memoryGb: memory ?? null, isolated: self.crossOriginIsolated,
    secure: self.isSecureContext, wasm: probeFeatures(), adapter: await describeAdapter(),
  };
}

/** The builds of the WebAssembly kernels that run here. */
function buildsOf(tables: Tables, { wasm }: Machine): { run: Build[]; left: string[] } {
  const left: string[] = [];
  const run = Object.keys(tables.wasm.builds).filter((name) => name.startsWith("wasm")).filter((name) => {
    const lacks = [
      wasm.simd ? "" : "SIMD",
      name.startsWith("wasm64") && !wasm.memory64 ? "64-bit memory" : "",
      name.endsWith("-threads") && !wasm.threads ? "threads (they need cross-origin isolation)" : "",
    ].filter(Boolean);
    if (lacks.length > 0) left.push(`${name}: this browser has no ${lacks.join(" and no ")}`);
    return lacks.length === 0;
  });
  return { run: run as Build[], left };
}

async function wasmOps(host: Host, tables: Tables, build: Build, vectors: PageVectors, data: ArrayBuffer): Promise<EngineOps> {
  const began = performance.now();
  const cases = vectors.cases.map((one) => ({ ...one, limit: one.limits.wasm }));
  const found = await checkOps(host, tables, build, { ...vectors, cases }, data, stage(build));
  return { engine: "wasm", name: build, cases: found.cases, runs: found.runs, seconds: since(began), ops: found.ops, faults: found.faults };
}

async function gpuOps(tables: Tables, device: GpuDevice, vectors: PageVectors, data: ArrayBuffer): Promise<EngineOps> {
  const began = performance.now();
  const cases = vectors.cases.map((one) => ({ ...one, limit: one.limits.webgpu }));
  const found = await checkGpuOps(tables, device, { ...vectors, cases }, data, stage("webgpu"));
  return { engine: "webgpu", name: "webgpu", cases: found.cases, runs: found.runs, seconds: since(began), ops: found.ops, faults: found.faults };
}

const since = (began: number): number => Math.round(performance.now() - began) / 1000;

/** The same weights and batches on both engines, step by step. */
async function parity(host: Host, tables: Tables, device: GpuDevice, vectors: PageVectors, asked: ToChecks): Promise<Parity> {
  const { parity: plan } = vectors;
  const [preset, steps] = [asked.preset ?? plan.preset, asked.steps ?? plan.steps];
  const settings: Settings = { ...tables.presets[preset]?.settings, ...plan.settings, "training.steps": steps };
  const whole = await host.read(formsOf(tables).bundled_corpus.file);
  const control = await WebAssembly.compile(await host.read("posttrain-control.wasm"));
  const train = whole.subarray(0, new Statistics(control, tables).split(whole, number(settings, "data.val_fraction")));
  const progress = stage("steps");
  await progress(0, steps);
  const wasm = await openWasm({ host, tables, set: programSet(tables, settings, "training"), threads: 1 });
  const webgpu: Engine = await createWebGPUEngine(tables, settings, { host, device });
  const losses: [number[], number[]] = [[], []];
  let fault = "";
  try {
    const seed = number(settings, "training.seed");
    await wasm.initialize(seed);
    await webgpu.initialize(seed);
    for (let step = 1; step <= steps; step++) {
      for (const [k, engine] of [wasm, webgpu].entries()) {
        await trainStep(engine, settings, train, step);
        for (const { loss, finite } of await engine.results()) {
          losses[k as 0 | 1].push(loss);
          if (!finite) fault ||= `step ${step}: the loss or a gradient on ${engine.name} is not a finite number`;
        }
      }
      tell({ kind: "losses", wasm: losses[0].slice(), webgpu: losses[1].slice() });
      await progress(step, steps);
    }
  } finally {
    await wasm.close();
    await webgpu.close();
  }
  const differences = losses[0].map((loss, k) => Math.abs((losses[1][k] ?? NaN) - loss) / Math.abs(loss));
  const most = (part: number[]): number => part.reduce((all, one) => Math.max(all, Number.isNaN(one) ? Infinity : one), 0);
  const [early, later] = plan.limits;
  return {
    preset, steps, wasm: losses[0], webgpu: losses[1], fault,
    early: { steps: plan.early_steps, difference: most(differences.slice(0, plan.early_steps)), limit: early },
    later: { difference: most(differences.slice(plan.early_steps)), limit: later },
  };
}

async function run(asked: ToChecks): Promise<void> {
  const host = browserHost(asked.data);
  const [tables, machine] = [readTables(text(await host.read("posttrainllm.json"))), await machineOf()];
  const { run: builds, left } = buildsOf(tables, machine);
  const { usable, reason } = machine.adapter;
  if (!usable) left.push(`webgpu: ${reason}`);
  tell({ kind: "machine", machine, names: [...builds, ...(usable ? ["webgpu"] : [])] });
  const everything = JSON.parse(text(await host.read("kernels/cases.json"))) as PageVectors;
  const vectors = { ...everything, cases: everything.cases.filter(({ op }) => op.includes(asked.only ?? "")) };
  const data = (await host.read("kernels/data.bin")).buffer;
  const engines: EngineOps[] = [];
  const keep = (ops: EngineOps): void => {
    engines.push(ops);
    tell({ kind: "ops", ops });
  };
  for (const build of builds) keep(await wasmOps(host, tables, build, vectors, data));
  let compared: Parity | null = null;
  if (usable) {
    try {
      const device = await GpuDevice.open(host);
      try {
        keep(await gpuOps(tables, device, vectors, data));
        compared = await parity(host, tables, device, vectors, asked);
      } finally {
        device.close();
      }
    } catch (error) {
      left.push(`webgpu: ${error instanceof Error ? error.message : String(error)}`);
    }
  }
  const whole = !usable || compared !== null;
  tell({
    kind: "report",
    report: {
      format: FORMAT, version: tables.version, date: new Date().toISOString(), machine, engines, parity: compared, left,
      passed: whole && engines.every(passed) && (compared === null || parityPassed(compared)),
    },
  });
}

self.onmessage = (event: MessageEvent<ToChecks>) => {
  run(event.data).catch((error: unknown) => tell({ kind: "failed", message: error instanceof Error ? error.message : String(error) }));
};
