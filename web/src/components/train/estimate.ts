// estimate.ts: how long a preset would take on this device, from a probe of one preset and records of all.
import type { Tables } from "../../runtime/tables.ts";
import type { Speed } from "../../worker/protocol.ts";
import { siteOf } from "../../worker/site.ts";

export interface Estimate {
  readonly preset: string;
  readonly seconds: number;
  /** Validation loss that was reached with it. */
  readonly loss: number;
  readonly writes: string;
}

/** Every preset that was measured, smallest first. */
export function estimates(tables: Tables, speed: Speed): Estimate[] {
  const { records } = siteOf(tables);
  const tried = records[speed.preset];
  return Object.entries(records).map(([preset, { loss, writes, step_ms: ms, step_flops: flops }]) => {
    const byRecord = speed.engine === "wasm" && ms !== null && tried?.step_ms ? ms / tried.step_ms : null;
    const largest = Object.values(records).findLast((record) => record.step_ms !== null);
    const byWork = flops / (tried?.step_flops ?? NaN);
    const beyond = speed.engine === "wasm" && largest?.step_ms && tried?.step_ms ? (largest.step_ms / tried.step_ms) * (flops / largest.step_flops) : byWork;
    const ratio = byRecord ?? (speed.engine === "wasm" ? beyond : Math.max(1, byWork));
    const steps = Number(tables.presets[preset]?.settings["training.steps"] ?? NaN);
    return { preset, loss, writes, seconds: (steps * speed.msPerStep * ratio) / 1000 };
  });
}

/** The one that gets furthest within the time that a first try may take. */
export function recommended(tables: Tables, speed: Speed): Estimate | null {
  const { front, recommend } = siteOf(tables);
  const all = estimates(tables, speed).filter(({ preset }) => front.includes(preset));
  const quick = all.filter(({ seconds }) => seconds <= recommend.seconds);
  return (quick.length ? quick : all.slice(0, 1)).reduce<Estimate | null>((best, one) => (best === null || one.loss < best.loss ? one : best), null);
}
