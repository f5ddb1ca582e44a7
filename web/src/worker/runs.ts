// runs.ts: the runs of a place, as this worker opens them.
import { openServerStore, openTabStore, StorageError } from "../storage/index.ts";
import type { RunStore } from "../storage/index.ts";
import type { Tables } from "../runtime/tables.ts";
import type { Library } from "./library.ts";
import type { StorePlace } from "./protocol.ts";

const opened = new Map<StorePlace, Promise<RunStore>>();

export function openRuns(library: Library, place: StorePlace, notice: (message: string) => void): Promise<RunStore> {
  let store = opened.get(place);
  if (store === undefined) {
    const options = { data: library.data, notice };
    store = library.tables().then((tables) => (place === "tab" ? openTabStore(tables, options) : serverStore(tables, options)));
    store.catch(() => opened.delete(place));
    opened.set(place, store);
  }
  return store;
}

async function serverStore(tables: Tables, options: { readonly data: string; readonly notice: (message: string) => void }): Promise<RunStore> {
  const store = await openServerStore(tables, options);
  if (store === null) throw new StorageError("this page's server keeps no runs", "start it with: posttrainllm play, or keep the run in this browser");
  return store;
}
