// training_job.ts: a short training run for the tests, in node and in Chromium alike.
import type { Host } from "../src/runtime/host.ts";
import type { ProgramSet } from "../src/runtime/program.ts";
import type { EngineName, Settings, Tables } from "../src/runtime/tables.ts";
import { trainStep } from "../src/runtime/training.ts";
import { openWasm } from "../src/runtime/wasm.ts";
import type { Build } from "../src/runtime/wasm.ts";
import { openWebGPU } from "../src/runtime/webgpu.ts";

export interface Job {
  readonly settings: Settings;
  /** Left out: wasm. */
  readonly engine?: EngineName;
  readonly steps: number;
  readonly build?: Build;
  readonly threads: number;
  /** Train on the first window of the text, again and again. */
  readonly overfit?: boolean;
  /** Losses only: a copy of the weights of the largest model does not fit beside it. */
  readonly bare?: boolean;
  /** Write so many tokens at the end, by prefill and decode. */
  readonly write?: number;
}

export interface Report {
  readonly info: Readonly<Record<string, string | number>>;
  readonly bytes: number;
  readonly losses: number[];
  readonly gradNorms: number[];
  readonly weights: string;
  readonly written: number[];
  readonly notices: string[];
  readonly milliseconds: number;
}

/** `gpu`: in place of navigator.gpu. */
export async function train(host: Host, tables: Tables, set: ProgramSet, job: Job, text: Uint8Array, gpu?: GPU): Promise<Report> {
  const notices: string[] = [];
  const { build } = job;
  const notice = (message: string): void => void notices.push(message);
  const engine =
    job.engine === "webgpu"
      ? await openWebGPU(tables, set, { host, gpu })
      : await openWasm({ host, tables, set, threads: job.threads, notice, ...(build ? { build } : {}) });
  const seed = job.settings["training.seed"] as number;
  await engine.initialize(seed);
  let { bytes } = engine;
  const began = performance.now();
  const oneWindow = (job.settings["model.n_ctx"] as number) + 1;
  const read = job.overfit ? text.subarray(0, oneWindow) : text;
  for (let step = 1; step <= job.steps; step++) {
    await trainStep(engine, job.settings, read, step);
    if (step === 1 && job.engine === "webgpu") ({ bytes } = engine); // a program is recorded at its first run
  }
  const milliseconds = (performance.now() - began) / job.steps;
  const results = await engine.results();
  const grown = engine.bytes - bytes;
  const written: number[] = [];
  if (job.write) {
    let logits = await engine.prefill(Int32Array.from(text.subarray(0, 5)), 1, 5);
    for (let position = 0; position < job.write; position++) {
      const { token } = engine.control.sample(logits, seed, position, { temperature: 0.8, topK: 0, topP: 1 });
      written.push(token);
      logits = await engine.decode(Int32Array.of(token));
    }
  }
  const weights = job.bare ? "" : await hashOf((await engine.state()).params.values());
  const { info } = engine;
  if (grown !== 0 || (job.engine !== "webgpu" && engine.bytes !== bytes)) throw new Error(`memory grew from ${bytes} to ${engine.bytes}`);
  await engine.close();
  return {
    info, bytes, weights, written, notices, milliseconds,
    losses: results.map((result) => result.loss),
    gradNorms: results.map((result) => result.gradNorm),
  };
}

async function hashOf(arrays: Iterable<Float32Array>): Promise<string> {
  const parts = [...arrays].map((array) => new Uint8Array(array.buffer, array.byteOffset, array.byteLength));
  const all = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", all));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
