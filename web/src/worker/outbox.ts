// outbox.ts: what a job tells the page, lines of metrics gathered so that a page gets few messages.
import type { FromWorker, MetricLine, Phase } from "./protocol.ts";

const GAP_MS = 100;

export class Outbox {
  readonly #post: (message: FromWorker) => void;
  #lines: MetricLine[] = [];
  #steps = 0;
  #flushed = 0;
  #phase: Phase | null = null;
  #phased = 0;

  constructor(post: (message: FromWorker) => void) {
    this.#post = post;
  }

  /** At once, behind the lines that wait. */
  tell(message: FromWorker): void {
    this.flush();
    this.#post(message);
  }

  /** A line of metrics, with others. */
  line(line: MetricLine, steps: number): void {
    this.#lines.push(line);
    this.#steps = steps;
    if (performance.now() - this.#flushed >= GAP_MS) this.flush();
  }

  flush(): void {
    const last = this.#lines.at(-1);
    if (last === undefined) return;
    this.#flushed = performance.now();
    this.#post({ kind: "progress", step: last.step, steps: this.#steps, lines: this.#lines });
    this.#lines = [];
  }

  /** How far an engine is with its kernels. */
  readonly opening = (done = 0, of = 0): void => this.phase("opening", done, of);

  /** What the job does now; repeated with other numbers it is told a few times a second. */
  phase(phase: Phase, done = 0, of = 0): void {
    const now = performance.now();
    if (phase === this.#phase && (of === 0 || (now - this.#phased < GAP_MS && done < of))) return;
    this.#phase = phase;
    this.#phased = now;
    this.tell({ kind: "phase", phase, done, of });
  }
}
