"""Trained models: found by name, put on an engine, measured, and writing.

What this is: ``open_model`` and ``Model``, for the command line, the Python API and the server alike. A name is a run, a folder, a
file, or one of the gallery's models.
What this is not: training (``training/session.py``) or the loop that writes (``training/generate.py``).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from itertools import count
from pathlib import Path
from typing import TypedDict, Unpack

from posttrainllm.config import (
    EngineConfig,
    GPTConfig,
    SamplingConfig,
    TrainConfig,
    load_config,
    replace,
)
from posttrainllm.engine_settings import check_abilities
from posttrainllm.engines.base import Engine
from posttrainllm.errors import CheckpointError, ConfigError, CorpusError
from posttrainllm.figures import Progress, untold
from posttrainllm.formats.quantised import Quantised, read_quantised
from posttrainllm.gallery import catalogue
from posttrainllm.gallery.catalogue import PREFIX, Card
from posttrainllm.gallery.python_text import write_python_text
from posttrainllm.runs.checkpoint import Checkpoint, list_checkpoints
from posttrainllm.runs.folder import TRAIN_FIRST, resolve_run
from posttrainllm.runs.folder import Run as RunFolder
from posttrainllm.runs.opening import read_file, read_folder
from posttrainllm.settings import show
from posttrainllm.storage import default_cache_dir
from posttrainllm.text.corpus import Corpus, open_corpus
from posttrainllm.text.counting import lines as counting_lines
from posttrainllm.text.tokenizer import ByteTokenizer, Tokenizer
from posttrainllm.training.engine_choice import HAVE_INT8, inference_engine
from posttrainllm.training.evaluate import Evaluation, evaluate
from posttrainllm.training.looking import Inspection, look
from posttrainllm.training.samples import Samples
from posttrainllm.training.streams import Piece, write_texts
from posttrainllm.training.writing import Verdict, verdict
from posttrainllm.wording import Wording, worded

PYTHON = "python"  # the model whose text every machine with Python makes itself
GALLERY_BATCH = 8  # rows at a time for measuring a model that says no number of its own


@dataclass(frozen=True)
class Measured:
    """What ``Model.measure`` found, and on which text."""

    corpus: Corpus
    evaluation: Evaluation
    verdict: Verdict


class Sampling(TypedDict, total=False):
    """The settings of ``SamplingConfig`` as arguments; one that is left out, or None, is as the model has it."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    repetition_window: int | None
    max_tokens: int | None


@dataclass(repr=False)
class Model:
    """A trained model, ready to write."""

    config: GPTConfig
    tokenizer: Tokenizer
    engine: Engine
    checkpoint: Checkpoint
    batch: int
    card: Card | None = None  # of a model of the gallery

    def __repr__(self) -> str:
        """One line: what it is and where it came from."""
        step = f", step {self.checkpoint.state.step}" if self.checkpoint.state else ""
        return f"Model({self.config.parameters():,} parameters, {self.engine.name}, {self.title}{step})"

    @property
    def title(self) -> str:
        """What to call it: ``gallery:NAME``, or where it lies."""
        return _title(self.checkpoint, self.card)

    @property
    def sampling(self) -> SamplingConfig:
        """How its run or its card samples; the defaults for a model that has neither."""
        if self.card is not None:
            return self.card.writes_with
        state = self.checkpoint.state
        return SamplingConfig() if state is None else state.config.sampling

    def measure(
        self,
        sources: Sequence[str] = (),
        *,
        windows: int | None = None,
        samples: int | None = None,
        progress: Progress = untold,
    ) -> Measured:
        """Evaluate on the validation part of the run's text, or of another, and judge what the model writes.

        ``windows`` and ``samples`` are as at the end of training unless given; 0 windows are all. ``progress`` is told how far it is.

        Raises: ConfigError for a number below 0; CorpusError when there is no validation part, or the run's text is no longer what it was.
        """
        state = self.checkpoint.state
        config = load_config() if state is None else state.config
        sizes = {f"model.{key}": value for key, value in self.config.model_dump().items()}
        if samples is not None:
            sizes["training.verdict_samples"] = samples
        if windows:  # 0 is all, and no setting of a run
            sizes["training.final_windows"] = windows
        config = replace(config, sizes)
        corpus = open_corpus(
            sources or self._own_text(config),
            val_fraction=config.data.val_fraction,
            tokenizer=self.tokenizer,
            sha256=state.corpus.sha256 if state and state.corpus and not sources else None,
        )
        corpus.check(self.config.n_ctx, fixed=True)
        if not len(corpus.val):
            raise CorpusError(
                "this run kept no text for validation",
                Wording(
                    'name another text: model.measure(["my.txt"])',
                    terminal="name another text: --corpus FILE",
                ),
            )
        loop, n_ctx = config.training, self.config.n_ctx
        some = loop.final_windows if windows is None else windows
        measured = len(corpus.validation_offsets(some, n_ctx))
        evaluation = evaluate(
            self.engine,
            corpus,
            n_ctx=n_ctx,
            batch=self.batch,
            windows=some,
            check=_counting(progress, "windows measured", self.batch, measured),
        )
        written = loop.verdict_samples * loop.sample_tokens
        texts = Samples(self.engine, config, corpus, self.tokenizer).for_verdict(
            _counting(progress, "tokens written", 1, written)
        )
        judged = verdict(
            texts=texts,
            corpus=corpus,
            val_loss=evaluation.loss,
            counting=counting_lines(corpus.train, corpus.val, self.config.n_vocab),
            config=config,
            best_val_loss=None if state is None else state.best_val_loss,
        )
        return Measured(corpus, evaluation, judged)

    def _own_text(self, config: TrainConfig) -> Sequence[str]:
        """The text that the model was trained on, as far as this machine has it."""
        if self.card is not None and self.card.name == PYTHON:
            path = default_cache_dir() / f"python-{platform.python_version()}.txt"
            return [str(write_python_text(path))]
        if self.checkpoint.state is not None and self.checkpoint.path.is_dir():
            own = RunFolder(self.checkpoint.path.resolve().parent.parent).corpus
            if own is not None:
                return [str(own)]
        return config.data.corpus

    def sampling_with(self, **changes: Unpack[Sampling]) -> SamplingConfig:
        """How the model samples, with some settings changed. Raises: ConfigError."""
        given = {key: value for key, value in changes.items() if value is not None}
        return SamplingConfig.model_validate({**self.sampling.model_dump(), **given})

    def generate(
        self,
        prompt: str = "\n",
        *,
        seed: int = 1,
        stop: str | Sequence[str] = (),
        **sampling: Unpack[Sampling],
    ) -> str:
        """Continue a prompt; returns the new text alone.

        ``sampling``: ``temperature``, ``top_k``, ``top_p``, ``repetition_penalty``, ``repetition_window``, ``max_tokens``, as in
        ``SamplingConfig``; what is not given is as the model's run or card has it. The text ends before the first of the ``stop`` strings.

        Raises: ConfigError.
        """
        return "".join(self.stream(prompt, seed=seed, stop=stop, **sampling))

    def stream(
        self,
        prompt: str = "\n",
        *,
        seed: int = 1,
        stop: str | Sequence[str] = (),
        **sampling: Unpack[Sampling],
    ) -> Iterator[str]:
        """Continue a prompt and give the new text in pieces, as it is written; arguments as in ``generate``."""
        pieces = self.stream_all(
            [prompt], sampling=self.sampling_with(**sampling), seeds=[seed], stop=stop
        )
        return (piece.text for piece in pieces)

    def stream_all(
        self,
        prompts: Sequence[str],
        *,
        sampling: SamplingConfig | None = None,
        seeds: Sequence[int],
        stop: str | Sequence[str] = (),
    ) -> Iterator[Piece]:
        """Continue prompts side by side, each with its seed; at most ``batch`` of them. Raises: ConfigError.

        A text also ends where the model says so, if its vocabulary has a token for that.
        """
        stops = stop if isinstance(stop, list | tuple) else [stop]
        for what, texts in (("a prompt", prompts), ("stop", stops)):
            for text in texts:
                if not isinstance(text, str):
                    raise ConfigError(f"{what} is a text, got {show(text)}")
        end = self.tokenizer.end
        done = () if end is None else (self.tokenizer.decode([end]),)
        for seed in seeds:
            replace(load_config(), {"training.seed": seed})  # one range for every seed
        return write_texts(
            self.engine,
            self.config.n_ctx,
            self.tokenizer,
            prompts,
            sampling or self.sampling,
            seeds=seeds,
            stop=(*stops, *done),
        )

    def inspect(self, text: str) -> Inspection:
        """Look inside: what it expects after every token of a text, how surprised it is, and what its heads look at.

        Raises: ConfigError for no text; EngineError when this machine does not have the memory.
        """
        return look(
            text,
            config=self.config,
            params=self.checkpoint.params,
            tokenizer=self.tokenizer,
            beside=self.engine.info,
        )


@dataclass(frozen=True)
class Found:
    """A model behind a name, read and not yet on an engine."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    card: Card | None = None
    int8: bool = False  # the weights were rounded, so that reading them as int8 changes nothing

    @property
    def title(self) -> str:
        """What to call it: ``gallery:NAME``, or where it lies."""
        return _title(self.checkpoint, self.card)

    @property
    def name(self) -> str:
        """What finds it again from anywhere: ``gallery:NAME``, or where it lies."""
        return PREFIX + self.card.name if self.card else str(self.checkpoint.path.resolve())


def _counting(progress: Progress, what: str, each: int, total: int) -> Callable[[], None]:
    """What long work calls before each part of it, to say how far it is."""
    done = count(0, each)
    return lambda: progress(what, next(done), total)


def _title(checkpoint: Checkpoint, card: Card | None) -> str:
    return PREFIX + card.name if card else str(checkpoint.path)


def find_model(name: str, runs_dir: Path, *, moments: bool = False) -> Found:
    """Read the weights behind a name: of a run, a checkpoint or Hugging Face folder, a file, or a model of the gallery.

    A file is a .zip of a run or a model folder, a .tinygpt, or a quantised .safetensors.
    A run, or a folder here, goes before a model of the gallery with the same name, and a notice says so; ``gallery:NAME`` is always
    the gallery's. With ``moments`` the optimizer's numbers are read too, where there are any.

    Raises: CheckpointError.
    """
    bundled = catalogue.named(name)
    run = runs_dir / name
    taken = bundled is not None and name == bundled and (os.path.isdir(run) or os.path.isdir(name))
    if bundled is not None and not taken:
        card = catalogue.card(bundled)
        return _quantised(catalogue.load(card), card.path, card)
    if name.endswith(".safetensors") and os.path.isfile(name):
        return _quantised(read_quantised(Path(name)), Path(name))
    if not os.path.isdir(run) and os.path.isfile(name):
        opened = read_file(Path(name), moments=moments)
        return Found(opened.checkpoint, opened.tokenizer)
    folder = resolve_run(name, runs_dir, catalogue.names())
    opened = read_folder(folder, moments=moments)
    checkpoint = opened.checkpoint
    if taken:
        note = f"{folder} has the name of a model of the gallery, which is {PREFIX}{name}"
        checkpoint = replace_fields(checkpoint, notices=(note, *checkpoint.notices))
    return Found(checkpoint, opened.tokenizer)


def _quantised(model: Quantised, path: Path, card: Card | None = None) -> Found:
    tokenizer = ByteTokenizer()
    if model.tokenizer != tokenizer.fingerprint or model.config.n_vocab != tokenizer.n_vocab:
        raise CheckpointError(
            f"{path} has {model.config.n_vocab:,} tokens of the kind {show(model.tokenizer)}, wanted "
            f"the {tokenizer.n_vocab} of {tokenizer.fingerprint!r}",
            "only models of bytes are read from one file",
        )
    checkpoint = Checkpoint(path, model.config, model.params, None, None, None)
    return Found(checkpoint, tokenizer, card, int8=True)


def open_model(
    name: str,
    *,
    runs_dir: Path,
    engine: EngineConfig | None = None,
    batch: int | None = 1,
    weights: str | None = None,
) -> Model:
    """Load a model that ``find_model`` knows, on the engine it was trained on unless another is given.

    ``weights`` is the setting ``engine.weights``; None takes int8 for a model that was stored so, where the engine can, and else what
    ``engine`` says. ``batch`` None plans for as many rows at a time as it was trained with.

    Raises: CheckpointError, EngineError; ConfigError for weights that the engine does not have.
    """
    found = find_model(name, runs_dir)
    checkpoint = found.checkpoint
    config = None if checkpoint.state is None else checkpoint.state.config
    if engine is None:
        engine = EngineConfig() if config is None else _writing(config.engine)
    if weights is not None:
        engine = EngineConfig.model_validate({**engine.model_dump(), "weights": weights})
        check_abilities(engine, 0.0, "adamw")
    elif found.int8 and engine.chosen in HAVE_INT8:
        engine = engine.model_copy(update={"weights": "int8"})
    if batch is None:
        batch = GALLERY_BATCH if config is None else config.data.batch_size
    loaded = inference_engine(checkpoint.config, engine, batch=batch)
    loaded.load(checkpoint.params)
    return Model(checkpoint.config, found.tokenizer, loaded, checkpoint, batch, found.card)


def _writing(trained: EngineConfig) -> EngineConfig:
    """The engine that a run was trained on, to write with: threads and builds may be others here."""
    if trained.weights == "int8":
        return EngineConfig(name=trained.name, weights="int8")
    return EngineConfig(name=trained.name)


def newest_run(runs_dir: Path) -> str:
    """The name of the run with the newest checkpoint. Raises: CheckpointError when there is none."""
    found = [
        (folder.stat().st_mtime, folder.parent.name)
        for folder in runs_dir.glob("*/checkpoints")
        if list_checkpoints(folder)
    ]
    if not found:
        raise CheckpointError(
            f"there is no trained model in {runs_dir}",
            worded(
                "{first}; or take one that comes along: {along}",
                first=TRAIN_FIRST,
                along=Wording('posttrainllm.load("shakespeare")', terminal="posttrainllm models"),
            ),
        )
    return max(found)[1]
