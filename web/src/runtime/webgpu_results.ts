// webgpu_results.ts: what a step leaves to look at, read back many steps at a time and without waiting.
//
// Each step copies its flags and its loss into a staging buffer; a full one is mapped while the next one
// fills. There are three, so a host that runs ahead waits for the GPU at last: as many steps are under way
// as take about PATIENCE_MS each buffer, and pausing is quick on every GPU.
import type { StepResult } from "./engine.ts";
import { MAP_READ } from "./webgpu_device.ts";
import type { GpuDevice } from "./webgpu_device.ts";

/** Bytes a step: the clip buffer's four numbers, the loss, padding. */
const SLOT = 32;
export const LOSS_AT = 16;

const BUFFERS = 3;
const MOST = 32; // steps a buffer
const PATIENCE_MS = 60; // that the steps of one buffer should take

interface Held {
  readonly buffer: GPUBuffer;
  steps: number;
}

/** Numbers of a step: the four of clip, then the loss. */
export type Decode = (numbers: Float32Array) => StepResult;

export class Results {
  readonly #device: GpuDevice;
  readonly #decode: Decode;
  readonly #free: Held[];
  #filling: Held | null = null;
  #reading: Promise<void>[] = [];
  #found: StepResult[] = [];
  #share = 1; // steps that a buffer takes before it is read
  #readAt = performance.now();
  #failure: unknown = null;

  private constructor(device: GpuDevice, decode: Decode, buffers: GPUBuffer[]) {
    this.#device = device;
    this.#decode = decode;
    this.#free = buffers.map((buffer) => ({ buffer, steps: 0 }));
  }

  static async open(device: GpuDevice, decode: Decode): Promise<Results> {
    const buffers: GPUBuffer[] = [];
    for (let k = 0; k < BUFFERS; k++) buffers.push(await device.buffer("results", MOST * SLOT, "readback"));
    return new Results(device, decode, buffers);
  }

  get bytes(): number {
    return BUFFERS * MOST * SLOT;
  }

  /** Where the next step's results go; waits for the GPU when too many steps are under way. */
  async room(): Promise<{ buffer: GPUBuffer; offset: number }> {
    while (this.#filling === null) {
      this.#throwFailure();
      const next = this.#free.pop();
      if (next !== undefined) this.#filling = next;
      else await this.#reading[0];
    }
    return { buffer: this.#filling.buffer, offset: this.#filling.steps * SLOT };
  }

  /** The step that was given room was submitted. */
  submitted(): void {
    if (this.#filling === null) return;
    this.#filling.steps++;
    if (this.#filling.steps >= this.#share) this.#read();
  }

  /** Begins to read what was submitted. */
  #read(): void {
    const held = this.#filling;
    if (held === null || held.steps === 0) return;
    this.#filling = null;
    const before = this.#reading.at(-1);
    const mapped = this.#device.settled(held.buffer.mapAsync(MAP_READ, 0, held.steps * SLOT));
    const reading = this.#take(held, mapped, before).catch((error: unknown) => {
      this.#failure ??= error;
    });
    this.#reading.push(reading);
    void reading.then(() => this.#reading.splice(this.#reading.indexOf(reading), 1));
  }

  async #take(held: Held, mapped: Promise<unknown>, before: Promise<void> | undefined): Promise<void> {
    await mapped;
    await before; // in order
    const numbers = new Float32Array(held.buffer.getMappedRange(0, held.steps * SLOT));
    for (let step = 0; step < held.steps; step++) {
      this.#found.push(this.#decode(numbers.slice((step * SLOT) / 4, ((step + 1) * SLOT) / 4)));
    }
    held.buffer.unmap();
    const now = performance.now();
    const each = (now - this.#readAt) / held.steps;
    this.#share = Math.max(1, Math.min(MOST, Math.floor(PATIENCE_MS / Math.max(each, 1e-3))));
    this.#readAt = now;
    held.steps = 0;
    this.#free.push(held);
  }

  /** Results since the last time, in order: of all steps, or of those that are there already. */
  async take(wait: boolean): Promise<StepResult[]> {
    if (wait || performance.now() - this.#readAt > 4 * PATIENCE_MS) this.#read();
    while (wait && this.#reading.length > 0) await this.#reading[0];
    this.#throwFailure();
    this.#device.check();
    const found = this.#found;
    this.#found = [];
    return found;
  }

  #throwFailure(): void {
    if (this.#failure !== null) throw this.#failure;
  }

  close(): void {
    for (const { buffer } of this.#free) buffer.destroy();
    this.#filling?.buffer.destroy();
  }
}
