// config_check.ts: one value of a configuration against its setting's kind and range, and what it takes in words.
import { DAMAGED, show, StorageError } from "./errors.ts";
import type { SettingField, Settings } from "../runtime/tables.ts";

/** Whether a value is of a setting's kind and in its range; null is nobody's. */
export function fits(field: SettingField, value: unknown): value is NonNullable<Settings[string]> {
  const number = typeof value === "number" && value >= (field.low ?? -Infinity) && value <= (field.high ?? Infinity) && Number.isFinite(value);
  return {
    integer: number && Number.isInteger(value),
    number,
    boolean: typeof value === "boolean",
    text: typeof value === "string" && charactersFit(value, field.high),
    texts: Array.isArray(value) && value.every((part) => typeof part === "string"),
    choice: typeof value === "string" && field.choices.includes(value),
  }[field.kind];
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

/** The value, when the setting takes it. Throws a StorageError that says what it takes. */
export function inRange(key: string, field: SettingField, value: unknown, usual: Settings[string], source: string): Settings[string] {
  if (fits(field, value)) return value;
  if (value === null && usual === null) return null; // unset is a value of its own
  throw new StorageError(`${source}: ${key} must be ${wanted(field)}, got ${show(value)}`, "put it right, or start a new run");
}

/** Whether a text has at most so many characters, counted as Python counts them. */
const charactersFit = (text: string, most: number | null): boolean => most === null || text.length <= most || [...text].length <= most;

/** Refuses a model whose heads do not divide its width. */
export function checkHeads(settings: Settings, source: string): void {
  const [width, heads] = [settings["model.n_embd"] as number, settings["model.n_head"] as number];
  if (width % heads) throw new StorageError(`${source}: model.n_embd ${width} is not divisible by model.n_head ${heads}`, DAMAGED);
}
