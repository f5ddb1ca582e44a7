// downloads.ts: runs out of the page as files, and files into it as runs.
import { openTinygpt, openWeights, tinygptBlob, weightsFile } from "../../storage/model_files.ts";
import { StorageError } from "../../storage/index.ts";
import type { RunStore } from "../../storage/index.ts";
import type { Tables } from "../../runtime/tables.ts";
import type { Kind } from "./python_lines.ts";

export interface Made {
  readonly name: string;
  readonly blob: Blob;
  /** What the file cannot say about this model. */
  readonly notes: readonly string[];
}

/** A run as a file to keep. */
export async function fileOf(store: RunStore, tables: Tables, run: string, kind: Kind): Promise<Made> {
  if (kind === "zip") return { name: `${run}.zip`, blob: await store.exportZip(run), notes: [] };
  const open = await store.open(run);
  if (kind === "safetensors") return { name: "model.safetensors", blob: await weightsFile(open, tables), notes: [] };
  const { blob, notes } = await tinygptBlob(open, tables, "fp32");
  return { name: `${run}.tinygpt`, blob, notes };
}

/** Gives a file to the browser's downloads. */
export function download({ name, blob }: { readonly name: string; readonly blob: Blob }): void {
  const address = URL.createObjectURL(blob);
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** Makes a run of what a person chose or dropped: one archive or model file, or weights with their config.json. */
export async function openFiles(store: RunStore, tables: Tables, files: readonly File[]): Promise<string> {
  const ending = (end: string): File | undefined => files.find((file) => file.name.toLowerCase().endsWith(end));
  const [zip, tiny, weights, config] = [ending(".zip"), ending(".tinygpt"), ending(".safetensors"), ending(".json")];
  if (zip !== undefined) return store.importZip(zip, zip.name);
  if (tiny !== undefined) return openTinygpt(store, tables, tiny, tiny.name);
  if (weights !== undefined) {
    const text = config === undefined ? null : new Uint8Array(await config.arrayBuffer());
    return openWeights(store, tables, weights, weights.name, text);
  }
  const pickle = files.find((file) => /\.(bin|pt|pth|ckpt|pkl|pickle)$/i.test(file.name));
  if (pickle !== undefined) {
    throw new StorageError(`${pickle.name} is a pickle, which can run any program and is never loaded`, "save the model as safetensors");
  }
  const names = files.map((file) => file.name).join(", ");
  throw new StorageError(`${names || "nothing"} is no run and no model that this page opens`, "choose a .zip of a run, a .tinygpt or a .safetensors file");
}
