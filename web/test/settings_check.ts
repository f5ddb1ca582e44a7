// settings_check.ts: node settings_check.ts ASSETS CASES: configurations as the pages check them, for
// comparison with Python (tests/test_web_settings.py). A case is {preset, changes}; out comes {settings, wrong}.
import { readFileSync } from "node:fs";
import { nodeHost } from "../src/runtime/host_node.ts";
import { readTables } from "../src/runtime/tables.ts";
import { joinFiles } from "../src/worker/text.ts";
import { check, settingsOf } from "../src/worker/settings.ts";
import type { Changes } from "../src/worker/settings.ts";
import { siteOf } from "../src/worker/site.ts";

const [assets, file] = process.argv.slice(2);
const tables = readTables(new TextDecoder().decode(await nodeHost(assets ?? "").read("posttrainllm.json")));
const given = JSON.parse(readFileSync(file ?? "", "utf8")) as {
  readonly cases: readonly { readonly preset: string; readonly changes: Changes }[];
  readonly files: readonly (readonly string[])[];
};

const refused = (files: readonly string[]): string => {
  try {
    const { text } = joinFiles(files.map((hex) => ({ name: "a file", bytes: Uint8Array.from(Buffer.from(hex, "hex")) })), siteOf(tables).text);
    return `text ${Buffer.from(text).toString("hex")}`;
  } catch (error) {
    return `refused ${error instanceof Error ? error.message : error}`;
  }
};

const cases = given.cases.map(({ preset, changes }) => {
  const settings = settingsOf(tables, preset, changes);
  return { settings, wrong: check(tables, settings) };
});
console.log(JSON.stringify({ cases, files: given.files.map(refused) }));
