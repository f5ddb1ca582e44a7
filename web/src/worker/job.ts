// job.ts: one training run in this worker, from its first step or a snapshot to its end, and beyond.
//
// What this is: the order of things: steps, evaluations, samples, snapshots, pauses, and what happens
// when the engine is lost. Step s is a function of (settings, seed, s) and of the state before it, so a
// resumed run computes what an undisturbed one would have computed.
// What this is not: arithmetic, the learning rate, which windows are read (the engine, the control
// module), or files (storage/).
import { EngineLost } from "../runtime/engine.ts";
import type { Engine, StepResult, Tensors } from "../runtime/engine.ts";
import { number } from "../runtime/program.ts";
import type { Statistics } from "../runtime/statistics.ts";
import type { Settings } from "../runtime/tables.ts";
import { trainStep } from "../runtime/training.ts";
import { Breathing } from "./breath.ts";
import { openTraining, tokensPerStep } from "./engines.ts";
import type { Choice, Place } from "./engines.ts";
import { Outbox } from "./outbox.ts";
import { Judge } from "./judge.ts";
import { evaluate } from "./measure.ts";
import { movementOf } from "./movement.ts";
import type { Facts, MetricLine, StorePlace } from "./protocol.ts";
import { refusalOf, Refused } from "./refusal.ts";
import { Samples } from "./samples.ts";
import { siteOf } from "./site.ts";
import { Stopwatch } from "./stopwatch.ts";
import type { RunHandle, Snapshot } from "./store.ts";
import type { Corpus } from "./text.ts";

const BREATH_MS = 40; // between two looks at what the page wants
const RETRY_MS = 5000; // until what could not be saved is saved again, while nothing is trained
const LOSSES = 3; // of the engine, with no snapshot in between, before a run is given up

export interface JobParts {
  readonly place: Place;
  readonly storePlace: StorePlace;
  readonly run: RunHandle;
  readonly statistics: Statistics;
  readonly settings: Settings;
  readonly corpus: Corpus;
  readonly choice: Choice;
  /** Open for these settings; the job closes it. */
  readonly engine: Engine;
  readonly facts: Facts;
  /** The snapshot to go on from, already read. */
  readonly first: Snapshot | null;
  readonly outbox: Outbox;
}

type Wish = "go" | "pause" | "stop";

export class Job {
  readonly #parts: JobParts;
  readonly #outbox: Outbox;
  readonly #judge: Judge;
  #first: Snapshot | null;
  #settings: Settings;
  #choice: Choice;
  #threads: number;
  #engine: Engine;
  #samples!: Samples;
  #step = 0;
  #val: number | null = null;
  #best: number | null = null;
  #watch = new Stopwatch();
  #saved = -1;
  #savedAt = 0;
  #losses = 0;
  #wish: Wish = "go";
  #wake: (() => void) | null = null;
  #more = 0;
  readonly #breathing = new Breathing(BREATH_MS);

  constructor(parts: JobParts) {
    this.#parts = parts;
    this.#outbox = parts.outbox;
    this.#first = parts.first;
    this.#settings = parts.settings;
    this.#choice = parts.choice;
    this.#engine = parts.engine;
    this.#threads = number(parts.settings, "engine.threads");
    this.#judge = new Judge(parts.statistics, parts.corpus, parts.facts.lines);
  }

  /** Trains to the last step, waits for what comes next there, and returns when it was stopped. */
  async run(): Promise<void> {
    try {
      await this.#surviving(() => this.#begin());
      await this.#started();
      for (;;) {
        await this.#surviving(() => this.#train());
        if (this.#wants("stop")) break;
        if (this.#step >= this.#steps) await this.#end();
        await this.#asked();
        if (this.#wants("stop")) break;
      }
      await this.#surviving(() => this.#snapshot());
      this.#outbox.phase("stopped");
    } finally {
      this.#outbox.flush();
      await this.#parts.run.close();
      await this.#engine.close().catch(() => {});
    }
  }

  pause(): void {
    if (this.#wish === "go") this.#wish = "pause";
  }

  resume(): void {
    this.#wish = "go";
    this.#wake?.();
  }

  stop(): void {
    this.#wish = "stop";
    this.#wake?.();
  }

  /** Makes a snapshot after the next step. */
  save(): void {
    this.#savedAt = -Infinity;
  }

  /** Goes on beyond the last step, or sets the last step further away. */
  more(steps: number): void {
    this.#more += steps;
    this.resume();
  }

  /** Asked afresh: messages come in between any two steps. */
  #wants = (wish: Wish): boolean => this.#wish === wish;

  get #steps(): number {
    return number(this.#settings, "training.steps");
  }

  // ---- opening, losing and going on ---------------------------------------------------------------

  async #reopen(): Promise<void> {
    this.#outbox.opening();
    this.#engine = await openTraining(this.#parts.place, this.#settings, this.#choice, this.#threads, this.#outbox.opening);
    await this.#begin();
  }

  /** Brings the engine to the run's newest snapshot, or to its first values. */
  async #begin(): Promise<void> {
    const { place, corpus, run } = this.#parts;
    const found = this.#first ?? (await run.latest());
    this.#first = null;
    if (found === null) {
      await this.#engine.initialize(number(this.#settings, "training.seed"));
      this.#step = 0;
      this.#val = this.#best = null;
    } else {
      await this.#engine.load(found.state.params, found.state.m, found.state.v);
      this.#step = found.step;
      this.#val = found.trainerState.valLoss;
      this.#best = found.trainerState.bestValLoss;
    }
    this.#watch = new Stopwatch(found?.trainerState.elapsedS);
    await run.startFrom(this.#step);
    this.#saved = this.#step;
    this.#savedAt = performance.now();
    this.#samples = new Samples(this.#engine, siteOf(place.tables), this.#settings, corpus);
  }

  async #started(): Promise<void> {
    const { run, facts, storePlace } = this.#parts;
    this.#outbox.tell({
      kind: "started",
      run: run.name,
      place: storePlace,
      settings: this.#settings,
      step: this.#step,
      facts: { ...facts, bytes: this.#engine.bytes },
      info: this.#info,
      history: await run.metrics(),
      samples: await run.samples(),
    });
  }

  /** What runs, and on a GPU how many dispatches a step is. */
  get #info(): Readonly<Record<string, string | number>> {
    const { dispatches } = this.#engine as { readonly dispatches?: number };
    return dispatches === undefined ? this.#engine.info : { ...this.#engine.info, "dispatches a step": dispatches };
  }

  /** Does the work; when the engine is lost meanwhile, opens another one, goes back to the last snapshot, and returns. */
  async #surviving(work: () => Promise<void>): Promise<void> {
    try {
      await work();
    } catch (error) {
      if (!(error instanceof EngineLost)) throw error;
      await this.#recover(error, this.#step);
    }
  }

  async #recover(loss: EngineLost, at: number): Promise<void> {
    this.#losses++;
    if (this.#losses > LOSSES) {
      throw new Refused(`the engine was lost ${this.#losses} times in a row: ${loss.message}`, "the last snapshot is kept; try the other engine or a smaller preset");
    }
    await this.#engine.close().catch(() => {});
    const onGpu = this.#choice.engine === "webgpu";
    if (!onGpu) this.#threads = 1;
    else if (this.#losses > 1) this.#choice = { engine: "wasm", reason: "the GPU was lost twice", adapter: null };
    try {
      await this.#reopen();
    } catch (error) {
      // A GPU that was reset may not come back, or be lost again while it is set up; WebAssembly is always there.
      if (!onGpu && !(error instanceof EngineLost)) throw error;
      return this.#recover(error instanceof EngineLost ? error : loss, at);
    }
    this.#outbox.tell({ kind: "recovered", at, from: this.#step, why: loss.message });
    this.#outbox.tell({ kind: "engine", info: this.#info, reason: this.#choice.reason });
  }

  // ---- the loop ---------------------------------------------------------------------------------

  async #train(): Promise<void> {
    const { corpus } = this.#parts;
    await this.#applyMore();
    const pending: { step: number; lr: number }[] = [];
    let taken = performance.now();
    let { aside } = this.#watch;
    const take = async (all: boolean): Promise<void> => {
      do {
        const results = await this.#engine.results(all);
        if (results.length === 0 && !all) return;
        const now = performance.now();
        const ms = now - taken - (this.#watch.aside - aside);
        [taken, aside] = [now, this.#watch.aside];
        const speed = (results.length * tokensPerStep(this.#settings)) / Math.max(ms / 1000, 1e-9);
        for (const result of results) await this.#took(result, pending.shift(), speed);
        if (results.length === 0) await this.#breathing.now();
      } while (all && pending.length > 0);
    };
    if (this.#step < this.#steps) this.#outbox.phase("training");
    while (this.#step < this.#steps && this.#wish === "go") {
      this.#step++;
      const before = this.#looksAtMovement ? (await this.#engine.state()).params : null;
      const lr = await trainStep(this.#engine, this.#settings, corpus.train, this.#step);
      pending.push({ step: this.#step, lr });
      const stands = this.#step === this.#steps || this.#due("training.eval_every") || this.#due("training.sample_every");
      await take(stands);
      if (before !== null) await this.#watch.setAside(() => this.#tellMovement(before));
      if (stands || this.#samples.glimpseIsDue()) {
        await take(true);
        await this.#watch.setAside(() => this.#sample(stands));
      }
      if (performance.now() - this.#savedAt > 1000 * this.#site.snapshot_s) {
        await take(true);
        await this.#watch.setAside(() => this.#snapshot());
      }
      await this.#breathing.now();
    }
    await take(true);
    this.#outbox.flush();
  }

  /** With every evaluation, for models that are quickly read. */
  get #looksAtMovement(): boolean {
    return this.#parts.facts.parameters <= this.#site.movement_most && this.#due("training.eval_every");
  }

  async #tellMovement(before: Tensors): Promise<void> {
    const { params } = await this.#engine.state();
    this.#outbox.tell({ kind: "movement", movement: movementOf(this.#parts.statistics, this.#step, params, before) });
  }

  get #site(): ReturnType<typeof siteOf> {
    return siteOf(this.#parts.place.tables);
  }

  #due(setting: string): boolean {
    const every = number(this.#settings, setting);
    return every > 0 && this.#step % every === 0;
  }

  async #took(result: StepResult, of: { step: number; lr: number } | undefined, speed: number): Promise<void> {
    if (of === undefined) return;
    const { step, lr } = of;
    if (!result.finite) {
      throw new Refused(
        `step ${step}: a loss or gradient is not a finite number`,
        `the last snapshot is step ${Math.max(0, this.#saved)}; try a lower learning rate or a longer warm-up`,
      );
    }
    const last = step === this.#steps;
    this.#val = null;
    const every = number(this.#settings, "training.eval_every");
    if (last || (every > 0 && step % every === 0)) await this.#watch.setAside(() => this.#evaluate(last));
    else if (step % number(this.#settings, "training.log_every")) return;
    const line: MetricLine = {
      step, loss: result.loss, val_loss: this.#val, lr, grad_norm: result.gradNorm,
      tokens_per_second: speed, elapsed_s: this.#watch.elapsed,
    };
    await this.#parts.run.append([line]);
    this.#outbox.line(line, this.#steps);
  }

  async #evaluate(last: boolean): Promise<void> {
    const { corpus, statistics } = this.#parts;
    if (corpus.val.length === 0) return;
    const windows = number(this.#settings, last ? "training.final_windows" : "training.eval_windows");
    const found = await evaluate(this.#engine, statistics, corpus, this.#settings, windows, async (done, of) => {
      this.#outbox.phase("evaluating", done, of);
      await this.#breathing.now();
      return this.#wish !== "stop";
    });
    if (!last) this.#outbox.phase("training");
    if (found === null) return;
    this.#val = found;
    this.#best = Math.min(found, this.#best ?? found);
  }

  async #sample(recorded: boolean): Promise<void> {
    const due = recorded && (this.#due("training.sample_every") || this.#step === this.#steps);
    const line = await this.#samples.along(this.#step, !due, async () => {
      await this.#breathing.now();
      return this.#wish === "go" || (due && this.#wish === "pause");
    });
    if (line === null) return;
    if (due) await this.#parts.run.appendSample(line);
    this.#outbox.tell({ kind: "sample", sample: line });
  }

  async #snapshot(): Promise<void> {
    this.#savedAt = performance.now();
    if (this.#saved === this.#step) return;
    this.#outbox.phase("saving");
    try {
      await this.#parts.run.saveCheckpoint(await this.#engine.state(), {
        step: this.#step,
        engine: this.#engine.name,
        engineInfo: this.#engine.info,
        threads: Number(this.#engine.info["threads"] ?? 1),
        valLoss: this.#val,
        bestValLoss: this.#best,
        elapsedS: this.#watch.elapsed,
      });
      this.#saved = this.#step;
      this.#losses = 0;
      this.#outbox.tell({ kind: "saved", step: this.#step });
    } catch (error) {
      if (error instanceof EngineLost) throw error;
      const { message, hint } = refusalOf(error);
      this.#outbox.tell({ kind: "notice", until: "saved", message: `the snapshot of step ${this.#step} was not saved: ${message}${hint && `; ${hint}`}` });
    }
    if (this.#wish === "go" && this.#step < this.#steps) this.#outbox.phase("training");
  }

  // ---- the end, and what comes after it ------------------------------------------------------------

  async #end(): Promise<void> {
    await this.#surviving(() => this.#snapshot());
    if (this.#step < this.#steps) return; // the engine was lost, and some steps are to be done again
    await this.#surviving(async () => {
      const texts = await this.#samples.forVerdict(async (done, of) => {
        this.#outbox.phase("judging", done, of);
        await this.#breathing.now();
        return this.#wish === "go" && this.#more === 0;
      });
      if (texts === null) return;
      const preset = String(this.#settings["preset"]);
      const goOn = (): boolean => this.#wants("go") && this.#more === 0;
      const verdict = await this.#judge.verdict(texts, this.#val, this.#best, preset, this.#settings, goOn);
      if (verdict !== null) this.#outbox.tell({ kind: "verdict", verdict });
    });
    if (this.#step >= this.#steps) this.#outbox.phase("finished");
  }

  async #applyMore(): Promise<void> {
    if (this.#more === 0) return;
    this.#settings = { ...this.#settings, "training.steps": Math.max(this.#step, this.#steps) + this.#more };
    this.#more = 0;
    await this.#parts.run.changeSettings(this.#settings);
  }

  /** Waits while paused, or at the end, for the page; what could not be saved is tried again meanwhile. */
  async #asked(): Promise<void> {
    if (this.#wish === "pause") {
      await this.#surviving(() => this.#snapshot());
      if (this.#wish === "pause") this.#outbox.phase("paused");
    }
    while (this.#waits) {
      const again = this.#saved === this.#step ? undefined : setTimeout(() => this.#wake?.(), RETRY_MS);
      await new Promise<void>((wake) => (this.#wake = wake));
      this.#wake = null;
      clearTimeout(again);
      if (!this.#waits || this.#saved === this.#step) continue;
      await this.#surviving(() => this.#snapshot());
      if (this.#waits) this.#outbox.phase(this.#wish === "pause" ? "paused" : "finished");
    }
  }

  get #waits(): boolean {
    return this.#wish === "pause" || (this.#wish === "go" && this.#step >= this.#steps && this.#more === 0);
  }
}
