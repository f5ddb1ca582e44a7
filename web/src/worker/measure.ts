// measure.ts: the loss on fixed windows of the validation part, in the words of training/evaluate.py.
import type { Engine } from "../runtime/engine.ts";
import { number } from "../runtime/program.ts";
import type { Statistics } from "../runtime/statistics.ts";
import type { Settings } from "../runtime/tables.ts";
import { validationBatch } from "./text.ts";
import type { Corpus } from "./text.ts";

/** Mean over the windows, nats a token. `between` is awaited after every batch and may end it: then null. */
export async function evaluate(
  engine: Engine, statistics: Statistics, corpus: Corpus, settings: Settings, windows: number,
  between: (done: number, of: number) => Promise<boolean>,
): Promise<number | null> {
  const [rows, context] = [number(settings, "data.batch_size"), number(settings, "model.n_ctx")];
  const offsets = statistics.validationOffsets(corpus.val.length, windows, context);
  let total = 0;
  for (let start = 0; start < offsets.length; start += rows) {
    const some = offsets.slice(start, start + rows);
    total += (await engine.loss(validationBatch(corpus, some, rows, context))) * some.length;
    if (!(await between(start + some.length, offsets.length))) return null;
  }
  return total / Math.max(1, offsets.length);
}
