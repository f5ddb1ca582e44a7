// letters.ts: bytes as a person sees them: whole characters, and names for those that are not seen.
import type { WrittenToken } from "../../worker/protocol.ts";

/** One character as it was written: one token, or several where UTF-8 needs them. */
export interface Letter {
  readonly text: string;
  /** Null in the prompt, which nobody chose. */
  readonly written: WrittenToken | null;
  /** How many tokens stand before it, prompt included. */
  readonly at: number;
  readonly length: number;
}

/** Makes letters of tokens as they come; a character that is not whole yet waits. */
export class LetterMaker {
  #waiting: number[] = [];
  #first: WrittenToken | null = null;
  #at: number;

  /** `at`: how many tokens stand before the first one. */
  constructor(at = 0) {
    this.#at = at;
  }

  push(token: number, written: WrittenToken | null): Letter[] {
    if (this.#waiting.length === 0) this.#first = written;
    this.#waiting.push(token);
    const text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(this.#waiting), { stream: true });
    if (text === "" && this.#waiting.length < 4) return [];
    const letter = { text: text || "\ufffd", written: this.#first, at: this.#at, length: this.#waiting.length };
    this.#at += this.#waiting.length;
    this.#waiting = [];
    return [letter];
  }
}

/** Where the last characters begin that take at most so many tokens. */
export function tailStart(tokens: readonly number[], most: number): number {
  let start = Math.max(0, tokens.length - most);
  while (start > 0 && start < tokens.length && ((tokens[start] ?? 0) & 0xc0) === 0x80) start++; // not within a character
  return start;
}

const NAMES: Readonly<Record<number, string>> = { 9: "tab", 10: "line feed", 13: "carriage return", 32: "space" };

/** What to call a byte in a list. */
export function nameOf(token: number): string {
  const name = NAMES[token];
  if (name !== undefined) return name;
  if (token > 32 && token < 127) return String.fromCharCode(token);
  return `byte ${token}`;
}

/** The same for a letter of the text. */
export function nameOfText(text: string): string {
  return text.length === 1 ? (NAMES[text.charCodeAt(0)] ?? text) : text;
}
