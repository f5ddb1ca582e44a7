// plans.ts: node plans.ts TABLES CASES [INDEX]: what TypeScript plans for each case, for comparison
// with Python (tests/test_web_plan.py): one hash a case, or the whole text of one of them.
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { Plan } from "../src/runtime/plan.ts";
import type { Place } from "../src/runtime/plan.ts";
import { programSet } from "../src/runtime/program.ts";
import { readTables } from "../src/runtime/tables.ts";
import type { Dims, EngineName, Settings } from "../src/runtime/tables.ts";

interface Case {
  readonly settings: Settings;
  readonly engine: EngineName;
  readonly kind: "training" | "inference";
  readonly batch: number;
  readonly smaller: Readonly<Record<string, Dims>>;
}

const bits = (value: number): string => {
  const view = new DataView(new ArrayBuffer(8));
  view.setFloat64(0, value);
  return view.getBigUint64(0).toString(16).padStart(16, "0");
};
const text = (place: Place | null): string =>
  place === null ? "-" : `${place.region}:${place.offset}:${place.shape.join("x")}`;

function describe(given: Case): string {
  const plan = new Plan(tables, programSet(tables, given.settings, given.kind, given.batch, given.engine));
  const lines = [`bytes ${plan.bytes}`];
  for (const region of plan.regions.values()) lines.push(`region ${region.name} ${region.dtype} ${region.elements}`);
  for (const [name, { part, place, init }] of plan.layout) lines.push(`parameter ${name} ${part} ${init} ${text(place)}`);
  for (const name of Object.keys(plan.programs)) {
    for (const [buffer, place] of plan.places.get(name) ?? []) lines.push(`place ${name} ${buffer} ${text(place)}`);
    for (const smaller of [{}, given.smaller[name] ?? {}]) {
      for (const call of plan.bind(name, smaller)) {
        const numbers = `${call.sizes.join(",")} ${call.attrs.map(bits).join(",")}`;
        lines.push(`call ${name} ${call.op} ${call.operands.map(text).join(" ")} ${numbers}`);
      }
    }
  }
  return lines.join("\n");
}

const [tablesFile, casesFile, index] = process.argv.slice(2);
const tables = readTables(readFileSync(tablesFile ?? "", "utf8"));
const cases = JSON.parse(readFileSync(casesFile ?? "", "utf8")) as Case[];
if (index === undefined) {
  for (const given of cases) console.log(createHash("sha256").update(describe(given)).digest("hex"));
} else {
  console.log(describe(cases[Number(index)] as Case));
}
