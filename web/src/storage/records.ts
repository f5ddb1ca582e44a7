// records.ts: files of JSON lines (runs/records.py): appended while training, cut back on resume. A torn last
// line is not data: reading leaves it out and appending removes it first.
import { DAMAGED, StorageError } from "./errors.ts";
import type { Bytes, Files } from "./files.ts";
import { readObject, utf8, writeJson } from "./text_forms.ts";
import type { Json } from "./text_forms.ts";

const NEWLINE = 10;
const MOST_LINES = 2_000_000; // more would fill the memory, and no run writes them

export class Records {
  readonly #files: Files;
  readonly path: string;
  #end: number | null = null;

  constructor(files: Files, path: string) {
    this.#files = files;
    this.path = path;
  }

  /** All whole lines. Throws a StorageError that names a damaged one by its number. */
  async read(): Promise<Json[]> {
    const content = await this.#content();
    let lines = 0;
    for (const byte of content) if (byte === NEWLINE) lines++;
    if (lines > MOST_LINES) throw new StorageError(`${this.path} has more than ${MOST_LINES} lines`, DAMAGED);
    return [...linesOf(content, this.path)].map(({ record }) => record);
  }

  async append(records: readonly Json[]): Promise<void> {
    if (records.length === 0) return;
    const cleared = this.#end !== null && !this.#files.gathers && this.#end > ((await this.#files.size(this.path)) ?? 0); // under this page
    if (this.#end === null || cleared) this.#end = (await this.#content()).lastIndexOf(NEWLINE) + 1;
    const text = utf8(records.map((record) => `${writeJson(record)}\n`).join(""));
    await this.#files.append(this.path, this.#end, text);
    this.#end += text.length;
  }

  /** Removes the lines beyond a step, and a torn one. */
  async cutBack(step: number): Promise<void> {
    const content = await this.#content();
    this.#end = 0;
    for (const { end, record } of linesOf(content, this.path)) {
      if (typeof record["step"] !== "number") throw new StorageError(`${this.path}: a line has no whole number as step`, DAMAGED);
      if (record["step"] > step) break;
      this.#end = end;
    }
    if (this.#end < content.length) await this.#files.append(this.path, this.#end, new Uint8Array(0));
  }

  async #content(): Promise<Bytes> {
    return (await this.#files.size(this.path)) === null ? new Uint8Array(0) : this.#files.read(this.path);
  }
}

function* linesOf(content: Bytes, source: string): Generator<{ end: number; record: Json }> {
  let [start, number] = [0, 0];
  for (let at = content.indexOf(NEWLINE); at >= 0; at = content.indexOf(NEWLINE, start)) {
    yield { end: at + 1, record: readObject(content.subarray(start, at), `${source}, line ${++number}`) };
    start = at + 1;
  }
}
