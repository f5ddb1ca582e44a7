// program.ts: programs from their JSON, with the values of a configuration put in, and unrolled.
//
// What this is: the TypeScript side of program.py and extent.py: sizes from letters, blocks into
// calls. What this is not: a model (Python writes the programs) or a check (Python validates them
// before it writes them). Read next: plan.ts.
import { FORMAT, ProgramError } from "./tables.ts";
import type { BufferJson, CallJson, Dims, EngineName, Extent, ItemJson, ProgramJson, Settings, Shape, Tables } from "./tables.ts";

/** One call of an unrolled program: concrete names, and the row chunk it works on (null outside row blocks). */
export interface Step {
  readonly call: CallJson;
  readonly chunk: number | null;
  readonly rows: Extent | null;
}

/** The number behind an extent. Throws a ProgramError for a dim that nobody gave. */
export function bindExtent(extent: Extent, dims: Dims): number {
  let value = extent[0];
  for (const dim of extent[1]) {
    const size = dims[dim];
    if (size === undefined) {
      throw new ProgramError(`a size needs the dim '${dim}'; given are ${Object.keys(dims).sort().join(", ")}`);
    }
    value *= size;
  }
  return value;
}

export function bindShape(shape: Shape, dims: Dims): number[] {
  return shape.map((extent) => bindExtent(extent, dims));
}

/** `h.{i+1}.in` in layer 2 is `h.3.in`; `h.{L}.in` is the end of the residual stream. */
function inLayer(name: string, i: number, nLayer: number): string {
  if (!name.includes("{")) return name;
  return name.replaceAll("{i}", `${i}`).replaceAll("{i+1}", `${i + 1}`).replaceAll("{L}", `${nLayer}`);
}

/** Every buffer by its concrete name, per-layer buffers unrolled; in the order of declaration, layer by layer. */
export function instances(program: ProgramJson, nLayer: number): Map<string, BufferJson> {
  const found = new Map<string, BufferJson>();
  const perLayer: { buffer: BufferJson; lo: number; hi: number }[] = [];
  let last = 0;
  for (const buffer of program.buffers) {
    if (buffer.layers === null) {
      found.set(buffer.name, buffer);
      continue;
    }
    const [lo, hi] = buffer.layers.map(([fromLast, offset]) => offset + (fromLast ? nLayer : 0)) as [number, number];
    perLayer.push({ buffer, lo, hi });
    last = Math.max(last, hi);
  }
  for (let i = 0; i < last; i++) {
    for (const { buffer, lo, hi } of perLayer) {
      if (lo <= i && i < hi) {
        const name = inLayer(buffer.name, i, nLayer);
        found.set(name, { ...buffer, name, layers: null });
      }
    }
  }
  return found;
}

/** The calls in the order in which they run, blocks unrolled. */
export function expand(program: ProgramJson, tables: Tables, nLayer: number, nChunks: number): Step[] {
  const steps: Step[] = [];
  const { add, beta, chunk: resolved } = tables.accumulate;
  for (const item of program.items) {
    if ("layers" in item) {
      const [lo, hi] = item.layers.map(([fromLast, offset]) => offset + (fromLast ? nLayer : 0)) as [number, number];
      for (let n = 0; n < hi - lo; n++) {
        const layer = item.reverse ? hi - 1 - n : lo + n;
        for (const call of item.body) steps.push({ call: callInLayer(call, layer, nLayer), chunk: null, rows: null });
      }
    } else if ("rows" in item) {
      for (let chunk = 0; chunk < nChunks; chunk++) {
        for (const symbolic of item.body) {
          let call = callInLayer(symbolic, 0, nLayer);
          if (call.attrs["accumulate"] === resolved) {
            call = { ...call, attrs: { ...call.attrs, accumulate: chunk ? add : beta } };
          }
          steps.push({ call, chunk, rows: item.rows });
        }
      }
    } else {
      steps.push({ call: callInLayer(item, nLayer, nLayer), chunk: null, rows: null });
    }
  }
  return steps;
}

function callInLayer(call: CallJson, i: number, nLayer: number): CallJson {
  return {
    ...call,
    outputs: call.outputs.map((name) => inLayer(name, i, nLayer)),
    inputs: call.inputs.map((name) => name && inLayer(name, i, nLayer)),
  };
}

/** How many row chunks a program has under these dims. */
export function chunks(program: ProgramJson, dims: Dims): number {
  for (const item of program.items) {
    if ("rows" in item) {
      const rows = bindExtent(item.rows, dims);
      const total = bindExtent(item.total, dims);
      if (total % rows) throw new ProgramError(`program ${program.name}: chunks of ${rows} rows do not divide ${total}`);
      return total / rows;
    }
  }
  return 1;
}

/** Reads what Program.to_json wrote. Throws a ProgramError for another format version. */
function readProgram(json: ProgramJson): ProgramJson {
  if (json.format !== FORMAT) throw new ProgramError(`program format ${json.format} is not ${FORMAT}`);
  return json;
}

/** A program of posttrainllm.json with the values of settings in place of their names. */
function withSettings(program: ProgramJson, settings: Settings): ProgramJson {
  const fill = (call: CallJson): CallJson => {
    const attrs: Record<string, number | string> = {};
    for (const [key, value] of Object.entries(call.attrs)) {
      attrs[key] = typeof value === "string" && value.includes(".") ? number(settings, value) : value;
    }
    return { ...call, attrs };
  };
  const items: ItemJson[] = program.items.map((item) =>
    "body" in item ? { ...item, body: item.body.map(fill) } : fill(item),
  );
  return { ...readProgram(program), items };
}

/** A setting that must be a number. */
export function number(settings: Settings, name: string): number {
  const value = settings[name];
  if (typeof value !== "number") throw new ProgramError(`the setting ${name} is ${value}, a number was wanted`);
  return value;
}

export interface ProgramSet {
  readonly programs: Readonly<Record<string, ProgramJson>>;
  readonly dims: Readonly<Record<string, Dims>>;
}

/**
 * The programs of a configuration, and their dims: all that training runs ("training"), or what
 * writing and evaluating need ("inference"; `batch` rows at a time), or looking inside ("inspection"). `engine` is the one that runs them.
 */
export function programSet(
  tables: Tables,
  settings: Settings,
  kind: "training" | "inference" | "inspection",
  batch = kind === "training" ? number(settings, "data.batch_size") : 1,
  engine: EngineName = "wasm",
): ProgramSet {
  const variant = `${settings["model.activation"]}/${settings["model.tied"] ? "tied" : "untied"}`;
  const all = tables.programs[engine][variant];
  const members = tables.sets[kind];
  if (all === undefined || members === undefined) throw new ProgramError(`there are no programs for ${variant}`);
  const programs: Record<string, ProgramJson> = {};
  const dims: Record<string, Dims> = {};
  const size = (value: number | string): number =>
    typeof value === "number" ? value : value === "batch" ? batch : number(settings, value);
  for (const [name, [rows, time]] of Object.entries(members)) {
    const program = all[name];
    if (program === undefined) throw new ProgramError(`there is no program '${name}'`);
    programs[name] = withSettings(program, settings);
    dims[name] = modelDims(tables, settings, size(rows), size(time));
  }
  return { programs, dims };
}

/** The numbers behind a program's letters for `batch` rows of `time` tokens. */
function modelDims(tables: Tables, settings: Settings, batch: number, time: number): Dims {
  const setting = (name: string): number => number(settings, `model.${name}`);
  const width = setting("n_embd");
  const inner = settings["model.n_inner"];
  const vocabulary = setting("n_vocab");
  return {
    B: batch,
    T: time,
    C: width,
    H: setting("n_head"),
    F: typeof inner === "number" ? inner : tables.plan.inner_ratio * width,
    V: vocabulary,
    L: setting("n_layer"),
    S: setting("n_ctx"),
    R: chunkRows(tables, batch * time, vocabulary),
  };
}

/**
 * The largest divisor of `rows` whose logits stay below the limit, a multiple of the alignment where
 * there is one; where that would be very few rows, the smallest divisor that is not.
 */
function chunkRows(tables: Tables, rows: number, vocabulary: number): number {
  const { align, chunk_bytes: limit, chunk_rows: few } = tables.plan;
  const divisors: number[] = [];
  for (let size = 1; size * size <= rows; size++) if (rows % size === 0) divisors.push(size, rows / size);
  divisors.sort((a, b) => a - b);
  const fitting = divisors.filter((size) => size * vocabulary * 4 <= limit);
  const largest = fitting.at(-1) ?? 1;
  if (largest < few) return divisors.find((size) => size >= few) ?? rows;
  return fitting.findLast((size) => size % align === 0) ?? largest;
}
