// What this host lacks, or loses: the next best build, or one clear message.
import { Worker } from "node:worker_threads";
import { afterEach, describe, expect, test, vi } from "vitest";
import { callTable } from "../src/runtime/call_table.ts";
import type { State } from "../src/runtime/engine.ts";
import { EngineError, EngineLost } from "../src/runtime/engine.ts";
import { probeFeatures } from "../src/runtime/features.ts";
import type { Host, PoolMessage } from "../src/runtime/host.ts";
import { programSet } from "../src/runtime/program.ts";
import type { Settings, Tables } from "../src/runtime/tables.ts";
import { trainStep } from "../src/runtime/training.ts";
import { builds, openWasm, TooLarge } from "../src/runtime/wasm.ts";
import type { WasmEngine, WasmOptions } from "../src/runtime/wasm.ts";
import { host, settingsOf, tables } from "./assets.ts";

const ALL = { simd: true, threads: true, memory64: true };
const SETTINGS = settingsOf("tiny");
const TEXT = Uint8Array.from({ length: 5000 }, (_, i) => (i * i + (i >> 3)) % 251);

async function opened(options: Partial<WasmOptions> = {}, settings: Settings = SETTINGS): Promise<[WasmEngine, string[]]> {
  const notices: string[] = [];
  const set = programSet(options.tables ?? tables, settings, "training");
  const engine = await openWasm({ host, tables, set, threads: 2, notice: (text) => notices.push(text), ...options });
  return [engine, notices];
}

async function losses(engine: WasmEngine, from: number, to: number): Promise<number[]> {
  for (let step = from; step <= to; step++) await trainStep(engine, SETTINGS, TEXT, step);
  return (await engine.results()).map((result) => result.loss);
}

/** The tables with other limits of memory, in pages. */
const limited = (wasm32: number, wasm64: number): Tables => ({ ...tables, wasm: { ...tables.wasm, pages: { wasm32, wasm64 } } });

/** A host whose pool workers are those of dying_worker.ts. */
const dying = (how: "traps" | "vanishes"): Host => ({
  ...host,
  startWorker(start, tell) {
    const worker = new Worker(new URL("./dying_worker.ts", import.meta.url), { workerData: { ...start, how } });
    worker.on("message", (message: PoolMessage) => tell(message));
    worker.unref();
    return { terminate: () => void worker.terminate() };
  },
});

afterEach(() => void vi.restoreAllMocks());

describe("what a host lacks", () => {
  test("this node has everything", () => expect(probeFeatures()).toEqual(ALL));

  test("the ladder goes from threads to none and from 32 to 64 bits", () => {
    expect(builds(ALL, true)).toEqual(["wasm32-threads", "wasm64-threads", "wasm32", "wasm64"]);
    expect(builds({ ...ALL, threads: false }, true)).toEqual(["wasm32", "wasm64"]);
    expect(builds({ ...ALL, memory64: false }, true)).toEqual(["wasm32-threads", "wasm32"]);
    expect(builds(ALL, false)).toEqual(["wasm32", "wasm64"]);
  });

  test("without SIMD one message says what to do", async () => {
    await expect(opened({ features: { ...ALL, simd: false } })).rejects.toThrow(/needs WebAssembly SIMD.*update/);
  });

  test("without shared memory one thread is used, and said", async () => {
    const [engine, notices] = await opened({ features: { ...ALL, threads: false } });
    expect(engine.info).toMatchObject({ build: "wasm32", threads: 1 });
    expect(notices.join()).toMatch(/one thread only.*cross-origin isolation/);
    await engine.close();
  });

  test("a plan over the 32-bit limit takes the 64-bit build, with the same losses", async () => {
    const [narrow] = await opened();
    const [wide] = await opened({ tables: limited(80, 1 << 18) });
    expect([narrow.info["build"], wide.info["build"]]).toEqual(["wasm32-threads", "wasm64-threads"]);
    expect(await losses(wide, 1, 3)).toEqual(await losses(narrow, 1, 3));
    await narrow.close();
    await wide.close();
  });

  test("a plan that fits nowhere is refused with both numbers", async () => {
    const refused = opened({ tables: limited(80, 1 << 18), features: { ...ALL, memory64: false } });
    await expect(refused).rejects.toThrow(TooLarge);
    await expect(refused).rejects.toThrow(/needs [\d,]+ bytes of memory and may take 5,242,880 bytes.*no 64-bit/);
  });

  test("a host that does not give shared memory gives the other kind", async () => {
    const { Memory } = WebAssembly;
    vi.spyOn(WebAssembly, "Memory").mockImplementation(function (given: WebAssembly.MemoryDescriptor) {
      if (given.shared && Number(given.initial) > 80) throw new RangeError("could not allocate memory");
      return new Memory(given);
    } as never);
    const [engine, notices] = await opened();
    expect(engine.info).toMatchObject({ build: "wasm32", threads: 1 });
    expect(notices.join()).toMatch(/wasm32-threads does not get [\d,]+ bytes of memory: could not allocate/);
    await engine.close();
  });

  test("modules of another version are refused", async () => {
    const other = { ...tables, ops: [...tables.ops, ...tables.ops] };
    await expect(opened({ tables: other })).rejects.toThrow(EngineError);
  });
});

describe("what a host loses", () => {
  test("a worker that does not start is a notice, and the rest go on", async () => {
    const deaf: Host = {
      ...host,
      startWorker(_, tell) {
        tell({ kind: "failed", why: "blocked" });
        return { terminate: () => {} };
      },
    };
    const [engine, notices] = await opened({ host: deaf });
    expect(notices.join()).toMatch(/a thread was lost \(blocked\); 1 go on/);
    expect((await losses(engine, 1, 1))[0]).toBeCloseTo(Math.log(256), 1);
    await engine.close();
  });

  test("a trap inside the module ends the engine with a message", async () => {
    const [engine] = await opened({ threads: 1 });
    await engine.initialize(1);
    const far = new Map([...engine.plan.regions.keys()].map((name) => [name, 3 << 29]));
    const wild = callTable(tables, engine.plan.bind("update"), far);
    const inner = engine as unknown as { run(table: Uint8Array): void };
    expect(() => inner.run(wild)).toThrow(/the WebAssembly module stopped.*last snapshot/);
    await expect(losses(engine, 1, 1)).rejects.toThrow(EngineLost);
  });

  test.each(["traps", "vanishes"] as const)("a worker that %s ends the engine; one thread goes on with the same losses", async (how) => {
    const [whole] = await opened();
    await whole.initialize(1);
    const wanted = await losses(whole, 1, 6);
    await whole.initialize(1);
    await losses(whole, 1, 3);
    const snapshot: State = await whole.state();
    await whole.close();

    const [engine] = await opened({ host: dying(how) });
    await engine.load(snapshot.params, snapshot.m, snapshot.v);
    await expect(losses(engine, 4, 200)).rejects.toThrow(EngineLost);

    const [next] = await opened({ threads: 1 });
    await next.load(snapshot.params, snapshot.m, snapshot.v);
    expect(await losses(next, 4, 6)).toEqual(wanted.slice(3));
    await next.close();
  });
});
