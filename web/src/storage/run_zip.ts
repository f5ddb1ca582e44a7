// run_zip.ts: a run folder as one zip archive, as the terminal reads and writes it: files unchanged, below the run's name.
import type { Settings, Tables } from "../runtime/tables.ts";
import { checkpointBytes, checkpointFolders, readState, verify } from "./checkpoint.ts";
import { fromToml } from "./config.ts";
import { DAMAGED, show, showBytes, StorageError } from "./errors.ts";
import type { Files } from "./files.ts";
import { joined } from "./files.ts";
import { formsOf } from "./forms.ts";
import { Records } from "./records.ts";
import type { ZipFile } from "./zip_write.ts";
import { openZip } from "./zip_read.ts";
import type { ZipEntry } from "./zip_read.ts";

const IN_MEMORY = 32 << 20; // smaller files are copied, so that training may go on while the download runs
const MAX_CONFIG = 1 << 20;
const MAX_TEXT = 1 << 28;
const MAX_LINES = 1 << 26;
const [MOST_EXPANSION, ALWAYS_ALLOWED] = [50, 16 << 20]; // lines get ten times as small, zeros a thousand times
const LINES = ["metrics.jsonl", "samples.jsonl"];
const IN_CHECKPOINT = /^checkpoints\/step-\d{6,12}\/[^/]+$/;
const hidden = (path: string): boolean => path.split("/").some((part) => part.startsWith(".") || part === "__MACOSX");

/** The files of a run as a zip has them. */
export async function runFiles(files: Files, name: string): Promise<ZipFile[]> {
  const found: ZipFile[] = [];
  const entries = (await files.list()).filter(({ path }) => !hidden(path)).sort((a, b) => (a.path < b.path ? -1 : 1));
  for (const { path, bytes, modified } of entries) {
    const content = bytes <= IN_MEMORY ? new Blob([await files.read(path)]) : await files.blob(path);
    found.push({ path: `${name}/${path}`, content, modified });
  }
  return found;
}

/**
 * Unpacks a run into an empty folder. Only files that a run has are taken; config.toml comes last.
 * Returns the name of its folder in the archive; null when it has none.
 * Throws a StorageError that names the archive, the file and what is wrong with it.
 */
export async function unpackRun(blob: Blob, source: string, files: Files, tables: Tables, room: number): Promise<string | null> {
  const { zip, entries } = await openZip(blob, source);
  const { run_config: config, corpus, hashes } = formsOf(tables).names;
  const visible = entries.filter(({ path }) => !hidden(path));
  const roots = visible.filter(({ path }) => path === config || (path.endsWith(`/${config}`) && path.split("/").length === 2));
  const [top] = roots;
  if (top === undefined || roots.length > 1) {
    const what = top === undefined ? `holds no ${config}` : `holds ${roots.length} runs`;
    throw zip.fail(what, "choose the zip of one run: downloaded here, or written by posttrainllm export RUN --to zip");
  }
  const root = top.path.slice(0, -config.length);
  if (top.bytes > MAX_CONFIG) throw zip.fail(`has a ${config} of ${showBytes(top.bytes)}`);
  const text = await joined(zip.content(top));
  const settings = fromToml(tables, new TextDecoder().decode(text), `${source}: ${config}`);
  const wanted = (path: string): boolean => [...LINES, corpus].includes(path) || IN_CHECKPOINT.test(path);
  const taken = visible.filter((entry) => entry !== top && entry.path.startsWith(root) && wanted(entry.path.slice(root.length)));
  checkSizes(taken, root, tables, settings, source, Math.min(room, Math.max(ALWAYS_ALLOWED, MOST_EXPANSION * blob.size)), room);
  const last = (entry: ZipEntry): number => Number(entry.path.endsWith(`/${hashes}`)); // the mark that a checkpoint is whole
  taken.sort((a, b) => last(a) - last(b));
  for (const entry of taken) await files.write(entry.path.slice(root.length), zip.content(entry));
  await checkOne(files, tables, settings, source);
  for (const lines of LINES) await new Records(files, lines).read().catch((error: unknown) => refuse(error, source));
  await files.write(config, [text]);
  return root === "" ? null : root.slice(0, -1);
}

/** A checkpoint cannot be larger than its model's, nor all of it than the room there is. */
function checkSizes(entries: readonly ZipEntry[], root: string, tables: Tables, settings: Settings, source: string, allowed: number, room: number): void {
  const most = checkpointBytes(tables, settings);
  const sums = new Map<string, number>();
  for (const { path, bytes } of entries) {
    const [part = "", step] = path.slice(root.length).split("/");
    const key = step === undefined ? part : `${part}/${step}`;
    const sum = (sums.get(key) ?? 0) + bytes;
    const limit = step !== undefined ? most : part.endsWith(".jsonl") ? MAX_LINES : MAX_TEXT;
    if (sum > limit) {
      throw new StorageError(`${source}: ${show(key)} has ${showBytes(sum)}, more than the ${showBytes(limit)} that this run can have`, "the file is damaged or no run");
    }
    sums.set(key, sum);
  }
  const all = [...sums.values()].reduce((sum, part) => sum + part, 0);
  if (all > allowed && all <= room) {
    throw new StorageError(`${source} unpacks to ${showBytes(all)}, more than ${MOST_EXPANSION} times what it has`, "the file is damaged or no run");
  }
  if (all > room) {
    throw new StorageError(`${source} unpacks to ${showBytes(all)}, and this browser has room for ${showBytes(room)}`, "delete runs on the Runs page first");
  }
}

/** A run must have a checkpoint that is whole, of the model that its configuration describes. */
async function checkOne(files: Files, tables: Tables, settings: Settings, source: string): Promise<void> {
  let problem: unknown = new StorageError("the run has no checkpoint", "let it train to its first one");
  for (const folder of [...(await checkpointFolders(files)).values()].reverse()) {
    try {
      await verify(files, folder, tables);
      const { settings: trained } = await readState(files, folder, tables);
      const other = Object.keys(settings).find((key) => key.startsWith("model.") && settings[key] !== trained[key]);
      if (other === undefined) return;
      const { run_config: config, state } = formsOf(tables).names;
      throw new StorageError(`${config} and ${folder}/${state} describe different models: ${other} is ${show(settings[other])} and ${show(trained[other])}`, DAMAGED);
    } catch (error) {
      problem = error;
    }
  }
  refuse(problem, source);
}

function refuse(error: unknown, source: string): never {
  if (!(error instanceof StorageError)) throw error;
  throw new StorageError(`${source}: ${error.message}`, error.hint);
}
