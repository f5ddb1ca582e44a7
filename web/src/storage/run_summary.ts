// run_summary.ts: one line of the list of runs (runs/folder.py, describe_run): what can be read cheaply from a folder.
import type { Settings, Tables } from "../runtime/tables.ts";
import { checkpointFolders, readState } from "./checkpoint.ts";
import { fromToml, presetOf } from "./config.ts";
import { StorageError } from "./errors.ts";
import type { Files } from "./files.ts";
import { formsOf } from "./forms.ts";
import { readObject } from "./text_forms.ts";
import type { Json } from "./text_forms.ts";

export interface RunSummary {
  readonly name: string;
  readonly preset: string | null;
  readonly state: "running" | "finished" | "stopped" | "damaged";
  /** The last logged step, or the newest checkpoint's. */
  readonly step: number;
  readonly steps: number | null;
  /** The newest checkpoint's step, 0 without one; null where that was not looked up. */
  readonly checkpoint: number | null;
  readonly loss: number | null;
  readonly bestValLoss: number | null;
  readonly bytes: number;
  /** Milliseconds since 1970. */
  readonly modified: number | null;
  /** Why it is damaged. */
  readonly problem: string | null;
}

const TAIL = 4096;

export async function summaryOf(name: string, files: Files, tables: Tables, locked: boolean): Promise<RunSummary> {
  const entries = await files.list();
  const bytes = entries.reduce((sum, entry) => sum + entry.bytes, 0);
  const modified = entries.reduce<number | null>((latest, entry) => Math.max(latest ?? 0, entry.modified), null);
  let settings: Settings | null = null;
  let problem: string | null = null;
  const { run_config: config } = formsOf(tables).names;
  try {
    settings = fromToml(tables, new TextDecoder().decode(await files.read(config)), config);
  } catch (error) {
    problem = error instanceof StorageError ? error.message : String(error);
  }
  const [newest, folder] = [...(await checkpointFolders(files))].at(-1) ?? [0, null];
  const state = folder === null ? null : await readState(files, folder, tables).catch(() => null);
  const last = await lastLine(files, "metrics.jsonl");
  const steps = settings === null ? null : Number(settings["training.steps"]);
  const value = (key: string): number | null => (Number.isFinite(last?.[key]) ? (last?.[key] as number) : null);
  const finished = steps !== null && newest >= steps;
  return {
    name, bytes, modified, problem, steps, checkpoint: newest,
    preset: settings === null ? null : presetOf(tables, settings),
    state: settings === null ? "damaged" : finished ? "finished" : locked ? "running" : "stopped",
    step: Math.max(newest, value("step") ?? 0),
    loss: value("loss"),
    bestValLoss: state?.bestValLoss ?? value("val_loss"),
  };
}

/** The last whole line of a file of JSON lines; null when there is none. */
async function lastLine(files: Files, path: string): Promise<Json | null> {
  const size = await files.size(path);
  if (size === null) return null;
  const lines = new TextDecoder().decode(await files.read(path, Math.max(0, size - TAIL))).split("\n");
  try {
    return readObject(new TextEncoder().encode(lines.at(-2) ?? ""), path);
  } catch {
    return null;
  }
}
