// refusal.ts: what a person did that cannot be done: one sentence of what is wrong, one of what to do.
import type { Refusal } from "./protocol.ts";

export class Refused extends Error {
  override name = "Refused";
  readonly hint: string;

  constructor(message: string, hint: string) {
    super(message);
    this.hint = hint;
  }
}

/** Any error as a page shows it. */
export function refusalOf(error: unknown): Refusal {
  const message = error instanceof Error ? error.message : String(error);
  const hint = (error as { hint?: unknown } | null)?.hint;
  return { message, hint: typeof hint === "string" ? hint : "" };
}
