// runs.ts: the runs of a place, as this worker opens them.
import { openTabStore } from "../storage/index.ts";
import type { RunStore } from "../storage/index.ts";
import type { Library } from "./library.ts";
import type { StorePlace } from "./protocol.ts";

const opened = new Map<StorePlace, Promise<RunStore>>();

export function openRuns(library: Library, place: StorePlace, notice: (message: string) => void): Promise<RunStore> {
  let store = opened.get(place);
  if (store === undefined) {
    store = library.tables().then((tables) => openTabStore(tables, { data: library.data, notice }));
    store.catch(() => opened.delete(place));
    opened.set(place, store);
  }
  return store;
}
