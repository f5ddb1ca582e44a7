// protocol.ts: what page and worker say to each other. One worker trains, another one writes; both run
// worker.ts and are told the same way. Bytes are bytes of text; times are seconds unless they say ms.
import type { CountingLine, Verdict as Judgement } from "../runtime/statistics.ts";
import type { Settings } from "../runtime/tables.ts";
import type { MetricLine, SampleLine as KeptSample } from "../storage/run_handle.ts";

export type { CountingLine } from "../runtime/statistics.ts";
export type { MetricLine } from "../storage/run_handle.ts";

/** What the model wrote along the way; `glimpse`: only to look at, between those that the settings ask for. */
export interface SampleLine extends KeptSample {
  readonly glimpse?: boolean;
}

export type EngineChoice = "auto" | "wasm" | "webgpu";

/** The text to train on. */
export type TextSource =
  | { readonly kind: "bundled" }
  | { readonly kind: "own"; readonly name: string; readonly files: readonly { readonly name: string; readonly bytes: Uint8Array<ArrayBuffer> }[] };

/** A model to write with. */
export type ModelSource =
  | { readonly kind: "bundled"; readonly name: string }
  | { readonly kind: "run"; readonly name: string; readonly place: StorePlace };

/** Where runs are kept: in this browser, or in the folder that `posttrainllm play` serves. */
export type StorePlace = "tab" | "server";

export interface SamplingChoice {
  readonly temperature: number;
  readonly topK: number;
  readonly topP: number;
  /** Makes the last tokens, `repetitionWindow` of them, less likely; 1 is no penalty. */
  readonly repetitionPenalty: number;
  readonly repetitionWindow: number;
}

/** What is known of a run before its first step. */
export interface Facts {
  readonly parameters: number;
  /** Of all memory that the engine takes. */
  readonly bytes: number;
  readonly tokensPerStep: number;
  readonly trainBytes: number;
  readonly valBytes: number;
  readonly epochs: number;
  readonly bytesPerParameter: number;
  readonly textName: string;
  readonly lines: readonly CountingLine[];
  readonly notices: readonly string[];
  readonly warning: string | null;
  /** Which engine would run, and why it and not another one. */
  readonly engine: "wasm" | "webgpu";
  readonly reason: string;
}

/** Why something was refused: what is wrong, and what to do. */
export interface Refusal {
  readonly message: string;
  readonly hint: string;
}

/** What a device can do, from a short probe. */
export interface Speed {
  readonly engine: "wasm" | "webgpu";
  readonly reason: string;
  /** Of one step of the preset that was tried. */
  readonly preset: string;
  readonly msPerStep: number;
  readonly threads: number;
  /** Of a GPU: what the browser calls it. */
  readonly adapter: string | null;
}

export interface Verdict extends Judgement {
  readonly valLoss: number | null;
  readonly counting: readonly CountingLine[];
  /** The longest piece of the samples that stands in the text. */
  readonly copied: string;
}

/** How far one step moved the numbers of each layer, compared with their size. */
export interface Movement {
  readonly step: number;
  readonly layers: readonly { readonly name: string; readonly ratio: number }[];
}

export type Phase =
  | "opening"
  | "training"
  | "paused"
  | "evaluating"
  | "judging"
  | "saving"
  | "finished"
  | "stopped";

/** A token that was written: its probability among those it was chosen from, and the likeliest of those. */
export interface WrittenToken {
  readonly token: number;
  readonly probability: number;
  readonly candidates: readonly (readonly [token: number, probability: number])[];
}

/** What the heads of a layer looked at when they chose what comes after a window. */
export interface Attention {
  readonly layer: number;
  readonly heads: number;
  /** Where the window begins, in tokens of the whole text. */
  readonly first: number;
  /** (heads, time): the sum of each row is 1. */
  readonly weights: Float32Array;
}

export type ToWorker =
  | { readonly kind: "hello"; readonly data: string; readonly lock: string | null }
  | { readonly kind: "write"; readonly id: number; readonly model: ModelSource; readonly prompt: string; readonly sampling: SamplingChoice; readonly seed: number; readonly tokens: number; readonly stop: readonly string[] }
  | { readonly kind: "stop-writing" }
  | { readonly kind: "attend"; readonly id: number; readonly model: ModelSource; readonly tokens: readonly number[]; readonly prompt: number; readonly layer: number }
  | { readonly kind: "probe" }
  | { readonly kind: "examine"; readonly id: number; readonly settings: Settings; readonly text: TextSource; readonly engine: EngineChoice }
  | { readonly kind: "train"; readonly settings: Settings; readonly text: TextSource; readonly engine: EngineChoice; readonly place: StorePlace; readonly turn: number }
  | { readonly kind: "go-on"; readonly run: string; readonly place: StorePlace; readonly engine: EngineChoice; readonly more: number; readonly turn: number }
  | { readonly kind: "pause" }
  | { readonly kind: "resume" }
  | { readonly kind: "stop" }
  /** A snapshot as soon as a step is done. */
  | { readonly kind: "save" }
  | { readonly kind: "more"; readonly steps: number };

export type FromWorker =
  /** `held`: the lock of "hello" is this worker's, for as long as it lives. */
  | { readonly kind: "ready"; readonly held: boolean }
  | { readonly kind: "failed"; readonly about: ToWorker["kind"]; readonly refusal: Refusal }
  /** `until`: what makes it untrue. */
  | { readonly kind: "notice"; readonly message: string; readonly until?: "saved" }
  /** From here on the messages about a run are about the one that was asked for with this turn. */
  | { readonly kind: "begun"; readonly turn: number }
  | { readonly kind: "model"; readonly id: number; readonly parameters: number; readonly context: number; readonly layers: number; readonly heads: number; readonly info: Readonly<Record<string, string | number>> }
  | { readonly kind: "written"; readonly id: number; readonly tokens: readonly WrittenToken[]; readonly firstMs: number; readonly perSecond: number }
  | { readonly kind: "write-ended"; readonly id: number; readonly why: "length" | "stop" | "stopped" }
  | { readonly kind: "attention"; readonly id: number; readonly attention: Attention }
  | { readonly kind: "speed"; readonly speed: Speed }
  | { readonly kind: "facts"; readonly id: number; readonly facts: Facts | null; readonly refusal: Refusal | null }
  | { readonly kind: "started"; readonly run: string; readonly place: StorePlace; readonly settings: Settings; readonly step: number; readonly facts: Facts; readonly info: Readonly<Record<string, string | number>>; readonly history: readonly MetricLine[]; readonly samples: readonly SampleLine[] }
  | { readonly kind: "phase"; readonly phase: Phase; readonly done: number; readonly of: number }
  | { readonly kind: "progress"; readonly step: number; readonly steps: number; readonly lines: readonly MetricLine[] }
  | { readonly kind: "sample"; readonly sample: SampleLine }
  | { readonly kind: "saved"; readonly step: number }
  | { readonly kind: "movement"; readonly movement: Movement }
  /** The engine was lost: training went back from step `at` to the last snapshot. */
  | { readonly kind: "recovered"; readonly at: number; readonly from: number; readonly why: string }
  /** Another engine than the one that `started` named. */
  | { readonly kind: "engine"; readonly info: Readonly<Record<string, string | number>>; readonly reason: string }
  | { readonly kind: "verdict"; readonly verdict: Verdict };
