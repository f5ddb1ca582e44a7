// The pieces of storage against what others compute, and what happens when writing fails or two want the same run.
import { createHash } from "node:crypto";
import { crc32 as nodeCrc32 } from "node:zlib";
import { beforeEach, describe, expect, test } from "vitest";
import type { State, Tensors } from "../src/runtime/engine.ts";
import { crc32 } from "../src/storage/crc32.ts";
import { MemoryShelf, joined } from "../src/storage/files.ts";
import type { Bytes, Chunks, Files, Shelf } from "../src/storage/files.ts";
import { fromHalf, toHalf } from "../src/storage/half.ts";
import { count, parameterShapes } from "../src/storage/parameters.ts";
import { Records } from "../src/storage/records.ts";
import type { RunHandle } from "../src/storage/run_handle.ts";
import { checkName, nextName } from "../src/storage/run_name.ts";
import type { BrowserStore } from "../src/storage/run_store.ts";
import { hashOf, Sha256 } from "../src/storage/sha256.ts";
import { Float, floatText, writeJson } from "../src/storage/text_forms.ts";
import { openZip } from "../src/storage/zip_read.ts";
import { zipOf } from "../src/storage/zip_write.ts";
import { settingsOf, tables } from "./assets.ts";
import { storeOf } from "./storage_work.ts";

const SETTINGS = { preset: "tiny", ...settingsOf("tiny", { "model.n_layer": 1, "model.n_embd": 12, "model.n_ctx": 8, "training.keep_checkpoints": 2 }) };
const TEXT = { name: "mine.txt", text: new TextEncoder().encode("abc ".repeat(100)) as Bytes, bundled: false };

const noise = (length: number): Bytes => Uint8Array.from({ length }, (_, i) => (i * 7919 + (i >> 3) * 31) & 255);

describe("what is computed is what others compute", () => {
  test("SHA-256 in pieces of any size", async () => {
    for (const length of [0, 1, 55, 56, 63, 64, 65, 119, 120, 1000, 100_000]) {
      const data = noise(length);
      const wanted = createHash("sha256").update(data).digest("hex");
      const digest = new Sha256();
      for (let at = 0; at < length; at += 37) digest.update(data.subarray(at, at + 37));
      expect(digest.digest()).toBe(wanted);
      expect(await hashOf([data.subarray(0, length >> 1), data.subarray(length >> 1)])).toEqual({ sha256: wanted, bytes: length });
    }
  });

  test("CRC-32 in pieces", () => {
    for (const length of [0, 1, 7, 8, 9, 1000]) {
      const data = noise(length);
      expect(crc32(data.subarray(3), crc32(data.subarray(0, 3)))).toBe(nodeCrc32(data));
    }
  });

  test("numbers and JSON in Python's words", () => {
    const words = [[1, "1.0"], [1e-5, "1e-05"], [0.0001, "0.0001"], [1e16, "1e+16"], [123456789012345680, "1.2345678901234568e+17"],
      [1e15, "1000000000000000.0"], [5e-324, "5e-324"], [-0, "-0.0"], [0.1, "0.1"], [1.5e-7, "1.5e-07"], [1e22, "1e+22"]] as const;
    for (const [value, word] of words) expect(floatText(value)).toBe(word);
    expect(writeJson({ a: [], b: {}, c: [1, new Float(2)], d: NaN, e: new Float(Infinity), f: "\u00e9\n" })).toBe(
      '{"a": [], "b": {}, "c": [1, 2.0], "d": null, "e": null, "f": "\u00e9\\n"}');
  });

  test("every float16, and what lies between two of them", () => {
    for (let bits = 0; bits < 0x7c00; bits++) {
      const value = fromHalf(bits);
      const back = new Uint16Array(toHalf(Float32Array.of(value, -value), "x").buffer);
      expect([...back]).toEqual([bits, bits | 0x8000]);
    }
    for (const bits of [0, 1, 2, 0x3ff, 0x400, 0x3c00, 0x3c01, 0x7bfe]) {
      const between = (fromHalf(bits) + fromHalf(bits + 1)) / 2; // goes to the even one
      expect(new Uint16Array(toHalf(Float32Array.of(between), "x").buffer)[0]).toBe(bits % 2 ? bits + 1 : bits);
    }
    expect(() => toHalf(Float32Array.of(65520), "tensor 'x'")).toThrow(/tensor 'x' holds 65520, and the largest float16 is 65504/);
  });

  test("a zip with 64-bit records is read again", async () => {
    const files = [["a/one", noise(100)], ["a/two", noise(0)], ["a/\u00e9", noise(5000)]] as const;
    const archive = await zipOf(files.map(([path, content]) => ({ path, content: new Blob([content]), modified: 0 })), 50);
    const { zip, entries } = await openZip(archive, "x.zip");
    expect(entries.map(({ path }) => path)).toEqual(files.map(([path]) => path));
    for (const [k, entry] of entries.entries()) expect(await joined(zip.content(entry))).toEqual(files[k]?.[1]);
  });
});

describe("lines", () => {
  const text = async (files: Files): Promise<string> => new TextDecoder().decode(await files.read("x.jsonl"));

  test("a torn line is left out, removed by the next one, and lines are cut back", async () => {
    const files = await new MemoryShelf().create("run");
    await files.write("x.jsonl", [new TextEncoder().encode('{"step": 1}\n{"step": 2}\n{"st') as Bytes]);
    const lines = new Records(files, "x.jsonl");
    expect((await lines.read()).map((line) => line["step"])).toEqual([1, 2]);
    await lines.append([{ step: 3 }]);
    expect(await text(files)).toBe('{"step": 1}\n{"step": 2}\n{"step": 3}\n');
    await lines.cutBack(2);
    await lines.append([{ step: 3, again: true }]);
    expect(await text(files)).toBe('{"step": 1}\n{"step": 2}\n{"step": 3, "again": true}\n');
  });

  test("a damaged line is named by its number", async () => {
    const files = await new MemoryShelf().create("run");
    await files.write("x.jsonl", [new TextEncoder().encode('{"step": 1}\nnonsense\n') as Bytes]);
    await expect(new Records(files, "x.jsonl").read()).rejects.toThrow(/x.jsonl, line 2 is not JSON/);
  });
});

/** Files of which writing fails as in a full browser, after some bytes, as long as `full` is set. */
class FailingShelf extends MemoryShelf {
  full = Infinity;

  override async create(name: string): Promise<Files> {
    return this.#failing(await super.create(name));
  }

  override async open(name: string): Promise<Files> {
    return this.#failing(await super.open(name));
  }

  #failing(files: Files): Files {
    const write = async (path: string, content: Chunks): Promise<void> => {
      const whole = await joined(content);
      await files.write(path, [whole.subarray(0, this.full)]);
      this.full -= whole.length;
      if (this.full < 0) throw new DOMException("no room", "QuotaExceededError");
    };
    return {
      list: () => files.list(), size: (path) => files.size(path), blob: (path) => files.blob(path),
      read: (path, from, to) => files.read(path, from, to), append: (path, at, content) => files.append(path, at, content),
      remove: (path) => files.remove(path), write,
    };
  }
}

function stateOf(value: number): State {
  const all = (by: number): Tensors =>
    new Map([...parameterShapes(tables, SETTINGS)].map(([name, shape]) => [name, new Float32Array(count(shape)).fill(value * by)]));
  return { params: all(1), m: all(0.5), v: all(0.25) };
}

const save = (run: RunHandle, step: number, valLoss: number | null = null): Promise<void> =>
  run.saveCheckpoint(stateOf(step), { step, engine: "wasm", engineInfo: {}, threads: 1, valLoss, bestValLoss: valLoss, elapsedS: step });

describe("runs", () => {
  let shelf: FailingShelf;
  let store: BrowserStore;
  let run: RunHandle;

  beforeEach(async () => {
    shelf = new FailingShelf();
    store = storeOf({ host: undefined as never, tables, bundled: TEXT.text, shelf: shelf as Shelf });
    run = await store.create(`run-${Math.random()}`, SETTINGS, TEXT);
    return () => run.close();
  });

  const steps = async (): Promise<number[]> =>
    [...new Set((await run.files.list()).flatMap(({ path }) => /step-(\d+)\/hashes/.exec(path)?.[1] ?? []).map(Number))].sort((a, b) => a - b);

  test("the newest checkpoints are kept, and the best one beside them", async () => {
    for (const [step, loss] of [[1, 3], [2, 1.5], [3, 2], [4, null], [5, 2.5]] as const) await save(run, step, loss);
    expect(await steps()).toEqual([2, 4, 5]);
    expect((await run.latest())?.state.params.get("ln_f.bias")?.[0]).toBe(5);
  });

  test("a write that fails anywhere leaves the earlier checkpoint whole, says so, and can be repeated", async () => {
    await save(run, 1);
    const whole = (await run.files.list()).filter(({ path }) => path.includes("step-000001")).reduce((sum, { bytes }) => sum + bytes, 0);
    for (let full = 0; full < whole; full += Math.ceil(whole / 23)) {
      shelf.full = full;
      await expect(save(run, 2)).rejects.toThrow(/cannot save the checkpoint of step 2 of run .*, which needs .*: this browser gives the page no more room/);
      shelf.full = Infinity;
      expect((await run.latest())?.step).toBe(1);
    }
    await save(run, 2);
    expect((await run.latest())?.step).toBe(2);
  });

  test("values that are not finite are not saved", async () => {
    await save(run, 1);
    const state = stateOf(2);
    state.m.get("ln_f.bias")?.fill(NaN);
    const facts = { step: 2, engine: "wasm", engineInfo: {}, threads: 1, valLoss: null, bestValLoss: null, elapsedS: 1 };
    await expect(run.saveCheckpoint(state, facts)).rejects.toThrow(/adam.m.ln_f.bias holds NaN values/);
    expect((await run.latest())?.step).toBe(1);
  });

  test("a loss that was measured after the snapshot of its step is added to it", async () => {
    await save(run, 1);
    await save(run, 1, 2.25);
    expect((await run.latest())?.trainerState.valLoss).toBe(2.25);
  });

  test("a run that is open is opened by nobody else, and not removed", async () => {
    await expect(store.open(run.name, "write")).rejects.toThrow(/is open on the Train page, here or in another tab/);
    await expect(store.remove(run.name)).rejects.toThrow(/is open/);
    expect((await store.open(run.name)).name).toBe(run.name);
    await run.close();
    await (await store.open(run.name, "write")).close();
  });

  test("what was removed comes back, under another name when its own is taken", async () => {
    const { name } = run;
    await run.close();
    const bring = await store.remove(name);
    expect(await store.list()).toEqual([]);
    await (await store.create(name, SETTINGS, TEXT)).close();
    expect(await bring()).toBe(`${name}-2`);
    expect((await store.list()).map((one) => one.name).sort()).toEqual([name, `${name}-2`]);
  });

  test("lines wait while the disk is full, and nothing of them is lost", async () => {
    const line = (step: number) => ({ step, loss: 1, val_loss: null, lr: 1, grad_norm: 1, tokens_per_second: 1, elapsed_s: 1 });
    await run.append([line(1)]);
    await run.flush();
    await run.append([line(2), line(3)]);
    await run.close();
    expect((await run.metrics()).map(({ step }) => step)).toEqual([1, 2, 3]);
  });
});

test("names that cannot be folders everywhere are refused, and the next free number is found", () => {
  for (const name of ["", "a/b", "a\\b", "..", ".x", "-x", "x.", "con", "LPT1.txt", "a\nb", "a:b", "x".repeat(101)]) {
    expect(() => checkName(name, 100)).toThrow(/the run name/);
  }
  for (const name of ["small-001", "caf\u00e9", "a b", "\u4e2d\u6587"]) checkName(name, 100);
  expect(nextName("small", new Set(["small-001", "small-041", "small-x", "tiny-100"]))).toBe("small-042");
});
