// errors.ts: what storage tells a person: one line that names the file, the field and the value, and what to do next.
import { bytes as showBytes } from "../runtime/words.ts";

export { showBytes };

export class StorageError extends Error {
  override name = "StorageError";
  readonly hint: string;

  constructor(message: string, hint = "") {
    super(message);
    this.hint = hint;
  }
}

/** The run's text is in no place that this page can read: only its owner has it. */
export class CorpusMissing extends StorageError {
  override name = "CorpusMissing";
  readonly corpus: { readonly name: string; readonly sha256: string };

  constructor(run: string, corpus: { readonly name: string; readonly sha256: string }) {
    super(
      `run ${run} was trained on ${show(corpus.name)}, which is not in this browser`,
      "open that file, and the run goes on where it stopped",
    );
    this.corpus = corpus;
  }
}

export const DAMAGED = "the file is damaged: take another one, or copy it again";

/** A refused value on one line of at most 60 characters. */
export function show(value: unknown): string {
  let text: string | undefined;
  try {
    text = typeof value === "number" ? String(value) : JSON.stringify(value); // JSON has no infinity
  } catch {
    // a BigInt or a cycle
  }
  text ??= String(value);
  return text.length <= 60 ? text : `${text.slice(0, 57)}...`;
}

/** What a failed write says; the quota of a browser's storage is the usual reason. */
export function writeError(action: string, error: unknown, need?: number): StorageError {
  if (error instanceof StorageError) return error;
  const wanted = need === undefined ? "" : `, which needs ${showBytes(need)}`;
  const name = error instanceof Error ? error.name : "";
  if (name === "QuotaExceededError") {
    return new StorageError(
      `cannot ${action}${wanted}: this browser gives the page no more room`,
      "delete runs on the Runs page, or download this one; nothing that was saved is lost",
    );
  }
  const reason = error instanceof Error ? error.message || error.name : String(error);
  return new StorageError(`cannot ${action}${wanted}: ${reason}`, "try again; nothing that was saved is lost");
}
