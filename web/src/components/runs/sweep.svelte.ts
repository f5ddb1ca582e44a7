// sweep.svelte.ts: one setting over three values: three runs of this tab, one after another.
//
// One for all pages, like the training itself: a change of page keeps it. Stopping a run stops the sweep.
import type { SettingField, Tables } from "../../runtime/tables.ts";
import { freeName } from "../../storage/run_name.ts";
import { refusalOf } from "../../worker/refusal.ts";
import { wanted } from "../../storage/config_check.ts";
import { check, parse, settingsOf, takes } from "../../worker/settings.ts";
import type { Value } from "../../worker/settings.ts";
import type { Refusal } from "../../worker/protocol.ts";
import { session } from "../train/session.svelte.ts";
import { runs } from "./runs.svelte.ts";

export interface Plan {
  readonly preset: string;
  readonly key: string;
  readonly values: readonly Value[];
}

/** Values around the usual one: a third, the same, three times as much; or the first choices. */
export function around(field: SettingField, usual: Value): string[] {
  if (field.kind === "choice") return field.choices.slice(0, 3).map(String);
  if (typeof usual !== "number") return ["", "", ""];
  const held = (value: number): number => Math.min(field.high ?? Infinity, Math.max(field.low ?? -Infinity, value));
  const near = [usual / 3, usual, usual * 3].map((value) => held(field.kind === "integer" ? Math.round(value) : Number(value.toPrecision(2))));
  return near.map(String);
}

/** The plan behind what was typed, or what is wrong with it. */
export function planOf(tables: Tables, preset: string, key: string, field: SettingField, texts: readonly string[]): Plan | Refusal {
  const values: Value[] = [];
  for (const text of texts) {
    const value = parse(field, text);
    if (value === undefined || !takes(field, value)) return { message: `${key} must be ${wanted(field)}, got ${JSON.stringify(text)}`, hint: field.help };
    if (values.includes(value)) return { message: `${text} stands there twice`, hint: "three different values make a comparison" };
    const [wrong] = check(tables, settingsOf(tables, preset, { [key]: value }));
    if (wrong !== undefined) return wrong;
    values.push(value);
  }
  return { preset, key, values };
}

class Sweep {
  plan = $state.raw<Plan | null>(null);
  /** Names of the runs that are done. */
  done = $state.raw<readonly string[]>([]);
  problem = $state.raw<Refusal | null>(null);
  #end: () => void = () => undefined;

  get active(): boolean {
    return this.plan !== null && this.done.length < this.plan.values.length && this.problem === null;
  }

  start(tables: Tables, plan: Plan): void {
    this.#end();
    this.plan = plan;
    this.done = [];
    this.problem = null;
    let busy = false;
    this.#next(tables);
    this.#end = $effect.root(() => {
      $effect(() => {
        const { phase, problem, run } = session;
        if (busy || !this.active) return;
        if (phase === "stopped" || (phase === null && problem !== null)) {
          this.problem = problem ?? { message: "the sweep was stopped", hint: "its finished runs are kept" };
        } else if (phase === "finished" && session.verdict !== null) {
          busy = true;
          void this.#finished(tables, run).finally(() => (busy = false));
        }
      });
    });
  }

  #next(tables: Tables): void {
    const { plan } = this;
    const value = plan?.values[this.done.length];
    if (plan === null || value === undefined) return;
    session.start({ settings: settingsOf(tables, plan.preset, { [plan.key]: value }), text: { kind: "bundled" }, engine: "auto", place: "tab" });
  }

  /** Names a finished run after its value and begins the next one. */
  async #finished(tables: Tables, run: string): Promise<void> {
    const { plan } = this;
    if (plan === null) return;
    const wish = `${plan.preset}-${plan.key.split(".").at(-1)}-${String(plan.values[this.done.length])}`;
    session.leave();
    let name = run;
    try {
      const store = runs.store("tab");
      name = freeName(wish, new Set((await store.list()).map((one) => one.name)));
      await store.rename(run, name);
    } catch (error) {
      runs.problem = refusalOf(error); // the run is there under the name that it had
      name = run;
    }
    this.done = [...this.done, name];
    runs.show(this.done.map((one) => `tab/${one}`));
    if (this.active) this.#next(tables);
    else this.#end();
  }

  stop(): void {
    this.#end();
    this.problem = { message: "the sweep was stopped", hint: "its finished runs are kept" };
    session.stop();
  }
}

export const sweep = new Sweep();
