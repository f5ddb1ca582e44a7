// server_files.ts: the files of a run in the folder that `posttrainllm play` serves, over its API (server/run_api.py).
//
// The server gathers the files of a checkpoint out of sight and shows the folder when its hashes.json has arrived.
import { StorageError } from "./errors.ts";
import type { Bytes, Chunks, FileEntry, Files } from "./files.ts";
import { missing } from "./files.ts";
import { readObject } from "./text_forms.ts";
import type { Json } from "./text_forms.ts";

export interface Api {
  /** A request below api/; throws a StorageError with what the server says. */
  ask(method: string, path: string, body?: BodyInit, headers?: Readonly<Record<string, string>>): Promise<Response>;
  /** The same, giving the JSON object that comes back. */
  json(method: string, path: string, body?: Json): Promise<Json>;
}

const encoded = (path: string): string => path.split("/").map(encodeURIComponent).join("/");

/** The API of the server that this page came from. `root`: the address of the site, with a slash at its end. */
export function apiOf(root: string | URL): Api {
  const ask: Api["ask"] = async (method, path, body, headers = {}) => {
    const response = await fetch(new URL(`api/${path}`, root), { method, headers, cache: "no-store", ...(body === undefined ? {} : { body }) })
      .catch(() => {
        throw new StorageError("the playground's server does not answer", "is `posttrainllm play` still running? nothing is lost here");
      });
    if (response.ok) return response;
    const told = await response.json().catch(() => ({})) as { error?: unknown; hint?: unknown };
    const message = typeof told.error === "string" ? told.error : `the server says ${response.status} ${response.statusText}`;
    throw new StorageError(message, typeof told.hint === "string" ? told.hint : "");
  };
  return {
    ask,
    json: async (method, path, body) => {
      const headers = body === undefined ? {} : { "Content-Type": "application/json" };
      const response = await ask(method, path, body === undefined ? undefined : JSON.stringify(body), headers);
      return readObject(new Uint8Array(await response.arrayBuffer()), "the server's answer");
    },
  };
}

/** That a run is this tab's: the connection is the lock, and its token is shown with each write. */
export interface Hold {
  /** Null when the connection has ended. */
  readonly token: string | null;
  /** Takes the run, anew when the server was started again. Throws a StorageError when it is somebody else's. */
  take(): Promise<void>;
  release(): void;
}

export class ServerFiles implements Files {
  readonly gathers = true;
  readonly #api: Api;
  readonly #run: string;
  /** Null while the run is only read. */
  hold: Hold | null = null;
  #taking: Promise<void> | null = null;
  /** Where files that were appended to end, at least and at most: an answer may have been lost. */
  readonly #ends = new Map<string, readonly [number, number]>();

  constructor(api: Api, run: string) {
    this.#api = api;
    this.#run = `runs/${encodeURIComponent(run)}`;
  }

  /** The header that lets a write in. */
  async #held(): Promise<Record<string, string>> {
    const { hold } = this;
    if (hold === null) return {};
    if (hold.token === null) await (this.#taking ??= this.#takeAgain(hold).finally(() => (this.#taking = null)));
    return { "X-Hold": hold.token ?? "" };
  }

  /** Nobody watched the run while the server was away: what was written elsewhere must not be written over. */
  async #takeAgain(hold: Hold): Promise<void> {
    await hold.take();
    try {
      for (const [path, [least, most]] of this.#ends) {
        const size = (await this.size(path)) ?? 0;
        if (size >= least && size <= most) continue;
        throw new StorageError(`${decodeURIComponent(this.#run)} went on elsewhere while the server was away`, "stop here, and go on from what is saved there");
      }
    } catch (error) {
      hold.release();
      throw error;
    }
  }

  #file(path: string): string {
    return `${this.#run}/files/${encoded(path)}`;
  }

  async list(): Promise<FileEntry[]> {
    const { files } = await this.#api.json("GET", this.#run);
    return (files as { path: string; bytes: number; modified: number | string }[]).map(({ path, bytes, modified }) =>
      ({ path, bytes, modified: typeof modified === "number" ? modified : Date.parse(modified) }));
  }

  async size(path: string): Promise<number | null> {
    return (await this.list()).find((file) => file.path === path)?.bytes ?? null;
  }

  async read(path: string, from = 0, to?: number): Promise<Bytes> {
    if (to !== undefined && to <= from) return new Uint8Array(0);
    const range = from === 0 && to === undefined ? {} : { Range: `bytes=${from}-${to === undefined ? "" : to - 1}` };
    const response = await this.#api.ask("GET", this.#file(path), undefined, range);
    return new Uint8Array(await response.arrayBuffer());
  }

  async blob(path: string): Promise<Blob> {
    if ((await this.size(path)) === null) throw missing(path);
    return (await this.#api.ask("GET", this.#file(path))).blob();
  }

  async write(path: string, content: Chunks): Promise<void> {
    const pieces: Bytes[] = [];
    for await (const piece of content) pieces.push(piece);
    await this.#api.ask("PUT", this.#file(path), new Blob(pieces), await this.#held());
  }

  async append(path: string, at: number, content: Bytes): Promise<void> {
    const held = await this.#held();
    const end = at + content.length;
    this.#ends.set(path, [at, Math.max(end, this.#ends.get(path)?.[1] ?? 0)]);
    await this.#api.ask("PATCH", this.#file(path), content, { ...held, "X-Offset": String(at) });
    this.#ends.set(path, [end, end]);
  }

  /** A file of a checkpoint stays: what is written next replaces the whole folder. */
  async remove(path: string): Promise<void> {
    if (path.startsWith("checkpoints/") && path.split("/").length > 2) return;
    await this.#api.ask("DELETE", this.#file(path), undefined, await this.#held());
  }
}
