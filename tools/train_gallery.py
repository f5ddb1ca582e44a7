"""Train the models of the gallery and write their files: weights as int8, and the card that says how good they are.

    make gallery                                        all of them, on the fastest device that PyTorch finds
    python tools/train_gallery.py shakespeare-small     one
    python tools/train_gallery.py NAME --run FOLDER     only write the files of a run that was trained before

The weights are those of the best checkpoint on the validation part, which is then measured whole, before and after rounding. The
sample of a card is one that every build of the C++ kernels here writes alike.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
import tomllib
from pathlib import Path
from typing import Any

from posttrainllm.cli import main as command_line
from posttrainllm.config import EngineConfig, GPTConfig, SamplingConfig, TrainConfig
from posttrainllm.engines.cpp_engine import runnable_builds
from posttrainllm.formats.quantised import read_quantised, rounded, write_quantised
from posttrainllm.gallery.catalogue import FOLDER, MOST_BYTES, RECIPES, Card
from posttrainllm.gallery.python_text import python_text, write_python_text
from posttrainllm.lab.benchmark_record import Record, make_record, write_record
from posttrainllm.lab.measured_run import LAST
from posttrainllm.runs.checkpoint import Checkpoint, list_checkpoints, read_checkpoint
from posttrainllm.runs.folder import Run
from posttrainllm.text.corpus import Corpus, open_corpus
from posttrainllm.text.tokenizer import ByteTokenizer
from posttrainllm.training.engine_choice import inference_engine
from posttrainllm.training.evaluate import Evaluation, evaluate
from posttrainllm.training.streams import write_texts

ROOT = Path(__file__).parent.parent
PYTHON_TEXT = Path("build", "python.txt")
TEXTS = {"python": PYTHON_TEXT}  # the others are trained on the default text
NAMES = ("shakespeare", "shakespeare-small", "python")
EXPECT = {
    "shakespeare": {"int8_loss_at_most": 1.50},
    "shakespeare-small": {"int8_loss_at_most": 1.55},
    "python": {"int8_loss_at_most": 0.90},
}
BATCH = 64  # windows at a time while measuring


def main() -> None:
    """Train and pack what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--run", type=Path, help="a run that was trained before")
    parser.add_argument("--runs-dir", type=Path, default=Path("build", "gallery"))
    parser.add_argument("--set", action="append", default=[], help="a setting to change")
    parser.add_argument("--engine", default="cpp", help="what measures the losses")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the files")
    parser.add_argument("--record", type=Path, help="write records into this folder")
    given = parser.parse_args()
    for name in given.names or NAMES:
        if name not in NAMES:
            parser.error(f"there is no model {name}; there are {', '.join(NAMES)}")
        run = given.run or train(name, given.runs_dir, given.set)
        card, record = pack(name, Run(run), given.engine, given.out)
        print(f"{name}: {card.losses.float32:.4f} nats a byte, {card.losses.int8:.4f} as int8")
        if given.record:
            print(f"record {write_record(record, given.record)}")


def commands(name: str) -> list[list[str]]:
    """What trains a model, as it is typed."""
    recipe = (RECIPES / f"{name}.toml").relative_to(ROOT)
    text = TEXTS.get(name)
    prepare = [["python", "-m", "posttrainllm.gallery.python_text", str(text)]] if text else []
    train = ["posttrainllm", "train", *([str(text)] if text else [])]
    return [*prepare, [*train, "--config", str(recipe), "--name", name]]


def train(name: str, runs_dir: Path, settings: list[str]) -> Path:
    """Train one model by its command; returns the run's folder."""
    if name in TEXTS and not TEXTS[name].exists():
        write_python_text(TEXTS[name])
    arguments = [*commands(name)[-1][1:], "--runs-dir", str(runs_dir)]
    code = command_line([*arguments, *(part for text in settings for part in ("--set", text))])
    if code:
        sys.exit(code)
    return runs_dir / name


def best_checkpoint(run: Run) -> Checkpoint:
    """The checkpoint with the lowest validation loss."""
    found = [read_checkpoint(path, moments=False) for path in list_checkpoints(run.checkpoints)]

    def loss(checkpoint: Checkpoint) -> float:
        state = checkpoint.state
        return math.inf if state is None or state.val_loss is None else state.val_loss

    return min(found, key=loss)


def pack(name: str, run: Run, engine: str, out: Path) -> tuple[Card, Record]:
    """Write weights and card of a run's best checkpoint; returns the card and a record of the training."""
    best = best_checkpoint(run)
    state = best.state
    assert state is not None
    assert state.corpus is not None
    config = state.config
    own = [str(TEXTS[name])] if name in TEXTS else []
    corpus = open_corpus(own, val_fraction=config.data.val_fraction, sha256=state.corpus.sha256)
    before = measure(best.config, best.params, corpus, engine)
    after = measure(best.config, rounded(best.config, best.params), corpus, engine)
    out.mkdir(parents=True, exist_ok=True)
    weights = out / f"{name}.safetensors"
    weights.unlink(missing_ok=True)
    written = write_quantised(weights, best.config, best.params)
    if written.bytes > MOST_BYTES:
        sys.exit(f"{weights} has {written.bytes:,} bytes, and may have {MOST_BYTES:,}")
    said = tomllib.loads(Path(__file__).with_name("gallery_cards.toml").read_text("utf-8"))[name]
    lines = run.metrics.read()
    shape = best.config
    document = {
        "name": name,
        "title": said["title"],
        "parameters": shape.parameters(),
        "shape": f"{shape.n_layer} layers, {shape.n_head} heads, {shape.n_embd} wide, context {shape.n_ctx} bytes",
        "file": weights.name,
        "sha256": written.sha256,
        "bytes": written.bytes,
        "data": {
            "name": text_name(name, said["text"], corpus),
            "about": said["about"],
            "licence": said["licence"],
            "sha256": corpus.sha256,
            "bytes": corpus.n_bytes,
            "train_bytes": len(corpus.train_text),
            "val_bytes": len(corpus.val_text),
        },
        "training": {
            "commands": [" ".join(command) for command in commands(name)],
            "steps": config.training.steps,
            "step": state.step,
            "tokens": config.tokens_per_step * config.training.steps,
            "seconds": round(lines[-1]["elapsed_s"], 1),
            "engine": f"torch {state.engine_info.get('torch', '')}".strip(),
            "device": str(state.engine_info.get("device_name", "")),
        },
        "losses": {
            "float32": round(before.loss, 5),
            "int8": round(after.loss, 5),
            "windows": after.windows,
            "n_ctx": shape.n_ctx,
        },
        "bits_per_byte": round(after.bits_per_byte, 4),
        "bad_at": said["bad_at"],
        "sampling": said["sampling"],
        "sample": sample(name, weights, said),
    }
    text = json.dumps({"format_version": Card.FORMAT, **document}, indent=1, ensure_ascii=False)
    path = out / f"{name}.json"
    path.write_text(text + "\n", encoding="utf-8")
    return Card.read(path), record_of(name, config, state.engine_info, state.step, lines, after)


def text_name(name: str, text: str, corpus: Corpus) -> str:
    """The text's name; of the standard library with the version of Python, where it is the running one's."""
    own = name in TEXTS and hashlib.sha256(python_text()).hexdigest() == corpus.sha256
    return f"{text} {sys.version.split()[0]}" if own else text


def measure(model: GPTConfig, params: dict[str, Any], corpus: Corpus, engine: str) -> Evaluation:
    """The loss over the whole validation part."""
    settings = EngineConfig.model_validate({"name": engine})
    loaded = inference_engine(model, settings, batch=BATCH)
    try:
        loaded.load(params)
        return evaluate(loaded, corpus, n_ctx=model.n_ctx, batch=BATCH, windows=0)
    finally:
        loaded.close()


def sample(name: str, weights: Path, said: dict[str, Any]) -> dict[str, Any]:
    """The first seed's text that all builds of the C++ kernels agree on."""
    model = read_quantised(weights)
    prompt, tokens = said["prompt"], said["tokens"]
    sampling = SamplingConfig.model_validate({**said["sampling"], "max_tokens": tokens})
    for seed in range(1, 100):
        texts = set()
        for build in runnable_builds():
            engine = inference_engine(
                model.config, EngineConfig.model_validate({"cpp_build": build, "weights": "int8"})
            )
            engine.load(model.params)
            pieces = write_texts(
                engine, model.config.n_ctx, ByteTokenizer(), [prompt], sampling, seeds=[seed]
            )
            texts.add("".join(piece.text for piece in pieces))
            engine.close()
        if len(texts) == 1:
            command = f"posttrainllm generate {name} --prompt {json.dumps(prompt)}"
            return {
                "command": f"{command} --seed {seed} --max-tokens {tokens}",
                "prompt": prompt,
                "seed": seed,
                "max_tokens": tokens,
                "text": texts.pop(),
            }
    sys.exit(f"{name}: no seed whose text is the same on {', '.join(runnable_builds())}")


def record_of(
    name: str,
    config: TrainConfig,
    info: dict[str, Any],
    step: int,
    lines: list[Any],
    after: Evaluation,
) -> Record:
    """The training as a record: the row of any training, its validation curve, and what the kept step came to as int8."""
    curve = [(line["step"], line["val_loss"]) for line in lines if line["val_loss"] is not None]
    best = min(loss for _, loss in curve)
    row = {
        "settings": {},
        "seed": config.training.seed,
        "steps": config.training.steps,
        "val_loss": best,
        "train_loss": statistics.fmean(line["loss"] for line in lines[-LAST:]),
        "word_share": None,
        "longest_copy": None,
        "seconds": lines[-1]["elapsed_s"],
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in lines),
        "diverged": None,
    }
    results = {
        "about": f"the gallery's {name}: best step of its recipe",
        "expect": EXPECT[name],
        "passed": after.loss <= EXPECT[name]["int8_loss_at_most"],
        "val_loss": {"median": best, "min": best, "max": best},
        "seconds": dict.fromkeys(("median", "min", "max"), row["seconds"]),
        "kept_step": step,
        "validation_curve": curve,
        "int8": {"val_loss": after.loss, "bits_per_byte": after.bits_per_byte},
    }
    return make_record(
        "training",
        f"gallery-{name}",
        engine="torch",
        info=info,
        config=config,
        rows=[row],
        method={"seeds": [config.training.seed], "repeats": 1, "warmup": 0, "kept": "best step"},
        results=results,
    )


if __name__ == "__main__":
    main()
