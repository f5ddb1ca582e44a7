// wasm.ts: the kernels as WebAssembly, in a Web Worker or in node, with threads where there are any.
//
// The host lays all regions into one memory, which is made once at its final size and never grows,
// writes a bound program as a call table and runs it with one call. Which build runs is decided by
// what there is: threads before none, 32-bit memory before 64-bit. Results have the same bits in all.
// A page's main thread may not wait, so threads need a Web Worker as their caller.
import { callTable, RECORD } from "./call_table.ts";
import { EngineError, EngineLost, ProgramEngine } from "./engine.ts";
import { probeFeatures } from "./features.ts";
import type { Features } from "./features.ts";
import type { Host, PoolMessage, PoolWorker } from "./host.ts";
import { product } from "./plan.ts";
import type { BoundCall, Place } from "./plan.ts";
import type { ProgramSet } from "./program.ts";
import type { Tables } from "./tables.ts";

export type Build = "wasm32" | "wasm64" | "wasm32-threads" | "wasm64-threads";

export interface WasmOptions {
  readonly host: Host;
  readonly tables: Tables;
  readonly set: ProgramSet;
  /** 0 or left out: all processors. */
  readonly threads?: number;
  /** In place of what this host offers. */
  readonly features?: Features;
  /** This build and no other. */
  readonly build?: Build;
  /** Told what is not possible here and what is used instead. */
  readonly notice?: (message: string) => void;
}

interface Exports {
  readonly __heap_base: WebAssembly.Global;
  posttrain_op_count(): number;
  posttrain_workspace(calls: number | bigint, n: bigint): bigint;
  posttrain_run(base: number | bigint, calls: number | bigint, n: bigint, workspace: bigint, threads: number): number;
  posttrain_stop?(): void;
}

const PAGE = 1 << 16;
const ALIGN = 4096;
const STACK = 1 << 20; // as kernels/build_wasm.py gives the first thread
const PATIENCE_MS = 10_000; // for workers to start, and to come home

const up = (bytes: number): number => Math.ceil(bytes / ALIGN) * ALIGN;
const later = (milliseconds: number): Promise<void> => new Promise((done) => setTimeout(done, milliseconds));
const said = (bytes: number): string => `${bytes.toLocaleString("en-US")} bytes of memory`;

/** A plan that no build of this host can hold. */
export class TooLarge extends EngineError {
  override name = "TooLarge";
  readonly hint = "close other tabs, or take a smaller model";
  readonly needed: number;
  readonly allowed: number;

  constructor(needed: number, allowed: number, why: string) {
    super(needed > allowed ? `the wasm engine needs ${said(needed)} and may take ${said(allowed)} here${why}` : `this browser does not give the wasm engine ${said(needed)}${why}`);
    this.needed = needed;
    this.allowed = allowed;
  }
}

/** Opens the best build that runs here. Throws TooLarge, or an EngineError that says what is missing. */
export async function openWasm(options: WasmOptions): Promise<WasmEngine> {
  const { host, tables } = options;
  const features = options.features ?? probeFeatures();
  const notice = options.notice ?? ((): void => {});
  if (!features.simd) {
    throw new EngineError("the wasm engine needs WebAssembly SIMD, which this browser does not have: update it");
  }
  const threads = options.threads || host.processors;
  if (threads > 1 && !features.threads) {
    notice("one thread only: there is no shared memory here (a page needs cross-origin isolation for it)");
  }
  const ladder = options.build === undefined ? builds(features, threads > 1) : [options.build];
  const engine = new WasmEngine(options, await WebAssembly.compile(await host.read("posttrain-control.wasm")));
  let [needed, allowed, refused] = [0, 0, ""];
  for (const build of ladder) {
    const module = await WebAssembly.compile(await host.read(`posttrain-${build}.wasm`));
    const limit = tables.wasm.pages[build.startsWith("wasm64") ? "wasm64" : "wasm32"] * PAGE;
    allowed = Math.max(allowed, limit);
    let bytes = 0;
    try {
      bytes = engine.measure(build, module, threads);
      needed = Math.max(needed, bytes);
      if (bytes > limit) continue;
      await engine.open();
      return engine;
    } catch (error) {
      if (!(error instanceof RangeError)) throw error; // what a host says when it has not so much memory
      refused = `: ${error.message}`;
      notice(`${build} does not get ${bytes > 0 ? said(bytes) : "its memory"}${refused}`);
    }
  }
  if (!features.memory64) refused += " (there is no 64-bit WebAssembly memory here)";
  throw new TooLarge(needed, allowed, refused);
}

/** What to try, the best first. */
export function builds(features: Features, threads: boolean): Build[] {
  const all: Build[] = ["wasm32-threads", "wasm64-threads", "wasm32", "wasm64"];
  return all.filter(
    (build) =>
      (features.memory64 || !build.startsWith("wasm64")) &&
      (!build.endsWith("-threads") || (threads && features.threads)),
  );
}

/** See `Engine`. Made by openWasm: `measure` chooses a build, `open` takes the memory. */
export class WasmEngine extends ProgramEngine {
  readonly name = "wasm";
  readonly #options: WasmOptions;
  readonly #offsets = new Map<string, number>();
  readonly #views = new Map<string, Float32Array | Int32Array>();
  readonly #tables: Uint8Array[];
  readonly #regionBytes: number;
  readonly #tableBytes: number;
  #build: Build = "wasm32";
  #module!: WebAssembly.Module;
  #memory!: WebAssembly.Memory;
  #exports!: Exports;
  #threads = 1;
  #stacks = 0;
  #table = 0;
  #base = 0;
  #workspaceBytes = 0;
  #total = 0;
  #inTable: Uint8Array | null = null;
  #workers: PoolWorker[] = [];
  #working = 0;
  #lost: EngineLost | null = null;

  constructor(options: WasmOptions, control: WebAssembly.Module) {
    super(options.tables, options.set, control);
    this.#options = options;
    let end = 0;
    for (const region of this.plan.regions.values()) {
      this.#offsets.set(region.name, end);
      end += 4 * region.elements;
    }
    this.#regionBytes = up(end);
    this.#tables = Object.keys(this.plan.programs).map((name) => callTable(this.tables, this.plan.bind(name), this.#offsets));
    this.#tableBytes = up(Math.max(...this.#tables.map((table) => table.length)));
  }

  /** Bytes of memory that a build needs for this plan: stacks of the workers, call table, regions, workspace. */
  measure(build: Build, module: WebAssembly.Module, threads: number): number {
    this.#build = build;
    this.#module = module;
    this.#threads = build.endsWith("-threads") ? threads : 1;
    const least = 64 * PAGE; // more than the module's own data and stack
    this.#instantiate((least + this.#tableBytes) / PAGE);
    this.#stacks = up(Number(this.#exports.__heap_base.value));
    this.#workspaceBytes = 0;
    for (const table of this.#tables) {
      new Uint8Array(this.#memory.buffer).set(table, least);
      const calls = BigInt(table.length / RECORD);
      const bytes = this.#exports.posttrain_workspace(this.#address(least), calls);
      this.#workspaceBytes = Math.max(this.#workspaceBytes, Number(bytes));
    }
    this.#table = this.#stacks + (this.#threads - 1) * STACK;
    this.#base = this.#table + this.#tableBytes;
    this.#total = Math.ceil((this.#base + this.#regionBytes + this.#workspaceBytes) / PAGE) * PAGE;
    return this.#total;
  }

  /** Takes the memory that was measured and starts the threads. Throws a RangeError when the host does not give it. */
  async open(): Promise<void> {
    this.#instantiate(this.#total / PAGE);
    const { buffer } = this.#memory;
    for (const region of this.plan.regions.values()) {
      const View = region.dtype === "f32" ? Float32Array : Int32Array;
      this.#views.set(region.name, new View(buffer, this.#base + (this.#offsets.get(region.name) ?? 0), region.elements));
    }
    if (this.#threads > 1) await this.#startWorkers();
  }

  #instantiate(pages: number): void {
    const size = Math.ceil(pages);
    const shared = this.#build.endsWith("-threads");
    // Not in the DOM's types yet: 64-bit memory is described in bigints.
    const wide = { address: "i64", initial: BigInt(size), maximum: BigInt(size), shared } as unknown;
    const narrow = { initial: size, maximum: size, shared };
    this.#memory = new WebAssembly.Memory(this.#wide ? (wide as WebAssembly.MemoryDescriptor) : narrow);
    const instance = new WebAssembly.Instance(this.#module, { env: { memory: this.#memory } });
    this.#exports = instance.exports as unknown as Exports;
    if (this.#exports.posttrain_op_count() !== this.tables.ops.length) {
      throw new EngineError("the WebAssembly modules are not those of this version: reload without the cache");
    }
  }

  get #wide(): boolean {
    return this.#build.startsWith("wasm64");
  }

  #address(bytes: number): number | bigint {
    return this.#wide ? BigInt(bytes) : bytes;
  }

  async #startWorkers(): Promise<void> {
    const { host, notice } = this.#options;
    const ready: Promise<void>[] = [];
    for (let i = 1; i < this.#threads; i++) {
      const start = { module: this.#module, memory: this.#memory, stackTop: this.#stacks + i * STACK, wide: this.#wide };
      ready.push(
        new Promise((settled) => {
          let inside = false;
          const tell = (message: PoolMessage): void => {
            if (message.kind === "ready") {
              inside = true;
              this.#working++;
            } else {
              if (inside) this.#working--;
              inside = false;
              if (message.kind === "failed") notice?.(`a thread was lost (${message.why}); ${this.#working + 1} go on`);
            }
            settled();
          };
          try {
            this.#workers.push(host.startWorker(start, tell));
          } catch (error) {
            tell({ kind: "failed", why: String(error) }); // a host whose workers may have none of their own
          }
        }),
      );
    }
    const all = Promise.all(ready);
    let timer: ReturnType<typeof setTimeout> | undefined;
    await Promise.race([all, new Promise((late) => (timer = setTimeout(late, PATIENCE_MS)))]);
    clearTimeout(timer);
  }

  get info(): Readonly<Record<string, string | number>> {
    const build = this.#build;
    return {
      engine: this.name,
      build,
      build_id: this.tables.wasm.builds[build] ?? "",
      host: this.#options.host.name,
      threads: 1 + this.#working,
    };
  }

  get bytes(): number {
    return this.#memory.buffer.byteLength;
  }

  /** The place itself, not a copy. */
  view(place: Place): Float32Array | Int32Array {
    const region = this.#views.get(place.region);
    if (region === undefined) throw new EngineError(`there is no region '${place.region}'`);
    return region.subarray(place.offset, place.offset + product(place.shape));
  }

  write(place: Place, values: Float32Array | Int32Array): void {
    this.view(place).set(values);
  }

  async read(place: Place): Promise<Float32Array> {
    return Float32Array.from(this.view(place));
  }

  protected prepare(calls: BoundCall[]): Uint8Array {
    const table = callTable(this.tables, calls, this.#offsets);
    this.#place(table);
    const bytes = this.#exports.posttrain_workspace(this.#address(this.#table), BigInt(calls.length));
    if (Number(bytes) > this.#workspaceBytes) throw new EngineError("the plan's workspace is too small for this run");
    return table;
  }

  /** Programs take turns in one place: there are more tables (shorter prompts) than programs. */
  #place(table: Uint8Array): void {
    if (table.length > this.#tableBytes) throw new EngineError("the plan has no room for so many calls");
    new Uint8Array(this.#memory.buffer, this.#table, table.length).set(table);
    this.#inTable = table;
  }

  protected run(prepared: unknown): void {
    if (this.#lost) throw this.#lost;
    const table = prepared as Uint8Array;
    if (table !== this.#inTable) this.#place(table);
    let failed: number;
    try {
      failed = this.#exports.posttrain_run(
        this.#address(this.#base), this.#address(this.#table), BigInt(table.length / RECORD), BigInt(this.#regionBytes),
        this.#threads,
      );
    } catch (error) {
      this.#lost = new EngineLost(`the WebAssembly module stopped (${error}): go on from the last snapshot, with one thread`);
      throw this.#lost;
    }
    if (failed) throw new EngineError(`the WebAssembly driver refused call ${failed - 1}`);
  }

  async close(): Promise<void> {
    this.#exports.posttrain_stop?.();
    const end = Date.now() + PATIENCE_MS;
    while (this.#working > 0 && Date.now() < end) await later(5);
    for (const worker of this.#workers) worker.terminate();
    this.#workers = [];
    this.#views.clear();
  }
}
