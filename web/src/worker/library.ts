// library.ts: what this worker reads once and keeps: tables, modules, texts with their counting lines, models.
import { browserHost } from "../runtime/host_browser.ts";
import type { Host } from "../runtime/host.ts";
import { hasWasm } from "../runtime/features.ts";
import { number } from "../runtime/program.ts";
import { Statistics } from "../runtime/statistics.ts";
import { readTables } from "../runtime/tables.ts";
import type { Settings, Tables } from "../runtime/tables.ts";
import { formsOf } from "../storage/forms.ts";
import { unhurried } from "./judge.ts";
import type { CountingLine, TextSource } from "./protocol.ts";
import { Refused } from "./refusal.ts";
import { siteOf } from "./site.ts";
import type { Site } from "./site.ts";
import { corpusOf, joinFiles } from "./text.ts";
import type { Corpus } from "./text.ts";

type Bytes = Uint8Array<ArrayBuffer>;

export class Library {
  readonly host: Host;
  readonly data: string;
  readonly #kept = new Map<string, Promise<Bytes>>();
  readonly #modules = new Map<string, Promise<WebAssembly.Module>>();
  #tables: Promise<Tables> | undefined;
  #statistics: Promise<Statistics> | undefined;
  #lines: { readonly corpus: Corpus; readonly lines: readonly CountingLine[] } | undefined;
  #own: { readonly source: TextSource; readonly text: Bytes; readonly notices: readonly string[] } | undefined;

  constructor(data: string) {
    this.data = data;
    const host = browserHost(data);
    this.host = { ...host, read: (name) => this.read(name, () => host.read(name)) };
  }

  /** A file of data/, fetched once. */
  read(name: string, fetched = (): Promise<Bytes> => this.host.read(name)): Promise<Bytes> {
    let found = this.#kept.get(name);
    if (found === undefined) {
      found = fetched();
      found.catch(() => this.#kept.delete(name)); // the next one tries again
      this.#kept.set(name, found);
    }
    return found;
  }

  tables(): Promise<Tables> {
    this.#tables ??= this.read("posttrainllm.json").then((bytes) => readTables(new TextDecoder().decode(bytes)));
    this.#tables.catch(() => (this.#tables = undefined)); // here, too, the next one tries again
    return this.#tables;
  }

  async site(): Promise<Site> {
    return siteOf(await this.tables());
  }

  /** Throws Refused where there is no WebAssembly. */
  async module(name: string): Promise<WebAssembly.Module> {
    if (!hasWasm()) throw new Refused("this browser runs no WebAssembly", "a setting or a lockdown mode forbids it: allow it for this page, or take another browser");
    let found = this.#modules.get(name);
    if (found === undefined) {
      found = this.read(name).then((bytes) => WebAssembly.compile(bytes));
      found.catch(() => this.#modules.delete(name));
      this.#modules.set(name, found);
    }
    return found;
  }

  statistics(): Promise<Statistics> {
    this.#statistics ??= Promise.all([this.module("posttrain-control.wasm"), this.tables()]).then(
      ([module, tables]) => new Statistics(module, tables),
    );
    this.#statistics.catch(() => (this.#statistics = undefined));
    return this.#statistics;
  }

  /** The text of a source, in two parts. Throws Refused for files that are no text. */
  async corpus(source: TextSource, settings: Settings): Promise<Corpus> {
    const statistics = await this.statistics();
    const valFraction = number(settings, "data.val_fraction");
    if (source.kind === "bundled") {
      const { name, file } = formsOf(await this.tables()).bundled_corpus;
      return corpusOf(statistics, name, await this.read(file), valFraction, true);
    }
    if (this.#own?.source !== source) this.#own = { source, ...joinFiles(source.files, (await this.site()).text) };
    return corpusOf(statistics, source.name, this.#own.text, valFraction, false, this.#own.notices);
  }

  /** What counting reaches on a text; remembered for the last one. */
  async lines(corpus: Corpus, settings: Settings, goOn: () => boolean): Promise<readonly CountingLine[] | null> {
    const known = this.#lines;
    const same = known?.corpus.text.buffer === corpus.text.buffer && known.corpus.train.length === corpus.train.length;
    if (known !== undefined && same && known.corpus.text.length === corpus.text.length) return known.lines;
    const statistics = await this.statistics();
    const lines = await unhurried(statistics.counting(corpus.train, corpus.val, number(settings, "model.n_vocab")), goOn);
    if (lines !== null) this.#lines = { corpus, lines };
    return lines;
  }
}
