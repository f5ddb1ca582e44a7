// What the engine refuses before it touches memory, and that writing with the cache is writing without it.
import { beforeAll, describe, expect, test } from "vitest";
import { EngineError } from "../src/runtime/engine.ts";
import { programSet } from "../src/runtime/program.ts";
import { openWasm } from "../src/runtime/wasm.ts";
import type { WasmEngine } from "../src/runtime/wasm.ts";
import { host, settingsOf, tables } from "./assets.ts";

const SETTINGS = settingsOf("tiny", { "model.n_ctx": 9, "data.batch_size": 2 });
const PROMPT = Int32Array.of(3, 1, 4, 1, 5, 9, 2, 6);

let training: WasmEngine;
let inference: WasmEngine;

beforeAll(async () => {
  const open = (kind: "training" | "inference", batch: number): Promise<WasmEngine> =>
    openWasm({ host, tables, set: programSet(tables, SETTINGS, kind, batch), threads: 1 });
  training = await open("training", 2);
  inference = await open("inference", 2);
  await training.initialize(1);
  await inference.initialize(1);
});

describe("what does not fit is refused", () => {
  const batch = { tokens: new Int32Array(18), targets: new Int32Array(18), rows: 2, time: 9 };

  test.each([
    ["another shape", { ...batch, rows: 3 }, /3 x 9 is not the planned 2 x 9/],
    ["too few targets", { ...batch, targets: new Int32Array(17) }, /is not the planned/],
    ["a token outside of the vocabulary", { ...batch, tokens: new Int32Array(18).fill(256) }, /0 .. 255, got 256/],
    ["a target outside of it", { ...batch, targets: new Int32Array(18).fill(256) }, /targets must lie in 0 .. 255/],
  ])("a batch with %s", async (_, given, message) => {
    await expect(training.gradients(given, 1, true)).rejects.toThrow(message);
  });

  test("prompts that are too many, too long or of no length", async () => {
    await expect(inference.prefill(new Int32Array(10), 1, 10)).rejects.toThrow(/do not fit the planned 2 x 9/);
    await expect(inference.prefill(new Int32Array(3), 3, 1)).rejects.toThrow(EngineError);
    await expect(inference.prefill(PROMPT, 2, 4, Int32Array.of(4, 0))).rejects.toThrow(/need 2 lengths in 1 .. 4/);
  });

  test("a program that was not planned", async () => {
    await expect(inference.gradients(batch, 1, true)).rejects.toThrow(/without the program 'gradients'/);
  });

  test("weights of another model, and then nothing has changed", async () => {
    const { params } = await training.state();
    const other = new Map(params).set("ln_f.bias", new Float32Array(3));
    other.set("wte.weight", new Float32Array(256 * 48));
    await expect(training.load(other)).rejects.toThrow(/'ln_f.bias' has 3 numbers but the model has 48/);
    const fewer = new Map(params);
    fewer.delete("wpe.weight");
    await expect(training.load(fewer)).rejects.toThrow(/'wpe.weight' is missing or unexpected/);
    expect((await training.state()).params.get("wte.weight")).toEqual(params.get("wte.weight"));
  });
});

test("logits by the cache are the logits without it, prompts of two lengths side by side", async () => {
  const { params } = await training.state();
  await inference.load(params);
  const whole = await inference.logits(PROMPT, 1, PROMPT.length);
  const at = (position: number): Float32Array => whole.slice(256 * position, 256 * (position + 1));
  const prompts = Int32Array.of(3, 1, 4, 1, 3, 1, 0, 0);
  const first = await inference.prefill(prompts, 2, 4, Int32Array.of(4, 2));
  const close = (got: Float32Array, wanted: Float32Array): number =>
    got.reduce((most, value, i) => Math.max(most, Math.abs(value - (wanted[i] ?? NaN))), 0);
  expect(close(first.subarray(0, 256), at(3))).toBeLessThan(1e-5);
  expect(close(first.subarray(256), at(1))).toBeLessThan(1e-5);
  const next = await inference.decode(Int32Array.of(5, 4));
  expect(close(next.subarray(0, 256), at(4))).toBeLessThan(1e-5);
  expect(close(next.subarray(256), at(2))).toBeLessThan(1e-5);
});

test("the cache is full at the context's end", async () => {
  await inference.prefill(new Int32Array(9), 1, 9);
  await expect(inference.decode(Int32Array.of(1))).rejects.toThrow(/room in the cache of 9 tokens/);
});
