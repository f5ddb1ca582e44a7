// webgpu_work.ts: calls as the dispatch table sees them, and neighbours that share dispatches.
//
// The twin of engines/webgpu/work.py, which says why: a bound call by names, and runs of calls that a row
// under `fused` of dispatch.json makes one piece of work. Read next: webgpu_dispatch.ts.
import type { BoundCall, Place } from "./plan.ts";
import { ProgramError } from "./tables.ts";
import type { Op, Operand } from "./tables.ts";

export type Names = Map<string, number>;

/** A buffer of a piece of work; windowed ones have the shape (P,) and may be cut into windows. */
export interface WorkOperand {
  readonly place: Place | null;
  readonly written: boolean;
  readonly windowed: boolean;
}

/** One or more calls: `op` and `key` as choices of kernels are kept by, numbers and operands by name. */
export interface Work {
  readonly op: string;
  readonly key: string;
  readonly names: Names;
  readonly operands: Map<string, WorkOperand>;
}

/** A run of calls that may share dispatches. */
export interface Rule {
  readonly op: string;
  readonly calls: readonly { readonly op: string; readonly as?: Readonly<Record<string, string>> }[];
  /** Operands that are written and read inside the run only, and never reach memory. */
  readonly inner?: readonly string[];
}

/** A number as C's %g prints it. */
function general(value: number): string {
  if (value === 0) return "0";
  const [digits = "", exponent = "0"] = value.toExponential(5).split("e");
  const power = Number(exponent);
  if (power >= -4 && power < 6) return String(Number(value.toPrecision(6)));
  const size = String(Math.abs(power)).padStart(2, "0");
  return `${Number(digits)}e${power < 0 ? "-" : "+"}${size}`;
}

/** An op with its sizes and attributes, as choices are kept: `linear_forward 1024 96 288 / 0`. */
function choiceKey(call: BoundCall): string {
  return `${call.op} ${call.sizes.join(" ")} / ${call.attrs.map(general).join(" ")}`;
}

const samePlace = (a: Place | null, b: Place | null): boolean =>
  a === b ||
  (a !== null && b !== null && a.region === b.region && a.offset === b.offset && `${a.shape}` === `${b.shape}`);

const isArena = (operand: Operand): boolean =>
  operand.shape.length === 1 && operand.shape[0]?.[0] === 1 && `${operand.shape[0][1]}` === "P";

/** The op table by name, and what it makes of calls. */
export class Works {
  readonly #ops: ReadonlyMap<string, Op>;

  constructor(ops: readonly Op[]) {
    this.#ops = new Map(ops.map((op) => [op.name, op]));
  }

  has(op: string): boolean {
    return this.#ops.has(op);
  }

  /** A call by names. */
  of(call: BoundCall): Work {
    const row = this.#row(call);
    const operands = new Map<string, WorkOperand>();
    this.#operands(row).forEach((operand, index) => {
      const place = call.operands[index] ?? null;
      operands.set(operand.name, { place, written: index < row.outputs.length, windowed: isArena(operand) });
    });
    return { op: call.op, key: choiceKey(call), names: this.#numbers(call), operands };
  }

  /** Calls as pieces of work; the first rule that takes the calls from here on, and whose work is wanted, merges them. */
  merged(calls: readonly BoundCall[], rules: readonly Rule[], wanted: (work: Work) => boolean): Work[] {
    const found: Work[] = [];
    for (let at = 0; at < calls.length; ) {
      let work: Work | null = null;
      let length = 1;
      for (const rule of rules) {
        work = this.#merge(calls, at, rule);
        if (work !== null && wanted(work)) {
          length = rule.calls.length;
          break;
        }
        work = null;
      }
      found.push(work ?? this.of(calls[at] as BoundCall));
      at += length;
    }
    return found;
  }

  #row(call: BoundCall): Op {
    const row = this.#ops.get(call.op);
    if (row === undefined) throw new ProgramError(`there is no op '${call.op}'`);
    return row;
  }

  #operands(row: Op): readonly Operand[] {
    return [...row.outputs, ...row.inputs];
  }

  #numbers(call: BoundCall): Names {
    const row = this.#row(call);
    const names: Names = new Map();
    row.sizes.forEach((name, k) => names.set(name, call.sizes[k] ?? 0));
    row.attrs.forEach((name, k) => names.set(name, call.attrs[k] ?? 0));
    this.#operands(row).forEach((operand, k) => {
      if (operand.optional) names.set(`has_${operand.name}`, call.operands[k] === null ? 0 : 1);
    });
    return names;
  }

  #merge(calls: readonly BoundCall[], at: number, rule: Rule): Work | null {
    const run = calls.slice(at, at + rule.calls.length);
    if (run.length !== rule.calls.length || run.some((call, k) => call.op !== rule.calls[k]?.op)) return null;
    const names: Names = new Map();
    const operands = new Map<string, WorkOperand>();
    for (const [index, call] of run.entries()) {
      for (const [name, value] of this.#numbers(call)) {
        names.set(`${index}.${name}`, value);
        if (!names.has(name)) names.set(name, value);
      }
      for (const [own, operand] of this.of(call).operands) {
        const name = rule.calls[index]?.as?.[own] ?? own;
        const held = operands.get(name) ?? operand;
        if (!samePlace(held.place, operand.place)) return null;
        operands.set(name, {
          place: operand.place,
          written: held.written || operand.written,
          windowed: held.windowed || operand.windowed,
        });
      }
    }
    for (const name of rule.inner ?? []) {
      const place = operands.get(name)?.place ?? null;
      operands.delete(name);
      if (place === null || !this.#dead(calls, at + run.length, place)) return null;
    }
    return clash(operands) ? null : { op: rule.op, key: run.map(choiceKey).join(" + "), names, operands };
  }

  /** Whether nobody reads a place of the work space before it is written again. */
  #dead(calls: readonly BoundCall[], from: number, place: Place): boolean {
    if (!isWork(place)) return false;
    for (const call of calls.slice(from)) {
      const row = this.#row(call);
      const written = this.#operands(row)
        .map((operand, k) => [call.operands[k] ?? null, k < row.outputs.length && operand.mode === "write"] as const)
        .filter(([other]) => other?.region === place.region)
        .map(([, writes]) => writes);
      if (written.length > 0) return written.every(Boolean);
    }
    return true;
  }
}

const isWork = (place: Place): boolean => place.region.startsWith("work.");

/** Whether something that is written shares a slot of the work space with another operand. */
function clash(operands: ReadonlyMap<string, WorkOperand>): boolean {
  const all = [...operands.values()];
  return all.some(
    (one) =>
      one.written &&
      one.place !== null &&
      isWork(one.place) &&
      all.some((other) => other !== one && other.place?.region === one.place?.region),
  );
}
