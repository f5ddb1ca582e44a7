// desk.ts: a worker of this page: started, spoken to, and heard of when it ends by itself.
import type { FromWorker, ToWorker } from "../../worker/protocol.ts";
import { dataUrl } from "./root.ts";

export interface Listener {
  told(message: FromWorker): void;
  /** The worker has ended (the browser took its memory, or it crashed). */
  lost(why: string): void;
}

export class Desk {
  readonly #worker: Worker | null;
  #over = false;

  constructor(listener: Listener) {
    const lost = (why: string): void => {
      if (this.#over) return;
      this.end();
      listener.lost(why);
    };
    const worker = started((why) => setTimeout(lost, 0, why));
    this.#worker = worker;
    if (worker === null) return;
    const lock = `posttrainllm:worker:${crypto.randomUUID?.() ?? Math.floor(performance.now() * 1e6)}`;
    const locks = (navigator as { locks?: LockManager }).locks;
    worker.onmessage = (event: MessageEvent<FromWorker>) => {
      if (this.#over) return;
      if (event.data.kind === "ready" && event.data.held) void locks?.request(lock, () => lost("the browser ended it"));
      listener.told(event.data);
    };
    worker.onerror = (event) => lost(event.message || "it did not start");
    this.post({ kind: "hello", data: dataUrl().href, lock: locks === undefined ? null : lock });
  }

  post(message: ToWorker): void {
    if (!this.#over) this.#worker?.postMessage(message);
  }

  /** Ends the worker at once. */
  end(): void {
    this.#over = true;
    this.#worker?.terminate();
  }
}

/** A worker; null, with the reason told, where the browser does not let the page have one. */
function started(failed: (why: string) => void): Worker | null {
  try {
    return new Worker(new URL("../../worker/worker.ts", import.meta.url), { type: "module", name: "posttrainllm" });
  } catch (error) {
    failed(error instanceof Error ? error.message : String(error));
    return null;
  }
}
