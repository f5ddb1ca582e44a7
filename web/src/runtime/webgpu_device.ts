// webgpu_device.ts: the GPU behind the webgpu engine: buffers, shader modules, pipelines, and what can go
// wrong with each.
//
// Every creation runs inside error scopes and names what it creates. What the driver says at any other
// time, and the loss of the device, end the engine with an EngineLost: its memory must not be used any
// more. The twin of engines/webgpu/device.py. Read next: webgpu_memory.ts.
import { EngineError, EngineLost } from "./engine.ts";
import type { Host } from "./host.ts";
import { findAdapter, nameOf, reportOf, requestDevice } from "./webgpu_adapter.ts";
import type { AdapterOptions, AdapterReport } from "./webgpu_adapter.ts";
import { readDispatch } from "./webgpu_dispatch.ts";
import type { Dispatch, Limits, TableJson } from "./webgpu_dispatch.ts";

/** A part of a buffer. */
export interface Resource {
  readonly buffer: GPUBuffer;
  readonly offset: number;
  readonly size: number;
}

/** What a binding is to a shader. */
export type Access = "storage" | "read-only-storage" | "uniform";

type Usage = "storage" | "uniform" | "readback";

// GPUBufferUsage, GPUMapMode and GPUShaderStage by number: node has no such globals.
const COPY_SRC = 4;
const COPY_DST = 8;
const USAGE: Readonly<Record<Usage, number>> = {
  storage: 128 | COPY_SRC | COPY_DST,
  uniform: 64 | COPY_DST,
  readback: 1 | COPY_DST,
};
export const MAP_READ = 1;
const COMPUTE = 4;

/** Offsets beyond this are no 32-bit integers. */
const MOST_BINDING = 2 ** 31 - 4;
const GRACE_MS = 1_000;
const MIB = 2 ** 20;
const GO_ON = "its driver may have been reset or be out of memory: go on from the last snapshot";
const SMALLER = "use a smaller preset, a smaller batch, or WebAssembly";

const mib = (bytes: number): string => `${(bytes / MIB).toLocaleString("en-US", { maximumFractionDigits: 1 })} MiB`;

export class GpuDevice {
  readonly device: GPUDevice;
  readonly queue: GPUQueue;
  readonly report: AdapterReport;
  readonly table: TableJson;
  readonly name: string;
  readonly limits: Limits;
  readonly bindingBytes: number;
  readonly bufferBytes: number;
  readonly #host: Host;
  readonly #modules = new Map<string, Promise<GPUShaderModule>>();
  readonly #layouts = new Map<string, { group: GPUBindGroupLayout; pipeline: GPUPipelineLayout }>();
  readonly #pipelines = new Map<string, Promise<GPUComputePipeline>>();
  readonly #waiting = new Set<(error: EngineLost) => void>();
  #failure: EngineLost | null = null;
  #closed = false;

  private constructor(device: GPUDevice, report: AdapterReport, table: TableJson, host: Host) {
    this.device = device;
    this.table = table;
    this.queue = device.queue;
    this.report = report;
    this.name = nameOf(report);
    this.#host = host;
    const have = device.limits;
    this.bindingBytes = Math.min(have.maxStorageBufferBindingSize, MOST_BINDING);
    this.bufferBytes = have.maxBufferSize;
    this.limits = {
      workgroup_bytes: have.maxComputeWorkgroupStorageSize,
      invocations: have.maxComputeInvocationsPerWorkgroup,
      subgroups: Number(device.features.has("subgroups")),
      binding_bytes: this.bindingBytes,
      half: 0,
      checked: 1,
    };
    void device.lost.then((info) => this.#fail(`the GPU ${this.name} was lost (${info.reason}: ${info.message}); ${GO_ON}`));
    device.onuncapturederror = (event: GPUUncapturedErrorEvent): void => {
      this.#fail(`the GPU ${this.name} stopped working: ${event.error.message.trim()}; ${GO_ON}`);
    };
  }

  /** Opens the best adapter. Throws an EngineError that says why there is none. */
  static async open(host: Host, options: AdapterOptions = {}): Promise<GpuDevice> {
    const [adapter, text] = await Promise.all([findAdapter(options), host.read("wgsl/dispatch.json")]);
    const table = readDispatch(new TextDecoder().decode(text));
    return new GpuDevice(await requestDevice(adapter), reportOf(adapter), table, host);
  }

  #fail(message: string): void {
    if (this.#closed) return;
    this.#failure ??= new EngineLost(message);
    for (const refuse of this.#waiting) refuse(this.#failure);
    this.#waiting.clear();
  }

  /** A promise, or the loss of the device, whichever comes first. (Promise.race would keep every promise for as long as the device lives.) */
  #unlessLost<T>(promise: Promise<T>): Promise<T> {
    return new Promise<T>((resolve, reject) => {
      if (this.#failure !== null) reject(this.#failure);
      this.#waiting.add(reject);
      const over = (): boolean => this.#waiting.delete(reject);
      promise.then((value) => (over(), resolve(value)), (error: unknown) => (over(), reject(error)));
    });
  }

  /** Throws the EngineLost of a device that must not be used any more. */
  check(): void {
    if (this.#failure !== null) throw this.#failure;
    if (this.#closed) throw new EngineError("the GPU was given back: open it again");
  }

  /** Waits for something that the GPU does; a lost device ends the wait. */
  async settled<T>(promise: Promise<T>): Promise<T> {
    try {
      return await this.#unlessLost(promise);
    } catch (error) {
      // A map that is broken off is told of before the loss that broke it off.
      if (this.#failure === null && !this.#closed) {
        await this.#unlessLost(new Promise((late) => setTimeout(late, GRACE_MS)));
      }
      this.check();
      throw new EngineError(`the GPU ${this.name} does not answer: ${error instanceof Error ? error.message : error}`);
    }
  }

  /** Waits until all that was submitted is done. */
  async idle(): Promise<void> {
    await this.settled(this.queue.onSubmittedWorkDone());
  }

  /** Runs a creation inside error scopes. Throws an EngineError with what was to be made. */
  async guarded<T>(what: string, make: () => T): Promise<T> {
    this.check();
    const filters = ["validation", "internal", "out-of-memory"] as const;
    for (const filter of filters) this.device.pushErrorScope(filter);
    let made: T;
    let thrown: unknown = null;
    try {
      made = make();
    } catch (error) {
      thrown = error;
    }
    const scopes = filters.map(() => this.device.popErrorScope());
    const errors = await this.settled(Promise.all(scopes));
    const [memory, ...others] = errors;
    if (memory) throw new EngineError(`the GPU ${this.name} has no room for ${what}: ${SMALLER}`);
    const said = thrown ?? others.find(Boolean);
    if (said) throw new EngineError(`the GPU ${this.name} refuses ${what}: ${(said as { message?: string }).message ?? said}`);
    return made!;
  }

  /** A buffer of zeros. Throws an EngineError, with its name and size, where the device does not hold it. */
  async buffer(name: string, bytes: number, usage: Usage = "storage"): Promise<GPUBuffer> {
    if (bytes > this.bufferBytes) {
      throw new EngineError(
        `buffer '${name}' takes ${mib(bytes)}, over the ${mib(this.bufferBytes)} that ${this.name} allows a buffer: ${SMALLER}`,
      );
    }
    return this.guarded(`buffer '${name}' of ${mib(bytes)}`, () =>
      this.device.createBuffer({ label: name, size: bytes, usage: USAGE[usage] }),
    );
  }

  /** Refuses what cannot be bound at once. */
  checkBinding(name: string, bytes: number): void {
    if (bytes > this.bindingBytes) {
      throw new EngineError(
        `${name} takes ${mib(bytes)}, over the ${mib(this.bindingBytes)} that ${this.name} binds at once: ${SMALLER}`,
      );
    }
  }

  /** Layouts for bindings of these types, in order. */
  #layout(access: readonly Access[]): { group: GPUBindGroupLayout; pipeline: GPUPipelineLayout } {
    const key = access.join();
    let found = this.#layouts.get(key);
    if (found === undefined) {
      const entries = access.map((type, binding) => ({ binding, visibility: COMPUTE, buffer: { type } }));
      const group = this.device.createBindGroupLayout({ entries });
      found = { group, pipeline: this.device.createPipelineLayout({ bindGroupLayouts: [group] }) };
      this.#layouts.set(key, found);
    }
    return found;
  }

  /** The pipeline of a dispatch, made once for each entry point and set of override constants, without blocking. */
  pipeline(dispatch: Dispatch, access: readonly Access[]): Promise<GPUComputePipeline> {
    const { file, entry, overrides } = dispatch;
    const key = JSON.stringify([file, entry, overrides, access]);
    let found = this.#pipelines.get(key);
    if (found === undefined) {
      found = this.#makePipeline(dispatch, access);
      found.catch(() => this.#pipelines.delete(key));
      this.#pipelines.set(key, found);
    }
    return found;
  }

  async #makePipeline(dispatch: Dispatch, access: readonly Access[]): Promise<GPUComputePipeline> {
    const { file, entry, overrides } = dispatch;
    const module = await this.#module(file);
    const layout = this.#layout(access).pipeline;
    try {
      return await this.#unlessLost(
        this.device.createComputePipelineAsync({
          label: entry,
          layout,
          compute: { module, entryPoint: entry, constants: Object.fromEntries(overrides) },
        }),
      );
    } catch (error) {
      this.check();
      const said = error instanceof Error ? error.message : String(error);
      throw new EngineError(`the GPU ${this.name} refuses ${file}.wgsl, ${entry}: ${said}`);
    }
  }

  #module(file: string): Promise<GPUShaderModule> {
    let found = this.#modules.get(file);
    if (found === undefined) {
      found = this.#readModule(file);
      found.catch(() => this.#modules.delete(file));
      this.#modules.set(file, found);
    }
    return found;
  }

  async #readModule(file: string): Promise<GPUShaderModule> {
    const names = [...(this.table.parts[file] ?? []), file];
    const texts = await Promise.all(names.map(async (name) => new TextDecoder().decode(await this.#host.read(`wgsl/${name}.wgsl`))));
    const code = (this.table.enables[file] ?? []).map((name) => `enable ${name};\n`).join("") + texts.join("\n");
    return this.guarded(`${file}.wgsl`, () => this.device.createShaderModule({ label: file, code }));
  }

  /** A bind group of resources. Its errors go to the scope around it. */
  bind(access: readonly Access[], resources: readonly Resource[]): GPUBindGroup {
    return this.device.createBindGroup({
      layout: this.#layout(access).group,
      entries: resources.map((resource, binding) => ({ binding, resource })),
    });
  }

  /** Gives the device back, with all that was made on it. */
  close(): void {
    this.#closed = true;
    this.device.destroy();
  }
}
