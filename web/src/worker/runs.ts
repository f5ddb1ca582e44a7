// runs.ts: the runs of a place, as this worker opens them.
import { openServerStore, openTabStore } from "../storage/index.ts";
import type { RunStore } from "../storage/index.ts";
import type { Library } from "./library.ts";
import type { StorePlace } from "./protocol.ts";
import { Refused } from "./refusal.ts";

const opened = new Map<StorePlace, Promise<RunStore>>();

/** Throws Refused when no server keeps runs for this page. */
export function openRuns(library: Library, place: StorePlace, notice: (message: string, until?: "saved") => void): Promise<RunStore> {
  let store = opened.get(place);
  if (store === undefined) {
    store = library.tables().then(async (tables) => {
      const options = { data: library.data, notice };
      if (place === "tab") return openTabStore(tables, options);
      const server = await openServerStore(tables, options);
      if (server === null) throw new Refused("no server keeps runs for this page", "start posttrainllm play, or keep the run in this browser");
      return server;
    });
    store.catch(() => opened.delete(place));
    opened.set(place, store);
  }
  return store;
}
