// forms.ts: what Python says about the files of a run (runs/export_form.py), and its documents filled in.
import type { Settings, Tables } from "../runtime/tables.ts";
import { Float } from "./text_forms.ts";

/** A value, or {"setting": name} in its place, at any depth; a text on top is the file itself. */
type Template = unknown;

export interface FileForms {
  readonly formats: Readonly<Record<"config" | "trainer_state" | "hashes", number>>;
  readonly names: Readonly<Record<"run_config" | "corpus" | "config" | "weights" | "optimizer" | "state" | "hashes", string>>;
  readonly documents: Readonly<Record<string, Template>>;
  readonly tensors: Readonly<Record<"prefix" | "head" | "mean" | "square", string>>;
  readonly metrics: readonly string[];
  readonly max_name_bytes: number;
  readonly tokenizer: { readonly fingerprint: string; readonly n_vocab: number };
  readonly bundled_corpus: { readonly name: string; readonly file: string; readonly sha256: string; readonly bytes: number };
}

export const formsOf = (tables: Tables): FileForms => (tables as Tables & { readonly files: FileForms }).files;

/** A document of the forms with the values of settings in place of their names. */
export function filled(template: Template, tables: Tables, settings: Settings): unknown {
  if (Array.isArray(template)) return template.map((part) => filled(part, tables, settings));
  if (typeof template !== "object" || template === null) return template;
  const { setting } = template as { setting?: unknown };
  if (typeof setting === "string") return typed(tables, setting, settings[setting] ?? null);
  return Object.fromEntries(Object.entries(template).map(([name, part]) => [name, filled(part, tables, settings)]));
}

/** A setting's value with its type: a number that Python holds as a float is one. */
export function typed(tables: Tables, key: string, value: Settings[string]): unknown {
  return typeof value === "number" && tables.schema.settings[key]?.kind === "number" ? new Float(value) : value;
}
