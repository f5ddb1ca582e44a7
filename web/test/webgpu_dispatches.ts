// webgpu_dispatches.ts: node webgpu_dispatches.ts ASSETS CASES [INDEX]: the dispatches that TypeScript
// chooses for each case, for comparison with Python (tests/test_web_webgpu.py): one hash a case, or the
// whole text of one of them.
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { Plan } from "../src/runtime/plan.ts";
import { programSet } from "../src/runtime/program.ts";
import { readTables } from "../src/runtime/tables.ts";
import type { Dims, Settings } from "../src/runtime/tables.ts";
import { DispatchTable, readDispatch } from "../src/runtime/webgpu_dispatch.ts";
import type { Dispatch, Limits } from "../src/runtime/webgpu_dispatch.ts";
import { cutsOf, windowsOf } from "../src/runtime/webgpu_memory.ts";
import type { Work } from "../src/runtime/webgpu_work.ts";

interface Case {
  readonly settings: Settings;
  readonly kind: "training" | "inference";
  readonly batch: number;
  readonly smaller: Readonly<Record<string, Dims>>;
  readonly limits: Limits;
  readonly bufferBytes: number;
  readonly preferred: Readonly<Record<string, string>>;
}

const [folder = "", casesFile = "", index] = process.argv.slice(2);
const tables = readTables(readFileSync(join(folder, "posttrainllm.json"), "utf8"));
const json = readDispatch(readFileSync(join(folder, "wgsl", "dispatch.json"), "utf8"));

const line = ({ file, entry, bind, overrides, words, grid, window }: Dispatch): string => {
  const constants = overrides.map(([name, value]) => `${name}=${value}`);
  const hex = Buffer.from(words.buffer).toString("hex");
  return `  ${file} ${entry} ${bind.join()} ${constants.join()} ${hex} ${grid.join("x")} ${window?.join("..") ?? "-"}`;
};

function describe(given: Case): string {
  const plan = new Plan(tables, programSet(tables, given.settings, given.kind, given.batch, "webgpu"));
  const table = new DispatchTable(json, tables.ops, given.limits, Object.entries(given.preferred));
  const dispatches = (work: Work): string => {
    const arena = [...work.operands.values()].find((operand) => operand.windowed)?.place ?? null;
    const windows =
      table.works.has(work.op) && arena !== null
        ? windowsOf(arena, cutsOf(plan, plan.region(arena.region), given.bufferBytes), given.limits.binding_bytes, tables.plan.align)
        : null;
    try {
      const found = table.dispatches(work, windows);
      return [`${work.key} ${found.variant} ${found.workspace}`, ...found.passes.map(line)].join("\n");
    } catch (error) {
      return `${work.key} ${(error as Error).message}`;
    }
  };
  const lines: string[] = [];
  for (const name of Object.keys(plan.programs)) {
    for (const smaller of [{}, given.smaller[name] ?? {}]) {
      for (const work of table.merge(plan.bind(name, smaller))) {
        lines.push(`${name} ${table.candidates(work).join()}`, dispatches(work));
      }
    }
  }
  return lines.join("\n");
}

const cases = JSON.parse(readFileSync(casesFile, "utf8")) as Case[];
if (index === undefined) {
  for (const given of cases) console.log(createHash("sha256").update(describe(given)).digest("hex"));
} else {
  console.log(describe(cases[Number(index)] as Case));
}
