// webgpu.ts: the WGSL kernels on a GPU, in a Web Worker or in node with Dawn.
//
// Programs are recorded once and replayed; a step is one submit, or a few where the GPU would need longer
// than SUBMIT_MS for it. Nothing waits for the GPU along the way: results come back many at a time. The twin
// of engines/webgpu/engine.py. The same bits on the same adapter and driver; the limits against other
// engines are those of the tests. Read next: webgpu_device.ts, webgpu_recorder.ts.
import { ProgramEngine } from "./engine.ts";
import type { StepResult, StepScalars, Tensors } from "./engine.ts";
import type { Host } from "./host.ts";
import type { ArenaKind, BoundCall, Place } from "./plan.ts";
import { programSet } from "./program.ts";
import type { ProgramSet } from "./program.ts";
import type { Settings, Tables } from "./tables.ts";
import type { AdapterOptions } from "./webgpu_adapter.ts";
import { GpuDevice } from "./webgpu_device.ts";
import { DispatchTable } from "./webgpu_dispatch.ts";
import { GpuMemory } from "./webgpu_memory.ts";
import { Recorder } from "./webgpu_recorder.ts";
import type { Recording } from "./webgpu_recorder.ts";
import { LOSS_AT, Results } from "./webgpu_results.ts";

export { describeAdapter } from "./webgpu_adapter.ts";
export { GpuDevice } from "./webgpu_device.ts";

export interface WebGPUOptions extends AdapterOptions {
  readonly host: Host;
  /** A device that several engines share; without it, the engine opens one and closes it. */
  readonly device?: GpuDevice;
  readonly kind?: "training" | "inference";
  /** Rows at a time, where the settings do not say it. */
  readonly batch?: number;
  /** Variants of kernels by op or by choice key, in place of the table's own preference. */
  readonly preferred?: Iterable<readonly [string, string]>;
  /** Told of kernels that are compiled. */
  readonly onProgress?: (progress: { readonly done: number; readonly total: number }) => void;
}

const SUBMIT_MS = 400; // of GPU work that one submit may hold
const TIMED = 8; // dispatches that are timed together
const WRITTEN = 1 << 26; // bytes that may wait for their copy to the GPU

/** Opens the engine of a configuration. Throws an EngineError that says what this GPU does not have or hold. */
export async function createWebGPUEngine(tables: Tables, settings: Settings, options: WebGPUOptions): Promise<WebGPUEngine> {
  const { kind = "training", batch } = options;
  return openWebGPU(tables, programSet(tables, settings, kind, batch, "webgpu"), options);
}

/** The same for a set of programs. */
export async function openWebGPU(tables: Tables, set: ProgramSet, options: WebGPUOptions): Promise<WebGPUEngine> {
  const { host } = options;
  const control = await WebAssembly.compile(await host.read("posttrain-control.wasm"));
  const device = options.device ?? (await GpuDevice.open(host, options));
  let engine: WebGPUEngine | undefined;
  try {
    engine = new WebGPUEngine(tables, set, control, device, options);
    const usual = device.report.software ? Object.entries(device.table.software) : [];
    await engine.open(new DispatchTable(device.table, tables.ops, device.limits, options.preferred ?? usual));
    return engine;
  } catch (error) {
    if (engine !== undefined) await engine.close();
    else if (options.device === undefined) device.close();
    throw error;
  }
}

/** See `Engine`. Made by createWebGPUEngine. */
export class WebGPUEngine extends ProgramEngine {
  readonly name = "webgpu";
  readonly device: GpuDevice;
  readonly #options: WebGPUOptions;
  memory!: GpuMemory;
  recorder!: Recorder;
  #results!: Results;
  #pending: Recording[] = [];
  #joining = false;
  #written = 0;

  constructor(tables: Tables, set: ProgramSet, control: WebAssembly.Module, device: GpuDevice, options: WebGPUOptions) {
    super(tables, set, control);
    this.device = device;
    this.#options = options;
  }

  /** Takes the memory and compiles the kernels of all programs. */
  async open(table: DispatchTable): Promise<void> {
    this.memory = await GpuMemory.open(this.plan, this.device);
    this.recorder = await Recorder.open(this.device, this.memory, table);
    this.#results = await Results.open(this.device, (numbers) => {
      return this.resultOf(numbers.subarray(0, LOSS_AT / 4), numbers[LOSS_AT / 4] ?? NaN);
    });
    const programs = Object.keys(this.plan.programs).map((name) => this.plan.bind(name));
    await this.recorder.reserve(programs, (done, total) => this.#options.onProgress?.({ done, total }));
  }

  get info(): Readonly<Record<string, string | number>> {
    const { vendor, architecture, software } = this.device.report;
    return {
      engine: this.name,
      adapter: this.device.name,
      vendor,
      architecture,
      software: Number(software),
      host: this.#options.host.name,
      kernels: this.tables.webgpu.kernels,
    };
  }

  get bytes(): number {
    return this.memory.bytes + this.recorder.bytes + this.#results.bytes;
  }

  /** Dispatches of a training step: what it costs the host. */
  get dispatches(): number {
    const names = ["gradients", "update"].filter((name) => name in this.plan.programs);
    return names.reduce((sum, name) => sum + this.recorder.count(this.plan.bind(name)), 0);
  }

  /** Programs that were asked for run first, unless nothing changes for them. */
  write(place: Place, values: Float32Array | Int32Array): void {
    this.device.check();
    if (!this.memory.isInput(place)) {
      this.#flush();
      this.memory.write(place, values);
    } else if (!this.memory.sameInput(place, values)) {
      if (!this.#joining) this.#flush();
      this.memory.setInput(place, values);
    }
  }

  protected override zero(region: string): void {
    this.device.check();
    this.#flush();
    this.memory.clear(region);
  }

  protected override async written(bytes: number): Promise<void> {
    this.#written += bytes;
    if (this.#written < WRITTEN) return;
    this.#written = 0;
    this.device.queue.submit([]);
    await this.device.idle();
  }

  async read(place: Place): Promise<Float32Array> {
    this.device.check();
    this.#flush();
    return this.memory.read(place);
  }

  protected override async readTensors(kind: ArenaKind): Promise<Tensors> {
    this.device.check();
    this.#flush();
    return this.memory.readTensors(kind);
  }

  protected prepare(calls: BoundCall[]): Promise<Recording> {
    return this.recorder.record(calls);
  }

  protected override forget(prepared: unknown): void {
    this.#flush();
    this.recorder.forget(prepared as Recording);
  }

  /** Puts a recording down to be submitted with what comes next: a step is one submit. */
  protected async run(prepared: unknown): Promise<void> {
    this.device.check();
    const recording = prepared as Recording;
    if (recording.untimed) await this.#time(recording);
    else this.#pending.push(recording);
  }

  /** Runs a recording a few dispatches at a time, and cuts it into submits by how long they took. */
  async #time(recording: Recording): Promise<void> {
    this.#flush();
    this.memory.sendInputs();
    await this.device.idle();
    const count = recording.pipelines.length;
    const ends: number[] = [];
    let sum = 0;
    for (let from = 0; from < count; from += TIMED) {
      const to = Math.min(count, from + TIMED);
      const began = performance.now();
      this.#submit((encoder) => this.#encode(encoder, recording, from, to));
      await this.device.idle();
      const took = performance.now() - began;
      if (from > 0 && sum + took > SUBMIT_MS) {
        ends.push(from);
        sum = 0;
      }
      sum += took;
    }
    recording.ends = [...ends, count];
    recording.untimed = false;
  }

  #encode(encoder: GPUCommandEncoder, recording: Recording, from: number, to: number): void {
    const pass = encoder.beginComputePass();
    this.recorder.encode(pass, recording, from, to);
    pass.end();
  }

  #submit(encode: (encoder: GPUCommandEncoder) => void): void {
    const encoder = this.device.device.createCommandEncoder();
    encode(encoder);
    this.device.queue.submit([encoder.finish()]);
  }

  /** Submits what was asked for, and what `last` adds; does not wait for it. */
  #flush(last?: (encoder: GPUCommandEncoder) => void): void {
    if (this.#pending.length === 0 && last === undefined) return;
    this.memory.sendInputs();
    let encoder = this.device.device.createCommandEncoder();
    for (const recording of this.#pending) {
      let from = 0;
      for (const to of recording.ends) {
        this.#encode(encoder, recording, from, to);
        from = to;
        if (to === recording.pipelines.length) break;
        this.device.queue.submit([encoder.finish()]);
        encoder = this.device.device.createCommandEncoder();
      }
    }
    this.#pending = [];
    last?.(encoder);
    this.device.queue.submit([encoder.finish()]);
  }

  /** The scalars go along with those of the gradients before, which read other slots of the same buffer. */
  override async update(scalars: StepScalars): Promise<void> {
    this.#joining = true;
    this.setScalars({ ...scalars });
    this.#joining = false;
    await this.runProgram("update");
    const { buffer, offset } = await this.#results.room();
    const clip = this.memory.resource({ region: "state.clip", offset: 0, shape: [this.tables.clip.length] });
    const loss = this.memory.resource({ region: "out.loss", offset: 0, shape: [1] });
    this.#flush((encoder) => {
      encoder.copyBufferToBuffer(clip.buffer, clip.offset, buffer, offset, clip.size);
      encoder.copyBufferToBuffer(loss.buffer, loss.offset, buffer, offset + LOSS_AT, loss.size);
    });
    this.#results.submitted();
  }

  override async results(wait = true): Promise<StepResult[]> {
    this.device.check();
    return this.#results.take(wait);
  }

  protected override async fresh(): Promise<void> {
    await this.#results.take(true);
    await super.fresh();
  }

  async close(): Promise<void> {
    this.#pending = [];
    if (this.#options.device === undefined) this.device.close(); // and with it all that was made on it
    else {
      this.#results?.close();
      this.recorder?.close();
      this.memory?.close();
    }
  }
}
