// pool_node.ts: node's worker thread around pool.ts.
import { parentPort, workerData } from "node:worker_threads";
import type { PoolStart } from "./host.ts";
import { work } from "./pool.ts";

work(workerData as PoolStart, (message) => parentPort?.postMessage(message));
