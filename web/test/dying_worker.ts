// dying_worker.ts: pool workers that do not do their work, for failures.test.ts.
import { parentPort, workerData } from "node:worker_threads";
import type { PoolMessage, PoolStart } from "../src/runtime/host.ts";
import { work } from "../src/runtime/pool.ts";

const { how, ...start } = workerData as PoolStart & { how: "traps" | "vanishes" };
const tell = (message: PoolMessage): void => parentPort?.postMessage(message);
// The stack of a kernel ends below address 0: its first large tile is out of bounds.
const doomed = { ...start, stackTop: 4096 };
if (how === "traps") {
  work(doomed, tell);
} else {
  const instance = new WebAssembly.Instance(start.module, { env: { memory: start.memory } });
  const exports = instance.exports as unknown as { __stack_pointer: WebAssembly.Global; posttrain_worker(): void };
  exports.__stack_pointer.value = start.wide ? 4096n : 4096;
  tell({ kind: "ready" });
  try {
    exports.posttrain_worker();
  } catch {
    // gone with its tile, and nobody was told
  }
}
