// settings.ts: a configuration from a preset and what a person changed, refused as the terminal refuses it.
// Every default, limit and rule comes from posttrainllm.json.
import type { Settings, Tables } from "../runtime/tables.ts";
import { fill } from "../runtime/words.ts";
import { charactersFit } from "../storage/config_check.ts";
import { show } from "../storage/errors.ts";
import { schemaOf, siteOf } from "./site.ts";
import type { Rule, SettingField } from "./site.ts";

export type Value = Settings[string];
/** What a person changed, by the settings' names. */
export type Changes = Readonly<Record<string, Value>>;

export interface Wrong {
  /** The setting, or "" for the configuration as a whole. */
  readonly key: string;
  readonly message: string;
  readonly hint: string;
}

/** The settings of a preset with the changes in. Nothing is checked. */
export function settingsOf(tables: Tables, preset: string, changes: Changes): Settings {
  const usual = tables.presets[preset]?.settings ?? {};
  const settings: Record<string, Value> = { preset, ...usual, ...changes };
  const { key, of, divisor } = siteOf(tables).short_run;
  const [warmup, steps] = [usual[key], settings[of]];
  if (!(key in changes) && typeof warmup === "number" && typeof steps === "number") {
    settings[key] = Math.max(0, Math.min(warmup, Math.floor(steps / divisor)));
  }
  return settings;
}

/** In words what a setting takes. */
export function wanted(field: SettingField): string {
  const say = (value: number | null): string =>
    value === null ? "" : Math.abs(value) >= 1e-4 && Math.abs(value) < 1e15 ? value.toLocaleString("en-US", { maximumFractionDigits: 6 }) : String(value);
  const range = `from ${say(field.low)} to ${say(field.high)}`;
  return {
    integer: `a whole number ${range}`,
    number: `a number ${range}`,
    boolean: "true or false",
    text: field.high === null ? "text" : `text of at most ${say(field.high)} characters`,
    texts: "a list of texts",
    choice: `one of ${field.choices.map((choice) => choice || "(empty)").join(", ")}`,
  }[field.kind];
}

/** Whether a setting takes a value. */
export function takes(field: SettingField, value: Value): boolean {
  const inRange = typeof value === "number" && Number.isFinite(value) && value >= (field.low ?? -Infinity) && value <= (field.high ?? Infinity);
  if (value === null) return field.default === null && !field.from_preset;
  return {
    integer: inRange && Number.isInteger(value),
    number: inRange,
    boolean: typeof value === "boolean",
    text: typeof value === "string" && charactersFit(value, field.high),
    texts: Array.isArray(value),
    choice: typeof value === "string" && field.choices.includes(value),
  }[field.kind];
}

/** What is wrong with a configuration; nothing when it can be trained. */
export function check(tables: Tables, settings: Settings): Wrong[] {
  const { settings: fields } = schemaOf(tables);
  const found: Wrong[] = [];
  for (const [key, field] of Object.entries(fields)) {
    const value = settings[key] ?? null;
    if (takes(field, value)) continue;
    found.push({ key, message: `${key} must be ${wanted(field)}, got ${show(value)}`, hint: field.help });
  }
  if (found.length > 0) return found;
  return siteOf(tables).rules.flatMap((rule) => broken(rule, settings));
}

function broken(rule: Rule, settings: Settings): Wrong[] {
  const of = (key: string): number => settings[key] as number;
  const [key, fails, limit] = (() => {
    switch (rule.kind) {
      case "divides":
        return [rule.of, of(rule.of) % of(rule.divisor) !== 0, 0] as const;
      case "at_most":
        return [rule.key, of(rule.key) > of(rule.other), 0] as const;
      case "product_at_most":
        return [rule.of[0] ?? "", rule.of.reduce((product, name) => product * of(name), 1) > rule.limit, rule.limit] as const;
      case "only":
        return [rule.key, settings[rule.key] !== rule.value, 0] as const;
      default:
        return rule satisfies never;
    }
  })();
  if (!fails) return [];
  const values = { limit: limit.toLocaleString("en-US") };
  const message = rule.message.replace(/\{([\w.]+)\}/g, (_, name: string) => (name === "limit" ? fill("{limit}", values) : String(settings[name])));
  return [{ key, message, hint: rule.hint }];
}

/** What a person typed, as the setting wants it; undefined when it is no such value. */
export function parse(field: SettingField, text: string): Value | undefined {
  const trimmed = text.trim();
  if (field.kind === "integer" || field.kind === "number") {
    if (trimmed === "") return field.default === null && !field.from_preset ? null : undefined;
    const value = Number(trimmed.replaceAll(",", "").replaceAll("_", ""));
    return Number.isFinite(value) ? value : undefined;
  }
  if (field.kind === "boolean") return trimmed === "true" ? true : trimmed === "false" ? false : undefined;
  if (field.kind === "choice") return field.choices.includes(trimmed) ? trimmed : undefined;
  return text;
}
