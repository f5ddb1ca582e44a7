// places.svelte.ts: where runs can be kept: in this browser always, in the folder of `posttrainllm play` where it serves this page.
import type { RunStore } from "../../storage/index.ts";
import type { Tables } from "../../runtime/tables.ts";
import { dataUrl } from "../site/root.ts";

class Places {
  tab = $state.raw<RunStore | null>(null);
  server = $state.raw<RunStore | null>(null);
  #asked: Promise<void> | null = null;

  /** Asks once, unless the storage's code did not come; then there are no places, and the next one asks again. */
  open(tables: Tables): Promise<void> {
    const asked = (this.#asked ??= (async () => {
      const { openServerStore, openTabStore } = await import("../../storage/index.ts");
      const options = { data: dataUrl() };
      [this.tab, this.server] = await Promise.all([openTabStore(tables, options), openServerStore(tables, options)]);
    })());
    return asked.catch(() => {
      this.#asked = null;
    });
  }
}

export const places = new Places();
