// pool_browser.ts: the Web Worker around pool.ts.
import type { PoolStart } from "./host.ts";
import { work } from "./pool.ts";

self.onmessage = (event: MessageEvent<PoolStart>) => {
  work(event.data, (message) => self.postMessage(message));
};
