// storage.ts: node storage.ts ASSETS WORK: jobs of storage_work.ts on a shelf in memory. WORK is a folder with work.json, a
// list of jobs whose values {"file": name} stand for a file beside it; results.json and the files that came out are written there.
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { nodeHost } from "../src/runtime/host_node.ts";
import { readTables } from "../src/runtime/tables.ts";
import { perform } from "./storage_work.ts";
import type { Work } from "./storage_work.ts";

const [assets = "", folder = ""] = process.argv.slice(2);
const host = nodeHost(assets);
const tables = readTables(readFileSync(join(assets, "posttrainllm.json"), "utf8"));
const bundled = await host.read("tinyshakespeare.txt");
const jobs = JSON.parse(readFileSync(join(folder, "work.json"), "utf8"), (_, value: unknown) => {
  const file = (value as { file?: unknown } | null)?.file;
  return typeof file === "string" ? new Uint8Array(readFileSync(join(folder, file))) : value;
}) as Work[];

const results: unknown[] = [];
for (const [index, job] of jobs.entries()) {
  const done = await perform({ host, tables, bundled }, job);
  if (done.zip !== undefined) writeFileSync(join(folder, `${index}.zip`), done.zip);
  results.push({ ...done, zip: done.zip && `${index}.zip` });
}
writeFileSync(join(folder, "results.json"), JSON.stringify(results));
