// run_handle.ts: one open run: its lines, samples, checkpoints and text, in the folder that the terminal has too.
//
//     config.toml  metrics.jsonl  samples.jsonl  checkpoints/step-000500/...  corpus.txt (a text of its own)
//
// What this is: writing that a full disk cannot turn into lost work, and reading that never trusts a file.
// What this is not: the list of runs (run_store.ts) or a training loop.
import type { State } from "../runtime/engine.ts";
import type { Settings, Tables } from "../runtime/tables.ts";
import { checkpointBytes, checkpointFolders, folderOf, readCheckpoint, readState, restateCheckpoint, verify, writeCheckpoint } from "./checkpoint.ts";
import type { Checkpoint, CorpusIdentity, SnapshotFacts } from "./checkpoint.ts";
import { toToml } from "./config.ts";
import { CorpusMissing, StorageError, writeError } from "./errors.ts";
import type { Bytes, Files } from "./files.ts";
import { formsOf } from "./forms.ts";
import type { Release } from "./locks.ts";
import { Records } from "./records.ts";
import { hashOf } from "./sha256.ts";
import { Float, utf8 } from "./text_forms.ts";
import type { Json } from "./text_forms.ts";

/** One line of metrics.jsonl. */
export interface MetricLine {
  readonly step: number;
  readonly loss: number;
  readonly val_loss: number | null;
  readonly lr: number;
  readonly grad_norm: number;
  readonly tokens_per_second: number;
  readonly elapsed_s: number;
}

export interface SampleLine {
  readonly step: number;
  readonly prompt: string;
  readonly text: string;
}

export interface Latest extends Checkpoint {
  /** What a person should see: a damaged checkpoint was passed over. */
  readonly notices: readonly string[];
}

/** What a run asks of the place around it. */
export interface Surroundings {
  readonly tables: Tables;
  /** The text that the site brings along. */
  bundledText(): Promise<Bytes>;
  /** Bytes that may still be written; null when nobody knows. */
  room(): Promise<number | null>;
  /** `until`: what makes it untrue. */
  notice(message: string, until?: "saved"): void;
}

const FLUSH_MS = 1000;

export class RunHandle {
  readonly name: string;
  readonly files: Files;
  readonly #around: Surroundings;
  readonly #metrics: Records;
  readonly #samples: Records;
  readonly #release: Release;
  #settings: Settings;
  #corpus: CorpusIdentity | null;
  #waiting: { readonly records: Records; readonly record: Json }[] = [];
  #writing: Promise<void> = Promise.resolve();
  #timer: ReturnType<typeof setTimeout> | undefined;
  #failing = false;

  constructor(name: string, files: Files, settings: Settings, corpus: CorpusIdentity | null, around: Surroundings, release: Release) {
    this.name = name;
    this.files = files;
    this.#settings = settings;
    this.#corpus = corpus;
    this.#around = around;
    this.#release = release;
    this.#metrics = new Records(files, "metrics.jsonl");
    this.#samples = new Records(files, "samples.jsonl");
  }

  get settings(): Settings {
    return this.#settings;
  }

  /** Which text it is trained on; null for a model that came from elsewhere and was not trained here. */
  get corpusIdentity(): CorpusIdentity | null {
    return this.#corpus;
  }

  async metrics(): Promise<MetricLine[]> {
    return (await this.#metrics.read()).flatMap(metricsOf);
  }

  async samples(): Promise<SampleLine[]> {
    return (await this.#samples.read()).flatMap(sampleOf);
  }

  /** Adds lines; they are written within a second, and before each checkpoint. */
  async append(lines: readonly MetricLine[]): Promise<void> {
    const { metrics: keys } = formsOf(this.#around.tables);
    for (const line of lines) {
      const given = line as unknown as Record<string, number | null>;
      const value = (key: string): unknown => (key === "step" ? given[key] : given[key] == null ? null : new Float(given[key]));
      this.#wait(this.#metrics, Object.fromEntries(keys.map((key) => [key, value(key)])));
    }
  }

  async appendSample({ step, prompt, text }: SampleLine): Promise<void> {
    this.#wait(this.#samples, { step, prompt, text });
  }

  #wait(records: Records, record: Json): void {
    this.#waiting.push({ records, record });
    this.#timer ??= setTimeout(() => void this.flush(), FLUSH_MS);
  }

  /** Writes the lines that wait; when that fails, says so once and keeps them for later. */
  async flush(): Promise<void> {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    this.#writing = this.#writing.then(() => this.#write());
    await this.#writing;
  }

  async #write(): Promise<void> {
    try {
      for (const records of [this.#metrics, this.#samples]) {
        const lines = this.#waiting.filter((one) => one.records === records);
        await records.append(lines.map(({ record }) => record));
        this.#waiting = this.#waiting.filter((one) => !lines.includes(one));
      }
      this.#failing = false;
    } catch (error) {
      if (!this.#failing) {
        const { message, hint } = writeError(`write to run ${this.name}`, error);
        this.#around.notice(`${message}; training goes on and keeps the lines; ${hint}`, "saved");
      }
      this.#failing = true;
    }
  }

  /** Another configuration, such as more steps. */
  async changeSettings(settings: Settings): Promise<void> {
    const { run_config: name } = formsOf(this.#around.tables).names;
    await this.files.write(name, [utf8(toToml(this.#around.tables, settings))]);
    this.#settings = settings;
  }

  /**
   * Saves everything that resume needs, then removes the oldest checkpoints beyond those that are kept.
   * Throws a StorageError when it cannot be written; earlier checkpoints are whole, and the call can be repeated.
   */
  async saveCheckpoint(state: State, facts: SnapshotFacts): Promise<void> {
    await this.flush();
    const { tables } = this.#around;
    const need = checkpointBytes(tables, this.#settings);
    const action = `save the checkpoint of step ${facts.step} of run ${this.name}`;
    const folder = folderOf(facts.step);
    if (!this.files.gathers && await verify(this.files, folder, tables, false).then(() => true, () => false)) {
      return restateCheckpoint(this.files, tables, this.#settings, this.#corpus, facts); // the same step has the same tensors
    }
    const room = await this.#around.room();
    if (room !== null && room < need) throw writeError(action, new DOMException("", "QuotaExceededError"), need);
    try {
      const { run_config: config } = formsOf(tables).names;
      if (!this.files.gathers && (await this.files.size(config)) === null) await this.changeSettings(this.#settings); // the storage was cleared
      await writeCheckpoint(this.files, tables, this.#settings, this.#corpus, state, facts);
    } catch (error) {
      if (!this.files.gathers) await this.files.remove(folder).catch(() => undefined); // half of a checkpoint takes room for nothing
      throw writeError(action, error, need);
    }
    await this.#removeOldest();
  }

  async #removeOldest(): Promise<void> {
    const found = [...(await checkpointFolders(this.files))];
    const keep = Number(this.#settings["training.keep_checkpoints"]);
    const kept = new Set(found.slice(-keep).map(([, folder]) => folder));
    let best: { loss: number; folder: string } | undefined;
    for (const [, folder] of found) {
      const loss = await readState(this.files, folder, this.#around.tables).then((state) => state.valLoss, () => null);
      if (loss !== null && loss < (best?.loss ?? Infinity)) best = { loss, folder };
    }
    if (best !== undefined) kept.add(best.folder);
    for (const [, folder] of found) if (!kept.has(folder)) await this.#discard(folder);
  }

  /** The mark goes first: what a kill leaves is no checkpoint. */
  async #discard(folder: string): Promise<void> {
    await this.files.remove(`${folder}/${formsOf(this.#around.tables).names.hashes}`);
    await this.files.remove(folder);
  }

  /** The newest checkpoint whose hashes hold; null when there is none at all. Throws a StorageError when all are damaged. */
  async latest(): Promise<Latest | null> {
    const notices: string[] = [];
    for (const [step, folder] of [...(await checkpointFolders(this.files))].reverse()) {
      try {
        await verify(this.files, folder, this.#around.tables);
        const found = await readCheckpoint(this.files, folder, this.#around.tables);
        if (found.step !== step) throw new StorageError(`${folder} is of step ${found.step}`);
        this.#corpus = found.trainerState.corpus ?? this.#corpus;
        return { ...found, notices: notices.map((message) => `${message}; using ${folder}`) };
      } catch (error) {
        if (!(error instanceof StorageError)) throw error;
        notices.push(error.message);
      }
    }
    if (notices.length === 0) return null;
    throw new StorageError(`run ${this.name} has no checkpoint that is whole: ${notices[0]}`, "train again, or open its download again");
  }

  /** Makes the folder that of a run at a step: nothing beyond it, nothing half-written. Called before training goes on. */
  async startFrom(step: number): Promise<void> {
    const { hashes } = formsOf(this.#around.tables).names;
    for (const [at, folder] of await checkpointFolders(this.files)) {
      if (at > step || (await this.files.size(`${folder}/${hashes}`)) === null) await this.#discard(folder);
    }
    await this.#metrics.cutBack(step);
    await this.#samples.cutBack(step);
  }

  /** Whether the text is here: brought along by the site, or kept with the run. */
  async hasCorpus(): Promise<boolean> {
    const { names, bundled_corpus: bundled } = formsOf(this.#around.tables);
    if ((await this.files.size(names.corpus)) !== null) return true;
    const named = (this.#settings["data.corpus"] ?? []) as readonly string[];
    return this.#corpus === null ? named.length === 0 : this.#corpus.sha256 === bundled.sha256;
  }

  /** The whole text. Throws CorpusMissing when only its owner has it, a StorageError when it is not the run's text. */
  async corpus(): Promise<Bytes> {
    const { names } = formsOf(this.#around.tables);
    if ((await this.files.size(names.corpus)) !== null) {
      const text = await this.files.read(names.corpus);
      await this.#checkText(text, names.corpus);
      return text;
    }
    if (await this.hasCorpus()) return this.#around.bundledText();
    const named = (this.#settings["data.corpus"] ?? []) as readonly string[];
    throw new CorpusMissing(this.name, this.#corpus ?? { name: named.join(", "), sha256: "" });
  }

  /** Gives a run its text, which is kept with it. Throws a StorageError when it is another text. */
  async provideCorpus(text: Bytes): Promise<void> {
    await this.#checkText(text, "this text");
    await this.files.write(formsOf(this.#around.tables).names.corpus, [text]);
  }

  async #checkText(text: Bytes, what: string): Promise<void> {
    const wanted = this.#corpus?.sha256;
    const { sha256 } = await hashOf([text]);
    if (wanted !== undefined && sha256 !== wanted) {
      throw new StorageError(
        `${what} is not the text of run ${this.name}: its hash is ${sha256.slice(0, 12)}, wanted ${wanted.slice(0, 12)}`,
        "bring the text back as it was, or start a new run",
      );
    }
  }

  /** Writes what waits and gives the run back. */
  async close(): Promise<void> {
    await this.flush();
    clearTimeout(this.#timer);
    this.#release();
  }
}

/** A line from a file, of this page or from elsewhere; none where it says no step and loss. */
function metricsOf(record: Json): MetricLine[] {
  const value = (key: string): number | null => (Number.isFinite(record[key]) ? (record[key] as number) : null);
  const [step, loss] = [value("step"), value("loss")];
  if (step === null || loss === null) return [];
  const or = (key: string): number => value(key) ?? 0;
  return [{
    step, loss, val_loss: value("val_loss"), lr: or("lr"), grad_norm: or("grad_norm"),
    tokens_per_second: or("tokens_per_second"), elapsed_s: or("elapsed_s"),
  }];
}

function sampleOf({ step, prompt, text }: Json): SampleLine[] {
  return Number.isFinite(step) && typeof prompt === "string" && typeof text === "string" ? [{ step: step as number, prompt, text }] : [];
}
