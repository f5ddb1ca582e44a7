// serve.ts: node serve.ts ASSETS: an engine for lab/node_engine.py: one JSON object a line in, one out.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import type { Batch, StepScalars, Tensors } from "../src/runtime/engine.ts";
import { nodeHost } from "../src/runtime/host_node.ts";
import { product } from "../src/runtime/plan.ts";
import { programSet } from "../src/runtime/program.ts";
import { readTables } from "../src/runtime/tables.ts";
import type { Settings } from "../src/runtime/tables.ts";
import { openWasm } from "../src/runtime/wasm.ts";
import type { WasmEngine } from "../src/runtime/wasm.ts";

type Request =
  | { readonly do: "open"; readonly settings: Settings; readonly threads: number }
  | { readonly do: "load"; readonly file: string }
  | { readonly do: "gradients"; readonly tokens: string; readonly targets: string; readonly rows: number; readonly time: number; readonly invCount: number; readonly first: boolean }
  | ({ readonly do: "update" } & StepScalars)
  | { readonly do: "close" };

const host = nodeHost(process.argv[2] ?? "");
const tables = readTables(new TextDecoder().decode(await host.read("posttrainllm.json")));
let engine: WasmEngine | undefined;

const ids = (text: string): Int32Array => {
  const bytes = new Uint8Array(Buffer.from(text, "base64"));
  return new Int32Array(bytes.buffer, 0, bytes.length / 4);
};

async function perform(request: Request): Promise<unknown> {
  if (request.do === "open") {
    const set = programSet(tables, request.settings, "training");
    engine = await openWasm({ host, tables, set, threads: request.threads });
    return { info: engine.info, bytes: engine.bytes };
  }
  if (engine === undefined) throw new Error("open comes first");
  if (request.do === "load") {
    const params: Tensors = new Map();
    const file = readFileSync(request.file);
    let at = file.byteOffset;
    for (const [name, { place }] of engine.plan.layout) {
      params.set(name, new Float32Array(file.buffer.slice(at, at + 4 * product(place.shape))));
      at += 4 * product(place.shape);
    }
    await engine.load(params);
  } else if (request.do === "gradients") {
    const { tokens, targets, rows, time } = request;
    const batch: Batch = { tokens: ids(tokens), targets: ids(targets), rows, time };
    await engine.gradients(batch, request.invCount, request.first);
  } else if (request.do === "update") {
    const { lr, correction1, correction2 } = request;
    await engine.update({ lr, correction1, correction2 });
    return (await engine.results())[0];
  } else {
    await engine.close();
  }
  return {};
}

for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line) as Request;
  const answer = await perform(request).catch((error: unknown) => ({ error: String(error) }));
  process.stdout.write(`${JSON.stringify(answer)}\n`);
  if (request.do === "close") break;
}
process.stdin.destroy(); // or it keeps the process
