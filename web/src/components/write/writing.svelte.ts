// writing.svelte.ts: the text that a model writes for this page, and the worker that writes it.
import type { Attention, FromWorker, ModelSource, SamplingChoice, WrittenToken } from "../../worker/protocol.ts";
import { Desk } from "../site/desk.ts";
import { LetterMaker, tailStart } from "./letters.ts";
import type { Letter } from "./letters.ts";

interface Wish {
  readonly model: ModelSource;
  readonly prompt: string;
  readonly sampling: SamplingChoice;
  readonly seed: number;
  readonly tokens: number;
  readonly stop: readonly string[];
}

type About = Extract<FromWorker, { kind: "model" }>;

const LETTERS_A_SECOND = 140; // so that it can be read along
const PROMPT_SHOWN = 2000; // tokens at its end that become letters, of a prompt that may be a book
const CATCH_UP_S = 2; // at most so far behind the model

class Writing {
  letters = $state.raw<readonly Letter[]>([]);
  /** How many of the letters are shown. */
  shown = $state(0);
  busy = $state(false);
  ended = $state<"" | "length" | "stop" | "stopped">("");
  about = $state.raw<About | null>(null);
  firstMs = $state(0);
  perSecond = $state(0);
  problem = $state.raw<{ message: string; hint: string } | null>(null);
  attention = $state.raw<Attention | null>(null);
  wish: Wish | null = null;
  #desk: Desk | null = null;
  #id = 0;
  #maker = new LetterMaker();
  #all: Letter[] = [];
  #tokens: number[] = [];
  #prompt = 0;
  #head = ""; // of the prompt, before the first letter
  #asked = 0;
  #frame = 0;
  #last = 0;
  #due = 0;

  write(wish: Wish): void {
    this.wish = wish;
    this.#tokens = Array.from(new TextEncoder().encode(wish.prompt));
    this.#prompt = this.#tokens.length;
    const start = tailStart(this.#tokens, PROMPT_SHOWN);
    this.#head = new TextDecoder().decode(Uint8Array.from(this.#tokens.slice(0, start)));
    this.#maker = new LetterMaker(start);
    this.attention = null;
    this.#all = this.#tokens.slice(start).flatMap((token) => this.#maker.push(token, null));
    this.letters = [...this.#all];
    this.shown = this.#all.length;
    this.#due = this.shown;
    this.busy = true;
    this.ended = "";
    this.problem = null;
    [this.firstMs, this.perSecond] = [0, 0];
    this.#start().post({ kind: "write", id: ++this.#id, ...plain(wish) });
  }

  /** At once: what is not shown yet is not shown any more. */
  stop(): void {
    this.#desk?.post({ kind: "stop-writing" });
    this.#id++;
    this.letters = this.#all.slice(0, this.shown);
    this.#all = [...this.letters];
    this.busy = false;
    this.ended = "stopped";
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
  }

  /** Asks what the heads of a layer looked at before a letter. */
  attend(letter: Letter, layer: number): void {
    if (this.wish === null || letter.at === 0) {
      this.attention = null;
      return;
    }
    const tokens = this.#tokens.slice(0, letter.at);
    const prompt = Math.min(this.#prompt, letter.at);
    this.#start().post({ kind: "attend", id: ++this.#asked, model: plain(this.wish).model, tokens, prompt, layer });
  }

  get text(): string {
    return this.#head + this.letters.slice(0, this.shown).map((letter) => letter.text).join("");
  }

  #start(): Desk {
    this.#desk ??= new Desk({
      told: (message) => this.#told(message),
      lost: (why) => {
        this.#desk = null;
        this.busy = false;
        this.problem = { message: `the writer was lost: ${why}`, hint: "press Write to start it again" };
      },
    });
    return this.#desk;
  }

  #told(message: FromWorker): void {
    if (message.kind === "attention") {
      if (message.id === this.#asked) this.attention = message.attention;
      return;
    }
    if ("id" in message && message.id !== this.#id) return;
    if (message.kind === "model") this.about = message;
    else if (message.kind === "written") this.#written(message.tokens, message.firstMs, message.perSecond);
    else if (message.kind === "write-ended") this.#end(message.why);
    else if (message.kind === "failed") {
      this.busy = false;
      this.problem = message.refusal;
    }
  }

  #written(tokens: readonly WrittenToken[], firstMs: number, perSecond: number): void {
    for (const token of tokens) {
      this.#tokens.push(token.token);
      this.#all.push(...this.#maker.push(token.token, token));
    }
    this.letters = [...this.#all];
    [this.firstMs, this.perSecond] = [firstMs, perSecond];
    if (matchMedia("(prefers-reduced-motion: reduce)").matches || document.hidden) this.#show(this.#all.length);
    else this.#reveal();
  }

  #end(why: "length" | "stop" | "stopped"): void {
    this.ended = why;
    if (this.shown >= this.#all.length) this.busy = false;
    else this.#reveal();
  }

  #show(many: number): void {
    this.shown = Math.min(many, this.#all.length);
    this.#due = Math.max(this.#due, this.shown);
    if (this.shown >= this.#all.length && this.ended !== "") this.busy = false;
  }

  /** Shows letter after letter: never faster than one can read along, never far behind. */
  #reveal(): void {
    if (this.#frame) return;
    this.#last = performance.now();
    const step = (now: number): void => {
      const seconds = Math.min(0.25, Math.max(0, now - this.#last) / 1000);
      this.#last = now;
      const behind = this.#all.length - this.#due;
      this.#due += seconds * Math.max(LETTERS_A_SECOND, behind / CATCH_UP_S);
      this.#show(Math.ceil(this.#due));
      this.#frame = this.shown < this.#all.length || this.ended === "" ? requestAnimationFrame(step) : 0;
    };
    this.#frame = requestAnimationFrame(step);
  }
}

/** A plain object: state of Svelte cannot be sent to a worker. */
const plain = (wish: Wish): Wish => JSON.parse(JSON.stringify(wish)) as Wish;

export const writing = new Writing();
