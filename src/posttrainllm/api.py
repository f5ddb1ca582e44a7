"""The Python API, for notebooks: train a model, look at its losses, let it write.

import posttrainllm
run = posttrainllm.train(preset="tiny", steps=200)
run.losses[-1]
run.generate("ROMEO:")
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from posttrainllm.config import (
    SETTINGS,
    EngineConfig,
    TrainConfig,
    given_settings,
    load_config,
)
from posttrainllm.errors import ConfigError, PosttrainError
from posttrainllm.figures import Progress, untold
from posttrainllm.notebook.comparison import Comparison
from posttrainllm.notebook.inspection import show_inspections
from posttrainllm.notebook.page import run_html
from posttrainllm.notebook.watching import watching
from posttrainllm.runs.folder import RUNS_DIR as RUNS_DIR
from posttrainllm.runs.folder import Run as RunFolder
from posttrainllm.runs.folder import describe_run, resolve_run
from posttrainllm.runs.records import column, newest
from posttrainllm.settings import show
from posttrainllm.text.counting import CountingLine
from posttrainllm.training.looking import Inspection
from posttrainllm.training.models import Model, Sampling, open_model
from posttrainllm.training.observer import Observer
from posttrainllm.training.session import new_trainer, resumed_trainer
from posttrainllm.training.starting import load_settings
from posttrainllm.training.trainer import Trainer
from posttrainllm.training.vocabulary import USUAL, NewTokenizer, make_tokenizer

LONGEST_NAME = 4096  # characters of a path; more are a text

show_inspections()  # training, which makes them, knows no notebook


@dataclass(frozen=True, repr=False)
class Run:
    """A run on disk: its curves, and the model of its newest checkpoint."""

    path: Path
    counting: tuple[CountingLine, ...] = field(default=(), compare=False)
    """What counting reaches on its text, when it was trained by this process; a run's folder does not hold it."""

    def __repr__(self) -> str:
        """One line: where it is, how far it came and what it reached."""
        try:
            config, lines = self.config, self.metrics
        except PosttrainError as error:  # gone or damaged: a notebook still shows something
            return f"Run({str(self.path)!r}: {error.message})"
        step, loss = newest(lines, "step") or 0, newest(lines, "val_loss")
        reached = "" if loss is None else f", validation loss {loss:.3f}"
        return f"Run({str(self.path)!r}, {config.preset}, step {step:,} of {config.training.steps:,}{reached})"

    def _repr_html_(self) -> str:
        """What a notebook shows of it: its curve, the facts and its newest sample."""
        return run_html(self.path, self.counting)

    @property
    def config(self) -> TrainConfig:
        """The configuration it was trained with."""
        return RunFolder(self.path).config()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: step, loss, val_loss, lr, grad_norm, tokens_per_second, elapsed_s."""
        return list(RunFolder(self.path).metrics.read())

    @property
    def losses(self) -> list[float]:
        """Training loss of every logged step, in nats per token."""
        return column(self.metrics, "loss")

    @property
    def val_loss(self) -> float | None:
        """The newest validation loss, in nats per token."""
        return newest(self.metrics, "val_loss")

    @property
    def finished(self) -> bool:
        """Whether all its steps are trained: False for one that was stopped, or is still training."""
        return describe_run(RunFolder(self.path)).state == "finished"

    @cached_property
    def model(self) -> Model:
        """The model of the newest checkpoint, loaded at first use on the engine of the run."""
        config = self.config
        return _opened(str(self.path), self.path.parent, config.engine)

    def generate(
        self,
        prompt: str = "\n",
        *,
        seed: int = 1,
        stop: str | Sequence[str] = (),
        **sampling: Unpack[Sampling],
    ) -> str:
        """Continue a prompt with the model of the newest checkpoint; returns the new text alone.

        ``sampling``: ``temperature``, ``top_k``, ``top_p``, ``repetition_penalty``, ``repetition_window``, ``max_tokens``; what is not
        given is as in the run's configuration. The text ends before the first of the ``stop`` strings.

        Raises: PosttrainError, in one line with the next action.
        """
        return self.model.generate(prompt, seed=seed, stop=stop, **sampling)

    def inspect(self, text: str) -> Inspection:
        """Look inside the model of the newest checkpoint: see ``Model.inspect``."""
        return self.model.inspect(text)


def train(
    corpus: str | os.PathLike[str] | Sequence[str] | None = None,
    *,
    preset: str | None = None,
    start_from: str | os.PathLike[str] | None = None,
    engine: str | None = None,
    steps: int | None = None,
    seed: int | None = None,
    name: str | None = None,
    runs_dir: str | os.PathLike[str] = RUNS_DIR,
    observer: Observer | None = None,
    progress: bool | None = None,
    **settings: object,
) -> Run:
    """Train a model and return its run.

    ``corpus`` is a text file or several (default: TinyShakespeare). ``start_from`` is a model whose weights training starts from: one of
    the gallery ("shakespeare"), a run or a folder; its sizes are then the run's. Every other setting can be given by its name:
    ``learning_rate=1e-3``, ``n_embd=64``, or with its section where two have the name: ``engine__name="cpp"``.

    A notebook shows the run while it trains, and a script prints nothing; ``progress=True`` makes a script write lines to standard error,
    and False is silent everywhere. An ``observer`` (``posttrainllm.training.observer.Observer``) watches in place of either. Ctrl-C, or a
    notebook's stop button, saves and returns the run as far as it came.

    Raises: PosttrainError, in one line with the next action.
    """
    named: dict[str, object] = {
        "corpus": None if corpus is None else _texts(corpus),
        "start_from": None if start_from is None else _place("start_from", start_from),
        "engine": engine,
        "steps": steps,
        "seed": seed,
    }
    flags = _by_section(settings, named)
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"name is a text, got {show(name)}", 'such as name="first"')
    runs = Path(_place("runs_dir", runs_dir))
    config = load_settings(preset, flags=flags, runs_dir=runs)
    with watching(observer, progress) as watcher:
        return _trained(new_trainer(config, runs_dir=runs, name=name, observer=watcher))


def resume(
    name: str | os.PathLike[str],
    *,
    steps: int | None = None,
    runs_dir: str | os.PathLike[str] = RUNS_DIR,
    allow_change: bool = False,
    observer: Observer | None = None,
    progress: bool | None = None,
    **settings: object,
) -> Run:
    """Go on with a run from its newest checkpoint; settings as in ``train``, refused when they change what is computed.

    ``observer`` and ``progress`` as in ``train``. Raises: PosttrainError.
    """
    flags = _by_section(settings, {"steps": steps})
    with watching(observer, progress) as watcher:
        trainer = resumed_trainer(
            _place("a run", name),
            runs_dir=Path(_place("runs_dir", runs_dir)),
            changes=given_settings(flags=flags),
            allow_change=allow_change,
            observer=watcher,
        )
        return _trained(trainer)


def _trained(trainer: Trainer) -> Run:
    return Run(trainer.train().run, tuple(trainer.counting))


def compare(
    *runs: Run | str | os.PathLike[str], runs_dir: str | os.PathLike[str] = RUNS_DIR
) -> Comparison:
    """Two runs or more beside each other: a notebook shows their curves in one picture, with a table; ``print`` shows the table.

    A run is one that was trained or opened, or its name. Raises: ConfigError, CheckpointError.
    """
    found = [run if isinstance(run, Run) else open_run(run, runs_dir=runs_dir) for run in runs]
    known = {run.counting for run in found}
    # Lines are of one text: those of runs on several would say nothing about the others.
    return Comparison(tuple(run.path for run in found), known.pop() if len(known) == 1 else ())


def train_tokenizer(
    corpus: str | os.PathLike[str] | Sequence[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    *,
    n_vocab: int = USUAL,
    val_fraction: float | None = None,
    progress: Progress = untold,
) -> NewTokenizer:
    """Make a byte-level BPE tokenizer of the training part of a text, for ``train(corpus, tokenizer=made.path)``.

    ``corpus`` as in ``train``; ``folder`` is a new one (default: tokenizer-4096, by the size of the vocabulary); ``val_fraction`` is the
    share of the text that stays unread (default: as in training). ``progress`` hears what is counted, how far it is and of how many.

    Raises: PosttrainError.
    """
    if isinstance(n_vocab, bool) or not isinstance(n_vocab, int):
        raise ConfigError(f"n_vocab is a number of tokens, got {show(n_vocab)}")
    place = f"tokenizer-{n_vocab}" if folder is None else _place("folder", folder)
    config = load_config(flags={"data.val_fraction": val_fraction})
    return make_tokenizer(
        () if corpus is None else _texts(corpus),
        Path(place),
        n_vocab=n_vocab,
        val_fraction=config.data.val_fraction,
        progress=progress,
    )


def _texts(corpus: object) -> list[str]:
    """The names of one text or several. Raises: ConfigError."""
    if isinstance(corpus, str) and ("\n" in corpus or len(corpus) > LONGEST_NAME):
        raise ConfigError(
            f"corpus is the name of a text file, got a text of {len(corpus):,} characters",
            'write it to a file: pathlib.Path("my.txt").write_text(text), then corpus="my.txt"',
        )
    if isinstance(corpus, str | bytes | os.PathLike) or not isinstance(corpus, Iterable):
        return [_place("corpus", corpus)]
    found = [_place("a text of corpus", each) for each in corpus]
    if not found:
        raise ConfigError(
            "corpus is an empty list",
            "name a text file or several; left out, it is TinyShakespeare",
        )
    return found


def _place(what: str, value: object) -> str:
    """A name or a path as a text. Raises: ConfigError."""
    if isinstance(value, str | bytes | os.PathLike):
        return os.fsdecode(value)
    hint = "give several one by one: compare(*runs)" if isinstance(value, list | tuple) else ""
    raise ConfigError(f"{what} is a name or a path, got {show(value)}", hint)


def _by_section(settings: dict[str, object], named: dict[str, object]) -> dict[str, object]:
    """{"learning_rate": ...} or {"schedule__learning_rate": ...} as {"schedule.learning_rate": ...}.

    ``named`` are the arguments that functions have for some settings; None is not given.

    Raises: ConfigError for a name that no setting has, or several, and for a setting that is given twice.
    """
    flags: dict[str, object] = {}
    given = {key: value for key, value in named.items() if value is not None}
    for key, value in [*settings.items(), *given.items()]:
        name = "engine.name" if key == "engine" else key.replace("__", ".")
        found = (
            [name]
            if name in SETTINGS
            else [known for known in SETTINGS if known.endswith(f".{key}")]
        )
        if len(found) != 1:
            near = found or get_close_matches(key, [known.partition(".")[2] for known in SETTINGS])
            spelled = ", ".join(known.replace(".", "__") for known in near)
            raise ConfigError(
                f"{key!r} is {'the name of several settings' if found else 'no setting'}",
                f"did you mean {spelled}?"
                if spelled
                else "posttrainllm.config.SETTINGS lists them, each with its help",
            )
        if found[0] in flags:
            raise ConfigError(f"{found[0]} is given twice", f"leave out one, such as {key}")
        flags[found[0]] = value
    return flags


def load(
    name: str | os.PathLike[str],
    *,
    runs_dir: str | os.PathLike[str] = RUNS_DIR,
    engine: str | None = None,
) -> Model:
    """Load a model to write with it.

    ``name`` is one of the gallery ("shakespeare"), a run (its newest checkpoint), a checkpoint or Hugging Face GPT-2 folder, a .zip or a
    .tinygpt file; docs/formats.md says what is taken.
    ``engine`` is the one it was trained on unless it is given. What is worth knowing, such as a damaged checkpoint that was passed over,
    is a warning.

    Raises: CheckpointError, EngineError; ConfigError when there is no such engine.
    """
    chosen = None if engine is None else EngineConfig.model_validate({"name": engine})
    return _opened(_place("a model", name), Path(_place("runs_dir", runs_dir)), chosen)


def _opened(name: str, runs_dir: Path, engine: EngineConfig | None) -> Model:
    """A model whose notices are told as Python tells them."""
    model = open_model(name, runs_dir=runs_dir, engine=engine)
    for notice in model.checkpoint.notices:
        warnings.warn(notice, stacklevel=3)
    return model


def open_run(name: str | os.PathLike[str], *, runs_dir: str | os.PathLike[str] = RUNS_DIR) -> Run:
    """A run that was trained before."""
    return Run(resolve_run(_place("a run", name), Path(_place("runs_dir", runs_dir))))
