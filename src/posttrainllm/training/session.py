"""Opening what a user named: a new run, a run to go on with, a model to write with.

What this is: the way from a configuration or a name to a ``Trainer`` or a loaded ``Model``, with every check on the way. The command line
and the Python API both go through here.
What this is not: parsing of arguments or printing. Read next: ``training/trainer.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

from posttrainllm.config import (
    EngineConfig,
    GPTConfig,
    SamplingConfig,
    TrainConfig,
    load_config,
    replace,
    settings_of,
)
from posttrainllm.engines.base import Engine
from posttrainllm.errors import CheckpointError, ConfigError, CorpusError
from posttrainllm.runs.checkpoint import Checkpoint, list_checkpoints, read_checkpoint
from posttrainllm.runs.folder import CONFIG_FILE, create_run, resolve_run
from posttrainllm.runs.folder import Run as RunFolder
from posttrainllm.runs.trainer_state import CorpusIdentity
from posttrainllm.text.corpus import Corpus, open_corpus
from posttrainllm.text.counting import lines as counting_lines
from posttrainllm.text.files import STANDARD_INPUT
from posttrainllm.text.tokenizer import ByteTokenizer, Tokenizer
from posttrainllm.text.tokenizer_files import load as load_tokenizer
from posttrainllm.training.engine_choice import inference_engine
from posttrainllm.training.evaluate import Evaluation, evaluate
from posttrainllm.training.generate import write_text
from posttrainllm.training.observer import Observer, Silent
from posttrainllm.training.samples import Samples
from posttrainllm.training.trainer import Trainer
from posttrainllm.training.writing import Verdict, verdict

#: Settings that decide what is written and shown but not what is computed: a resumed run may change them freely.
FREE = (
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "training.log_every",
    "training.sample_every",
    "training.sample_prompt",
    "training.sample_tokens",
    "training.save_best",
    "training.verdict_samples",
    "sampling.temperature",
    "sampling.top_k",
    "sampling.top_p",
    "sampling.repetition_penalty",
    "sampling.repetition_window",
    "sampling.max_tokens",
)


def corpus_of(
    config: TrainConfig, *, identity: CorpusIdentity | None = None, run: RunFolder | None = None
) -> Corpus:
    """The text of a configuration, long enough for its context.

    ``identity`` is the text that is wanted when a run goes on, and ``run`` the run: its own copy of the text goes before the files that
    its configuration names, which may be another machine's. Raises: CorpusError.
    """
    own = None if run is None else run.corpus
    corpus = open_corpus(
        config.data.corpus if own is None else (str(own),),
        val_fraction=config.data.val_fraction,
        sha256=None if identity is None else identity.sha256,
    )
    corpus.check(config.model.n_ctx)
    if own is not None:
        name = identity.name if identity is not None else ", ".join(config.data.corpus)
        return replace_fields(corpus, name=name or corpus.name)
    return corpus


def new_trainer(
    config: TrainConfig,
    *,
    runs_dir: Path,
    name: str | None = None,
    observer: Observer | None = None,
) -> Trainer:
    """A run folder and a trainer at step 0; nothing is created before the text is known to be good.

    Raises: CorpusError, CheckpointError (the name is taken, the folder cannot be written).
    """
    _check_vocabulary(config, ByteTokenizer())
    corpus = corpus_of(config)
    if corpus.sources:
        config = replace(config, {"data.corpus": corpus.sources})
    run = create_run(runs_dir, config, name)
    return Trainer(config, corpus, ByteTokenizer(), run, observer or Silent(), made_here=True)


def resumed_trainer(
    name: str,
    *,
    runs_dir: Path,
    changes: Mapping[str, object] | None = None,
    allow_change: bool = False,
    observer: Observer | None = None,
) -> Trainer:
    """A trainer at the newest valid checkpoint of a run.

    ``changes`` are the settings the user gave again: those that decide what is computed are refused unless ``allow_change``.

    Raises: CheckpointError, ConfigError, CorpusError (the text is not the one the run was trained on).
    """
    watcher = observer or Silent()
    path = resolve_run(name, runs_dir)
    if _has_no_checkpoint(path):
        return _from_the_start(path, changes or {}, allow_change=allow_change, observer=watcher)
    if (path / CONFIG_FILE).is_file() and not RunFolder(path).checkpoints.is_dir():
        raise CheckpointError(
            f"run {path} has lost its folder of checkpoints", "put it back, or start a new run"
        )
    checkpoint = read_checkpoint(path)
    for notice in checkpoint.notices:
        watcher.noticed(notice)
    if checkpoint.state is None:
        raise CheckpointError(
            f"{path} holds a model without training state", "start a new run instead"
        )
    run = RunFolder(path if (path / "checkpoints").is_dir() else path.resolve().parent.parent)
    if checkpoint.path.resolve().parent != run.checkpoints.resolve():
        raise CheckpointError(
            f"{path} is a checkpoint outside of a run, and training goes on inside one",
            "put it into the folder checkpoints/ of a run, under the name that it had",
        )
    finished = checkpoint.state.step >= checkpoint.state.config.training.steps
    config = changed(
        checkpoint.state.config,
        changes or {},
        allow_change=allow_change,
        observer=watcher,
        free=("training.steps",) if finished else (),  # there is nothing left that it could change
    )
    if checkpoint.state.step >= config.training.steps:
        raise ConfigError(
            f"run {path.name} is at its last step, {checkpoint.state.step}",
            f"give it more: posttrainllm train --resume {path.name} --steps {2 * checkpoint.state.step}",
        )
    corpus = corpus_of(config, identity=checkpoint.state.corpus, run=run)
    return Trainer(config, corpus, ByteTokenizer(), run, watcher, checkpoint)


def _check_vocabulary(config: TrainConfig, tokenizer: Tokenizer) -> None:
    """A model must have exactly the tokens that its text is read as."""
    if config.model.n_vocab != tokenizer.n_vocab:
        raise ConfigError(
            f"model.n_vocab is {config.model.n_vocab:,}, but text is read as bytes, {tokenizer.n_vocab} of them",
            f"leave it out, or set model.n_vocab={tokenizer.n_vocab}; training with other tokenizers is not there yet",
        )


def _has_no_checkpoint(path: Path) -> bool:
    """Whether this is a run that was stopped before its first checkpoint."""
    checkpoints = RunFolder(path).checkpoints
    return checkpoints.is_dir() and not list_checkpoints(checkpoints)


def _from_the_start(
    path: Path, changes: Mapping[str, object], *, allow_change: bool, observer: Observer
) -> Trainer:
    """A trainer at step 0 of a run that has no checkpoint; what it logged so far is cut back.

    Raises: ConfigError, CorpusError; CheckpointError when the text came through a pipe, which cannot be read again.
    """
    run = RunFolder(path)
    config = changed(run.config(), changes, allow_change=allow_change, observer=observer)
    if STANDARD_INPUT in config.data.corpus and run.corpus is None:
        raise CheckpointError(
            f"{path} has no checkpoint yet, and its text came through standard input",
            "start a new run",
        )
    observer.noticed(f"{path.name} was stopped before its first checkpoint: starting at step 1")
    return Trainer(config, corpus_of(config, run=run), ByteTokenizer(), run, observer)


def changed(
    config: TrainConfig,
    changes: Mapping[str, object],
    *,
    allow_change: bool,
    observer: Observer,
    free: tuple[str, ...] = (),
) -> TrainConfig:
    """A run's configuration with the user's changes; those in ``free`` and ``FREE`` decide nothing here.

    Raises: ConfigError that lists the others unless they are allowed.
    """
    if changes.get("preset", config.preset) != config.preset:
        raise ConfigError(
            f"this run has preset {config.preset}, not {changes['preset']}",
            "start a new run for that",
        )
    new = replace(config, {key: value for key, value in changes.items() if key != "preset"})
    before, after = settings_of(config), settings_of(new)
    differ = [f"{key} {before[key]} -> {after[key]}" for key in after if before[key] != after[key]]
    free = (*free, *FREE)
    if new.engine.name != "torch":  # torch sums as its threads do
        free = (*free, "engine.threads")
    decisive = [line for line in differ if line.split(" ")[0] not in free]
    if any(line.startswith("model.") for line in decisive):
        raise ConfigError(
            f"a run cannot change its model: {'; '.join(decisive)}", "start a new run for that"
        )
    if decisive and not allow_change:
        raise ConfigError(
            f"resuming with other settings would not be the same run: {'; '.join(decisive)}",
            "leave them out, or add --allow-change to go on with the new ones",
        )
    if differ:
        observer.noticed(f"changed settings: {'; '.join(differ)}")
    return new


@dataclass(frozen=True)
class Measured:
    """What ``Model.measure`` found, and on which text."""

    corpus: Corpus
    evaluation: Evaluation
    verdict: Verdict


@dataclass(repr=False)
class Model:
    """A trained model, ready to write."""

    config: GPTConfig
    tokenizer: Tokenizer
    engine: Engine
    checkpoint: Checkpoint
    batch: int

    def __repr__(self) -> str:
        """One line: what it is and where it came from."""
        step = f", step {self.checkpoint.state.step}" if self.checkpoint.state else ""
        return f"Model({self.config.parameters():,} parameters, {self.engine.name}, {self.checkpoint.path}{step})"

    @property
    def sampling(self) -> SamplingConfig:
        """How its run samples; the defaults for a model that was not trained here."""
        state = self.checkpoint.state
        return SamplingConfig() if state is None else state.config.sampling

    def measure(
        self,
        sources: Sequence[str] = (),
        *,
        windows: int | None = None,
        samples: int | None = None,
    ) -> Measured:
        """Evaluate on the validation part of the run's text, or of another, and judge what the model writes.

        ``windows`` and ``samples`` are as at the end of training unless given; 0 windows are all.

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
        own = RunFolder(self.checkpoint.path.resolve().parent.parent).corpus if state else None
        corpus = open_corpus(
            sources or (config.data.corpus if own is None else [str(own)]),
            val_fraction=config.data.val_fraction,
            tokenizer=self.tokenizer,
            sha256=state.corpus.sha256 if state and state.corpus and not sources else None,
        )
        corpus.check(self.config.n_ctx)
        if not len(corpus.val):
            raise CorpusError(
                "this run kept no text for validation", "name another text: --corpus FILE"
            )
        evaluation = evaluate(
            self.engine,
            corpus,
            n_ctx=self.config.n_ctx,
            batch=self.batch,
            windows=config.training.final_windows if windows is None else windows,
        )
        judged = verdict(
            texts=Samples(self.engine, config, corpus, self.tokenizer).for_verdict(),
            corpus=corpus,
            val_loss=evaluation.loss,
            counting=counting_lines(corpus.train, corpus.val, self.config.n_vocab),
            config=config,
            best_val_loss=None if state is None else state.best_val_loss,
        )
        return Measured(corpus, evaluation, judged)

    def stream(
        self,
        prompt: str,
        *,
        sampling: SamplingConfig | None = None,
        seed: int = 1,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Iterator[str]:
        """Continue a prompt and give the new text in pieces. Raises: ConfigError."""
        replace(load_config(), {"training.seed": seed})  # one range for every seed
        return write_text(
            self.engine,
            self.config.n_ctx,
            self.tokenizer,
            prompt,
            sampling or self.sampling,
            seed=seed,
            max_tokens=max_tokens,
            stop=stop,
        )

    def generate(self, prompt: str, **options: Any) -> str:
        """Continue a prompt; options as in ``stream``."""
        return "".join(self.stream(prompt, **options))


def open_model(
    name: str, *, runs_dir: Path, engine: EngineConfig | None = None, batch: int | None = 1
) -> Model:
    """Load a run's newest checkpoint, a checkpoint folder or a Hugging Face GPT-2 folder.

    ``engine`` is the one it was trained on unless given; ``batch`` None plans for as many rows at a time as it was trained with.

    Raises: CheckpointError, EngineError.
    """
    checkpoint = read_checkpoint(resolve_run(name, runs_dir), moments=False)
    config = None if checkpoint.state is None else checkpoint.state.config
    if engine is None:
        engine = EngineConfig() if config is None else EngineConfig(name=config.engine.name)
    if batch is None:
        batch = 1 if config is None else config.data.batch_size
    loaded = inference_engine(checkpoint.config, engine, batch=batch)
    loaded.load(checkpoint.params)
    return Model(checkpoint.config, load_tokenizer(checkpoint.path), loaded, checkpoint, batch)


def newest_run(runs_dir: Path) -> str:
    """The name of the run with the newest checkpoint. Raises: CheckpointError when there is none."""
    found = [
        (folder.stat().st_mtime, folder.parent.name)
        for folder in runs_dir.glob("*/checkpoints")
        if list_checkpoints(folder)
    ]
    if not found:
        raise CheckpointError(
            f"there is no trained model in {runs_dir}", "train one first: posttrainllm train"
        )
    return max(found)[1]
