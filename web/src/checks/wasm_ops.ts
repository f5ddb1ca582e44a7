// wasm_ops.ts: every op of a build of the WebAssembly kernels, on the cases of vectors.ts.
//
// The checks are those of tests/test_ops.py: guards around every buffer, finite numbers, errors
// within the limit, inputs as they were, the same bits a second time and with other threads.
import { callTable, RECORD } from "../runtime/call_table.ts";
import type { Host, PoolWorker } from "../runtime/host.ts";
import type { Place } from "../runtime/plan.ts";
import type { Tables } from "../runtime/tables.ts";
import type { Build } from "../runtime/wasm.ts";
import { addError, arrayOf, emptyReport, errorOf, resultOf } from "./vectors.ts";
import type { ArrayAt, Case, Numbers, OpReport, Progress, Vectors } from "./vectors.ts";

interface Exports {
  readonly __heap_base: WebAssembly.Global;
  posttrain_workspace(calls: number | bigint, n: bigint): bigint;
  posttrain_run(base: number | bigint, calls: number | bigint, n: bigint, workspace: bigint, threads: number): number;
  posttrain_workers?(): number;
  posttrain_stop?(): void;
}

const MARK = 0x7fc5a5a5; // a quiet NaN: a read past an end shows in the result
const GUARD = 1024;
const PAGE = 1 << 16;
const BYTES = 48 << 20;
const WORKERS = 2;
const STACK = 1 << 19;
const PATIENCE_MS = 30_000; // for workers to start

const ceil = (value: number, to: number): number => Math.ceil(value / to) * to;

/** Runs all cases on a build. */
export async function checkOps(
  host: Host, tables: Tables, build: Build, vectors: Vectors, data: ArrayBuffer, progress: Progress = () => undefined,
): Promise<OpReport> {
  const report = emptyReport();
  const module = await WebAssembly.compile(await host.read(`posttrain-${build}.wasm`));
  const [wide, shared] = [build.startsWith("wasm64"), build.endsWith("-threads")];
  const pages = BYTES / PAGE;
  const size = wide ? { address: "i64", initial: BigInt(pages), maximum: BigInt(pages) } : { initial: pages, maximum: pages };
  const memory = new WebAssembly.Memory({ ...size, shared } as unknown as WebAssembly.MemoryDescriptor);
  const exports = new WebAssembly.Instance(module, { env: { memory } }).exports as unknown as Exports;
  const stacks = ceil(Number(exports.__heap_base.value), 4096);
  const table = stacks + WORKERS * STACK;
  const base = table + 4096;
  const words = new Uint32Array(memory.buffer, base, Math.floor((BYTES - base) / 4));
  const address = (at: number): number | bigint => (wide ? BigInt(at) : at);
  const workers: PoolWorker[] = [];
  if (shared) {
    let lost = "";
    for (let i = 1; i <= WORKERS; i++) {
      const start = { module, memory, stackTop: stacks + i * STACK, wide };
      workers.push(host.startWorker(start, (message) => {
        if (message.kind === "failed") lost = message.why;
      }));
    }
    const late = performance.now() + PATIENCE_MS;
    while ((exports.posttrain_workers?.() ?? 0) < WORKERS) {
      if (performance.now() > late) lost ||= "it did not start in time";
      if (lost) throw new Error(`a thread of ${build} was lost: ${lost}`);
      await new Promise((again) => setTimeout(again, 1));
    }
  }

  const array = (at: ArrayAt): Numbers => arrayOf(data, at);

  /** Runs a case inside guards; faults, and the results as bits. */
  const run = (given: Case, threads: number, shift: number): { faults: string[]; bits: Uint32Array[] } => {
    const faults: string[] = [];
    let end = GUARD + shift;
    const places = given.operands.map((operand): Place | null => {
      if (operand === null) return null;
      const place = { region: "memory", offset: end, shape: operand.shape };
      end = ceil(end + array(operand).length + GUARD, 64) + shift;
      return place;
    });
    const call = { op: given.op, operands: places, sizes: given.sizes, attrs: given.attrs };
    new Uint8Array(memory.buffer, table, RECORD).set(callTable(tables, [call], new Map([["memory", 0]])));
    const scratch = Number(exports.posttrain_workspace(address(table), 1n));
    const scratchAt = ceil(4 * end, 4096);
    const used = words.subarray(0, (scratchAt + ceil(scratch, 4)) / 4 + GUARD);
    if (scratchAt + scratch + 4 * GUARD > 4 * words.length) throw new Error(`${given.name} needs more memory`);
    used.fill(MARK);
    new Uint8Array(memory.buffer, base + scratchAt, scratch).fill(0xff);
    given.operands.forEach((operand, k) => {
      const place = places[k];
      if (operand && place) {
        const values = array(operand);
        used.set(new Uint32Array(values.buffer, values.byteOffset, values.length), place.offset);
      }
    });
    const failed = exports.posttrain_run(address(base), address(table), 1n, BigInt(scratchAt), threads);
    if (failed) return { faults: [`the driver refused it`], bits: [] };
    const inside = [...places.flatMap((place) => (place ? [[place.offset, place.shape.reduce((all, n) => all * n, 1)]] : [])),
      [scratchAt / 4, ceil(scratch, 4) / 4]] as [number, number][];
    let at = 0;
    for (const [start, count] of inside) {
      for (; at < start; at++) if (used[at] !== MARK) faults.push(`wrote outside of its buffers at word ${at}`);
      at = start + count;
    }
    for (; at < used.length; at++) if (used[at] !== MARK) faults.push(`wrote outside of its buffers at word ${at}`);
    const bits: Uint32Array[] = [];
    given.operands.forEach((operand, k) => {
      const place = places[k];
      if (!operand || !place) return;
      const after = used.slice(place.offset, place.offset + array(operand).length);
      const result = given.results.find((one) => one.name === operand.name);
      if (result === undefined) {
        const before = array(operand);
        const held = new Uint32Array(before.buffer, before.byteOffset, before.length);
        if (after.some((word, i) => word !== held[i])) faults.push(`changed its input ${operand.name}`);
        return;
      }
      bits.push(after);
      const error = errorOf(new Float32Array(after.buffer), array(result.ref), array(result.scale), vectors.eps, given.exact);
      addError(report, given, error);
      if (!(error <= given.limit)) faults.push(`${operand.name} is off by ${error} eps * s, the limit is ${given.limit}`);
    });
    return { faults: faults.slice(0, 3), bits };
  };

  for (const [index, given] of vectors.cases.entries()) {
    const first = run(given, 1, 0);
    const found = [...first.faults, ...run(given, 1, 1).faults];
    for (const threads of shared ? [1, 2, 3] : [1]) {
      const again = run(given, threads, 0);
      const same = first.bits.every((words, k) => words.every((word, i) => word === again.bits[k]?.[i]));
      if (!same) found.push(`other bits the second time, with ${threads} threads`);
    }
    report.faults.push(...found.map((fault) => `${build} ${given.name}: ${fault}`));
    const result = resultOf(report, given.op);
    result.cases++;
    result.runs++;
    report.cases++;
    report.runs++;
    await progress(index + 1, vectors.cases.length);
  }
  exports.posttrain_stop?.();
  for (const worker of workers) worker.terminate();
  return report;
}
