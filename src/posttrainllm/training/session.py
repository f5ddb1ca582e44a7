"""Opening a run: a new one, or one to go on with.

What this is: the way from a configuration or a name to a ``Trainer``, with every check on the way. The command line and the Python API
both go through here.
What this is not: a trained model to write with (``training/models.py``), parsing of arguments or printing. Read next:
``training/trainer.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace as replace_fields
from pathlib import Path

from posttrainllm.config import SETTINGS, TrainConfig, fitting_warmup, replace, settings_of
from posttrainllm.engines.base import F32
from posttrainllm.errors import CheckpointError, ConfigError
from posttrainllm.figures import Progress, untold
from posttrainllm.runs.checkpoint import list_checkpoints, read_checkpoint
from posttrainllm.runs.folder import CONFIG_FILE, create_run, resolve_run, resuming
from posttrainllm.runs.folder import Run as RunFolder
from posttrainllm.runs.lock import check_free
from posttrainllm.runs.opening import folder_tokenizer
from posttrainllm.runs.trainer_state import CorpusIdentity, TrainerState
from posttrainllm.text.corpus import Corpus, open_corpus
from posttrainllm.text.files import STANDARD_INPUT
from posttrainllm.text.tokenizer import ByteTokenizer, Tokenizer
from posttrainllm.training.cut_short import cut_short_at
from posttrainllm.training.observer import Observer, Silent
from posttrainllm.training.starting import starting_model
from posttrainllm.training.trainer import Trainer
from posttrainllm.wording import Wording, setting, worded

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
    config: TrainConfig,
    *,
    identity: CorpusIdentity | None = None,
    run: RunFolder | None = None,
    tokenizer: Tokenizer | None = None,
    progress: Progress = untold,
) -> Corpus:
    """The text of a configuration as tokens (bytes unless given), long enough for its context.

    ``identity`` is the text that is wanted when a run goes on, and ``run`` the run: its own copy of the text goes before the files that
    its configuration names, which may be another machine's. Raises: CorpusError.
    """
    own = None if run is None else run.corpus
    corpus = open_corpus(
        config.data.corpus if own is None else (str(own),),
        val_fraction=config.data.val_fraction,
        tokenizer=tokenizer,
        sha256=None if identity is None else identity.sha256,
        progress=progress,
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
    watcher = observer or Silent()
    start, tokenizer = first_weights(config, runs_dir)
    corpus = corpus_of(config, tokenizer=tokenizer, progress=watcher.preparing)
    if corpus.sources:
        config = replace(config, {"data.corpus": corpus.sources})
    run = create_run(runs_dir, config, name)
    return Trainer(config, corpus, tokenizer, run, watcher, start=start, made_here=True)


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
    check_free(run.path)  # before its settings are compared: they may be the other process's
    at, planned = checkpoint.state.step, checkpoint.state.config.training.steps
    wanted = (changes or {}).get("training.steps", planned)
    if isinstance(wanted, int) and 0 < wanted < at:  # before other settings are held against it
        raise ConfigError(
            f"run {run.name} is at step {at}, beyond the {wanted} that are wanted",
            worded("give it more: {it}", it=resuming(run.path, 2 * at)),
        )
    config = changed(
        checkpoint.state.config,
        _with_warmup(checkpoint.state, changes or {}),
        allow_change=allow_change,
        observer=watcher,
        free=_undecided(checkpoint.state),
    )
    if at == config.training.steps and cut_short_at(run, config, at) is None:
        raise ConfigError(
            f"run {run.name} is at its last step, {at}",
            worded("give it more: {it}", it=resuming(run.path, 2 * at)),
        )
    tokenizer = folder_tokenizer(checkpoint.path, config.model.n_vocab)
    identity = checkpoint.state.corpus
    corpus = corpus_of(
        config, identity=identity, run=run, tokenizer=tokenizer, progress=watcher.preparing
    )
    return Trainer(config, corpus, tokenizer, run, watcher, checkpoint)


def _undecided(state: TrainerState) -> tuple[str, ...]:
    """The settings of a run that nothing depends on any more, or yet: at step 0 stands a model that was imported."""
    if state.step == 0:
        return tuple(key for key in SETTINGS if not key.startswith("model."))
    of_text = () if state.corpus else ("data.corpus", "data.val_fraction")
    return (*of_text, "training.steps") if state.step >= state.config.training.steps else of_text


def _with_warmup(state: TrainerState, changes: Mapping[str, object]) -> Mapping[str, object]:
    """The changes to a run, with a shorter warm-up where its first steps become fewer, as in ``load_config``."""
    steps, warmup = changes.get("training.steps"), "schedule.warmup_steps"
    if state.step or not isinstance(steps, int) or warmup in changes:
        return changes
    return {**changes, warmup: fitting_warmup(state.config.schedule.warmup_steps, steps)}


def first_weights(
    config: TrainConfig, runs_dir: Path
) -> tuple[Mapping[str, F32] | None, Tokenizer]:
    """The weights and the tokenizer of the model that a run starts from; None and bytes when weights are drawn.

    Raises: CheckpointError; ConfigError when the model that is wanted has other tokens than its text is read as.
    """
    found = starting_model(config, runs_dir)
    if found is not None:
        tokenizer = found.tokenizer
    elif config.data.tokenizer:
        tokenizer = folder_tokenizer(Path(config.data.tokenizer), config.model.n_vocab)
    else:
        tokenizer = ByteTokenizer()
    if config.model.n_vocab != tokenizer.n_vocab:
        raise ConfigError(
            f"model.n_vocab is {config.model.n_vocab:,}, but text is read as {tokenizer.n_vocab:,} tokens",
            worded(
                "use {vocabulary}, or a tokenizer of your own: {maker} makes one, {data.tokenizer=FOLDER} takes it",
                vocabulary=setting("model.n_vocab", tokenizer.n_vocab),
                maker=Wording("posttrainllm.train_tokenizer", terminal="posttrainllm tokenizer"),
            ),
        )
    return found.checkpoint.params if found else None, tokenizer


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
    check_free(path)
    config = changed(run.config(), changes, allow_change=allow_change, observer=observer)
    if STANDARD_INPUT in config.data.corpus and run.corpus is None:
        raise CheckpointError(
            f"{path} has no checkpoint yet, and its text came through standard input",
            "start a new run",
        )
    observer.noticed(f"{path.name} was stopped before its first checkpoint: starting at step 1")
    start, tokenizer = first_weights(config, path.parent)
    corpus = corpus_of(config, run=run, tokenizer=tokenizer, progress=observer.preparing)
    return Trainer(config, corpus, tokenizer, run, observer, start=start)


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
            worded("leave them out, or add {allow_change=True} to go on with the new ones"),
        )
    if differ:
        observer.noticed(f"changed settings: {'; '.join(differ)}")
    return new
