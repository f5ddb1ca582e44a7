// wasm_ops.ts: every op of a build of the WebAssembly kernels, on the cases of vectors.ts.
//
// The checks are those of tests/test_ops.py: guards around every buffer, finite numbers, errors
// within the limit, inputs as they were, the same bits a second time and with other threads.
import { callTable, RECORD } from "../runtime/call_table.ts";
import type { Host, PoolWorker } from "../runtime/host.ts";
import { product } from "../runtime/plan.ts";
import type { Place } from "../runtime/plan.ts";
import type { Tables } from "../runtime/tables.ts";
import type { Build } from "../runtime/wasm.ts";
import { addError, arrayOf, emptyReport, errorOf, resultOf } from "./vectors.ts";
import type { Case, OpReport, Progress, Vectors } from "./vectors.ts";

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

type Words = Uint32Array<ArrayBuffer>;

/** What a case left behind: the words of its operands, and what it did beside them. */
interface Left {
  readonly operands: readonly (Words | null)[];
  readonly faults: readonly string[];
}

/** Runs all cases on a build. */
export async function checkOps(
  host: Host, tables: Tables, build: Build, vectors: Vectors, data: ArrayBuffer, progress: Progress = () => undefined,
): Promise<OpReport> {
  const report = emptyReport();
  const kernels = await Kernels.open(host, tables, build);
  try {
    for (const [index, given] of vectors.cases.entries()) {
      const first = kernels.run(given, data, 1, 0);
      const found = [first, kernels.run(given, data, 1, 1)].flatMap((left) => [...left.faults, ...wrongIn(left, given, data, vectors.eps, report)]);
      for (const threads of kernels.shared ? [1, 2, 3] : [1]) {
        const again = kernels.run(given, data, threads, 0);
        const same = first.operands.every((words, k) => words?.every((word, i) => word === again.operands[k]?.[i]) ?? true);
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
  } finally {
    kernels.close();
  }
  return report;
}

/** Inputs that changed, and outputs that are too far from their references. */
function wrongIn(left: Left, given: Case, data: ArrayBuffer, eps: number, report: OpReport): string[] {
  return left.operands.flatMap((words, k) => {
    const operand = given.operands[k];
    if (!words || !operand) return [];
    const result = given.results.find((one) => one.name === operand.name);
    if (result === undefined) {
      const before = wordsOf(data, operand);
      return words.some((word, i) => word !== before[i]) ? [`changed its input ${operand.name}`] : [];
    }
    const error = errorOf(new Float32Array(words.buffer), arrayOf(data, result.ref), arrayOf(data, result.scale), eps, given.exact);
    addError(report, given, error);
    return error <= given.limit ? [] : [`${operand.name} is off by ${error} eps * s, the limit is ${given.limit}`];
  });
}

function wordsOf(data: ArrayBuffer, operand: NonNullable<Case["operands"][number]>): Uint32Array {
  const values = arrayOf(data, operand);
  return new Uint32Array(values.buffer, values.byteOffset, values.length);
}

/** The kernels of a build over memory of their own, and its threads. */
class Kernels {
  readonly shared: boolean;
  readonly #tables: Tables;
  readonly #wide: boolean;
  readonly #memory: WebAssembly.Memory;
  readonly #exports: Exports;
  readonly #stacks: number;
  readonly #workers: PoolWorker[] = [];

  private constructor(tables: Tables, build: Build, module: WebAssembly.Module) {
    this.#tables = tables;
    this.#wide = build.startsWith("wasm64");
    this.shared = build.endsWith("-threads");
    const pages = BYTES / PAGE;
    const size = this.#wide ? { address: "i64", initial: BigInt(pages), maximum: BigInt(pages) } : { initial: pages, maximum: pages };
    this.#memory = new WebAssembly.Memory({ ...size, shared: this.shared } as unknown as WebAssembly.MemoryDescriptor);
    this.#exports = new WebAssembly.Instance(module, { env: { memory: this.#memory } }).exports as unknown as Exports;
    this.#stacks = ceil(Number(this.#exports.__heap_base.value), 4096);
  }

  static async open(host: Host, tables: Tables, build: Build): Promise<Kernels> {
    const module = await WebAssembly.compile(await host.read(`posttrain-${build}.wasm`));
    const kernels = new Kernels(tables, build, module);
    try {
      if (kernels.shared) await kernels.#startWorkers(host, module, build);
      return kernels;
    } catch (error) {
      kernels.close();
      throw error;
    }
  }

  async #startWorkers(host: Host, module: WebAssembly.Module, build: Build): Promise<void> {
    let lost = "";
    for (let i = 1; i <= WORKERS; i++) {
      const start = { module, memory: this.#memory, stackTop: this.#stacks + i * STACK, wide: this.#wide };
      this.#workers.push(host.startWorker(start, (message) => {
        if (message.kind === "failed") lost = message.why;
      }));
    }
    const late = performance.now() + PATIENCE_MS;
    while ((this.#exports.posttrain_workers?.() ?? 0) < WORKERS) {
      if (performance.now() > late) lost ||= "it did not start in time";
      if (lost) throw new Error(`a thread of ${build} was lost: ${lost}`);
      await new Promise((again) => setTimeout(again, 1));
    }
  }

  /** Runs a case inside guards; `shift` words move its operands off their alignment. */
  run(given: Case, data: ArrayBuffer, threads: number, shift: number): Left {
    const table = this.#stacks + WORKERS * STACK;
    const base = table + 4096;
    const address = (at: number): number | bigint => (this.#wide ? BigInt(at) : at);
    let end = GUARD + shift;
    const places = given.operands.map((operand): Place | null => {
      if (operand === null) return null;
      const place = { region: "memory", offset: end, shape: operand.shape };
      end = ceil(end + product(operand.shape) + GUARD, 64) + shift;
      return place;
    });
    const call = { op: given.op, operands: places, sizes: given.sizes, attrs: given.attrs };
    new Uint8Array(this.#memory.buffer, table, RECORD).set(callTable(this.#tables, [call], new Map([["memory", 0]])));
    const scratch = Number(this.#exports.posttrain_workspace(address(table), 1n));
    const scratchAt = ceil(4 * end, 4096);
    if (base + scratchAt + scratch + 4 * GUARD > BYTES) throw new Error(`${given.name} needs more memory`);
    const used = new Uint32Array(this.#memory.buffer, base, (scratchAt + ceil(scratch, 4)) / 4 + GUARD).fill(MARK);
    new Uint8Array(this.#memory.buffer, base + scratchAt, scratch).fill(0xff);
    given.operands.forEach((operand, k) => {
      const place = places[k];
      if (operand && place) used.set(wordsOf(data, operand), place.offset);
    });
    const failed = this.#exports.posttrain_run(address(base), address(table), 1n, BigInt(scratchAt), threads);
    if (failed) return { operands: [], faults: ["the driver refused it"] };
    const inside = places.flatMap((place): [number, number][] => (place ? [[place.offset, product(place.shape)]] : []));
    return {
      operands: places.map((place) => (place ? used.slice(place.offset, place.offset + product(place.shape)) : null)),
      faults: strayWrites(used, [...inside, [scratchAt / 4, ceil(scratch, 4) / 4]]),
    };
  }

  close(): void {
    this.#exports.posttrain_stop?.();
    for (const worker of this.#workers) worker.terminate();
  }
}

const MOST_STRAY = 3; // words that are told

/** Words outside of the ranges (start, count) that are no marks any more. */
function strayWrites(words: Uint32Array, ranges: readonly (readonly [start: number, count: number])[]): string[] {
  const faults: string[] = [];
  let at = 0;
  for (const [start, count] of [...ranges, [words.length, 0] as const]) {
    for (; at < start; at++) if (words[at] !== MARK && faults.length < MOST_STRAY) faults.push(`wrote outside of its buffers at word ${at}`);
    at = start + count;
  }
  return faults;
}
