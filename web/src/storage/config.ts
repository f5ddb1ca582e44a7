// config.ts: a run's configuration, to and from its files: config.toml and the "config" of trainer_state.json.
//
// What this is: the form of both files (config.to_toml, TrainConfig), and the check of a file from outside against
// the schema. What this is not: defaults; what a file leaves out comes from its preset, which Python exported.
// A configuration is {"section.key": value} with the preset's name under "preset".
import { checkHeads, inRange } from "./config_check.ts";
import { DAMAGED, show, StorageError } from "./errors.ts";
import type { Settings, Tables } from "../runtime/tables.ts";
import { formsOf, typed } from "./forms.ts";
import { readToml, tomlValue } from "./text_forms.ts";

/** The row of the preset table that unset settings come from. */
export function presetOf(tables: Tables, settings: Settings): string {
  const preset = settings["preset"];
  return typeof preset === "string" ? preset : tables.schema.default_preset;
}

/** config.toml, as Python writes it. */
export function toToml(tables: Tables, settings: Settings): string {
  const preset = presetOf(tables, settings);
  const usual = tables.presets[preset]?.settings ?? {};
  const lines = [`format = ${formsOf(tables).formats.config}`, `preset = ${tomlValue(preset)}`];
  let section = "";
  for (const key of Object.keys(tables.schema.settings)) {
    const [part = "", name = ""] = key.split(".");
    const value = settings[key] ?? null;
    if (part !== section) lines.push("", `[${part}]`);
    section = part;
    if (value === null) continue; // TOML has no null
    const before = usual[key] ?? null;
    const note = same(value, before) ? "" : `  # preset: ${tomlValue(typed(tables, key, before))}`;
    lines.push(`${name} = ${tomlValue(typed(tables, key, value))}${note}`);
  }
  return `${lines.join("\n")}\n`;
}

const same = (a: unknown, b: unknown): boolean => JSON.stringify(a) === JSON.stringify(b);

/** Reads config.toml. Throws a StorageError that names the file, the setting and the value. */
export function fromToml(tables: Tables, text: string, source: string): Settings {
  const given = readToml(text, source);
  checkFormat(given.get("format") ?? formsOf(tables).formats.config, formsOf(tables).formats.config, source, "format");
  given.delete("format");
  return checked(tables, given, source);
}

/** The "config" of trainer_state.json: sections of settings. */
export function toSections(tables: Tables, settings: Settings): Record<string, unknown> {
  const found: Record<string, Record<string, unknown> | string> = { preset: presetOf(tables, settings) };
  for (const key of Object.keys(tables.schema.settings)) {
    const [part = "", name = ""] = key.split(".");
    const section = (found[part] ??= {}) as Record<string, unknown>;
    section[name] = typed(tables, key, settings[key] ?? null);
  }
  return found;
}

/** Reads what `toSections` gave. Throws a StorageError. */
export function fromSections(tables: Tables, sections: unknown, source: string): Settings {
  if (typeof sections !== "object" || sections === null || Array.isArray(sections)) {
    throw new StorageError(`${source}: config must be an object, got ${show(sections)}`, DAMAGED);
  }
  const flat = new Map<string, unknown>();
  for (const [part, section] of Object.entries(sections)) {
    if (typeof section !== "object" || section === null || Array.isArray(section)) flat.set(part, section);
    else for (const [name, value] of Object.entries(section)) flat.set(`${part}.${name}`, value);
  }
  return checked(tables, flat, source);
}

function checked(tables: Tables, given: ReadonlyMap<string, unknown>, source: string): Settings {
  const { settings: known, default_preset } = tables.schema;
  const preset = given.get("preset") ?? default_preset;
  const usual = typeof preset === "string" ? tables.presets[preset] : undefined;
  if (usual === undefined) {
    throw new StorageError(`${source}: unknown preset ${show(preset)}`, `presets: ${Object.keys(tables.presets).join(", ")}`);
  }
  const settings: Record<string, Settings[string]> = { preset: preset as string, ...usual.settings };
  for (const [key, value] of given) {
    if (key === "preset") continue;
    const setting = known[key];
    if (setting === undefined) {
      throw new StorageError(`${source}: unknown setting ${show(key)}`, "this file is of a newer version, or no configuration");
    }
    settings[key] = inRange(key, setting, value, usual.settings[key] ?? null, source);
  }
  checkHeads(settings, source);
  return settings;
}

/** Refuses a file of a format that this version does not know. */
export function checkFormat(version: unknown, supported: number, source: string, field = "format_version"): void {
  if (typeof version !== "number" || !Number.isInteger(version) || version < 1) {
    throw new StorageError(`${source}: ${field} must be a whole number from 1 on, got ${show(version)}`, DAMAGED);
  }
  if (version > supported) {
    throw new StorageError(`${source} has ${field} ${version}; this version reads up to ${supported}`, "reload this page for a newer one");
  }
}
