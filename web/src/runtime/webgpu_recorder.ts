// webgpu_recorder.ts: bound calls as recordings: pipelines and bind groups made once, replayed step by step.
//
// `record` asks the dispatch table what each call becomes and prepares all GPU objects; `encode` replays a
// recording into a command encoder and creates nothing. The twin of engines/webgpu/recorder.py.
import type { BoundCall } from "./plan.ts";
import type { Access, GpuDevice, Resource } from "./webgpu_device.ts";
import type { Dispatch, Dispatches, DispatchTable } from "./webgpu_dispatch.ts";
import type { GpuMemory } from "./webgpu_memory.ts";
import type { Work } from "./webgpu_work.ts";

/** Bytes between two calls' words in the uniform buffer. */
const SLICE = 256;

/** All dispatches of a program, ready to be replayed. */
export interface Recording {
  readonly pipelines: readonly GPUComputePipeline[];
  readonly groups: readonly GPUBindGroup[];
  /** Three numbers a dispatch. */
  readonly grids: Uint32Array;
  readonly uniforms: GPUBuffer;
  /** Entry point and variant of each dispatch. */
  readonly names: readonly string[];
  /** Where submits end, counted in dispatches: the last is the number of dispatches. */
  ends: readonly number[];
  /** Whether it is long enough on some GPUs to be cut into several submits, and has not been timed yet. */
  untimed: boolean;
}

interface Prepared {
  readonly found: Dispatches;
  readonly dispatch: Dispatch;
  readonly access: readonly Access[];
  readonly resources: readonly Resource[];
}

export type Progress = (done: number, total: number) => void;

export class Recorder {
  readonly device: GpuDevice;
  readonly memory: GpuMemory;
  readonly table: DispatchTable;
  bytes: number;
  readonly #absent: GPUBuffer;
  #workspace: GPUBuffer | null = null;
  #workspaceBytes = 0;
  readonly #recordings = new Set<Recording>();

  private constructor(device: GpuDevice, memory: GpuMemory, table: DispatchTable, absent: GPUBuffer) {
    this.device = device;
    this.memory = memory;
    this.table = table;
    this.#absent = absent;
    this.bytes = absent.size;
  }

  /** Takes nothing but a buffer that stands in for operands left out. */
  static async open(device: GpuDevice, memory: GpuMemory, table: DispatchTable): Promise<Recorder> {
    const absent = await device.buffer("absent", 4 * memory.plan.tables.plan.align);
    return new Recorder(device, memory, table, absent);
  }

  /**
   * Takes the workspace of all these programs and makes their pipelines, many at a time. Throws an
   * EngineError, with its name and size, for a buffer that the device cannot bind at once.
   */
  async reserve(programs: readonly (readonly BoundCall[])[], progress: Progress): Promise<void> {
    const chosen = programs.flatMap((calls) => this.table.merge(calls).map((work) => this.#dispatches(work)));
    await this.#grow(Math.max(0, ...chosen.map((found) => found.workspace)));
    const pipelines = new Set(
      chosen.flatMap((found) => found.passes.map((dispatch) => this.device.pipeline(dispatch, this.#bindings(found, dispatch).access))),
    );
    let done = 0;
    progress(done, pipelines.size);
    await Promise.all([...pipelines].map((made) => made.then(() => progress(++done, pipelines.size))));
  }

  /** How many dispatches calls become. */
  count(calls: readonly BoundCall[]): number {
    return this.table.merge(calls).reduce((sum, work) => sum + this.#dispatches(work).passes.length, 0);
  }

  /** Makes all GPU objects of these calls. Throws an EngineError, with the call, where the device refuses one. */
  async record(calls: readonly BoundCall[]): Promise<Recording> {
    return this.recordWorks(this.table.merge(calls));
  }

  /** The same for pieces of work. */
  async recordWorks(works: readonly Work[]): Promise<Recording> {
    const chosen = works.map((work) => this.#dispatches(work));
    await this.#grow(Math.max(0, ...chosen.map((found) => found.workspace)));
    const entries = chosen.flatMap((found) =>
      found.passes.map((dispatch): Prepared => ({ found, dispatch, ...this.#bindings(found, dispatch) })),
    );
    const words = new Uint32Array((Math.max(1, entries.length) * SLICE) / 4);
    entries.forEach(({ dispatch }, index) => words.set(dispatch.words, (index * SLICE) / 4));
    const uniforms = await this.device.buffer("uniforms", words.byteLength, "uniform");
    this.bytes += uniforms.size;
    this.device.queue.writeBuffer(uniforms, 0, words);
    const pipelines = await Promise.all(entries.map(({ dispatch, access }) => this.device.pipeline(dispatch, access)));
    const groups = await this.device.guarded(`the bindings of ${works[0]?.op ?? "nothing"} and what follows`, () =>
      entries.map(({ dispatch, access, resources }, index) => {
        const size = 16 * Math.ceil(dispatch.words.byteLength / 16);
        return this.device.bind(access, [...resources, { buffer: uniforms, offset: index * SLICE, size }]);
      }),
    );
    const recording: Recording = {
      pipelines,
      groups,
      uniforms,
      grids: Uint32Array.from(entries.flatMap(({ dispatch }) => dispatch.grid)),
      names: entries.map(({ found, dispatch }) => `${dispatch.entry} ${found.variant}`),
      ends: [entries.length],
      untimed: this.device.report.software || works.some((work) => work.op.includes("backward")),
    };
    this.#recordings.add(recording);
    return recording;
  }

  /** Gives back what a recording holds; it is not replayed again. */
  forget(recording: Recording): void {
    if (!this.#recordings.delete(recording)) return;
    this.bytes -= recording.uniforms.size;
    recording.uniforms.destroy();
  }

  /** Replays the dispatches from..to of a recording. */
  encode(pass: GPUComputePassEncoder, recording: Recording, from: number, to: number): void {
    const { pipelines, groups, grids } = recording;
    let last: GPUComputePipeline | undefined;
    for (let k = from; k < to; k++) {
      const pipeline = pipelines[k] as GPUComputePipeline;
      if (pipeline !== last) pass.setPipeline(pipeline);
      last = pipeline;
      pass.setBindGroup(0, groups[k] as GPUBindGroup);
      pass.dispatchWorkgroups(grids[3 * k] as number, grids[3 * k + 1], grids[3 * k + 2]);
    }
  }

  #dispatches(work: Work): Dispatches {
    const arena = [...work.operands.values()].find((operand) => operand.windowed)?.place ?? null;
    const windows = this.table.works.has(work.op) && arena !== null ? this.memory.windows(arena) : null;
    return this.table.dispatches(work, windows);
  }

  async #grow(elements: number): Promise<void> {
    const bytes = 256 * Math.ceil((4 * elements) / 256);
    this.device.checkBinding("the kernels' workspace", bytes);
    if (bytes <= this.#workspaceBytes) return;
    this.#workspace = await this.device.buffer("workspace", bytes);
    this.bytes += bytes - this.#workspaceBytes;
    this.#workspaceBytes = bytes;
  }

  /** Types and resources of the bindings, in the order of the table; the uniform's type comes last. */
  #bindings(found: Dispatches, dispatch: Dispatch): { access: readonly Access[]; resources: readonly Resource[] } {
    const access: Access[] = [];
    const resources: Resource[] = [];
    for (const name of dispatch.bind) {
      const [base = "", how] = name.split(":");
      if (base === "workspace") {
        access.push(how === "write" ? "storage" : "read-only-storage");
        const size = Math.max(4 * found.workspace, 16);
        resources.push({ buffer: this.#workspace as GPUBuffer, offset: 0, size });
        continue;
      }
      const operand = found.work.operands.get(base);
      access.push(operand?.written ? "storage" : "read-only-storage");
      const place = operand?.place ?? null;
      if (place === null) resources.push({ buffer: this.#absent, offset: 0, size: this.#absent.size });
      else resources.push(this.memory.resource(place, operand?.windowed ? dispatch.window : null));
    }
    access.push("uniform");
    return { access, resources };
  }

  /** Gives all buffers back. */
  close(): void {
    for (const recording of this.#recordings) this.forget(recording);
    this.#absent.destroy();
    this.#workspace?.destroy();
  }
}
