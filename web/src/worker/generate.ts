// generate.ts: token by token through the key/value cache, in the words of training/generate.py.
//
// Positions are learned, so a full cache cannot slide: when the context is full, its newest part is read
// again from position 0. The choice of a token is the control module's.
import type { Engine } from "../runtime/engine.ts";
import { Refused } from "./refusal.ts";
import type { SamplingChoice, WrittenToken } from "./protocol.ts";
import type { Site } from "./site.ts";

export interface Writing {
  readonly prompt: readonly number[];
  readonly context: number;
  readonly seed: number | bigint;
  readonly tokens: number;
  readonly sampling: SamplingChoice;
  /** How many of the likeliest tokens to tell with each one. */
  readonly candidates: number;
}

export async function* writeTokens(engine: Engine, site: Site, how: Writing): AsyncGenerator<WrittenToken> {
  if (how.prompt.length === 0) throw new Refused("the prompt is empty", "give at least one character, for example a line break");
  const { repetitionPenalty: penalty, repetitionWindow: most } = how.sampling;
  let window = how.prompt.slice(-how.context);
  let recent = how.prompt.slice(-most);
  let restart = true;
  for (let position = 0; position < how.tokens; position++) {
    const last = window.at(-1) ?? 0;
    const given = restart
      ? await engine.prefill(Int32Array.from(window), 1, window.length)
      : await engine.decode(Int32Array.of(last));
    const logits = penalty === 1 ? given : engine.control.penalize(given, Int32Array.from(recent), penalty).slice();
    const chosen = engine.control.sample(logits, how.seed, position, how.sampling);
    yield { ...chosen, candidates: how.candidates ? likeliest(engine, logits, how, position, chosen) : [] };
    restart = window.length >= how.context;
    window.push(chosen.token);
    recent = [...recent, chosen.token].slice(-most);
    if (restart) window = window.slice(-Math.max(1, Math.floor(how.context / site.kept_divisor)));
  }
}

/** Where the window begins that the token after `count` others was chosen from, of which `prompt` were given. */
export function windowStart(site: Site, context: number, prompt: number, count: number): number {
  let start = Math.max(0, prompt - context);
  for (let end = prompt; end < count; end++) {
    if (end - start >= context) start = end + 1 - Math.max(1, Math.floor(context / site.kept_divisor));
  }
  return start;
}

/** The likeliest tokens among those that were chosen from; at temperature 0, as the model itself sees them. */
function likeliest(
  engine: Engine, logits: Float32Array, how: Writing, position: number, chosen: { token: number; probability: number },
): (readonly [number, number])[] {
  const plain = how.sampling.temperature === 0;
  const drawn = plain ? engine.control.sample(logits, how.seed, position, { temperature: 1, topK: 0, topP: 1 }) : chosen;
  const found: [number, number][] = [];
  engine.control.probabilities(logits.length, drawn).forEach((probability, token) => {
    if (probability > 0) found.push([token, probability]);
  });
  return found.sort((a, b) => b[1] - a[1]).slice(0, how.candidates);
}

const encoder = new TextEncoder();

/** The tokens of a text: its bytes. */
export const encode = (text: string): number[] => Array.from(encoder.encode(text));

/** The text of tokens; bytes that are no UTF-8 show as U+FFFD. */
export const decode = (tokens: Iterable<number>): string => new TextDecoder().decode(Uint8Array.from(tokens));
