// webgpu_check.ts: the first use of a GPU: a few steps of a small preset against WebAssembly, from the same
// weights and on the same batches, since drivers do return wrong numbers silently.
//
// The twin of training/selfcheck.py. The outcome is kept by adapter, kernels and browser in a storage that
// the caller hands in, so that it costs a second once. How many steps, of what and how close they must be
// stands in posttrainllm.json.
import { EngineError } from "./engine.ts";
import type { Engine, State, StepResult } from "./engine.ts";
import type { Host } from "./host.ts";
import { programSet } from "./program.ts";
import type { Settings, Tables } from "./tables.ts";
import { trainStep } from "./training.ts";
import { openWasm } from "./wasm.ts";
import { createWebGPUEngine } from "./webgpu.ts";
import { GpuDevice } from "./webgpu_device.ts";

/** Texts by key, kept from visit to visit; one that fails is one that holds nothing. */
export interface CheckStorage {
  get(key: string): Promise<string | null>;
  set(key: string, value: string): Promise<void>;
}

export interface CheckOptions {
  readonly host: Host;
  readonly storage?: CheckStorage;
  /** In place of an own device. */
  readonly device?: GpuDevice;
  readonly gpu?: GPU | undefined;
}

/** An adapter that computes wrong numbers: use WebAssembly. */
export class WrongNumbers extends EngineError {
  override name = "WrongNumbers";
}

/** Text that is made up, and the same everywhere. */
const MADE_UP = Uint8Array.from({ length: 4096 }, (_, i) => (i * i + (i >> 3)) % 251);

/** Throws WrongNumbers, with what was wrong, when the adapter's steps are not those of WebAssembly. */
export async function checkAdapter(tables: Tables, options: CheckOptions): Promise<void> {
  const device = options.device ?? (await GpuDevice.open(options.host, options));
  try {
    const key = `webgpu-check-${await hashOf(described(tables, device))}`;
    let wrong = await kept(options.storage, key);
    if (wrong === null) {
      wrong = await compare(tables, options.host, device);
      await keep(options.storage, key, wrong);
    }
    if (wrong) throw new WrongNumbers(`the GPU ${device.name} computes wrong numbers and is not used: ${wrong}; update its driver`);
  } finally {
    if (options.device === undefined) device.close();
  }
}

/** All that the outcome depends on. */
function described(tables: Tables, device: GpuDevice): string {
  const browser = (globalThis.navigator as Navigator | undefined)?.userAgent ?? "";
  return JSON.stringify([device.report, tables.webgpu, tables.version, browser]);
}

/** What is wrong with an adapter's numbers, or nothing. */
async function compare(tables: Tables, host: Host, device: GpuDevice): Promise<string> {
  const { check } = tables.webgpu;
  const settings = tables.presets[check.preset]?.settings ?? {};
  const wasm = await openWasm({ host, tables, set: programSet(tables, settings, "training"), threads: 1 });
  let wanted: StepResult[];
  let start: State;
  try {
    await wasm.initialize(1);
    start = await wasm.state();
    wanted = await steps(wasm, settings, check.steps);
  } finally {
    await wasm.close();
  }
  const gpu = await createWebGPUEngine(tables, settings, { host, device });
  try {
    await gpu.load(start.params, start.m, start.v);
    return difference(await steps(gpu, settings, check.steps), wanted, check);
  } finally {
    await gpu.close();
  }
}

async function steps(engine: Engine, settings: Settings, count: number): Promise<StepResult[]> {
  for (let step = 1; step <= count; step++) await trainStep(engine, settings, MADE_UP, step);
  return engine.results();
}

/** The first step that is off, in words. */
export function difference(got: readonly StepResult[], wanted: readonly StepResult[], limits: Tables["webgpu"]["check"]): string {
  for (const [index, want] of wanted.entries()) {
    const pairs = [
      ["loss", got[index]?.loss ?? NaN, want.loss, limits.loss],
      ["gradient norm", got[index]?.gradNorm ?? NaN, want.gradNorm, limits.grad_norm],
    ] as const;
    for (const [what, value, reference, limit] of pairs) {
      if (!(Math.abs(value - reference) <= limit * Math.abs(reference))) {
        return `the ${what} of step ${index + 1} is ${value.toPrecision(6)}, and should be ${reference.toPrecision(6)}`;
      }
    }
  }
  return "";
}

async function kept(storage: CheckStorage | undefined, key: string): Promise<string | null> {
  try {
    const text = (await storage?.get(key)) ?? null;
    return text === null ? null : (JSON.parse(text) as { wrong: string }).wrong;
  } catch {
    return null;
  }
}

async function keep(storage: CheckStorage | undefined, key: string, wrong: string): Promise<void> {
  try {
    await storage?.set(key, JSON.stringify({ wrong }));
  } catch {
    // computed again next time
  }
}

async function hashOf(text: string): Promise<string> {
  const bytes = new TextEncoder().encode(text);
  if (globalThis.crypto?.subtle === undefined) return text; // outside of secure contexts
  const digest = await crypto.subtle.digest("SHA-256", bytes);
  return Array.from(new Uint8Array(digest, 0, 8), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
