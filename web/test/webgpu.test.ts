// What a GPU may lack, refuse or lose: one clear message each, and nothing that hangs. Needs an adapter.
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { EngineError, EngineLost } from "../src/runtime/engine.ts";
import { programSet } from "../src/runtime/program.ts";
import { trainStep } from "../src/runtime/training.ts";
import { createWebGPUEngine, describeAdapter, GpuDevice } from "../src/runtime/webgpu.ts";
import type { WebGPUEngine } from "../src/runtime/webgpu.ts";
import { Plan } from "../src/runtime/plan.ts";
import { cutsOf, windowsOf } from "../src/runtime/webgpu_memory.ts";
import { openWasm } from "../src/runtime/wasm.ts";
import { host, settingsOf, tables } from "./assets.ts";
import { dawn, dropDawn } from "./webgpu_dawn.ts";
import { checkedTwice, loseDevice, quickKernels } from "./webgpu_trouble.ts";

const SETTINGS = settingsOf("tiny", { "model.n_ctx": 8, "model.n_layer": 1, "data.batch_size": 2 });
const TEXT = Uint8Array.from({ length: 5000 }, (_, i) => (i * i + (i >> 3)) % 251);
const batch = { tokens: new Int32Array(16), targets: new Int32Array(16), rows: 2, time: 8 };

let gpu: GPU;
let device: GpuDevice;
const open = (kind: "training" | "inference" = "training"): Promise<WebGPUEngine> =>
  createWebGPUEngine(tables, SETTINGS, { host, device, kind, preferred: quickKernels(device) });

beforeAll(async () => {
  gpu = dawn();
  device = await GpuDevice.open(host, { gpu });
});
afterAll(() => {
  device.close();
  dropDawn();
});

/** A WebGPU whose adapter is changed. */
const changed = (change: (adapter: GPUAdapter) => object): GPU =>
  ({
    requestAdapter: async (options?: GPURequestAdapterOptions) => {
      const adapter = (await gpu.requestAdapter(options)) as GPUAdapter;
      const own = change(adapter);
      return new Proxy(adapter, {
        get: (from, name) => {
          if (name in own) return (own as Record<PropertyKey, unknown>)[name];
          const value = from[name as keyof GPUAdapter] as unknown;
          return typeof value === "function" ? (value as (...all: unknown[]) => unknown).bind(from) : value;
        },
      });
    },
  }) as unknown as GPU;

describe("what there is", () => {
  test("an adapter is described", async () => {
    const report = await describeAdapter({ gpu });
    expect(report).toMatchObject({ usable: true, reason: "" });
    expect(report.limits["maxStorageBufferBindingSize"]).toBeGreaterThanOrEqual(2 ** 27);
    expect(`${report.vendor}${report.description}`).not.toBe("");
  });

  test("no WebGPU, no adapter, one that does not answer and one that is too small have their own words", async () => {
    expect(await describeAdapter({})).toMatchObject({ usable: false, reason: "this browser has no WebGPU" });
    const none = { requestAdapter: async () => null } as unknown as GPU;
    expect((await describeAdapter({ gpu: none })).reason).toMatch(/gives no adapter .*its driver\)$/);
    await expect(GpuDevice.open(host, { gpu: none })).rejects.toThrow(/its driver\): use WebAssembly/);
    const began = performance.now();
    const silent = { requestAdapter: () => new Promise(() => {}) } as unknown as GPU;
    expect((await describeAdapter({ gpu: silent, patience: 100 })).reason).toMatch(/no GPU answered within 0.1 s/);
    expect(performance.now() - began).toBeLessThan(1000);
    const small = changed((adapter) => ({ limits: new Proxy(adapter.limits, { get: (from, name) => (name === "maxComputeInvocationsPerWorkgroup" ? 128 : from[name as keyof GPUSupportedLimits]) }) }));
    const report = await describeAdapter({ gpu: small });
    expect(report).toMatchObject({ usable: false, reason: expect.stringMatching(/allows 128 for maxComputeInvocationsPerWorkgroup, and the kernels need 256/) });
    await expect(GpuDevice.open(host, { gpu: small })).rejects.toThrow(/need 256: use WebAssembly/);
  });

  test("an adapter that gives no device is named", async () => {
    const refusing = changed(() => ({ requestDevice: () => Promise.reject(new TypeError("not today")) }));
    await expect(GpuDevice.open(host, { gpu: refusing })).rejects.toThrow(/gives no device: not today/);
  });
});

describe("what does not fit", () => {
  test("a buffer over the device's limit is refused by name and size, before anything is taken", async () => {
    const large = settingsOf("tiny", { "model.n_embd": 12288, "model.n_head": 12, "model.n_layer": 1 });
    await expect(createWebGPUEngine(tables, large, { host, device })).rejects.toThrow(/takes [\d,.]+ MiB, over the [\d,.]+ MiB/);
    device.check(); // and nothing is lost
  });

  test("a buffer that the device has no room for is refused by name and size", async () => {
    const full = Object.create(device.device) as GPUDevice;
    const scopes: string[] = [];
    Object.assign(full, {
      pushErrorScope: (filter: string) => void scopes.push(filter),
      popErrorScope: async () => (scopes.pop() === "out-of-memory" ? { message: "no" } : null),
      createBuffer: () => ({}),
    });
    const poor = Object.create(device, { device: { value: full } }) as GpuDevice;
    await expect(GpuDevice.prototype.guarded.call(bindTo(poor), "buffer 'param.decayed' of 5 MiB", () => ({}))).rejects.toThrow(
      /no room for buffer 'param.decayed' of 5 MiB: use a smaller preset/,
    );
  });

  test("arenas are cut between tensors and into windows", () => {
    const plan = new Plan(tables, programSet(tables, settingsOf("medium"), "training", undefined, "webgpu"));
    const region = plan.region("param.decayed");
    const cuts = cutsOf(plan, region, region.elements);
    const starts = new Set([...plan.layout.values()].filter((held) => held.part === "decayed").map((held) => held.place.offset));
    expect(cuts.length).toBeGreaterThan(3);
    expect(cuts[0]?.[0]).toBe(0);
    expect(cuts.at(-1)?.[1]).toBe(region.elements);
    for (const [begin, end] of cuts) {
      expect(starts.has(begin)).toBe(true);
      expect(4 * (end - begin)).toBeLessThanOrEqual(region.elements);
    }
    const place = { region: region.name, offset: 0, shape: [region.elements] };
    const windows = windowsOf(place, cuts, 65536, tables.plan.align);
    expect(windows.reduce((sum, [begin, end]) => sum + end - begin, 0)).toBe(region.elements);
    for (const [begin, end] of windows) expect([begin % 64, 4 * (end - begin) <= 65536]).toEqual([0, true]);
  });
});

/** Private fields are those of the object itself. */
function bindTo(poor: GpuDevice): GpuDevice {
  return new Proxy(device, { get: (from, name) => (name === "device" ? poor.device : bound(from, name)) });
}

function bound(from: GpuDevice, name: PropertyKey): unknown {
  const value = from[name as keyof GpuDevice] as unknown;
  return typeof value === "function" ? (value as (...all: unknown[]) => unknown).bind(from) : value;
}

describe("an engine", () => {
  test("refuses what wasm refuses", async () => {
    const engine = await open();
    await expect(engine.gradients({ ...batch, rows: 3 }, 1, true)).rejects.toThrow(/3 x 8 is not the planned 2 x 8/);
    await expect(engine.gradients({ ...batch, tokens: new Int32Array(16).fill(256) }, 1, true)).rejects.toThrow(/0 .. 255/);
    await engine.close();
    device.check();
  });

  test("trains in micro-batches, evaluates and writes as wasm does, and its memory stays", async () => {
    const settings = { ...SETTINGS, "data.accumulation": 2 };
    const wasm = await openWasm({ host, tables, set: programSet(tables, settings, "training"), threads: 1 });
    const engine = await createWebGPUEngine(tables, settings, { host, device, preferred: quickKernels(device) });
    const found: number[][] = [];
    let bytes = 0;
    for (const one of [wasm, engine]) {
      await one.initialize(3);
      for (let step = 1; step <= 4; step++) await trainStep(one, settings, TEXT, step);
      const results = await one.results();
      bytes = one.bytes;
      const held = await one.loss({ ...batch, tokens: Int32Array.from(TEXT.subarray(0, 16)), targets: Int32Array.from(TEXT.subarray(1, 17)) });
      const first = await one.prefill(Int32Array.from(TEXT.subarray(0, 5)), 1, 5);
      const second = await one.decode(Int32Array.of(7));
      found.push([...results.map((result) => result.loss), held, ...first.subarray(0, 9), ...second.subarray(0, 9)]);
      expect(results.every((result) => result.finite)).toBe(true);
    }
    const [wanted = [], got = []] = found;
    expect(got.length).toBe(23);
    got.forEach((value, k) => expect(Math.abs(value - (wanted[k] ?? NaN))).toBeLessThan(1e-5));
    expect(engine.bytes - bytes).toBeLessThan(2 ** 17); // programs that ran for the first time
    const { params } = await engine.state();
    const reference = (await wasm.state()).params;
    expect([...params.keys()]).toEqual([...reference.keys()]);
    const held = params.get("wte.weight") as Float32Array;
    expect(held.some((value) => value !== 0)).toBe(true);
    await engine.load(reference);
    expect((await engine.state()).params).toEqual(reference);
    await wasm.close();
    await engine.close();
    device.check();
  });

  test("trains as wasm does where arenas are cut into buffers and windows", async () => {
    const small = await GpuDevice.open(host, { gpu });
    const limits = { ...small.limits, binding_bytes: 65_536 };
    for (const [name, value] of Object.entries({ bindingBytes: 65_536, bufferBytes: 100_000, limits })) Object.defineProperty(small, name, { value });
    const engine = await createWebGPUEngine(tables, SETTINGS, { host, device: small, preferred: quickKernels(small) });
    const wasm = await openWasm({ host, tables, set: programSet(tables, SETTINGS, "training"), threads: 1 });
    const arena = { region: "param.decayed", offset: 0, shape: [engine.plan.region("param.decayed").elements] };
    expect(engine.memory.windows(arena).length).toBeGreaterThan(2);
    const found: number[][] = [];
    for (const one of [wasm, engine]) {
      await one.initialize(1);
      for (let step = 1; step <= 4; step++) await trainStep(one, SETTINGS, TEXT, step);
      found.push((await one.results()).flatMap((result) => [result.loss, result.gradNorm]));
    }
    const [wanted = [], got = []] = found;
    got.forEach((value, k) => expect(Math.abs(value / (wanted[k] ?? NaN) - 1)).toBeLessThan(1e-5));
    const { params } = await wasm.state();
    await engine.load(params);
    expect((await engine.state()).params).toEqual(params);
    await engine.close();
    small.close();
  });

  test("gives the same bits twice, waiting for results or not", async () => {
    const runs: number[][] = [];
    for (const wait of [true, false]) {
      const engine = await open();
      await engine.initialize(1);
      const losses: number[] = [];
      for (let step = 1; step <= 8; step++) {
        await trainStep(engine, SETTINGS, TEXT, step);
        for (const result of await engine.results(wait)) losses.push(result.loss);
      }
      for (const result of await engine.results()) losses.push(result.loss);
      runs.push(losses);
      await engine.close();
    }
    expect(runs[0]?.length).toBe(8);
    expect(runs[1]).toEqual(runs[0]);
  });

  test("a NaN never reaches the weights", async () => {
    const engine = await open();
    await engine.initialize(1);
    const { params } = await engine.state();
    const broken = new Map(params).set("h.0.mlp.c_fc.weight", (params.get("h.0.mlp.c_fc.weight") as Float32Array).slice().fill(NaN, 5, 6));
    await engine.load(broken);
    await trainStep(engine, SETTINGS, TEXT, 1);
    expect((await engine.results())[0]?.finite).toBe(false);
    expect((await engine.state()).params).toEqual(broken);
    await engine.close();
  });

  test("work that the driver refuses ends it, and says what was refused", async () => {
    const own = await GpuDevice.open(host, { gpu });
    const engine = await createWebGPUEngine(tables, SETTINGS, { host, device: own, preferred: quickKernels(own) });
    await engine.initialize(1);
    await trainStep(engine, SETTINGS, TEXT, 1);
    await engine.results();
    const wrong = own.device.createBuffer({ size: 16, usage: 1 | 8 });
    own.queue.writeBuffer(wrong, 8, new Uint8Array(64)); // beyond its end: a validation error
    await expect(async () => {
      for (let step = 2; step < 50; step++) await trainStep(engine, SETTINGS, TEXT, step);
    }).rejects.toThrow(EngineLost);
    await expect(engine.results()).rejects.toThrow(/stopped working/);
    own.close();
  });

  test("a kernel that does not compile is named", async () => {
    const broken = { ...host, read: async (name: string) => (name === "wgsl/add.wgsl" ? new TextEncoder().encode("fn nothing(") : host.read(name)) };
    const own = await GpuDevice.open(broken, { gpu });
    await expect(createWebGPUEngine(tables, SETTINGS, { host: broken, device: own, preferred: [["linear_residual_run", "apart"]] })).rejects.toThrow(
      /refuses add.wgsl/,
    );
    own.close();
    await expect(createWebGPUEngine(tables, SETTINGS, { host, device: own })).rejects.toThrow(EngineError);
  });
});

test("a device that is lost ends the engine at once; a new one goes on with the same losses", async () => {
  const got = await loseDevice(tables, { host, gpu }, SETTINGS, TEXT, 3);
  expect(got.error).toBe("EngineLost");
  expect(got.message).toMatch(/was lost \(destroyed.*go on from the last snapshot/);
  expect(got.heard).toBeLessThan(1000);
  expect([...got.before, ...got.after]).toEqual(got.whole);
}, 180_000);

test("the first use is checked against wasm once, and wrong numbers are named", async () => {
  const tiny = { ...tables, presets: { ...tables.presets, tiny: { ...tables.presets["tiny"], settings: SETTINGS } } } as typeof tables;
  const got = await checkedTwice(host, tiny, gpu);
  expect(got.seconds[1]).toBeLessThan(0.1);
  expect(got.kept).toBe(2);
  expect(got.tampered).toMatch(/^WrongNumbers: the GPU .* computes wrong numbers and is not used: the loss of step 1/);
}, 180_000);
