// training.ts: one optimizer step: which windows, which learning rate, in the words of training/trainer.py.
// Every number comes from the control module or from the settings.
import type { Batch, Engine } from "./engine.ts";
import { number } from "./program.ts";
import type { Settings } from "./tables.ts";

/** Tokens and targets of windows of `time` tokens at `offsets`; targets are the same one token later. */
export function windows(text: ArrayLike<number>, offsets: readonly number[], time: number): Batch {
  const tokens = new Int32Array(offsets.length * time);
  const targets = new Int32Array(offsets.length * time);
  offsets.forEach((offset, row) => {
    for (let t = 0; t < time; t++) {
      tokens[row * time + t] = text[offset + t] ?? -1;
      targets[row * time + t] = text[offset + t + 1] ?? -1;
    }
  });
  return { tokens, targets, rows: offsets.length, time };
}

/** Step `step`, counted from 1, on the training part of a text; its result comes from `engine.results()`. */
export async function trainStep(
  engine: Engine,
  settings: Settings,
  text: ArrayLike<number>,
  step: number,
): Promise<number> {
  const of = (name: string): number => number(settings, name);
  const [size, pieces, time] = [of("data.batch_size"), of("data.accumulation"), of("model.n_ctx")];
  const { control } = engine;
  const offsets = control.batchOffsets(of("training.seed"), step, size * pieces, 0, text.length - time);
  for (let piece = 0; piece < pieces; piece++) {
    const batch = windows(text, offsets.slice(piece * size, (piece + 1) * size), time);
    await engine.gradients(batch, 1 / (size * pieces * time), piece === 0);
  }
  const lr = control.learningRate(step, settings);
  const [correction1, correction2] = control.biasCorrections(step, settings);
  await engine.update({ lr, correction1, correction2 });
  return lr;
}
