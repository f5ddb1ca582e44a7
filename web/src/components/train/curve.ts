// curve.ts: the lines of a run as columns, for the chart: every logged step, and those that were evaluated.
import type { MetricLine } from "../../worker/protocol.ts";

const SMOOTH = 0.9; // of the moving average: what a step keeps of the ones before
const MOST = 4000; // points that are drawn

export interface Columns {
  readonly steps: number[];
  readonly loss: (number | null)[];
  readonly smooth: (number | null)[];
  readonly val: (number | null)[];
  readonly lr: (number | null)[];
  readonly gradNorm: (number | null)[];
}

export class Curve {
  #lines: MetricLine[] = [];

  clear(): void {
    this.#lines = [];
  }

  push(lines: readonly MetricLine[]): void {
    for (const line of lines) this.#lines.push(line);
  }

  cutBack(step: number): void {
    this.#lines = this.#lines.filter((line) => line.step <= step);
  }

  get length(): number {
    return this.#lines.length;
  }

  get lines(): readonly MetricLine[] {
    return this.#lines;
  }

  /** The newest validation loss. */
  get val(): number | null {
    return this.#lines.findLast((line) => line.val_loss !== null)?.val_loss ?? null;
  }

  /** Thinned to what a chart can show; every evaluation stays. */
  columns(): Columns {
    const every = Math.max(1, Math.ceil(this.#lines.length / MOST));
    const found = { steps: [] as number[], loss: [] as number[], smooth: [] as number[], val: [] as (number | null)[], lr: [] as number[], gradNorm: [] as number[] };
    let [mean, weight] = [0, 0];
    this.#lines.forEach((line, index) => {
      mean = SMOOTH * mean + (1 - SMOOTH) * line.loss;
      weight = SMOOTH * weight + (1 - SMOOTH);
      if (index % every && line.val_loss === null && index < this.#lines.length - 1) return;
      found.steps.push(line.step);
      found.loss.push(line.loss);
      found.smooth.push(mean / weight);
      found.val.push(line.val_loss);
      found.lr.push(line.lr);
      found.gradNorm.push(line.grad_norm);
    });
    return found;
  }
}
