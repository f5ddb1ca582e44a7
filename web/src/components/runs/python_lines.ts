// python_lines.ts: three lines of Python that load a download. tests/test_web_storage_models.py runs them as they stand here,
// in a folder with the file under the name that they say; NAME is the run's.

export type Kind = "zip" | "safetensors" | "tinygpt";

const LINES = {
  zip: [
    "import posttrainllm",
    "model = posttrainllm.load(\"NAME.zip\")",
    "print(model.generate(\"ROMEO:\", max_tokens=100))",
  ],
  safetensors: [
    "import json, safetensors, safetensors.torch; from transformers import GPT2Config, GPT2LMHeadModel",
    "config = GPT2Config(**json.loads(safetensors.safe_open(\"model.safetensors\", \"pt\").metadata()[\"config\"]))",
    "model = GPT2LMHeadModel.from_pretrained(None, config=config, state_dict=safetensors.torch.load_file(\"model.safetensors\"))",
  ],
  tinygpt: [
    "import posttrainllm",
    "model = posttrainllm.load(\"NAME.tinygpt\")",
    "print(model.generate(\"ROMEO:\", max_tokens=100))",
  ],
} satisfies Record<Kind, string[]>;

/** The lines for a download of a run. */
export function pythonLines(kind: Kind, run: string): string {
  return LINES[kind].join("\n").replace("NAME", run.replaceAll("\\", "\\\\").replaceAll('"', '\\"'));
}
