// host.ts: what the runtime asks of the place it runs in. host_browser.ts and host_node.ts give it.

/** What a pool worker is sent at its start. */
export interface PoolStart {
  readonly module: WebAssembly.Module;
  readonly memory: WebAssembly.Memory;
  /** Where its stack ends; stacks grow downwards. */
  readonly stackTop: number;
  readonly wide: boolean;
}

/** "ready" before it enters the pool, "done" when it was sent home, else what went wrong. */
export type PoolMessage = { readonly kind: "ready" } | { readonly kind: "done" } | { readonly kind: "failed"; readonly why: string };

export interface PoolWorker {
  terminate(): void;
}

export interface Host {
  readonly name: "browser" | "node";
  /** Processors that this process may use. */
  readonly processors: number;
  /** A file that export_web.py wrote. */
  read(name: string): Promise<Uint8Array<ArrayBuffer>>;
  /** Starts a worker that runs pool.ts; `tell` also hears of a worker that ends by itself. */
  startWorker(start: PoolStart, tell: (message: PoolMessage) => void): PoolWorker;
}
