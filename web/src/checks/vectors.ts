// vectors.ts: the op cases that tests/op_vectors.py wrote: operands, float64 references, the scale of rounding, limits.
//
// The error of an op is max |got - ref| / (eps * s): in units of the rounding that the op has (STYLE of the tests'
// tolerances.py). Read next: wasm_ops.ts and webgpu_ops.ts, which run them.

export interface ArrayAt {
  readonly name?: string;
  readonly dtype: "float32" | "float64" | "int32";
  readonly shape: number[];
  readonly offset: number;
}

export interface Case {
  readonly name: string;
  readonly op: string;
  readonly sizes: number[];
  readonly attrs: number[];
  readonly operands: ((ArrayAt & { readonly name: string }) | null)[];
  readonly results: { readonly name: string; readonly ref: ArrayAt; readonly scale: ArrayAt }[];
  readonly limit: number;
  readonly exact: boolean;
}

export interface Vectors {
  readonly eps: number;
  readonly cases: Case[];
}

/** What came of the cases of one op. */
export interface OpResult {
  cases: number;
  /** Runs of all cases in all variants of the op's kernels. */
  runs: number;
  /** The largest error in units of rounding, the limit of its case, and which case that was. */
  error: number;
  limit: number;
  worst: string;
}

export interface OpReport {
  cases: number;
  runs: number;
  readonly faults: string[];
  /** The largest error of each op, as a part of its limit. */
  readonly errors: Record<string, number>;
  readonly ops: Record<string, OpResult>;
}

/** Told after every case: how many are done. */
export type Progress = (done: number, of: number) => void | Promise<void>;

export const emptyReport = (): OpReport => ({ cases: 0, runs: 0, faults: [], errors: {}, ops: {} });

/** The result of an op so far. */
export function resultOf(report: OpReport, op: string): OpResult {
  return (report.ops[op] ??= { cases: 0, runs: 0, error: 0, limit: 0, worst: "" });
}

/** Adds the error of one operand of a case. */
export function addError(report: OpReport, given: Case, error: number): void {
  const share = error / Math.max(given.limit, 1);
  const found = resultOf(report, given.op);
  if (found.worst === "" || share > (report.errors[given.op] ?? 0)) Object.assign(found, { error, limit: given.limit, worst: given.name });
  report.errors[given.op] = Math.max(report.errors[given.op] ?? 0, share);
}

export type Numbers = Float32Array<ArrayBuffer> | Float64Array<ArrayBuffer> | Int32Array<ArrayBuffer>;

/** An array of the file. */
export function arrayOf(data: ArrayBuffer, at: ArrayAt): Numbers {
  const count = at.shape.reduce((all, n) => all * n, 1);
  if (at.dtype === "float32") return new Float32Array(data, at.offset, count);
  return at.dtype === "float64" ? new Float64Array(data, at.offset, count) : new Int32Array(data, at.offset, count);
}

/** The largest error in units of eps * s; infinite where a finite number was wanted and none came. */
export function errorOf(
  got: Float32Array, ref: ArrayLike<number>, scale: ArrayLike<number>, eps: number, exact: boolean,
): number {
  let most = 0;
  for (let i = 0; i < got.length; i++) {
    const have = got[i] as number;
    const wanted = exact ? Math.fround(ref[i] as number) : (ref[i] as number);
    if (have === wanted || (Number.isNaN(have) && Number.isNaN(wanted))) continue;
    const error = Math.abs(have - wanted) / (eps * (scale[i] as number));
    if (!(error <= most)) most = Number.isNaN(error) ? Infinity : error;
  }
  return most;
}
