// plan.ts: from letters to numbers and memory. The twin of plan.py, which says why; a test holds
// both to the same regions, places and calls for random configurations. Nothing here takes memory.
import { bindExtent, bindShape, chunks, expand, instances } from "./program.ts";
import type { ProgramSet, Step } from "./program.ts";
import { ProgramError } from "./tables.ts";
import type { BufferJson, CallJson, Dims, Dtype, Op, Operand, ProgramJson, Shape, Tables } from "./tables.ts";

/** A piece of memory that an engine allocates once: `elements` of four bytes. */
export interface Region {
  readonly name: string;
  readonly dtype: Dtype;
  readonly elements: number;
}

/** Where a buffer lies: a region, an offset in elements, a shape. */
export interface Place {
  readonly region: string;
  readonly offset: number;
  readonly shape: readonly number[];
}

/** A call with numbers: places in the op table's order (null for an operand left out), sizes and attributes in its order. */
export interface BoundCall {
  readonly op: string;
  readonly operands: readonly (Place | null)[];
  readonly sizes: readonly number[];
  readonly attrs: readonly number[];
}

export const product = (shape: readonly number[]): number => shape.reduce((all, size) => all * size, 1);

export type ArenaKind = "param" | "grad" | "adam.m" | "adam.v";

/** A parameter: its part of the arenas, its place within the part, how it is drawn. */
export interface Parameter {
  readonly part: string;
  readonly place: Place;
  readonly init: string;
}

/** Places for a set of programs. */
export class Plan {
  readonly tables: Tables;
  readonly programs: Readonly<Record<string, ProgramJson>>;
  readonly dims: Record<string, Dims> = {};
  readonly regions = new Map<string, Region>();
  readonly layout: Map<string, Parameter>;
  readonly places = new Map<string, Map<string, Place>>();
  readonly #ops: Map<string, Op>;

  constructor(tables: Tables, set: ProgramSet) {
    this.tables = tables;
    this.programs = set.programs;
    this.#ops = new Map(tables.ops.map((op) => [op.name, op]));
    const { parts, arenas, align } = tables.plan;
    const sizes = Object.fromEntries(parts.map((part) => [part, 0])) as Record<string, number>;
    this.layout = this.#layOut(set, sizes);
    for (const part of parts) sizes[part] = Math.max(sizes[part] ?? 0, align);
    for (const [name, dims] of Object.entries(set.dims)) {
      this.dims[name] = { ...dims, ...Object.fromEntries(parts.map((part) => [`P_${part}`, sizes[part] ?? 0])) };
    }
    const trains = Object.values(set.programs).some((program) => program.buffers.some((buffer) => buffer.role === "grad"));
    for (const kind of trains ? Object.keys(arenas) : ["param"]) {
      for (const part of parts) this.#claim(`${kind}.${part}`, "f32", sizes[part] ?? 0);
    }
    for (const [name, program] of Object.entries(set.programs)) this.#placeAll(name, program);
  }

  /** All regions together, in bytes. */
  get bytes(): number {
    let sum = 0;
    for (const region of this.regions.values()) sum += 4 * region.elements;
    return sum;
  }

  region(name: string): Region {
    const region = this.regions.get(name);
    if (region === undefined) throw new ProgramError(`the plan has no region '${name}'`);
    return region;
  }

  /** The place of a parameter ("param"), its gradient ("grad") or a moment ("adam.m", "adam.v"). */
  tensor(kind: ArenaKind, name: string): Place {
    const found = this.layout.get(name);
    if (found === undefined) throw new ProgramError(`the model has no parameter '${name}'`);
    return { region: `${kind}.${found.part}`, offset: found.place.offset, shape: found.place.shape };
  }

  /** The calls of a program with numbers, in order; dims may be given smaller than planned (a shorter prompt). */
  bind(name: string, smaller: Dims = {}): BoundCall[] {
    const program = this.programs[name];
    const planned = this.dims[name];
    const places = this.places.get(name);
    if (program === undefined || planned === undefined || places === undefined) {
      throw new ProgramError(`there is no program '${name}' in this plan`);
    }
    for (const [dim, value] of Object.entries(smaller)) {
      const most = planned[dim] ?? 0;
      if (!(value > 0 && value <= most)) {
        throw new ProgramError(`program ${name}: ${dim} = ${value} does not fit the plan's ${dim} = ${most}`);
      }
    }
    const dims = { ...planned, ...smaller };
    const layers = bindExtent([1, ["L"]], dims);
    const buffers = instances(program, layers);
    return expand(program, this.tables, layers, chunks(program, dims)).map((step, index) =>
      this.#bindStep(step, buffers, places, dims, `program ${name}, call ${index} ${step.call.op}`),
    );
  }

  /** Offsets of every parameter within its part of the arenas, in the order in which the programs declare them. */
  #layOut(set: ProgramSet, ends: Record<string, number>): Map<string, Parameter> {
    const layout = new Map<string, Parameter>();
    const [decayed, plain] = this.tables.plan.parts;
    for (const [name, program] of Object.entries(set.programs)) {
      const dims = dimsOf(set, name);
      for (const buffer of instances(program, bindExtent([1, ["L"]], dims)).values()) {
        if (buffer.role !== "param" || buffer.init === null || layout.has(buffer.name)) continue;
        const part = buffer.decay ? decayed : plain;
        const shape = bindShape(buffer.shape, dims);
        const offset = ends[part] ?? 0;
        layout.set(buffer.name, { part, place: { region: `param.${part}`, offset, shape }, init: buffer.init });
        ends[part] = offset + this.#aligned(product(shape));
      }
    }
    return layout;
  }

  #aligned(elements: number): number {
    const { align } = this.tables.plan;
    return Math.ceil(elements / align) * align;
  }

  #claim(name: string, dtype: Dtype, elements: number): void {
    const held = this.regions.get(name)?.elements ?? this.tables.plan.align;
    this.regions.set(name, { name, dtype, elements: Math.max(this.#aligned(elements), held) });
  }

  #placeAll(name: string, program: ProgramJson): void {
    const dims = dimsOf(this, name);
    const buffers = instances(program, bindExtent([1, ["L"]], dims));
    const slots = this.#slots(program, buffers, dims);
    for (const [slot, size] of slots.sizes) this.#claim(slot, "f32", size);
    const places = new Map<string, Place>();
    for (const buffer of buffers.values()) {
      const slot = slots.places.get(buffer.name);
      if (slot !== undefined) places.set(buffer.name, slot);
      else if (buffer.role !== "saved" && buffer.role !== "scratch") {
        places.set(buffer.name, this.#placeShared(buffer, dims));
      }
    }
    this.places.set(name, places);
  }

  /** The place of anything but work space: within an arena, an arena as a whole, or a region of its own. */
  #placeShared(buffer: BufferJson, dims: Dims): Place {
    const shape = bindShape(buffer.shape, dims);
    const { role, name } = buffer;
    const inArenas = role === "param" || role === "grad" || role === "moment";
    if (inArenas && this.regions.has(name)) return { region: name, offset: 0, shape };
    if (role === "param" || role === "grad") {
      return this.tensor(role, name.slice((this.tables.plan.arenas[role] ?? "").length));
    }
    const prefix = { state: "state.", input: "in.", output: "out." }[role as "state" | "input" | "output"];
    this.#claim(prefix + name, buffer.dtype, product(shape));
    return { region: prefix + name, offset: 0, shape };
  }

  /** Share work space between buffers that are never alive together: the smallest free slot that holds one, else the largest, which grows; what is saved takes its own size or a new one. */
  #slots(program: ProgramJson, buffers: Map<string, BufferJson>, dims: Dims): Slots {
    const alive = new Map<string, [first: number, last: number]>();
    const steps = expand(program, this.tables, bindExtent([1, ["L"]], dims), chunks(program, dims));
    steps.forEach(({ call }, index) => {
      for (const operand of operandsOf(call)) {
        if (operand === null) continue;
        const name = this.#bufferOf(operand);
        const role = buffers.get(name)?.role;
        if (role === "saved" || role === "scratch") alive.set(name, [alive.get(name)?.[0] ?? index, index]);
      }
    });
    const slots: Slot[] = [];
    const free: Slot[] = []; // sorted by size, then by number
    const ends: Slot[][] = steps.map(() => []); // slots by the last call that needs them
    const chosen: [name: string, slot: Slot, shape: number[]][] = [];
    let freed = 0;
    for (const [name, [first, last]] of [...alive].sort((a, b) => a[1][0] - b[1][0])) {
      for (; freed < first; freed++) for (const slot of ends[freed] ?? []) free.splice(rankOf(free, slot), 0, slot);
      const shape = bindShape(buffers.get(name)?.shape ?? [], dims);
      const need = this.#aligned(product(shape));
      const saved = buffers.get(name)?.role === "saved";
      const largest = free.at(-1)?.size ?? 0;
      const at = rankOf(free, { size: Math.min(need, largest), number: 0 });
      let slot = free[at];
      if (slot === undefined || (saved && slot.size !== need)) {
        slot = { size: need, number: slots.length };
        slots.push(slot);
      } else {
        free.splice(at, 1);
        slot.size = Math.max(slot.size, need);
      }
      ends[last]?.push(slot);
      chosen.push([name, slot, shape]);
    }
    const ranked = new Map<object, string>(
      [...slots].sort((a, b) => b.size - a.size).map((slot, rank) => [slot, `work.${rank}`]),
    );
    const region = (slot: object): string => ranked.get(slot) ?? "";
    return {
      sizes: slots.map((slot) => [region(slot), slot.size]),
      places: new Map(chosen.map(([name, slot, shape]) => [name, { region: region(slot), offset: 0, shape }])),
    };
  }

  #bufferOf(operand: string): string {
    const { rows } = this.tables;
    return operand.endsWith(rows) ? operand.slice(0, -rows.length) : operand;
  }

  #bindStep(step: Step, buffers: Map<string, BufferJson>, places: Map<string, Place>, dims: Dims, where: string): BoundCall {
    const { call, chunk, rows } = step;
    const op = this.#ops.get(call.op);
    if (op === undefined) throw new ProgramError(`${where}: there is no such op`);
    const operands = operandsOf(call).map((operand): Place | null => {
      if (operand === null) return null;
      const name = this.#bufferOf(operand);
      const [buffer, place] = [buffers.get(name), places.get(name)];
      if (buffer === undefined || place === undefined) throw new ProgramError(`${where}: buffer '${name}' has no place`);
      if (name === operand || rows === null || chunk === null) {
        return { region: place.region, offset: place.offset, shape: bindShape(buffer.shape, dims) };
      }
      const shape = bindShape([rows, ...buffer.shape.slice(1)], dims);
      return { region: place.region, offset: place.offset + chunk * product(shape), shape };
    });
    const letters = sizesOf(op, call, operands, where);
    const attrs = Object.values(call.attrs).map((value) =>
      typeof value === "number" ? value : bindExtent([1, [value]], dims),
    );
    return { op: call.op, operands, sizes: op.sizes.map((letter) => letters.get(letter) ?? 0), attrs };
  }
}

interface Slot {
  size: number;
  readonly number: number;
}

interface Slots {
  readonly sizes: [name: string, size: number][];
  readonly places: Map<string, Place>;
}

const operandsOf = (call: CallJson): (string | null)[] => [...call.outputs, ...call.inputs];

function dimsOf(set: { readonly dims: Readonly<Record<string, Dims>> }, name: string): Dims {
  const dims = set.dims[name];
  if (dims === undefined) throw new ProgramError(`program ${name} has no dims`);
  return dims;
}

/** Where a slot belongs among slots that are sorted by size, then by number. */
function rankOf(sorted: readonly Slot[], slot: Slot): number {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    const other = sorted[middle] as Slot;
    if (other.size < slot.size || (other.size === slot.size && other.number < slot.number)) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The number behind every letter of an op, from the shapes of a call's operands. Throws a ProgramError where two disagree. */
function sizesOf(op: Op, call: CallJson, places: readonly (Place | null)[], where: string): Map<string, number> {
  const known = new Map<string, number>();
  let waiting: [pattern: readonly [number, readonly string[]], size: number, name: string][] = [];
  [...op.outputs, ...op.inputs].forEach((operand, index) => {
    const place = places[index];
    if (place === undefined || place === null) return;
    const shape = shapeOf(operand, call);
    if (shape.length !== place.shape.length) throw new ProgramError(`${where}: ${operand.name} has another rank`);
    shape.forEach((pattern, axis) => waiting.push([pattern, place.shape[axis] ?? 0, operand.name]));
  });
  while (waiting.length) {
    const later: typeof waiting = [];
    for (const entry of waiting) {
      const [[times, letters], size, name] = entry;
      const unknown = letters.filter((letter) => !known.has(letter));
      if (unknown.length > 1) {
        later.push(entry);
        continue;
      }
      const left = letters.reduce((all, letter) => all * (known.get(letter) ?? 1), times);
      const rest = size / left;
      const [letter] = unknown;
      if (!Number.isInteger(rest) || (letter === undefined && rest !== 1)) {
        throw new ProgramError(`${where}: ${name} has ${size} where a multiple of ${left} was wanted`);
      }
      if (letter !== undefined) known.set(letter, rest);
    }
    if (later.length === waiting.length) throw new ProgramError(`${where}: the shapes do not determine all sizes`);
    waiting = later;
  }
  return known;
}

function shapeOf(operand: Operand, call: CallJson): Shape {
  return operand.transposed !== null && call.attrs["transposed"] ? operand.transposed : operand.shape;
}
