// session.svelte.ts: the training of this tab: what was chosen, what the worker told, and what the page may ask.
//
// One for all pages: a change of page keeps it, and the worker goes on. A worker that ends is replaced, and its
// run goes on from the last snapshot. Read next: worker/job.ts.
import type { Settings } from "../../runtime/tables.ts";
import type {
  EngineChoice, Facts, FromWorker, MetricLine, Movement, Phase, Refusal, SampleLine, Speed, StorePlace, TextSource, ToWorker, Verdict,
} from "../../worker/protocol.ts";
import { askToKeep } from "../../storage/keep.ts";
import { Desk } from "../site/desk.ts";
import { Curve } from "./curve.ts";

export interface Wish {
  readonly settings: Settings;
  readonly text: TextSource;
  readonly engine: EngineChoice;
  readonly place: StorePlace;
}

const DEATHS = 3; // of the worker, with no snapshot in between, before a run is given up
const KEPT_NOTICES = 4;

const OF_A_RUN: ReadonlySet<FromWorker["kind"]> = new Set(["started", "phase", "progress", "sample", "saved", "movement", "recovered", "engine", "verdict"]);
const ASKED: ReadonlySet<ToWorker["kind"]> = new Set(["train", "go-on"]);
/** Whether a message is about the run that the worker has at work. */
const ofARun = (message: FromWorker): boolean => OF_A_RUN.has(message.kind) || (message.kind === "failed" && ASKED.has(message.about));

class Session {
  speed = $state.raw<Speed | null>(null);
  /** Null before anything was started. */
  phase = $state<Phase | null>(null);
  done = $state(0);
  of = $state(0);
  run = $state("");
  place = $state<StorePlace>("tab");
  settings = $state.raw<Settings>({});
  facts = $state.raw<Facts | null>(null);
  refusal = $state.raw<Refusal | null>(null);
  examined = $state.raw<Facts | null>(null);
  examining = $state(false);
  info = $state.raw<Readonly<Record<string, string | number>>>({});
  step = $state(0);
  steps = $state(0);
  last = $state.raw<MetricLine | null>(null);
  samples = $state.raw<readonly SampleLine[]>([]);
  verdict = $state.raw<Verdict | null>(null);
  movement = $state.raw<Movement | null>(null);
  saved = $state(0);
  notices = $state.raw<readonly string[]>([]);
  problem = $state.raw<Refusal | null>(null);
  /** Grows with every change of the curve. */
  version = $state(0);
  readonly curve = new Curve();
  #desk: Desk | null = null;
  #engine: EngineChoice = "auto";
  #deaths = 0;
  readonly #passing = new Set<string>(); // notices that hold until a snapshot is saved
  #id = 0;
  #measuring = false;
  #watched = false;
  #turn = 0; // of the run that was asked for last
  #begun = false; // until then the worker tells of the run before, which was left
  #wish: Wish | null = null; // was asked about last

  get running(): boolean {
    return this.phase !== null && !["stopped", "finished", "paused"].includes(this.phase);
  }

  /** Whether a run is there, at work or not. */
  get open(): boolean {
    return this.phase !== null && this.phase !== "stopped";
  }

  /** Finds out how fast this device is; once. */
  measure(): void {
    if (this.speed !== null || this.#measuring || this.open) return;
    this.#measuring = true;
    this.#worker().post({ kind: "probe" });
  }

  /** Asks what is known of a run before it starts; the answer to the last question counts. */
  examine(wish: Wish): void {
    this.examining = true;
    this.#wish = wish;
    this.#worker().post({ kind: "examine", id: ++this.#id, settings: plain(wish.settings), text: wish.text, engine: wish.engine });
  }

  /** Begins a run; a run that is at work is not put away for it: that takes pausing or stopping. */
  start(wish: Wish): void {
    if (this.running) return;
    this.#fresh();
    void askToKeep();
    this.#engine = wish.engine;
    this.#worker().post({ kind: "train", settings: plain(wish.settings), text: wish.text, engine: wish.engine, place: wish.place, turn: this.#next() });
  }

  /** Goes on with a run that is kept, unless one is at work; `more` steps beyond its last one. */
  goOn(run: string, place: StorePlace, more = 0, engine: EngineChoice = "auto"): void {
    if (this.running) return;
    this.#fresh();
    this.#engine = engine;
    this.#worker().post({ kind: "go-on", run, place, engine, more, turn: this.#next() });
  }

  #next(): number {
    this.#begun = false;
    return ++this.#turn;
  }

  pause(): void {
    this.#tell({ kind: "pause" });
  }

  resume(): void {
    this.#tell({ kind: "resume" });
  }

  stop(): void {
    this.#tell({ kind: "stop" });
  }

  more(steps: number): void {
    this.verdict = null;
    this.#tell({ kind: "more", steps });
  }

  /** Back to the choices; the run is kept. */
  leave(): void {
    this.#tell({ kind: "stop" });
    this.#next();
    this.phase = null;
    this.problem = null;
    this.notices = [];
  }

  dismiss(notice: string): void {
    this.notices = this.notices.filter((one) => one !== notice);
  }

  #tell(message: ToWorker): void {
    this.#desk?.post(message);
  }

  #fresh(): void {
    this.phase = "opening";
    this.problem = null;
    this.verdict = null;
    this.movement = null;
    this.notices = [];
    this.samples = [];
    this.last = null;
    this.facts = null;
    [this.step, this.steps, this.done, this.of, this.saved] = [0, 0, 0, 0, 0];
    this.run = "";
    this.curve.clear();
    this.version++;
    this.#deaths = 0;
  }

  #worker(): Desk {
    this.#watch();
    this.#desk ??= new Desk({ told: (message) => this.#told(message), lost: (why) => this.#lost(why) });
    return this.#desk;
  }

  /** A tab that is put away may not come back: what is trained is saved then. */
  #watch(): void {
    if (this.#watched) return;
    this.#watched = true;
    document.addEventListener("visibilitychange", () => {
      if (document.hidden && this.phase === "training") this.#tell({ kind: "save" });
    });
  }

  #lost(why: string): void {
    this.#desk = null;
    this.#deaths++;
    const measuring = this.#measuring;
    this.#measuring = false;
    const worked = this.running || this.phase === "paused";
    if (!worked) {
      if (this.#deaths > DEATHS) {
        this.refusal = { message: `the training worker does not start: ${why}`, hint: "reload the page" };
        this.examining = false;
        return;
      }
      if (measuring) this.measure();
      if (this.examining && this.#wish) this.examine(this.#wish);
      return;
    }
    if (this.run === "" || this.#deaths > DEATHS) {
      this.problem = { message: `the training was lost: ${why}`, hint: this.run ? `run ${this.run} is kept on the Runs page` : "start it again" };
      this.phase = "stopped";
      return;
    }
    this.#note(`The worker was lost (${why}) at step ${this.step}; the run goes on from its last snapshot, and ${this.step - this.saved} steps are done again.`);
    this.phase = "opening";
    this.#worker().post({ kind: "go-on", run: this.run, place: this.place, engine: this.#engine, more: 0, turn: this.#next() });
  }

  #note(message: string): void {
    this.notices = [...this.notices.filter((one) => one !== message), message].slice(-KEPT_NOTICES);
  }

  #told(message: FromWorker): void {
    if (!this.#begun && ofARun(message)) return;
    switch (message.kind) {
      case "begun":
        this.#begun = message.turn === this.#turn;
        break;
      case "speed":
        this.speed = message.speed;
        break;
      case "facts":
        if (message.id !== this.#id) break;
        this.examining = false;
        this.examined = message.facts;
        this.refusal = message.refusal;
        break;
      case "started":
        [this.run, this.place, this.settings, this.facts, this.info] = [message.run, message.place, message.settings, message.facts, message.info];
        this.step = this.saved = message.step;
        this.steps = Number(message.settings["training.steps"]);
        this.samples = message.samples;
        this.curve.clear();
        this.curve.push(message.history);
        this.last = message.history.at(-1) ?? null;
        this.version++;
        break;
      case "phase":
        [this.phase, this.done, this.of] = [message.phase, message.done, message.of];
        if (message.phase === "stopped" && this.run === "") this.phase = null; // before there was anything to keep
        break;
      case "progress":
        [this.step, this.steps] = [message.step, message.steps];
        this.last = message.lines.at(-1) ?? this.last;
        this.curve.push(message.lines);
        this.version++;
        break;
      case "sample":
        this.samples = [...this.samples, message.sample];
        break;
      case "saved":
        this.saved = message.step;
        for (const notice of this.#passing) this.dismiss(notice);
        this.#passing.clear();
        this.#deaths = 0;
        break;
      case "movement":
        this.movement = message.movement;
        break;
      case "recovered":
        this.#note(`The engine was lost at step ${message.at} (${message.why}); going on from step ${message.from}, ${message.at - message.from} steps are done again.`);
        this.step = message.from;
        this.curve.cutBack(message.from);
        this.samples = this.samples.filter((sample) => sample.step <= message.from);
        this.version++;
        break;
      case "engine":
        this.info = message.info;
        break;
      case "verdict":
        this.verdict = message.verdict;
        break;
      case "notice":
        if (message.until === "saved") this.#passing.add(message.message);
        this.#note(message.message);
        break;
      case "failed":
        this.#measuring = false;
        if (message.about === "probe") break;
        this.problem = message.refusal;
        this.phase = this.run === "" ? null : "stopped";
        break;
      default:
        break;
    }
  }
}

/** A plain object: state of Svelte cannot be sent to a worker. */
const plain = (settings: Settings): Settings => JSON.parse(JSON.stringify(settings)) as Settings;

export const session = new Session();
