// stopwatch.ts: how long a run has trained: over all visits, and without what is not training.

export class Stopwatch {
  readonly #before: number;
  readonly #began = performance.now();
  #aside = 0;

  /** `before`: seconds of earlier visits. */
  constructor(before = 0) {
    this.#before = before;
  }

  /** Seconds since the run began, everything included. */
  get elapsed(): number {
    return this.#before + (performance.now() - this.#began) / 1000;
  }

  /** Milliseconds so far of what was set aside. */
  get aside(): number {
    return this.#aside;
  }

  /** Runs something that is not training, and keeps its time out of tokens per second. */
  async setAside(action: () => Promise<void>): Promise<void> {
    const began = performance.now();
    await action();
    this.#aside += performance.now() - began;
  }
}
