// index.ts: the runs of this browser, opened. Pages and workers import this file.
import type { Tables } from "../runtime/tables.ts";
import { StorageError } from "./errors.ts";
import { MemoryShelf } from "./files.ts";
import type { Bytes } from "./files.ts";
import { formsOf } from "./forms.ts";
import { openIndexed } from "./indexed.ts";
import { openOpfs } from "./opfs.ts";
import { BrowserStore, roomInBrowser } from "./run_store.ts";
import { apiOf } from "./server_files.ts";
import { ServerStore } from "./server_store.ts";

export { StorageError } from "./errors.ts";
export type { RunStore, Undo, Usage } from "./run_store.ts";
export type { RunSummary } from "./run_summary.ts";
export { RunHandle } from "./run_handle.ts";
export type { MetricLine } from "./run_handle.ts";
export { askToKeep } from "./keep.ts";

export interface StoreOptions {
  /** The address of the files that export_web.py wrote, with a slash at its end. */
  readonly data: string | URL;
  readonly notice?: (message: string, until?: "saved") => void;
}

const memory = new MemoryShelf();
/** Stands in every answer of a server that has runs for this page (server/security.py): no request fails to find out. */
const RUNS_HEADER = "X-Posttrainllm-Runs";

export { BrowserStore } from "./run_store.ts";
export { ServerStore } from "./server_store.ts";

/**
 * The runs of this browser: in its file system, or in its database where a page has none (http without s), which a private
 * window forgets; where it gives neither, in the memory of whoever asks, page or worker.
 */
export async function openTabStore(tables: Tables, { data, notice = () => undefined }: StoreOptions): Promise<BrowserStore> {
  const opfs = await openOpfs();
  const shelf = opfs ?? (await openIndexed());
  const lasting = opfs !== null || (shelf !== null && !isSecureContext);
  if (!lasting) {
    const rescue = shelf === null ? "" : ", unless you download them";
    notice(`this browser gives the page no storage (a private window): runs are gone when it is closed${rescue}`);
  }
  const around = {
    tables, notice,
    room: opfs === null ? async () => null : roomInBrowser,
    bundledText: () => fetchText(new URL(formsOf(tables).bundled_corpus.file, data)),
  };
  return new BrowserStore(shelf ?? memory, around, lasting);
}

/** The runs of the server that this page came from; null when that is a static host, or gives this machine none. */
export async function openServerStore(tables: Tables, { data, notice = () => undefined }: StoreOptions): Promise<ServerStore | null> {
  const root = new URL("..", data);
  const answer = await fetch(root, { method: "HEAD", cache: "no-store" }).catch(() => null);
  if (answer?.headers.get(RUNS_HEADER) == null) return null;
  const api = apiOf(root);
  const room = async (): Promise<number | null> => ((await api.json("GET", "runs"))["free"] as number | null | undefined) ?? null;
  const bundledText = (): Promise<Bytes> => fetchText(new URL(formsOf(tables).bundled_corpus.file, data));
  return new ServerStore(api, root, { tables, notice, room, bundledText });
}

async function fetchText(address: URL): Promise<Bytes> {
  const response = await fetch(address);
  if (!response.ok) throw new StorageError(`${address.pathname}: the server says ${response.status} ${response.statusText}`);
  return new Uint8Array(await response.arrayBuffer());
}
