// storage_work.ts: jobs on the storage of runs, in node (on a shelf in memory) and in Chromium (on OPFS) alike.
import type { Host } from "../src/runtime/host.ts";
import { programSet } from "../src/runtime/program.ts";
import type { Settings, Tables } from "../src/runtime/tables.ts";
import { trainStep } from "../src/runtime/training.ts";
import { openWasm } from "../src/runtime/wasm.ts";
import { fromToml, toToml } from "../src/storage/config.ts";
import { MemoryShelf } from "../src/storage/files.ts";
import type { Bytes, Shelf } from "../src/storage/files.ts";
import { openTinygpt, openWeights, tinygptBlob, weightsFile } from "../src/storage/model_files.ts";
import type { RunHandle } from "../src/storage/run_handle.ts";
import { BrowserStore } from "../src/storage/run_store.ts";

export type Work =
  | { readonly kind: "toml"; readonly settings?: Settings; readonly text?: string }
  /** Train a new run, or one from a zip, up to a step, with a checkpoint there; the whole text is given. */
  | { readonly kind: "train"; readonly name: string; readonly settings?: Settings; readonly zip?: Bytes; readonly text?: Bytes; readonly bundled?: boolean; readonly to: number; readonly steps?: number }
  /** Open a model file and give it out in another form. */
  | { readonly kind: "convert"; readonly name: string; readonly content: Bytes; readonly config?: Bytes; readonly to: "zip" | "safetensors" | "fp32" | "fp16" }
  | { readonly kind: "import"; readonly zips: readonly { readonly name: string; readonly content: Bytes }[] };

export interface Done {
  readonly text?: string;
  readonly settings?: Settings;
  readonly losses?: number[];
  readonly notices?: string[];
  readonly zip?: Bytes;
  readonly name?: string;
  readonly refusals?: (string | null)[];
  readonly names?: string[];
}

export interface Place {
  readonly host: Host;
  readonly tables: Tables;
  readonly bundled: Bytes;
  readonly shelf?: Shelf;
  readonly room?: number;
}

export function storeOf({ tables, bundled, shelf, room }: Place, notices: string[] = []): BrowserStore {
  const around = {
    tables, bundledText: async () => bundled, room: async () => room ?? null, notice: (message: string) => void notices.push(message),
  };
  return new BrowserStore(shelf ?? new MemoryShelf(), around, false);
}

export async function perform(place: Place, work: Work): Promise<Done> {
  const { tables } = place;
  if (work.kind === "toml") {
    if (work.text !== undefined) return { settings: fromToml(tables, work.text, "config.toml") };
    return { text: toToml(tables, work.settings ?? {}) };
  }
  const store = storeOf(place);
  if (work.kind === "convert") return convert(place, work);
  if (work.kind === "import") {
    const refusals: (string | null)[] = [];
    for (const { name, content } of work.zips) {
      refusals.push(await openAny(store, tables, content, name).then(() => null, (error: Error) => `${error.name}: ${error.message}`));
    }
    return { refusals, names: (await store.list()).map((run) => run.name) };
  }
  let run: RunHandle;
  if (work.zip === undefined) {
    const text = work.bundled ? place.bundled : work.text ?? new Uint8Array(0);
    run = await store.create(work.name, work.settings ?? {}, { name: work.bundled ? "TinyShakespeare" : "mine.txt", text, bundled: work.bundled ?? false });
  } else run = await store.open(await store.importZip(new Blob([work.zip]), `${work.name}.zip`), "write");
  if (work.steps !== undefined) await run.changeSettings({ ...run.settings, "training.steps": work.steps });
  const notices: string[] = [];
  const losses = await trainRun(place, run, work.to, notices);
  await run.close();
  return { losses, notices, name: run.name, zip: new Uint8Array(await (await store.exportZip(run.name)).arrayBuffer()) };
}

async function openAny(store: BrowserStore, tables: Tables, content: Bytes, name: string, config: Bytes | null = null): Promise<string> {
  const file = new Blob([content]);
  if (name.endsWith(".tinygpt")) return openTinygpt(store, tables, file, name);
  if (name.endsWith(".safetensors")) return openWeights(store, tables, file, name, config);
  return store.importZip(file, name);
}

async function convert(place: Place, work: Work & { readonly kind: "convert" }): Promise<Done> {
  const store = storeOf(place);
  const name = await openAny(store, place.tables, work.content, work.name, work.config);
  const run = await store.open(name);
  const out = async (): Promise<{ blob: Blob; notes: string[] }> => {
    if (work.to === "zip") return { blob: await store.exportZip(name), notes: [] };
    if (work.to === "safetensors") return { blob: await weightsFile(run, place.tables), notes: [] };
    return tinygptBlob(run, place.tables, work.to);
  };
  const { blob, notes } = await out();
  return { name, settings: run.settings, notices: notes, zip: new Uint8Array(await blob.arrayBuffer()) };
}

/** Goes on with a run from its newest checkpoint, or begins it, up to a step; the losses of the steps that were taken. */
export async function trainRun(place: Place, run: RunHandle, to: number, notices: string[] = []): Promise<number[]> {
  const { host, tables } = place;
  const { settings } = run;
  const found = await run.latest();
  notices.push(...(found?.notices ?? []));
  await run.startFrom(found?.step ?? 0);
  const text = await run.corpus();
  const cut = Math.trunc(text.length * (1 - (settings["data.val_fraction"] as number)));
  const engine = await openWasm({ host, tables, set: programSet(tables, settings, "training"), threads: 1 });
  if (found === null) await engine.initialize(settings["training.seed"] as number);
  else await engine.load(found.state.params, found.state.m, found.state.v);
  const losses: number[] = [];
  for (let step = (found?.step ?? 0) + 1; step <= to; step++) {
    const lr = await trainStep(engine, settings, text.subarray(0, cut), step);
    const [result] = await engine.results();
    losses.push(result?.loss ?? NaN);
    await run.append([{ step, loss: result?.loss ?? NaN, val_loss: null, lr, grad_norm: result?.gradNorm ?? NaN, tokens_per_second: 1000, elapsed_s: step / 4 }]);
  }
  await run.appendSample({ step: to, prompt: "A", text: 'an "answer"\n\u00e9\u{1f600}' });
  await run.saveCheckpoint(await engine.state(), {
    step: to, engine: engine.name, engineInfo: engine.info, threads: 1, valLoss: null, bestValLoss: null, elapsedS: to / 4,
  });
  await engine.close();
  return losses;
}
