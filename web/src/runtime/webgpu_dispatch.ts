// webgpu_dispatch.ts: which kernels an op becomes on WebGPU: the table kernels/wgsl/dispatch.json, read
// and evaluated.
//
// Plain arithmetic on data, the twin of engines/webgpu/dispatch.py; a test holds both to the same choices.
// Nothing here touches a GPU. The grammar stands in docs/ops/dispatch.md. Read next: webgpu_recorder.ts.
import { EngineError } from "./engine.ts";
import type { BoundCall } from "./plan.ts";
import { ProgramError } from "./tables.ts";
import type { Op } from "./tables.ts";
import { Works } from "./webgpu_work.ts";
import type { Names, Rule, Work } from "./webgpu_work.ts";

/** A number, a name or an operator over expressions. */
export type Expression = number | string | readonly Expression[];

interface PassRow {
  readonly file: string;
  readonly entry: string;
  readonly bind: readonly string[];
  readonly args: readonly Expression[];
  readonly overrides?: Readonly<Record<string, Expression>>;
  readonly grid: readonly Expression[];
  readonly windowed?: boolean;
}

interface Variant {
  readonly variant: string;
  readonly when?: readonly Expression[];
  readonly prefer?: readonly Expression[];
  readonly names?: readonly (readonly [string, Expression])[];
  readonly let?: readonly (readonly [string, Expression])[];
  readonly workspace?: Expression;
  readonly passes: readonly PassRow[];
}

/** A row that takes all variants of a shared list, under its own names and operands. */
interface Like {
  readonly like: string;
  readonly when?: readonly Expression[];
  readonly names: readonly (readonly [string, Expression])[];
  readonly operands: Readonly<Record<string, string>>;
}

type Row = Variant | Like;

export interface TableJson {
  readonly format: number;
  /** WGSL extensions of files, for which a line is written in front of their text. */
  readonly enables: Readonly<Record<string, readonly string[]>>;
  /** Files whose text a file shares with others; it goes in front of its own. */
  readonly parts: Readonly<Record<string, readonly string[]>>;
  /** Variants by op for software adapters, on which a barrier costs more than arithmetic. */
  readonly software: Readonly<Record<string, string>>;
  readonly shared: Readonly<Record<string, readonly Variant[]>>;
  readonly fused: readonly (Rule & { readonly variants: readonly Row[] })[];
  readonly ops: Readonly<Record<string, readonly Row[]>>;
}

/** What the choice of a variant may depend on. */
export interface Limits {
  readonly workgroup_bytes: number;
  readonly invocations: number;
  /** 1 where the feature is there. */
  readonly subgroups: number;
  readonly binding_bytes: number;
  /** 1 where half precision was asked for, and is there. */
  readonly half: number;
  /** 1 where shaders have run-time checks, as browsers and Dawn give them: other tiles are fast there. */
  readonly checked: number;
}

/** [begin, end) in elements. */
export type Range = readonly [begin: number, end: number];

/** One dispatch of an entry point. `window` is a range of the operands of shape (P,), for ops on whole arenas. */
export interface Dispatch {
  readonly file: string;
  readonly entry: string;
  readonly bind: readonly string[];
  readonly overrides: readonly (readonly [string, number])[];
  /** The uniform's words. */
  readonly words: Uint32Array<ArrayBuffer>;
  readonly grid: readonly [number, number, number];
  readonly window: Range | null;
}

/** What work becomes: dispatches in order, and the workspace they share, in elements. */
export interface Dispatches {
  readonly work: Work;
  readonly variant: string;
  readonly passes: readonly Dispatch[];
  readonly workspace: number;
}

/** The version of dispatch.json that this code reads. */
const FORMAT = 1;
/** Chosen for fused work: its calls one by one. */
export const APART = "apart";
/** Workgroups a dimension, on every adapter. */
const MOST_GROUPS = 65_535;

const OPERATORS: Readonly<Record<string, (a: number, b: number) => number>> = {
  "+": (a, b) => a + b,
  "-": (a, b) => a - b,
  "*": (a, b) => a * b,
  div: (a, b) => Math.floor(a / b),
  ceil: (a, b) => Math.ceil(a / b),
  mod: (a, b) => a - b * Math.floor(a / b),
  min: Math.min,
  max: Math.max,
  "==": (a, b) => Number(a === b),
  "!=": (a, b) => Number(a !== b),
  "<": (a, b) => Number(a < b),
  "<=": (a, b) => Number(a <= b),
  ">": (a, b) => Number(a > b),
  ">=": (a, b) => Number(a >= b),
};

/** A number, the number behind a name, an operator from left to right, or `rsqrt`, 1 / sqrt(x). */
function evaluate(expression: Expression, names: Names): number {
  if (typeof expression === "number") return expression;
  if (typeof expression === "string") {
    const value = names.get(expression);
    if (value === undefined) throw new ProgramError(`dispatch.json speaks of '${expression}', which is not known here`);
    return value;
  }
  const [operator, ...rest] = expression;
  const values = rest.map((entry) => evaluate(entry, names));
  if (operator === "rsqrt") return (values[0] ?? NaN) ** -0.5;
  const apply = OPERATORS[String(operator)];
  if (apply === undefined) throw new ProgramError(`dispatch.json has an operator '${operator}' that is not known here`);
  return values.reduce((a, b) => apply(a, b));
}

/** dispatch.json from its text. Throws a ProgramError for another format. */
export function readDispatch(text: string): TableJson {
  const table = JSON.parse(text) as TableJson;
  if (table.format !== FORMAT) throw new ProgramError(`dispatch.json has format ${table.format}, this version reads ${FORMAT}`);
  return table;
}

/**
 * The table, and the choice among its variants. `preferred` names a variant for an op, or for an op and
 * its sizes (choiceKey), that is taken where its conditions hold.
 */
export class DispatchTable {
  readonly limits: Limits;
  readonly preferred: Map<string, string>;
  readonly rules: readonly Rule[];
  readonly works: Works;
  readonly #variants = new Map<string, Variant[]>();

  constructor(json: TableJson, ops: readonly Op[], limits: Limits, preferred: Iterable<readonly [string, string]> = []) {
    this.limits = limits;
    this.preferred = new Map(preferred);
    this.rules = json.fused;
    this.works = new Works(ops);
    for (const [op, rows] of Object.entries(json.ops)) this.#variants.set(op, variantsOf(rows, json.shared));
    for (const rule of json.fused) this.#variants.set(rule.op, variantsOf(rule.variants, json.shared));
  }

  /** Whether an op has kernels. */
  has(op: string): boolean {
    return this.#variants.has(op);
  }

  /** Calls as pieces of work; neighbours become one where a rule says so and, by choice or by the table, a variant is preferred. */
  merge(calls: readonly BoundCall[]): Work[] {
    return this.works.merged(calls, this.rules, (work) => this.#wants(work));
  }

  #wants(work: Work): boolean {
    const names = this.#names(work, 1);
    const chosen = this.preferred.get(work.key) || this.preferred.get(work.op);
    if (chosen === APART) return false;
    const fitting = this.#fitting(work, names);
    if (chosen) return fitting.some((row) => row.variant === chosen);
    return fitting.some((row) => isPreferred(row, names));
  }

  /** Names of the variants that can run a piece of work, the default one first. */
  candidates(work: Work, windows = 1): string[] {
    const names = this.#names(work, windows);
    const fitting = this.#fitting(work, names);
    const first = fitting.filter((row) => isPreferred(row, names));
    return [...first, ...fitting.filter((row) => !first.includes(row))].map((row) => row.variant);
  }

  /**
   * The dispatches of work. `windows` cuts operands of shape (P,) into ranges of elements. Throws an
   * EngineError when no variant takes these sizes on this adapter, or a grid is too large.
   */
  dispatches(work: Work, windows: readonly Range[] | null = null, variant = ""): Dispatches {
    const pieces = windows?.length ? windows : [[0, work.names.get("P") ?? 0] as const];
    const names = this.#names(work, pieces.length);
    if (windows?.length) names.set("P", Math.max(...pieces.map(([begin, end]) => end - begin)));
    const row = this.#choose(work, names, variant);
    const known = extended(row, names);
    for (const [name, expression] of row.let ?? []) known.set(name, evaluate(expression, known));
    const passes: Dispatch[] = [];
    for (const entry of row.passes) {
      if (!entry.windowed) {
        passes.push(dispatchOf(work, entry, known, null));
        continue;
      }
      pieces.forEach(([begin, end], index) => {
        const inner = new Map(known).set("P", end - begin).set("window", index);
        passes.push(dispatchOf(work, entry, inner, [begin, end]));
      });
    }
    return { work, variant: row.variant, passes, workspace: Math.trunc(evaluate(row.workspace ?? 0, known)) };
  }

  #names(work: Work, windows: number): Names {
    return new Map<string, number>([...Object.entries(this.limits), ["windows", windows], ...work.names]);
  }

  #fitting(work: Work, names: Names): Variant[] {
    return (this.#variants.get(work.op) ?? []).filter((row) => holds(row.when ?? [], extended(row, names)));
  }

  #choose(work: Work, names: Names, variant: string): Variant {
    const fitting = this.#fitting(work, names);
    const first = fitting.find((row) => isPreferred(row, names)) ?? fitting[0];
    if (first === undefined) throw new EngineError(`no webgpu kernel takes ${work.key} on this adapter`);
    const wanted = variant || this.preferred.get(work.key) || this.preferred.get(work.op);
    return fitting.find((row) => row.variant === wanted) ?? first;
  }
}

function variantsOf(rows: readonly Row[], shared: TableJson["shared"]): Variant[] {
  return rows.flatMap((row) => {
    if (!("like" in row)) return [row];
    return (shared[row.like] ?? []).map((variant) => ({
      ...variant,
      when: [...(row.when ?? []), ...(variant.when ?? [])],
      names: row.names,
      passes: variant.passes.map((entry) => ({ ...entry, bind: entry.bind.map((name) => row.operands[name] ?? name) })),
    }));
  });
}

const isPreferred = (row: Variant, names: Names): boolean => holds(row.prefer ?? [], extended(row, names));

/** Names with those that the row defines for its conditions. */
function extended(row: Variant, names: Names): Names {
  const known: Names = new Map(names);
  for (const [name, expression] of row.names ?? []) known.set(name, evaluate(expression, known));
  return known;
}

const holds = (conditions: readonly Expression[], names: Names): boolean =>
  conditions.every((condition) => evaluate(condition, names) !== 0);

function dispatchOf(work: Work, entry: PassRow, names: Names, window: Range | null): Dispatch {
  const counts = entry.grid.map((expression) => Math.trunc(evaluate(expression, names)));
  const [x = 1, y = 1, z = 1] = counts;
  const grid = counts.length === 1 ? fold(x) : ([x, y, z] as const);
  const most = Math.max(...grid);
  if (most > MOST_GROUPS) {
    const [needs, limit] = [most, MOST_GROUPS].map((count) => count.toLocaleString("en-US"));
    throw new EngineError(`${work.key} needs ${needs} workgroups in one dimension, over WebGPU's limit of ${limit}`);
  }
  const words = new Uint32Array(entry.args.length);
  const floats = new Float32Array(words.buffer);
  entry.args.forEach((argument, index) => {
    if (Array.isArray(argument) && argument[0] === "f32") floats[index] = evaluate(argument[1] as Expression, names);
    else words[index] = evaluate(argument, names);
  });
  const overrides = Object.entries(entry.overrides ?? {}).map(
    ([name, expression]) => [name, Math.trunc(evaluate(expression, names))] as const,
  );
  return { file: entry.file, entry: entry.entry, bind: entry.bind, overrides, words, grid, window };
}

/** A flat number of workgroups in two dimensions; the kernel counts x + y * (groups in x) and checks its bounds. */
function fold(count: number): readonly [number, number, number] {
  const rows = Math.ceil(count / MOST_GROUPS);
  return [Math.ceil(count / rows), rows, 1];
}
