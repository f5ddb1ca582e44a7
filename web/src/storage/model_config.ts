// model_config.ts: the sizes of a model from a config.json of transformers, by the template that Python writes such files with.
import type { Settings, Tables } from "../runtime/tables.ts";
import { show, StorageError } from "./errors.ts";
import { formsOf } from "./forms.ts";
import type { Json } from "./text_forms.ts";

/** Fields that change what a model computes. */
const DECISIVE = ["model_type", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention"];

/** The settings under "model.". Throws a StorageError for a variant of GPT-2 that nothing here computes. */
export function modelOf(document: Json, tables: Tables): Settings {
  const template = formsOf(tables).documents[formsOf(tables).names.config] as Readonly<Record<string, unknown>>;
  const { settings: known } = tables.schema;
  const unsaid = Object.keys(known).filter((key) => key.startsWith("model."));
  const model: Record<string, Settings[string]> = Object.fromEntries(unsaid.map((key) => [key, known[key]?.default ?? null]));
  for (const [field, wanted] of Object.entries(template)) {
    const setting = (wanted as { setting?: string } | null)?.setting;
    const value = document[field];
    if (setting !== undefined && value !== undefined && setting !== "model.dropout") model[setting] = value as Settings[string];
    else if (DECISIVE.includes(field) && JSON.stringify(value ?? wanted) !== JSON.stringify(wanted)) {
      throw new StorageError(`config.json: ${field} is ${show(value)}, and this page computes ${show(wanted)} only`, "this variant of GPT-2 cannot be loaded");
    }
  }
  for (const size of ["n_layer", "n_head", "n_embd", "n_ctx", "n_vocab"]) {
    if (typeof model[`model.${size}`] !== "number") throw new StorageError(`config.json: the size ${size} is missing`, "is this the config.json of a GPT-2?");
  }
  const { n_vocab: bytes } = formsOf(tables).tokenizer;
  if (model["model.n_vocab"] !== bytes) {
    throw new StorageError(`config.json: vocab_size is ${show(model["model.n_vocab"])}, and this page reads text as ${bytes} bytes`, "models with another vocabulary run in the terminal: posttrainllm import");
  }
  const alias = { gelu_pytorch_tanh: "gelu_new", gelu_fast: "gelu_new" }[String(model["model.activation"])];
  return alias === undefined ? model : { ...model, "model.activation": alias };
}
