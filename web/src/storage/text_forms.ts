// text_forms.ts: numbers, JSON and TOML as Python writes them, so that files equal the terminal's byte for byte.
import { parse as parseToml } from "smol-toml";
import { DAMAGED, show, StorageError } from "./errors.ts";
import type { Bytes } from "./files.ts";

/** A number that Python holds as a float: 1 is written as 1.0. */
export class Float {
  readonly value: number;

  constructor(value: number) {
    this.value = value;
  }
}

/** A number as Python's repr writes it; the digits are the same, the shortest that give it back. */
export function floatText(value: number): string {
  const [digits = "", exponent = "0"] = value.toExponential().split("e");
  const power = Number(exponent);
  if (value === 0) return Object.is(value, -0) ? "-0.0" : "0.0";
  if (power < -4 || power >= 16) return `${digits}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
  const plain = String(value);
  return plain.includes(".") ? plain : `${plain}.0`;
}

/** JSON in Python's form: `indent` spaces a level, or one line with ", " and ": ". What is not finite becomes null. */
export function writeJson(value: unknown, indent = 0, depth = 1): string {
  if (value instanceof Float) return Number.isFinite(value.value) ? floatText(value.value) : "null";
  if (value === null || typeof value !== "object") {
    return typeof value === "number" && !Number.isFinite(value) ? "null" : JSON.stringify(value ?? null);
  }
  const [open, close] = Array.isArray(value) ? ["[", "]"] : ["{", "}"];
  const parts = Array.isArray(value)
    ? value.map((part) => writeJson(part, indent, depth + 1))
    : Object.entries(value).map(([name, part]) => `${JSON.stringify(name)}: ${writeJson(part, indent, depth + 1)}`);
  if (parts.length === 0) return open + close;
  if (indent === 0) return `${open}${parts.join(", ")}${close}`;
  const space = (levels: number): string => `\n${" ".repeat(indent * levels)}`;
  return `${open}${space(depth)}${parts.join(`,${space(depth)}`)}${space(depth - 1)}${close}`;
}

export type Json = Readonly<Record<string, unknown>>;

/** A JSON object from a file. Throws a StorageError that names it. */
export function readObject(content: Uint8Array, source: string): Json {
  let found: unknown;
  try {
    found = JSON.parse(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(content));
  } catch (error) {
    const kinds = { SyntaxError: `is not JSON: ${(error as Error).message.split("\n")[0]?.slice(0, 120)}`, RangeError: "is nested too deeply" };
    const what = kinds[(error as Error).name as keyof typeof kinds] ?? "is not UTF-8 text";
    throw new StorageError(`${source} ${what}`, DAMAGED);
  }
  if (typeof found !== "object" || found === null || Array.isArray(found)) {
    throw new StorageError(`${source} must hold a JSON object, got ${show(found)}`, DAMAGED);
  }
  return found as Json;
}

/** A TOML document as {"section.key": value}; tables stand one level deep. Throws a StorageError that names the line. */
export function readToml(text: string, source: string): Map<string, unknown> {
  let document: Record<string, unknown>;
  try {
    document = parseToml(text, { integersAsBigInt: "asNeeded" });
  } catch (error) {
    const line = (error as { line?: number }).line;
    const what = error instanceof Error ? (error.message.split("\n")[0] ?? "") : String(error);
    throw new StorageError(`${source}${line === undefined ? "" : `, line ${line}`}: ${what}`, "the format is TOML");
  }
  const flat = new Map<string, unknown>();
  for (const [key, value] of Object.entries(document)) {
    if (typeof value === "object" && value !== null && !Array.isArray(value) && !(value instanceof Date)) {
      for (const [name, part] of Object.entries(value)) flat.set(`${key}.${name}`, part);
    } else flat.set(key, value);
  }
  return flat;
}

/** A value as TOML. */
export function tomlValue(value: unknown): string {
  if (value instanceof Float) return floatText(value.value);
  if (typeof value === "boolean" || typeof value === "number") return String(value);
  if (Array.isArray(value)) return `[${value.map(tomlValue).join(", ")}]`;
  if (value === null) return "unset"; // in notes alone
  const text = String(value).replaceAll("\\", "\\\\").replaceAll('"', '\\"');
  // eslint-disable-next-line no-control-regex
  return `"${text.replace(/[\x00-\x1f\x7f]/g, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`)}"`;
}

/** The bytes of a text, a lone surrogate written as its escape, which JSON reads back. */
export function utf8(text: string): Bytes {
  const safe = text.replace(/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, (one) =>
    `\\u${one.charCodeAt(0).toString(16)}`);
  return new TextEncoder().encode(safe) as Bytes;
}
