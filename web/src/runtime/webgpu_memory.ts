// webgpu_memory.ts: the plan's regions as GPU buffers.
//
// One buffer a region, made once, except that all inputs lie in one buffer, of which the host keeps a copy
// and sends what changed with one write, and that arenas larger than a buffer may be are cut between two
// tensors. The twin of engines/webgpu/memory.py. Read next: webgpu_recorder.ts.
import { EngineError } from "./engine.ts";
import { product } from "./plan.ts";
import type { Place, Plan, Region } from "./plan.ts";
import { MAP_READ } from "./webgpu_device.ts";
import type { GpuDevice, Resource } from "./webgpu_device.ts";
import type { Range } from "./webgpu_dispatch.ts";

/** The elements [begin, end) of a region, at `offset` bytes of a buffer. */
interface Piece {
  readonly buffer: GPUBuffer;
  readonly offset: number;
  readonly begin: number;
  readonly end: number;
}

type Numbers = Float32Array | Int32Array;

/** What a plan says about memory. */
export type Layout = Pick<Plan, "tables" | "regions" | "region" | "layout" | "places">;

const READ_BYTES = 1 << 16; // what is read back at a time ...
const STATE_BYTES = 1 << 24; // ... and of arenas, at most

/** Ranges of a region that fit a buffer: all of it, or runs of whole tensors of an arena. */
export function cutsOf(plan: Layout, region: Region, bufferBytes: number): Range[] {
  const most = Math.floor(bufferBytes / 4);
  const part = region.name.slice(region.name.lastIndexOf(".") + 1);
  if (region.elements <= most || !plan.tables.plan.parts.includes(part)) return [[0, region.elements]];
  const starts = [...plan.layout.values()].filter((held) => held.part === part).map((held) => held.place.offset);
  starts.sort((a, b) => a - b);
  starts.push(region.elements);
  const cuts: Range[] = [];
  let begin = 0;
  for (let k = 0; k + 1 < starts.length; k++) {
    const [here = 0, after = 0] = [starts[k], starts[k + 1]];
    if (after - begin > most) {
      cuts.push([begin, here]);
      begin = here;
    }
  }
  cuts.push([begin, region.elements]);
  return cuts.filter(([from, to]) => from < to);
}

/** An arena that is cut like this as ranges that can each be bound at once. */
export function windowsOf(place: Place, cuts: readonly Range[], bindingBytes: number, align: number): Range[] {
  const most = Math.floor(bindingBytes / 4 / align) * align;
  const found: Range[] = [];
  for (const [begin, last] of cuts) {
    const end = Math.min(last, place.offset + product(place.shape));
    for (let from = Math.max(begin, place.offset); from < end; from += most) {
      found.push([from - place.offset, Math.min(end, from + most) - place.offset]);
    }
  }
  return found;
}

export class GpuMemory {
  readonly plan: Layout;
  readonly device: GpuDevice;
  bytes = 0;
  readonly #pieces = new Map<string, Piece[]>();
  readonly #inputsAt = new Map<string, number>();
  readonly #mirror: ArrayBuffer;
  readonly #align: number;
  #inputs!: GPUBuffer;
  #dirty: [low: number, high: number];
  #readback: Promise<unknown> = Promise.resolve();
  readonly #stateBytes: number;
  readonly #staging = new Map<number, GPUBuffer>();

  private constructor(plan: Layout, device: GpuDevice) {
    this.plan = plan;
    this.device = device;
    this.#align = 4 * plan.tables.plan.align;
    let end = 0;
    for (const region of plan.regions.values()) {
      if (!region.name.startsWith("in.")) continue;
      this.#inputsAt.set(region.name, end);
      end += 4 * region.elements;
    }
    this.#mirror = new ArrayBuffer(Math.max(end, this.#align));
    this.#dirty = [0, this.#mirror.byteLength];
    const arenas = plan.tables.plan.parts.map((part) => 4 * (plan.regions.get(`param.${part}`)?.elements ?? 0));
    this.#stateBytes = Math.min(STATE_BYTES, 4 * Math.floor(device.bufferBytes / 4), Math.max(READ_BYTES, ...arenas));
  }

  /** Takes the memory. Throws an EngineError, with the buffer's name and size, where the device cannot hold it. */
  static async open(plan: Layout, device: GpuDevice): Promise<GpuMemory> {
    const memory = new GpuMemory(plan, device);
    try {
      await memory.#take();
    } catch (error) {
      memory.close();
      throw error;
    }
    return memory;
  }

  async #take(): Promise<void> {
    this.#inputs = await this.#new("inputs", this.#mirror.byteLength);
    for (const region of this.plan.regions.values()) {
      const at = this.#inputsAt.get(region.name);
      const pieces: Piece[] = [];
      this.#pieces.set(region.name, pieces);
      if (at !== undefined) pieces.push({ buffer: this.#inputs, offset: at, begin: 0, end: region.elements });
      else {
        for (const [begin, end] of cutsOf(this.plan, region, this.device.bufferBytes)) {
          pieces.push({ buffer: await this.#new(region.name, 4 * (end - begin)), offset: 0, begin, end });
        }
      }
    }
    for (const bytes of [READ_BYTES, this.#stateBytes]) {
      if (this.#staging.has(bytes)) continue;
      this.#staging.set(bytes, await this.device.buffer("readback", bytes, "readback"));
      this.bytes += bytes;
    }
  }

  async #new(name: string, bytes: number): Promise<GPUBuffer> {
    const buffer = await this.device.buffer(name, bytes);
    this.bytes += bytes;
    return buffer;
  }

  // ---- where things are ------------------------------------------------------------------------------------

  /** What to bind for a place, or for a window of its elements. */
  resource(place: Place, window: Range | null = null): Resource {
    const [begin, end] = window ?? [0, product(place.shape)];
    const piece = this.#pieceOf(place, begin, end);
    const offset = piece.offset + 4 * (place.offset + begin - piece.begin);
    const size = 4 * (end - begin);
    this.device.checkBinding(this.#nameOf(place), size);
    if (offset % this.#align) {
      throw new EngineError(
        `a window of ${this.#nameOf(place)} begins at byte ${offset}, no multiple of ${this.#align}: ` +
          "choose a batch and a context whose product is a multiple of 64",
      );
    }
    return { buffer: piece.buffer, offset, size };
  }

  #pieceOf(place: Place, begin: number, end: number): Piece {
    const found = this.#pieces.get(place.region)?.find((piece) => piece.begin <= place.offset + begin && place.offset + end <= piece.end);
    if (found === undefined) throw new EngineError(`${this.#nameOf(place)} does not lie within one buffer`);
    return found;
  }

  /** An arena as ranges that can each be bound at once. */
  windows(place: Place): Range[] {
    const cuts = (this.#pieces.get(place.region) ?? []).map(({ begin, end }) => [begin, end] as const);
    return windowsOf(place, cuts, this.device.bindingBytes, this.plan.tables.plan.align);
  }

  #nameOf(place: Place): string {
    for (const [name, held] of this.plan.layout) {
      if (place.region.endsWith(`.${held.part}`) && place.offset === held.place.offset) return `'${name}' in ${place.region}`;
    }
    const users = new Set<string>();
    for (const places of this.plan.places.values()) {
      for (const [name, held] of places) if (held.region === place.region) users.add(name);
    }
    const [only] = users;
    return only !== undefined && users.size === 1 ? `'${only}'` : `'${place.region}'`;
  }

  // ---- moving data -------------------------------------------------------------------------------------------

  /** Whether a place lies in the inputs, which the host keeps a copy of. */
  isInput(place: Place): boolean {
    return this.#inputsAt.has(place.region);
  }

  #held(place: Place): Numbers {
    const at = (this.#inputsAt.get(place.region) ?? 0) + 4 * place.offset;
    const View = this.plan.region(place.region).dtype === "f32" ? Float32Array : Int32Array;
    return new View(this.#mirror, at, product(place.shape));
  }

  /** Whether an input already holds these values. */
  sameInput(place: Place, values: Numbers): boolean {
    const held = this.#held(place);
    for (let k = 0; k < values.length; k++) if (held[k] !== values[k]) return false;
    return true;
  }

  /** Changes the host's copy of an input; `sendInputs` takes it to the GPU. */
  setInput(place: Place, values: Numbers): void {
    const held = this.#held(place);
    held.set(values);
    const [low, high] = this.#dirty;
    this.#dirty = [Math.min(low, held.byteOffset), Math.max(high, held.byteOffset + held.byteLength)];
  }

  /** Sends what changed since the last time, as one range. */
  sendInputs(): void {
    const [low, high] = this.#dirty;
    if (low < high) this.device.queue.writeBuffer(this.#inputs, low, this.#mirror, low, high - low);
    this.#dirty = [this.#mirror.byteLength, 0];
  }

  /** Copies values into a place that is no input. */
  write(place: Place, values: Numbers): void {
    const piece = this.#pieceOf(place, 0, values.length);
    const offset = piece.offset + 4 * (place.offset - piece.begin);
    this.device.queue.writeBuffer(piece.buffer, offset, values as Float32Array<ArrayBuffer>);
  }

  /** Fills a region with zeros. */
  clear(region: string): void {
    const encoder = this.device.device.createCommandEncoder();
    for (const { buffer, offset, begin, end } of this.#pieces.get(region) ?? []) {
      encoder.clearBuffer(buffer, offset, 4 * (end - begin));
    }
    this.device.queue.submit([encoder.finish()]);
  }

  /** Copies a place out; waits for all that was submitted before. */
  async read(place: Place): Promise<Float32Array> {
    const found = new Float32Array(product(place.shape));
    await this.#readRange(place.region, place.offset, found.length, READ_BYTES, (part, at) => found.set(part, at));
    return found;
  }

  /** Copies all tensors of a kind out, many at a time. */
  async readTensors(kind: string): Promise<Map<string, Float32Array>> {
    const found = new Map<string, Float32Array>();
    for (const [name, { place }] of this.plan.layout) found.set(name, new Float32Array(product(place.shape)));
    for (const part of this.plan.tables.plan.parts) {
      const tensors = [...this.plan.layout].filter(([, held]) => held.part === part);
      const { elements } = this.plan.region(`${kind}.${part}`);
      await this.#readRange(`${kind}.${part}`, 0, elements, this.#stateBytes, (values, from) => {
        for (const [name, { place }] of tensors) {
          const into = found.get(name) as Float32Array;
          const [begin, end] = [Math.max(place.offset, from), Math.min(place.offset + into.length, from + values.length)];
          if (begin < end) into.set(values.subarray(begin - from, end - from), begin - place.offset);
        }
      });
    }
    return found;
  }

  /** Reads one range after another through a staging buffer; `take` is given each part and where it begins. */
  async #readRange(
    region: string, offset: number, count: number, most: number, take: (part: Float32Array, at: number) => void,
  ): Promise<void> {
    const turn = this.#readback.then(async () => {
      const bytes = 4 * count <= READ_BYTES ? READ_BYTES : most;
      const staging = this.#staging.get(bytes) as GPUBuffer;
      for (const piece of this.#pieces.get(region) ?? []) {
        const last = Math.min(piece.end, offset + count);
        for (let begin = Math.max(piece.begin, offset); begin < last; begin += bytes / 4) {
          const size = 4 * Math.min(bytes / 4, last - begin);
          const encoder = this.device.device.createCommandEncoder();
          encoder.copyBufferToBuffer(piece.buffer, piece.offset + 4 * (begin - piece.begin), staging, 0, size);
          this.device.queue.submit([encoder.finish()]);
          await this.device.settled(staging.mapAsync(MAP_READ, 0, size));
          take(new Float32Array(staging.getMappedRange(0, size)), begin - offset);
          staging.unmap();
        }
      }
    });
    this.#readback = turn.catch(() => {});
    return turn;
  }

  /** Gives the buffers back. */
  close(): void {
    for (const pieces of this.#pieces.values()) for (const piece of pieces) piece.buffer.destroy();
    for (const buffer of this.#staging.values()) buffer.destroy();
    this.#pieces.clear();
    this.#staging.clear();
  }
}
