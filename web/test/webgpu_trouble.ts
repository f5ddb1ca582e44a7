// webgpu_trouble.ts: a device that is lost in the middle of a run, and the check of a first use; in node
// and in Chromium alike.
import type { State } from "../src/runtime/engine.ts";
import type { Host } from "../src/runtime/host.ts";
import type { Settings, Tables } from "../src/runtime/tables.ts";
import { trainStep } from "../src/runtime/training.ts";
import { createWebGPUEngine, GpuDevice } from "../src/runtime/webgpu.ts";
import type { WebGPUEngine } from "../src/runtime/webgpu.ts";
import { checkAdapter } from "../src/runtime/webgpu_check.ts";

export interface Place {
  readonly host: Host;
  readonly gpu?: GPU | undefined;
}

/** On software adapters: kernels that compile quickly, for devices that are used once. */
export function quickKernels(device: GpuDevice): (readonly [string, string])[] {
  const rows = ["attention_forward", "attention_backward"].map((op) => [op, "rows"] as const);
  return device.report.software ? [...Object.entries(device.table.software), ...rows] : [];
}

export interface LostReport {
  /** Name and message of what the run ended with. */
  readonly error: string;
  readonly message: string;
  /** Milliseconds from the loss to the error. */
  readonly heard: number;
  /** Of the run that was lost, up to the snapshot; of the run that went on; of one without a loss. */
  readonly before: number[];
  readonly after: number[];
  readonly whole: number[];
}

/** Trains, takes a snapshot after `after` steps, loses the device two steps later and goes on from the snapshot. */
export async function loseDevice(tables: Tables, place: Place, settings: Settings, text: Uint8Array, after: number): Promise<LostReport> {
  const steps = async (engine: WebGPUEngine, from: number, to: number): Promise<number[]> => {
    for (let step = from; step <= to; step++) await trainStep(engine, settings, text, step);
    return (await engine.results()).map((result) => result.loss);
  };
  const [first, last] = [after + 1, 2 * after];
  const device = await GpuDevice.open(place.host, place);
  const preferred = quickKernels(device);
  const intact = await createWebGPUEngine(tables, settings, { ...place, preferred, device });
  await intact.initialize(1);
  const whole = await steps(intact, 1, last);
  await intact.close();

  const engine = await createWebGPUEngine(tables, settings, { ...place, preferred, device });
  await engine.initialize(1);
  const before = await steps(engine, 1, after);
  const snapshot: State = await engine.state();
  await steps(engine, first, after + 2);
  let [error, message] = ["none", ""];
  const began = performance.now();
  device.device.destroy();
  try {
    await steps(engine, after + 3, last + 100);
  } catch (caught) {
    [error, message] = [(caught as Error).name, (caught as Error).message];
  }
  const heard = performance.now() - began;
  await engine.close();
  device.close();

  const next = await createWebGPUEngine(tables, settings, { ...place, preferred });
  await next.load(snapshot.params, snapshot.m, snapshot.v);
  const gone = await steps(next, first, last);
  await next.close();
  return { error, message, heard, before, after: gone, whole };
}

export interface CheckReport {
  readonly seconds: number[];
  readonly kept: number;
  readonly tampered: string;
}

/** The check of a first use, again with what was kept, and with limits that nothing passes. */
export async function checkedTwice(host: Host, tables: Tables, gpu?: GPU): Promise<CheckReport> {
  const held = new Map<string, string>();
  const storage = {
    get: async (key: string) => held.get(key) ?? null,
    set: async (key: string, value: string) => void held.set(key, value),
  };
  const device = await GpuDevice.open(host, { gpu });
  const seconds: number[] = [];
  for (let time = 0; time < 2; time++) {
    const began = performance.now();
    await checkAdapter(tables, { host, storage, device });
    seconds.push((performance.now() - began) / 1000);
  }
  const strict = { ...tables, webgpu: { ...tables.webgpu, check: { ...tables.webgpu.check, loss: -1 } } };
  const refused = await checkAdapter(strict, { host, storage, device }).then(
    () => "passed",
    (error: Error) => `${error.name}: ${error.message}`,
  );
  device.close();
  return { seconds, kept: held.size, tampered: refused };
}
