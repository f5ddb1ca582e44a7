// site.ts: the part of posttrainllm.json that is for the site: what presets reached when they were measured,
// rules of configurations and of text files. Python writes it (export_site.py).
import type { EngineName, Tables } from "../runtime/tables.ts";

/** What a configuration must fulfil beyond the range of each value; `message` and `hint` hold {names} of settings. */
export type Rule =
  | { readonly kind: "divides"; readonly divisor: string; readonly of: string; readonly message: string; readonly hint: string }
  | { readonly kind: "at_most"; readonly key: string; readonly other: string; readonly message: string; readonly hint: string }
  | { readonly kind: "product_at_most"; readonly of: readonly string[]; readonly limit: number; readonly message: string; readonly hint: string }
  | { readonly kind: "only"; readonly key: string; readonly value: number | string | boolean; readonly message: string; readonly hint: string };

export interface PresetRecord {
  /** Validation loss that the preset reaches on TinyShakespeare, nats a byte. */
  readonly loss: number;
  /** What it writes then, in a few words. */
  readonly writes: string;
  /** Milliseconds a step of the wasm engine on one machine: only ratios of them mean anything elsewhere. */
  readonly step_ms: number | null;
  readonly step_flops: number;
}

export interface Term {
  readonly name: string;
  readonly says: string;
  readonly picture: string;
}

export interface Site {
  readonly front: readonly string[];
  /** Settings that a tab cannot change, or asks for elsewhere. */
  readonly hidden: readonly string[];
  readonly records: Readonly<Record<string, PresetRecord>>;
  readonly rules: readonly Rule[];
  readonly max_parameters: number;
  /** A run of few steps warms up over a part of them, unless a warm-up was asked for. */
  readonly short_run: { readonly key: string; readonly of: string; readonly divisor: number };
  readonly first: { readonly model: string; readonly prompt: string; readonly tokens: number };
  /** Models that come along, the first one first. */
  readonly models: readonly { readonly name: string; readonly title: string; readonly bytes: number; readonly prompt: string; readonly text: string }[];
  readonly probe: Readonly<Record<EngineName, { readonly preset: string; readonly least_ms: number }>>;
  readonly recommend: { readonly seconds: number; readonly more_seconds: number };
  readonly snapshot_s: number;
  /** Parameters of the largest model whose movement is looked at. */
  readonly movement_most: number;
  readonly glimpse: { readonly share: number; readonly least_s: number };
  readonly prompt_divisor: number;
  readonly kept_divisor: number;
  readonly text: TextRules;
  readonly terms: Readonly<Record<string, Term>>;
}

/** Which files are no text (text/files.py). */
export interface TextRules {
  readonly signatures: readonly { readonly hex: string; readonly what: string }[];
  readonly marks: readonly { readonly hex: string; readonly name: string }[];
  readonly bom: string;
  readonly control: readonly number[];
  readonly control_share: number;
  readonly few_controls: number;
}

export const siteOf = (tables: Tables): Site => (tables as Tables & { readonly site: Site }).site;
