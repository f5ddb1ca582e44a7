// worker.ts: the Web Worker around it all: one message in, one action; errors become messages.
import type { Engine } from "../runtime/engine.ts";
import { number } from "../runtime/program.ts";
import type { RunHandle } from "../storage/index.ts";
import { breath } from "./breath.ts";
import { openTraining } from "./engines.ts";
import { examine, probe } from "./examine.ts";
import { Job } from "./job.ts";
import { Library } from "./library.ts";
import { Outbox } from "./outbox.ts";
import type { FromWorker, TextSource, ToWorker } from "./protocol.ts";
import { refusalOf } from "./refusal.ts";
import { openRuns } from "./runs.ts";
import { Writer } from "./writer.ts";

const post = (message: FromWorker): void => self.postMessage(message);
const notice = (message: string, until?: "saved"): void => post({ kind: "notice", message, ...(until && { until }) });

/** A run that the page asked for: what it wants of it while it is being opened, and its job from then on. */
interface Turn {
  wish: "resume" | "pause" | "stop";
  job: Job | null;
}

let library: Library;
let writer: Writer;
let turn: Turn = { wish: "stop", job: null };
let ended: Promise<void> = Promise.resolve();
let examined = 0;

async function perform(message: ToWorker): Promise<void> {
  switch (message.kind) {
    case "hello":
      return greet(message);
    case "write":
      return writer.write(message);
    case "attend":
      return writer.attend(message);
    case "stop-writing":
      return writer.stop();
    case "probe":
      return post({ kind: "speed", speed: await probe(library, notice) });
    case "examine":
      return examineFor(message);
    case "train":
    case "go-on":
      wish("stop");
      turn = { wish: "resume", job: null };
      ended = next(ended, turn, message);
      return;
    case "pause":
    case "resume":
    case "stop":
      return wish(message.kind);
    case "save":
      return turn.job?.save();
    case "more":
      return turn.job?.more(message.steps);
    default:
      return message satisfies never;
  }
}

async function greet({ data, lock }: Extract<ToWorker, { kind: "hello" }>): Promise<void> {
  library = new Library(data);
  writer = new Writer(library, post);
  const held = lock !== null && (await hold(lock));
  await library.tables();
  post({ kind: "ready", held });
}

/** Takes a lock that goes with this worker, whether it could: whoever then waits for it learns that the worker has ended. */
function hold(lock: string): Promise<boolean> {
  return new Promise((taken) => {
    const asked = navigator.locks.request(lock, () => {
      taken(true);
      return new Promise(() => {});
    });
    asked.catch(() => taken(false));
  });
}

async function examineFor(message: Extract<ToWorker, { kind: "examine" }>): Promise<void> {
  const turn = ++examined;
  await breath(); // of several in a row, the last one counts
  if (turn !== examined) return;
  try {
    const found = await examine(library, message.settings, message.text, message.engine, () => turn === examined);
    if (found !== null) post({ kind: "facts", id: message.id, facts: found.facts, refusal: null });
  } catch (error) {
    post({ kind: "facts", id: message.id, facts: null, refusal: refusalOf(error) });
  }
}

type Asked = Extract<ToWorker, { kind: "train" | "go-on" }>;

function wish(what: Turn["wish"]): void {
  turn.wish = what;
  turn.job?.[what]();
}

/** Trains when the run before has ended, however it ended; what goes wrong is told before the next one begins. */
async function next(before: Promise<void>, mine: Turn, message: Asked): Promise<void> {
  await before;
  post({ kind: "begun", turn: message.turn });
  try {
    await train(message, mine);
  } catch (error) {
    fail(message, error);
  }
}

async function train(message: Asked, mine: Turn): Promise<void> {
  const outbox = new Outbox(post);
  const unwanted = (): boolean => mine.wish === "stop";
  outbox.opening();
  const tables = await library.tables();
  const store = await openRuns(library, message.place, notice);
  const run = message.kind === "go-on" ? await store.open(message.run, "write") : null;
  let engine: Engine | null = null;
  try {
    const first = (await run?.latest()) ?? null;
    first?.notices.forEach((one) => notice(one));
    const wanted = run?.settings ?? (message.kind === "train" ? message.settings : {});
    const text = run === null ? textOf(message) : await ownText(run);
    const found = unwanted() ? null : await examine(library, wanted, text, message.engine, () => !unwanted());
    if (found === null) {
      await run?.close();
      return outbox.phase("stopped");
    }
    const { facts, corpus, choice } = found;
    const settings = { ...wanted, "engine.name": choice.engine };
    const place = { host: library.host, tables, notice };
    engine = await openTraining(place, settings, choice, number(settings, "engine.threads"), outbox.opening);
    const held = run ?? (await store.create(undefined, settings, { name: corpus.name, text: corpus.text, bundled: corpus.bundled }));
    mine.job = new Job({
      place, engine,
      statistics: await library.statistics(),
      storePlace: message.place,
      run: held,
      settings, corpus, choice, facts, first, outbox,
    });
    if (message.kind === "go-on" && message.more > 0) mine.job.more(message.more);
    mine.job[mine.wish]();
    await mine.job.run();
  } catch (error) {
    await run?.close();
    await engine?.close();
    throw error;
  } finally {
    mine.job = null;
  }
}

const textOf = (message: ToWorker): TextSource => (message.kind === "train" ? message.text : { kind: "bundled" });

/** The text of a run that goes on. Throws CorpusMissing when it is nowhere here. */
async function ownText(run: RunHandle): Promise<TextSource> {
  const name = run.corpusIdentity?.name ?? run.name;
  return { kind: "own", name, files: [{ name, bytes: await run.corpus() }] };
}

const fail = ({ kind }: ToWorker, error: unknown): void => post({ kind: "failed", about: kind, refusal: refusalOf(error) });

self.onmessage = (event: MessageEvent<ToWorker>) => {
  perform(event.data).catch((error: unknown) => fail(event.data, error));
};
