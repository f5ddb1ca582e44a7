// engines.ts: which engine runs a model in this browser, and why that one.
import type { Engine } from "../runtime/engine.ts";
import type { Host } from "../runtime/host.ts";
import { number, programSet } from "../runtime/program.ts";
import type { ProgramSet } from "../runtime/program.ts";
import type { Settings, Tables } from "../runtime/tables.ts";
import { describeAdapter, nameOf } from "../runtime/webgpu_adapter.ts";
import { openWasm } from "../runtime/wasm.ts";
import type { WasmEngine } from "../runtime/wasm.ts";
import { kept } from "./kept.ts";
import type { EngineChoice } from "./protocol.ts";
import { Refused } from "./refusal.ts";

export interface Choice {
  readonly engine: "wasm" | "webgpu";
  /** Why this one, as the end of a sentence. */
  readonly reason: string;
  /** What the browser calls its GPU. */
  readonly adapter: string | null;
}

export interface Place {
  readonly host: Host;
  readonly tables: Tables;
  readonly notice: (message: string) => void;
}

/** WebGPU on a real GPU that computes right goes before WebAssembly. Throws Refused when webgpu was asked for and is not there. */
export async function chooseEngine(place: Pick<Place, "host" | "tables">, wanted: EngineChoice): Promise<Choice> {
  if (wanted === "wasm") return { engine: "wasm", reason: "you chose it", adapter: null };
  const report = await describeAdapter();
  const adapter = report.usable ? nameOf(report) : null;
  const { reason } = report;
  if (wanted === "webgpu") {
    if (!report.usable) throw new Refused(reason, "take the engine WebAssembly: it runs everywhere");
    return { engine: "webgpu", reason: `you chose it; it runs on ${adapter}`, adapter };
  }
  if (!report.usable) return { engine: "wasm", reason, adapter };
  if (report.software) return { engine: "wasm", reason: `WebGPU has no GPU here, only a program on the processor (${adapter})`, adapter };
  const wrong = await wrongNumbers(place);
  if (wrong !== null) return { engine: "wasm", reason: wrong, adapter };
  return { engine: "webgpu", reason: `this device has a GPU: ${adapter}`, adapter };
}

let checked: Promise<string | null> | undefined;

/** What a GPU computes wrong, tried at its first use; null when its numbers are those of WebAssembly. */
function wrongNumbers(place: Pick<Place, "host" | "tables">): Promise<string | null> {
  checked ??= tryNumbers(place);
  checked.catch(() => (checked = undefined)); // its code did not come: the next one tries again
  return checked;
}

async function tryNumbers({ host, tables }: Pick<Place, "host" | "tables">): Promise<string | null> {
  const { checkAdapter } = await import("../runtime/webgpu_check.ts");
  try {
    await checkAdapter(tables, { host, storage: kept });
    return null;
  } catch (error) {
    return error instanceof Error ? error.message : String(error);
  }
}

/** An engine for training. */
export async function openTraining(
  place: Place, settings: Settings, choice: Choice, threads: number, compiled: (done: number, of: number) => void,
): Promise<Engine> {
  const { host, tables, notice } = place;
  if (choice.engine === "webgpu") {
    const { createWebGPUEngine } = await import("../runtime/webgpu.ts");
    return createWebGPUEngine(tables, settings, { host, onProgress: ({ done, total }) => compiled(done, total) });
  }
  const set = programSet(tables, settings, "training");
  return openWasm({ host, tables, set, threads, notice });
}

/** An engine for writing; small models write fastest on one thread, and one thread starts at once. */
export async function openWriting(place: Place, settings: Settings): Promise<Engine> {
  const { programs, dims } = programSet(place.tables, settings, "inference");
  const only = <T>(all: Readonly<Record<string, T>>): Record<string, T> =>
    Object.fromEntries(Object.entries(all).filter(([name]) => name === "prefill" || name === "decode"));
  const set: ProgramSet = { programs: only(programs), dims: only(dims) };
  return openWasm({ host: place.host, tables: place.tables, set, threads: 1, notice: place.notice });
}

/** An engine for looking inside. */
export async function openInspection(place: Place, settings: Settings): Promise<WasmEngine> {
  return openWasm({ host: place.host, tables: place.tables, set: programSet(place.tables, settings, "inspection"), threads: 1, notice: place.notice });
}

export const tokensPerStep = (settings: Settings): number =>
  ["data.batch_size", "data.accumulation", "model.n_ctx"].reduce((product, name) => product * number(settings, name), 1);
