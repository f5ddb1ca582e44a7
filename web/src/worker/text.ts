// text.ts: files that a person gave as one text, refused or noticed as text/files.py does, and the text in
// its two parts as text/corpus.py cuts it. A token is a byte.
import type { Batch } from "../runtime/engine.ts";
import type { Statistics } from "../runtime/statistics.ts";
import { windows } from "../runtime/training.ts";
import { Refused } from "./refusal.ts";
import type { TextRules } from "./site.ts";

type Bytes = Uint8Array<ArrayBuffer>;

export interface Corpus {
  readonly name: string;
  readonly bundled: boolean;
  readonly text: Bytes;
  readonly train: Bytes;
  readonly val: Bytes;
  readonly notices: readonly string[];
}

const LINE_FEED = 10;
/** The text in a part to train on and a part that training never reads; training gets the beginning. */
export function corpusOf(
  statistics: Statistics, name: string, text: Bytes, valFraction: number, bundled: boolean, notices: readonly string[] = [],
): Corpus {
  const cut = statistics.split(text, valFraction);
  return { name, bundled, text, train: text.subarray(0, cut), val: text.subarray(cut), notices };
}

/** Makes sure that each part holds a window and the token behind it. Throws Refused. */
export function checkLength(corpus: Corpus, context: number, valFraction: number): void {
  const say = (n: number): string => n.toLocaleString("en-US");
  const parts: [string, Bytes][] = [["training", corpus.train]];
  if (valFraction > 0) parts.push(["validation", corpus.val]);
  for (const [part, bytes] of parts) {
    if (bytes.length >= context + 1) continue;
    throw new Refused(
      `the ${part} part of this text has ${say(bytes.length)} bytes, and a context of ${say(context)} needs at least ${say(context + 1)}`,
      part === "training" ? "take a longer text or a smaller context" : "take a longer text, a smaller context or a smaller validation share",
    );
  }
}

/** Rows of validation windows as a batch of `rows`, filled up with rows whose targets do not count. */
export function validationBatch(corpus: Corpus, offsets: readonly number[], rows: number, context: number): Batch {
  const found = windows(corpus.val, offsets, context);
  const tokens = new Int32Array(rows * context);
  const targets = new Int32Array(rows * context).fill(-1);
  tokens.set(found.tokens);
  targets.set(found.targets);
  return { tokens, targets, rows, time: context };
}

/** Files as one text, with a line feed between two where the first ends in none. Throws Refused. */
export function joinFiles(
  files: readonly { readonly name: string; readonly bytes: Bytes }[], rules: TextRules,
): { text: Bytes; notices: string[] } {
  const notices: string[] = [];
  const pieces: Bytes[] = [];
  for (const { name, bytes } of files) {
    if (bytes.length === 0) throw new Refused(`${name} is empty`, "give a file with text in it");
    refuse(name, bytes, rules);
    notices.push(...noticed(name, bytes));
    const before = pieces.at(-1);
    if (before !== undefined && before.at(-1) !== LINE_FEED) pieces.push(Uint8Array.of(LINE_FEED));
    pieces.push(startsWith(bytes, rules.bom) ? bytes.subarray(rules.bom.length / 2) : bytes);
  }
  const text = new Uint8Array(pieces.reduce((sum, piece) => sum + piece.length, 0));
  let at = 0;
  for (const piece of pieces) {
    text.set(piece, at);
    at += piece.length;
  }
  if (text.length === 0) throw new Refused("there is no text", "paste some, or choose a file");
  return { text, notices: [...new Set(notices)] }; // two files may have one name
}

function startsWith(bytes: Bytes, hex: string): boolean {
  for (let k = 0; k < hex.length / 2; k++) {
    if (bytes[k] !== Number.parseInt(hex.slice(2 * k, 2 * k + 2), 16)) return false;
  }
  return true;
}

function refuse(name: string, bytes: Bytes, rules: TextRules): void {
  for (const mark of rules.marks) {
    if (startsWith(bytes, mark.hex)) throw new Refused(`${name} is ${mark.name}, not UTF-8`, "save it as UTF-8 in an editor first");
  }
  for (const { hex, what } of rules.signatures) {
    if (startsWith(bytes, hex)) throw new Refused(`${name} is ${what}, not text`, "unpack it, or export its text first");
  }
  const nul = bytes.indexOf(0);
  if (nul >= 0) {
    throw new Refused(`${name} is binary: byte ${nul.toLocaleString("en-US")} is NUL`, "give plain text; UTF-16 must be saved as UTF-8 first");
  }
  const control = new Set(rules.control);
  let found = 0;
  for (const byte of bytes) if (control.has(byte)) found++;
  const share = found / bytes.length;
  if (share > rules.control_share && found > rules.few_controls) {
    throw new Refused(`${name} is binary: ${Math.round(100 * share)} % of its bytes are control characters`, "give plain text");
  }
}

function noticed(name: string, bytes: Bytes): string[] {
  const notices: string[] = [];
  try {
    new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    notices.push(`${name} is not UTF-8: it is trained on byte for byte, but letters beyond ASCII will show as \ufffd`);
  }
  for (let at = bytes.indexOf(13); at >= 0; at = bytes.indexOf(13, at + 1)) {
    if (bytes[at + 1] === LINE_FEED) {
      notices.push(`${name} ends its lines with CR LF: they are kept, so the model will write them too`);
      break;
    }
  }
  return notices;
}
