// settings.ts: a configuration from a preset and what a person changed, refused as the terminal refuses it.
// Every default, limit and rule comes from posttrainllm.json.
import type { SettingField, Settings, Tables } from "../runtime/tables.ts";
import { fill } from "../runtime/words.ts";
import { fits, wanted } from "../storage/config_check.ts";
import { show } from "../storage/errors.ts";
import { siteOf } from "./site.ts";
import type { Rule } from "./site.ts";

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

/** Whether a setting takes a value. */
export const takes = (field: SettingField, value: Value): boolean =>
  value === null ? field.default === null && !field.from_preset : fits(field, value);

/** What is wrong with a configuration; nothing when it can be trained. */
export function check(tables: Tables, settings: Settings): Wrong[] {
  const { settings: fields } = tables.schema;
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
