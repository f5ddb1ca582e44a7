// runs.svelte.ts: what the Runs page knows: the runs of this browser and of the server, which are compared, what went wrong.
import { openServerStore, openTabStore } from "../../storage/index.ts";
import type { BrowserStore, RunStore, RunSummary, ServerStore, Undo, Usage } from "../../storage/index.ts";
import type { MetricLine } from "../../storage/index.ts";
import type { Tables } from "../../runtime/tables.ts";
import { refusalOf } from "../../worker/refusal.ts";
import type { Refusal, StorePlace } from "../../worker/protocol.ts";
import { dataUrl } from "../site/root.ts";
import { session } from "../train/session.svelte.ts";

export interface Row extends RunSummary {
  readonly place: StorePlace;
  /** "tab/small-001" */
  readonly id: string;
}

export interface Removed {
  /** Its own, unlike the name. */
  readonly id: string;
  readonly name: string;
  readonly bytes: number;
  readonly restore: Undo;
}

const LOOK_MS = 2000;
const IDLE_LOOKS = 3; // that pass while nothing is being trained here
export const MOST_COMPARED = 5; // curves have five colours

class Runs {
  rows = $state.raw<readonly Row[]>([]);
  loaded = $state(false);
  /** Ids of the runs whose curves are shown, in the order in which they were chosen. */
  compared = $state.raw<readonly string[]>([]);
  curves = $state.raw<ReadonlyMap<string, readonly MetricLine[]>>(new Map());
  usage = $state.raw<Usage | null>(null);
  lasting = $state(true);
  served = $state(false);
  removed = $state.raw<readonly Removed[]>([]);
  undo = $state.raw<{ readonly name: string; readonly bring: Undo } | null>(null);
  busy = $state("");
  notice = $state("");
  problem = $state.raw<Refusal | null>(null);
  #tables: Tables | null = null;
  #tab: BrowserStore | null = null;
  #server: ServerStore | null = null;
  #served: readonly RunSummary[] = [];
  #seen = new Map<string, string>();
  #touched = false;

  /** Shows the runs and follows them until the returned function is called. */
  follow(tables: Tables): () => void {
    let over = false;
    let stop = (): void => {};
    void this.#open(tables).then(() => {
      if (over) return;
      let looks = 0;
      const timer = setInterval(() => {
        const lively = this.rows.some((row) => row.place === "tab" && row.state === "running");
        if (lively || ++looks % IDLE_LOOKS === 0) void this.refresh();
      }, LOOK_MS);
      const unwatch = this.#server?.watch((rows) => {
        this.#served = rows;
        void this.refresh();
      });
      stop = () => {
        clearInterval(timer);
        unwatch?.();
      };
    });
    return () => {
      over = true;
      stop();
    };
  }

  async #open(tables: Tables): Promise<void> {
    this.#tables = tables;
    try {
      this.#tab ??= await openTabStore(tables, { data: dataUrl() });
      this.lasting = this.#tab.lasting;
      await this.#tab.purge();
      this.#server ??= await openServerStore(tables, { data: dataUrl() });
      this.served = this.#server !== null;
      if (this.#server !== null) this.#served = await this.#server.list();
    } catch (error) {
      this.problem = refusalOf(error);
    }
    await this.refresh(true);
  }

  store(place: StorePlace): RunStore {
    const store = place === "tab" ? this.#tab : this.#server;
    if (store === null) throw new Error(`the runs of the ${place} are not open`);
    return store;
  }

  get tables(): Tables {
    if (this.#tables === null) throw new Error("the tables have not come");
    return this.#tables;
  }

  row(id: string): Row | undefined {
    return this.rows.find((row) => row.id === id);
  }

  /** Looks again; at the room and the removed ones when a run has changed, or when it is asked for. */
  async refresh(again = false): Promise<void> {
    if (document.hidden && this.loaded) return;
    try {
      const here = (await this.#tab?.list()) ?? [];
      const rows = (place: StorePlace, found: readonly RunSummary[]): Row[] =>
        found.map((run) => ({ ...run, place, id: `${place}/${run.name}`, state: openHere(run, place) ? "running" : run.state }));
      const all = [...rows("tab", here), ...rows("server", this.#served)].sort((a, b) => (b.modified ?? 0) - (a.modified ?? 0));
      const changed = JSON.stringify(all) !== JSON.stringify(this.rows);
      if (changed) this.rows = all;
      if (!this.#touched) this.compared = all.filter((row) => row.loss !== null).slice(0, 2).map((row) => row.id);
      this.compared = this.compared.filter((id) => this.row(id) !== undefined);
      if (changed || again) {
        this.usage = (await this.#tab?.usage()) ?? null;
        this.removed = (await this.#tab?.removed()) ?? [];
      }
      await this.#readCurves();
    } catch (error) {
      this.problem = refusalOf(error);
    }
    this.loaded = true;
  }

  /** Reads the lines of the runs that are shown and have changed. */
  async #readCurves(): Promise<void> {
    const curves = new Map(this.curves);
    let changed = false;
    for (const id of [...curves.keys()]) changed = (!this.compared.includes(id) && curves.delete(id)) || changed;
    for (const id of this.compared) {
      const row = this.row(id);
      const stamp = `${row?.step} ${row?.modified}`;
      if (row === undefined || (curves.has(id) && this.#seen.get(id) === stamp)) continue;
      const lines = await this.store(row.place).open(row.name).then((run) => run.metrics(), () => []);
      this.#seen.set(id, stamp);
      curves.set(id, lines);
      changed = true;
    }
    if (changed) this.curves = curves;
  }

  /** Shows a run's curve, or shows it no longer. */
  compare(id: string, shown: boolean): void {
    this.#touched = true;
    const others = this.compared.filter((one) => one !== id);
    this.compared = shown ? [...others, id].slice(-MOST_COMPARED) : others;
    void this.#readCurves();
  }

  /** Shows these curves alone, as far as the runs are there. */
  show(ids: readonly string[]): void {
    this.#touched = true;
    this.compared = ids.slice(0, MOST_COMPARED);
    void this.refresh();
  }

  /** Does something with a run; what goes wrong is shown. True when it went well. */
  async attempt(what: string, work: () => Promise<void>): Promise<boolean> {
    this.problem = null;
    this.notice = "";
    this.busy = what;
    try {
      await work();
      return true;
    } catch (error) {
      this.problem = refusalOf(error);
      return false;
    } finally {
      this.busy = "";
      if (this.#server !== null) this.#served = await this.#server.list().catch(() => this.#served);
      await this.refresh(true);
    }
  }

  remove(row: Row): Promise<boolean> {
    return this.attempt(`removing ${row.name}`, async () => {
      this.undo = { name: row.name, bring: await this.store(row.place).remove(row.name) };
    });
  }

  bringBack(bring: Undo): Promise<boolean> {
    return this.attempt("bringing it back", async () => {
      const name = await bring();
      this.undo = null;
      this.notice = `Brought back: ${name}`;
    });
  }

  /** Frees the room of all that was removed in this browser. */
  purge(): Promise<boolean> {
    return this.attempt("freeing room", async () => {
      this.undo = null;
      await this.#tab?.purge(0);
    });
  }
}

/** Where pages have no locks, this tab at least knows what it trains. */
const openHere = (run: RunSummary, place: StorePlace): boolean =>
  run.state === "stopped" && session.open && session.run === run.name && session.place === place;

export const runs = new Runs();
