// places.svelte.ts: where runs can be kept: in this browser always, in the folder of `posttrainllm play` where it serves this page.
import type { RunStore } from "../../storage/index.ts";
import type { Tables } from "../../runtime/tables.ts";
import { dataUrl } from "../site/root.ts";

class Places {
  tab = $state.raw<RunStore | null>(null);
  server = $state.raw<RunStore | null>(null);
  #asked: Promise<void> | null = null;

  /** Asks once; the storage's code is loaded for it. */
  open(tables: Tables): Promise<void> {
    this.#asked ??= (async () => {
      const { openServerStore, openTabStore } = await import("../../storage/index.ts");
      const options = { data: dataUrl() };
      [this.tab, this.server] = await Promise.all([openTabStore(tables, options), openServerStore(tables, options)]);
    })();
    return this.#asked;
  }
}

export const places = new Places();
