// config_check.ts: one value of a configuration against its setting's kind and range.
import { show, StorageError } from "./errors.ts";
import type { Setting } from "./forms.ts";
import type { Settings } from "../runtime/tables.ts";

/** The value, when the setting takes it. Throws a StorageError that says what it takes. */
export function inRange(key: string, setting: Setting, value: unknown, usual: Settings[string], source: string): Settings[string] {
  const number = typeof value === "number" && Number.isFinite(value)
    && value >= (setting.low ?? -Infinity) && value <= (setting.high ?? Infinity);
  const texts = Array.isArray(value) && value.every((part) => typeof part === "string");
  const fits = {
    integer: number && Number.isInteger(value),
    number,
    boolean: typeof value === "boolean",
    text: typeof value === "string" && charactersFit(value, setting.high),
    texts,
    choice: typeof value === "string" && setting.choices.includes(value),
  }[setting.kind];
  if (fits) return value as Settings[string];
  if (value === null && usual === null) return null; // unset is a value of its own
  const range = `from ${setting.low} to ${setting.high}`;
  const wanted = {
    integer: `a whole number ${range}`,
    number: `a number ${range}`,
    boolean: "true or false",
    text: setting.high === null ? "text" : `text of at most ${setting.high} characters`,
    texts: "a list of texts",
    choice: `one of ${setting.choices.map((choice) => choice || "''").join(", ")}`,
  }[setting.kind];
  throw new StorageError(`${source}: ${key} must be ${wanted}, got ${show(value)}`, "put it right, or start a new run");
}

/** Whether a text has at most so many characters, counted as Python counts them. */
export const charactersFit = (text: string, most: number | null): boolean => most === null || text.length <= most || [...text].length <= most;
