// host_browser.ts: a page or a Web Worker as the runtime's host.
import type { Host, PoolMessage } from "./host.ts";

/** `folder`: the address of the files that export_web.py wrote, with a slash at its end. */
export function browserHost(folder: string | URL): Host {
  return {
    name: "browser",
    processors: navigator.hardwareConcurrency || 1,
    async read(name) {
      const response = await fetch(new URL(name, folder));
      if (!response.ok) throw new Error(`${name}: the server says ${response.status} ${response.statusText}`);
      return new Uint8Array(await response.arrayBuffer());
    },
    startWorker(start, tell) {
      const worker = new Worker(new URL("./pool_browser.ts", import.meta.url), { type: "module" });
      worker.onmessage = (event: MessageEvent<PoolMessage>) => tell(event.data);
      worker.onerror = (event) => tell({ kind: "failed", why: event.message || "the worker did not start" });
      worker.postMessage(start);
      return worker;
    },
  };
}
