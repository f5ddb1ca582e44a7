// report.ts: what the checks of the kernels found on this device: the form of the report that can be downloaded.
import type { OpResult } from "../../checks/vectors.ts";
import type { Features } from "../../runtime/features.ts";
import type { AdapterReport } from "../../runtime/webgpu_adapter.ts";

export const FORMAT = 1;

export interface Machine {
  readonly browser: string;
  readonly processors: number;
  /** Gigabytes, as roughly as the browser says it; null where it says nothing. */
  readonly memoryGb: number | null;
  readonly isolated: boolean;
  readonly secure: boolean;
  readonly wasm: Features;
  readonly adapter: AdapterReport;
}

/** One engine, or one build of it. */
export interface EngineOps {
  readonly engine: "wasm" | "webgpu";
  readonly name: string;
  readonly cases: number;
  readonly runs: number;
  readonly seconds: number;
  readonly ops: Readonly<Record<string, OpResult>>;
  readonly faults: readonly string[];
}

export interface Parity {
  readonly preset: string;
  readonly steps: number;
  readonly wasm: readonly number[];
  readonly webgpu: readonly number[];
  /** The largest relative difference of the first steps and of the later ones, each with its limit. */
  readonly early: { readonly steps: number; readonly difference: number; readonly limit: number };
  readonly later: { readonly difference: number; readonly limit: number };
  readonly fault: string;
}

export interface Report {
  readonly format: number;
  readonly version: string;
  readonly date: string;
  readonly machine: Machine;
  readonly engines: readonly EngineOps[];
  /** Null where there is no WebGPU to compare. */
  readonly parity: Parity | null;
  /** What could not be run, and why. */
  readonly left: readonly string[];
  readonly passed: boolean;
}

/** What to run: `only` ops whose names hold a text, and how many steps of which preset; null is as usual. */
export type ToChecks = { readonly data: string; readonly only: string | null; readonly steps: number | null; readonly preset: string | null };

export type FromChecks =
  | { readonly kind: "machine"; readonly machine: Machine; readonly names: readonly string[] }
  | { readonly kind: "stage"; readonly name: string; readonly done: number; readonly of: number }
  | { readonly kind: "ops"; readonly ops: EngineOps }
  | { readonly kind: "losses"; readonly wasm: readonly number[]; readonly webgpu: readonly number[] }
  | { readonly kind: "report"; readonly report: Report }
  | { readonly kind: "failed"; readonly message: string };

export const passed = (ops: EngineOps): boolean => ops.faults.length === 0;

export const parityPassed = ({ early, later, fault }: Parity): boolean =>
  fault === "" && early.difference <= early.limit && later.difference <= later.limit;
