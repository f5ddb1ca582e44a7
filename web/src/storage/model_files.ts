// model_files.ts: models as single files: model.safetensors and .tinygpt, out of a run and into a new one.
//
// model.safetensors carries config.json in its metadata, so that the one file is the whole model; without it
// config.json must be opened together with it, for no tensor says how many heads there are.
import type { State, Tensors } from "../runtime/engine.ts";
import type { Settings, Tables } from "../runtime/tables.ts";
import { weightsOf, writeCheckpoint } from "./checkpoint.ts";
import { toToml } from "./config.ts";
import { show, StorageError } from "./errors.ts";
import type { Bytes, Files } from "./files.ts";
import { foreignSettings } from "./foreign.ts";
import { filled, formsOf } from "./forms.ts";
import { count, parameterShapes, storedName } from "./parameters.ts";
import { modelOf } from "./model_config.ts";
import { Records } from "./records.ts";
import type { RunHandle } from "./run_handle.ts";
import { readFloats, readHeader, tensorFile } from "./tensor_file.ts";
import type { Source } from "./tensor_file.ts";
import { readObject, utf8, writeJson } from "./text_forms.ts";
import { notInTinygpt, readTinygpt, tinygptFile } from "./tinygpt.ts";

/** A store that takes in what `fill` puts together. */
export interface Taking {
  arriving(wanted: string, fill: (files: Files, name: string) => Promise<string>): Promise<string>;
}

async function newest(run: RunHandle): Promise<{ state: State; step: number }> {
  const found = await run.latest();
  if (found === null) throw new StorageError(`run ${run.name} has no checkpoint yet`, "let it train a little longer");
  return found;
}

/** model.safetensors of a run's newest checkpoint, with config.json in its metadata. */
export async function weightsFile(run: RunHandle, tables: Tables): Promise<Blob> {
  const { state } = await newest(run);
  const shapes = parameterShapes(tables, run.settings);
  const config = writeJson(filled(formsOf(tables).documents[formsOf(tables).names.config], tables, run.settings));
  return new Blob([...tensorFile(weightsOf(tables, shapes, state.params), { config })]);
}

/** A run's newest checkpoint as .tinygpt; `notes` are what such a file cannot say about this model. */
export async function tinygptBlob(run: RunHandle, tables: Tables, dtype: "fp32" | "fp16"): Promise<{ blob: Blob; notes: string[] }> {
  const { state, step } = await newest(run);
  const about = { step, metrics: await run.metrics(), samples: await run.samples() };
  return { blob: new Blob([...tinygptFile(tables, run.settings, state, about, dtype)]), notes: notInTinygpt(tables, run.settings) };
}

/** Makes a run of a .tinygpt file; the name it has. Throws a StorageError that names the file, the field and the value. */
export async function openTinygpt(store: Taking, tables: Tables, file: Blob, fileName: string): Promise<string> {
  return store.arriving(fileName.replace(/\.tinygpt$/i, ""), async (files, name) => {
    const { settings, step, params, moments, history } = await readTinygpt(file, tables, fileName);
    await keep(files, tables, settings, step, params, moments);
    await new Records(files, "metrics.jsonl").append(history);
    return name;
  });
}

/** Makes a run of a model.safetensors, and of the config.json beside it where the file itself has none. */
export async function openWeights(store: Taking, tables: Tables, file: Blob, fileName: string, config: Bytes | null): Promise<string> {
  return store.arriving(fileName.replace(/\.safetensors$/i, ""), async (files, name) => {
    const read: Source = async (from, to) => new Uint8Array(await file.slice(from, to).arrayBuffer());
    const { entries, metadata } = await readHeader(read, file.size, fileName);
    const text = config ?? (typeof metadata["config"] === "string" ? utf8(metadata["config"]) : null);
    if (text === null) {
      throw new StorageError(`${fileName} does not say how many heads the model has`, "open it together with its config.json, both files at once");
    }
    const settings = foreignSettings(tables, modelOf(readObject(text, "config.json"), tables), {}, "config.json");
    const shapes = parameterShapes(tables, settings);
    const params: Tensors = new Map();
    for (const [parameter, shape] of shapes) {
      const entry = entries.get(storedName(tables, parameter)) ?? entries.get(parameter);
      if (entry === undefined) throw new StorageError(`${fileName} lacks the tensor ${storedName(tables, parameter)}`, "is config.json of the same model?");
      if (entry.shape.join() !== shape.join()) {
        throw new StorageError(`${fileName}: tensor ${entry.name} is ${show(entry.shape)}, and config.json says ${show(shape)}`, "is config.json of the same model?");
      }
      params.set(parameter, await readFloats(read, entry, fileName));
    }
    await keep(files, tables, settings, 0, params, null);
    return name;
  });
}

/** A run of one checkpoint in an empty folder; what a foreign model was trained on, nobody knows. */
async function keep(files: Files, tables: Tables, settings: Settings, step: number, params: Tensors, moments: { m: Tensors; v: Tensors } | null): Promise<void> {
  const shapes = parameterShapes(tables, settings);
  const zeros = (): Tensors => new Map([...shapes].map(([name, shape]) => [name, new Float32Array(count(shape))]));
  const state = { params, m: moments?.m ?? zeros(), v: moments?.v ?? zeros() };
  await writeCheckpoint(files, tables, settings, null, state, {
    step, engine: String(settings["engine.name"]), engineInfo: {}, threads: 0, valLoss: null, bestValLoss: null, elapsedS: 0,
  });
  await files.write(formsOf(tables).names.run_config, [utf8(toToml(tables, settings))]);
}
