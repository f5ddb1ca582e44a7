// store.ts: what a job asks of the place where its run is kept (storage/run_store.ts gives it).
import type { State } from "../runtime/engine.ts";
import type { Settings } from "../runtime/tables.ts";
import type { SnapshotFacts } from "../storage/checkpoint.ts";
import type { MetricLine, SampleLine } from "./protocol.ts";

export interface Snapshot {
  readonly step: number;
  readonly state: State;
  readonly trainerState: { readonly valLoss: number | null; readonly bestValLoss: number | null; readonly elapsedS: number };
}

/** One run, held by this worker alone. */
export interface RunHandle {
  readonly name: string;
  readonly settings: Settings;
  metrics(): Promise<MetricLine[]>;
  samples(): Promise<SampleLine[]>;
  append(lines: readonly MetricLine[]): Promise<void>;
  appendSample(line: SampleLine): Promise<void>;
  /** The newest whole snapshot; null before the first. */
  latest(): Promise<Snapshot | null>;
  /** Makes the run that of `step`: nothing beyond it. */
  startFrom(step: number): Promise<void>;
  saveCheckpoint(state: State, facts: SnapshotFacts): Promise<void>;
  changeSettings(settings: Settings): Promise<void>;
  corpus(): Promise<Uint8Array<ArrayBuffer>>;
  close(): Promise<void>;
}
