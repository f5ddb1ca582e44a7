// tables.svelte.ts: posttrainllm.json for the page: forms, limits, help. Null until it has come.
import { readTables } from "../../runtime/tables.ts";
import type { Tables } from "../../runtime/tables.ts";
import { dataUrl } from "./root.ts";

class Shelf {
  tables = $state.raw<Tables | null>(null);
  failed = $state("");
  #asked = false;

  /** Asks once; called when a page is shown. */
  load(): void {
    if (this.#asked) return;
    this.#asked = true;
    fetch(dataUrl("posttrainllm.json"))
      .then(async (response) => {
        if (!response.ok) throw new Error(`the server says ${response.status} ${response.statusText}`);
        this.tables = readTables(await response.text());
      })
      .catch((error: unknown) => {
        this.#asked = false;
        this.failed = `posttrainllm.json: ${error instanceof Error ? error.message : String(error)}`;
      });
  }
}

export const shelf = new Shelf();
