// breath.ts: lets the messages that wait for a worker come in between two steps of its work.

const channel = new MessageChannel();
let waiting: (() => void)[] = [];
channel.port1.onmessage = () => {
  const woken = waiting;
  waiting = [];
  for (const wake of woken) wake();
};

/** Resolves after the messages that are there now; far sooner than a timer of 0 ms. */
export function breath(): Promise<void> {
  return new Promise((wake) => {
    waiting.push(wake);
    channel.port2.postMessage(null);
  });
}

/** Breathes when the last breath is longer ago than `ms`. */
export class Breathing {
  #last = performance.now();
  readonly #ms: number;

  constructor(ms: number) {
    this.#ms = ms;
  }

  async now(): Promise<void> {
    if (performance.now() - this.#last < this.#ms) return;
    await breath();
    this.#last = performance.now();
  }
}
