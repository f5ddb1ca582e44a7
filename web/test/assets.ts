// assets.ts: what export_web.py wrote, for the tests in node: ASSETS names the folder.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { nodeHost } from "../src/runtime/host_node.ts";
import { readTables } from "../src/runtime/tables.ts";
import type { Settings } from "../src/runtime/tables.ts";

const folder = process.env["ASSETS"];
if (folder === undefined) throw new Error("run: ASSETS=FOLDER npm test, after: python -m posttrainllm.export_web FOLDER");

export const host = nodeHost(folder);
export const tables = readTables(readFileSync(join(folder, "posttrainllm.json"), "utf8"));

/** A preset's settings, some of them changed. */
export function settingsOf(preset: string, changes: Settings = {}): Settings {
  const found = tables.presets[preset];
  if (found === undefined) throw new Error(`there is no preset '${preset}'`);
  return { ...found.settings, ...changes };
}
