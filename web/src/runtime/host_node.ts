// host_node.ts: node as the runtime's host.
import { readFile } from "node:fs/promises";
import { availableParallelism } from "node:os";
import { join } from "node:path";
import { Worker } from "node:worker_threads";
import type { Host, PoolMessage } from "./host.ts";

/** `folder`: where the files lie that export_web.py wrote. */
export function nodeHost(folder: string): Host {
  return {
    name: "node",
    processors: availableParallelism(),
    read: async (name) => new Uint8Array(await readFile(join(folder, name))),
    startWorker(start, tell) {
      const worker = new Worker(new URL("./pool_node.ts", import.meta.url), { workerData: start });
      let over = false;
      worker.on("message", (message: PoolMessage) => {
        over ||= message.kind !== "ready";
        tell(message);
      });
      worker.on("error", (error: Error) => tell({ kind: "failed", why: error.message }));
      worker.on("exit", () => {
        if (!over) tell({ kind: "failed", why: "the worker ended" });
        over = true;
      });
      worker.unref(); // a pool that waits does not keep the process
      return {
        terminate() {
          over = true;
          void worker.terminate();
        },
      };
    },
  };
}
