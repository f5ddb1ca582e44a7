// pool.ts: what a worker of the thread pool does: it makes an instance of the module over the shared
// memory, with a stack of its own, and stays inside posttrain_worker until the pool is sent home.
// The pool itself is kernels/cpp/pool_wasm.cpp.
import type { PoolMessage, PoolStart } from "./host.ts";

interface Exports {
  readonly __stack_pointer: WebAssembly.Global;
  posttrain_worker(): void;
  posttrain_worker_failed(): void;
}

export function work(start: PoolStart, tell: (message: PoolMessage) => void): void {
  try {
    const instance = new WebAssembly.Instance(start.module, { env: { memory: start.memory } });
    const exports = instance.exports as unknown as Exports;
    exports.__stack_pointer.value = start.wide ? BigInt(start.stackTop) : start.stackTop;
    tell({ kind: "ready" });
    try {
      exports.posttrain_worker();
    } catch (error) {
      exports.posttrain_worker_failed(); // ends the wait of the thread that gave us the work
      throw error;
    }
    tell({ kind: "done" });
  } catch (error) {
    tell({ kind: "failed", why: String(error) });
  }
}
