// webgpu_ops.ts: every op in every variant of its WGSL kernels, on the cases of vectors.ts.
//
// The same checks as tests/webgpu_cases.py: guards around every operand, poison in what is written, errors in
// units of rounding, the same bits a second time.
import { EngineError } from "../runtime/engine.ts";
import { product } from "../runtime/plan.ts";
import type { BoundCall, Place, Region } from "../runtime/plan.ts";
import type { Tables } from "../runtime/tables.ts";
import type { GpuDevice } from "../runtime/webgpu_device.ts";
import { DispatchTable } from "../runtime/webgpu_dispatch.ts";
import { GpuMemory } from "../runtime/webgpu_memory.ts";
import { Recorder } from "../runtime/webgpu_recorder.ts";
import { addError, arrayOf, emptyReport, errorOf, resultOf } from "./vectors.ts";
import type { Case, OpReport, Progress, Vectors } from "./vectors.ts";

const GUARD = 64; // elements before and after an operand
const MARK = 0x7fc5a5a5; // a quiet NaN: a read past an end shows in the result

/** Runs all cases on a device. */
export async function checkGpuOps(
  tables: Tables, device: GpuDevice, vectors: Vectors, data: ArrayBuffer, progress: Progress = () => undefined,
): Promise<OpReport> {
  const report = emptyReport();
  const table = new DispatchTable(device.table, tables.ops, device.limits);
  for (const [index, given] of vectors.cases.entries()) {
    const lone = await LoneOp.open(tables, device, table, given, data);
    const variants = table.candidates(table.works.of(lone.call));
    if (variants.length > 0) {
      report.cases++;
      resultOf(report, given.op).cases++;
    } else if (table.has(given.op)) report.faults.push(`${given.name}: no kernel takes it`);
    for (const variant of variants) {
      report.runs++;
      resultOf(report, given.op).runs++;
      table.preferred.set(given.op, variant);
      const faults = await lone.check(vectors.eps, report).catch((error: unknown) => {
        if (error instanceof EngineError && error.name === "EngineError") return [error.message];
        throw error;
      });
      report.faults.push(...faults.map((fault) => `${given.name} ${variant}: ${fault}`));
    }
    table.preferred.delete(given.op);
    lone.close();
    await progress(index + 1, vectors.cases.length);
  }
  return report;
}

/** One case of an op, with memory of its own. */
class LoneOp {
  readonly call: BoundCall;
  readonly #given: Case;
  readonly #data: ArrayBuffer;
  readonly #memory: GpuMemory;
  readonly #recorder: Recorder;
  readonly #places: (Place | null)[];

  private constructor(given: Case, data: ArrayBuffer, places: (Place | null)[], memory: GpuMemory, recorder: Recorder) {
    this.#given = given;
    this.#data = data;
    this.#places = places;
    this.#memory = memory;
    this.#recorder = recorder;
    this.call = { op: given.op, operands: places, sizes: given.sizes, attrs: given.attrs };
  }

  static async open(tables: Tables, device: GpuDevice, table: DispatchTable, given: Case, data: ArrayBuffer): Promise<LoneOp> {
    const regions = new Map<string, Region>();
    const places = given.operands.map((operand): Place | null => {
      if (operand === null) return null;
      const elements = GUARD * Math.ceil(product(operand.shape) / GUARD) + 2 * GUARD;
      regions.set(operand.name, { name: operand.name, dtype: operand.dtype === "int32" ? "i32" : "f32", elements });
      return { region: operand.name, offset: GUARD, shape: operand.shape };
    });
    const region = (name: string): Region => regions.get(name) as Region;
    const memory = await GpuMemory.open({ tables, regions, region, layout: new Map(), places: new Map() }, device);
    return new LoneOp(given, data, places, memory, await Recorder.open(device, memory, table));
  }

  /** Runs it twice; what is wrong. */
  async check(eps: number, report: OpReport): Promise<string[]> {
    const given = this.#given;
    const recording = await this.#recorder.record([this.call]);
    const [first, again] = [await this.#run(recording), await this.#run(recording)];
    this.#recorder.forget(recording);
    const faults: string[] = [];
    for (const [k, place] of this.#places.entries()) {
      const operand = given.operands[k];
      if (!place || !operand) continue;
      const [got, same] = [first[k] as Uint32Array<ArrayBuffer>, again[k] as Uint32Array];
      const end = GUARD + product(place.shape);
      if (got.some((word, i) => (i < GUARD || i >= end) && word !== MARK)) faults.push(`wrote outside of ${operand.name}`);
      if (got.some((word, i) => word !== same[i])) faults.push(`${operand.name} has other bits the second time`);
      const result = given.results.find((one) => one.name === operand.name);
      const inside = got.slice(GUARD, end);
      if (result === undefined) {
        const before = arrayOf(this.#data, operand);
        const held = new Uint32Array(before.buffer, before.byteOffset, before.length);
        if (inside.some((word, i) => word !== held[i])) faults.push(`changed its input ${operand.name}`);
        continue;
      }
      const [ref, scale] = [arrayOf(this.#data, result.ref), arrayOf(this.#data, result.scale)];
      const error = errorOf(new Float32Array(inside.buffer), ref, scale, eps, given.exact);
      addError(report, given, error);
      if (!(error <= given.limit)) faults.push(`${operand.name} is off by ${error} eps * s, the limit is ${given.limit}`);
    }
    return faults;
  }

  async #run(recording: Awaited<ReturnType<Recorder["record"]>>): Promise<(Uint32Array<ArrayBuffer> | null)[]> {
    const { device } = this.#memory;
    for (const [k, place] of this.#places.entries()) {
      const operand = this.#given.operands[k];
      if (!place || !operand) continue;
      const content = new Uint32Array(this.#memory.plan.region(place.region).elements).fill(MARK);
      const values = arrayOf(this.#data, operand);
      content.set(new Uint32Array(values.buffer, values.byteOffset, values.length), GUARD);
      this.#memory.write({ ...place, offset: 0 }, new Int32Array(content.buffer));
    }
    const encoder = device.device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    this.#recorder.encode(pass, recording, 0, recording.pipelines.length);
    pass.end();
    device.queue.submit([encoder.finish()]);
    const found: (Uint32Array<ArrayBuffer> | null)[] = [];
    for (const place of this.#places) {
      if (place === null) {
        found.push(null);
        continue;
      }
      const { elements } = this.#memory.plan.region(place.region);
      const numbers = await this.#memory.read({ region: place.region, offset: 0, shape: [elements] });
      found.push(new Uint32Array(numbers.buffer as ArrayBuffer));
    }
    return found;
  }

  close(): void {
    this.#recorder.close();
    this.#memory.close();
  }
}
