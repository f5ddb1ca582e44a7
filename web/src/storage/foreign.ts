// foreign.ts: the configuration of a run for a model from elsewhere (training/importing.py): what its file says, and for the
// rest the nearest preset's values, at a gentler rate.
import type { Settings, Tables } from "../runtime/tables.ts";
import { checkHeads, inRange } from "./config_check.ts";
import { StorageError } from "./errors.ts";
import { parameters, parameterShapes } from "./parameters.ts";
import { tinyForm } from "./tinygpt_layout.ts";
import type { Json } from "./text_forms.ts";

const SIZES = ["model.n_layer", "model.n_head", "model.n_embd"];
const MOST = 2 ** 31; // parameters: more never fit into a tab

/** `model` is checked like a configuration from outside; what `training` says counts as far as it fits. */
export function foreignSettings(tables: Tables, model: Settings, training: Json, source: string): Settings {
  const { settings: known } = tables.schema;
  for (const [key, value] of Object.entries(model)) {
    const setting = known[key];
    if (setting !== undefined) inRange(key, setting, value, key === "model.n_inner" ? null : 0, source);
  }
  checkHeads(model, source);
  checkSize(tables, model, source);
  const preset = nearestPreset(tables, model);
  const usual = tables.presets[preset]?.settings ?? {};
  const settings: Record<string, Settings[string]> = {
    ...usual, ...model, preset,
    "schedule.kind": "constant",
    "schedule.warmup_steps": 0,
    "schedule.learning_rate": (usual["schedule.learning_rate"] as number) / tinyForm(tables).gentler,
  };
  for (const [theirs, ours] of Object.entries(tinyForm(tables).training)) {
    const setting = known[ours];
    try {
      if (setting !== undefined) settings[ours] = inRange(ours, setting, training[theirs], 0, source);
    } catch {
      // what does not fit is the preset's
    }
  }
  return settings;
}

/** Before a list of its parameters is made. */
function checkSize(tables: Tables, model: Settings, source: string): void {
  const of = (name: string): number => model[`model.${name}`] as number;
  const inner = (model["model.n_inner"] as number | null) ?? tables.plan.inner_ratio * of("n_embd");
  const least = of("n_embd") * (of("n_vocab") + of("n_ctx") + of("n_layer") * (4 * of("n_embd") + 2 * inner));
  if (least > MOST) throw new StorageError(`${source}: a model of ${least} parameters does not fit into a tab`, "open it in the terminal: posttrainllm import");
}

/** The preset with the same layers, heads and width, else the nearest in size. */
function nearestPreset(tables: Tables, model: Settings): string {
  const size = (settings: Settings): number => parameters(parameterShapes(tables, settings));
  const own = size(model);
  const distance = (settings: Settings): number[] => [
    Number(SIZES.some((key) => settings[key] !== model[key])),
    Math.abs(Math.log(size(settings) / own)),
    Math.abs((settings["model.n_ctx"] as number) - (model["model.n_ctx"] as number)),
  ];
  const rows = Object.entries(tables.presets).map(([name, { settings }]) => ({ name, far: distance(settings) }));
  const closer = (a: number[], b: number[]): number => a.map((value, i) => value - (b[i] ?? 0)).find((difference) => difference !== 0) ?? 0;
  return rows.sort((a, b) => closer(a.far, b.far))[0]?.name ?? "";
}
