"""The training loop: one, over any engine.

What this is: schedule, batches, accumulation, evaluation, samples, checkpoints, stopping. All it knows of the outside is an ``Observer``
that is told what happened.
What this is not: arithmetic (``engines/``), the choice of data and weights (``control.py``), or printing (``cli``).

Step s is a function of (configuration, seed, s) and of the state before it. A resumed run therefore computes what an undisturbed one
would have computed, bit for bit on the same engine and build.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from posttrainllm.config import TrainConfig
from posttrainllm.engines.base import F32, StepResult
from posttrainllm.errors import CheckpointError, EngineError, NonFiniteError, PosttrainError
from posttrainllm.runs.checkpoint import Checkpoint
from posttrainllm.runs.checkpoint_folder import check_space, list_checkpoints, step_of
from posttrainllm.runs.folder import Run, resuming
from posttrainllm.runs.trainer_state import CorpusIdentity, TrainerState
from posttrainllm.text.corpus import Corpus
from posttrainllm.text.counting import CountingLine
from posttrainllm.text.counting import lines as counting_lines
from posttrainllm.text.tokenizer import Tokenizer
from posttrainllm.training.cut_short import cut_short_at, evaluates, make_up
from posttrainllm.training.engine_choice import differences, initial_parameters, training_engine
from posttrainllm.training.evaluate import evaluate
from posttrainllm.training.journal import Journal
from posttrainllm.training.observer import Observer, Outcome, Record, Silent, Start
from posttrainllm.training.samples import Samples
from posttrainllm.training.step import step_gradients, step_update, training_batches
from posttrainllm.training.stopping import StopSignals
from posttrainllm.training.writing import Verdict, verdict
from posttrainllm.wording import worded

if TYPE_CHECKING:
    from posttrainllm.pytorch.distributed_group import Group


@dataclass
class Trainer:
    """One run from its first step, or from a checkpoint, to its end."""

    config: TrainConfig
    corpus: Corpus
    tokenizer: Tokenizer
    run: Run
    observer: Observer = field(default_factory=Silent)
    resumed: Checkpoint | None = None
    start: Mapping[str, F32] | None = None  # the first weights; None draws them
    made_here: bool = False  # the run's folder: then it goes when nothing comes of it
    group: Group | None = None  # the processes that this one leads

    def __post_init__(self) -> None:
        """Check what can be checked before memory is taken."""
        self.corpus.check(self.config.model.n_ctx)
        self.step = 0
        self.losses: list[float] = []
        self.best: float | None = None
        self._elapsed_before = 0.0
        self._val_loss: float | None = None
        self._cut_short = False  # an evaluation, by an interrupt
        self._stop = StopSignals(self.observer.stopping, breakable=self.group is None)
        if self.resumed is not None and self.resumed.state is not None:
            self.step = self.resumed.state.step
            self.best = self.resumed.state.best_val_loss
            self._val_loss = self.resumed.state.val_loss
            self._elapsed_before = self.resumed.state.elapsed_s

    def train(self) -> Outcome:
        """Train to the last step, or until the user stops it; either way the state is saved.

        Raises: TrainingError, CheckpointError or EngineError. What the disk holds then is a run that can be resumed; a new run without
        a first line leaves nothing.
        """
        try:
            return self._open_and_train()
        except BaseException:
            if self.made_here:
                self.run.remove_if_empty()
            raise

    def _open_and_train(self) -> Outcome:
        config, loop = self.config, self.config.training
        reasons = (loop.checkpoint_every, loop.eval_every if loop.save_best else 0)
        saves = 1 + sum(loop.steps // every for every in reasons if every)
        check_space(
            self.run.checkpoints,
            config.model,
            saves=saves,
            keep=loop.keep_checkpoints,
            keep_best=True,
        )
        before = self.resumed.state.engine_info if self.resumed and self.resumed.state else {}
        self.engine = training_engine(config, before=before, group=self.group)
        if before and (changed := differences(self.engine.info, before)):
            self.observer.noticed(
                "the engine is not what the run was trained with, losses may differ in their last digits: "
                + "; ".join(changed)
            )
        if self.engine.info.get("software"):
            self.observer.noticed(
                worded(
                    "no GPU computes here: {adapter} is a program on the processor, right but slow; {engine.name=cpp} is far faster",
                    adapter=self.engine.info["adapter"],
                )
            )
        self._samples = Samples(self.engine, config, self.corpus, self.tokenizer)
        try:
            self._load()
            with self.run.lock():
                self._still_newest()
                self.run.start_from(self.step)
                self.run.write_config(config)
                self.journal = Journal(self.run, self.corpus, self.tokenizer, self.observer.noticed)
                if self.resumed is not None:
                    self.journal.saved = self.resumed.path
                try:
                    self.observer.started(self._start())
                    with self._stop:
                        return self._train()
                finally:
                    self.journal.close()
        finally:
            self.engine.close()

    def _load(self) -> None:
        """Give the engine its numbers and let go of what they came in, which is as much memory again for the whole run."""
        if self.resumed is None:
            first = self.start or initial_parameters(self.config.model, self.config.training.seed)
            self.engine.load(first)
            self.start = None
        else:
            self.engine.load(self.resumed.params, self.resumed.m, self.resumed.v)
            self.resumed = replace(self.resumed, params={}, m=None, v=None)

    def _still_newest(self) -> None:
        """Refuse to go on from an older checkpoint: named by hand, or overtaken by another process before the lock was ours."""
        newest = max(map(step_of, list_checkpoints(self.run.checkpoints)), default=0)
        # one that was damaged is passed over on purpose
        damaged = bool(self.resumed and self.resumed.notices)
        if newest > self.step and not damaged:
            raise CheckpointError(
                f"run {self.run.name} has a checkpoint of step {newest}, beyond step {self.step}",
                worded(
                    "go on from the newest: {it}, or remove the later ones",
                    it=resuming(self.run.path),
                ),
            )

    def _train(self) -> Outcome:
        loop, stop = self.config.training, self._stop
        self._began = time.monotonic()
        self._aside = self._aside_taken = 0.0
        self._taken_at = self._began
        pending: deque[tuple[int, float]] = deque()
        if self.step:
            self._make_up()
        while self.step < loop.steps and not stop.requested:
            with stop.giving_up():
                step_gradients(self.engine, self.corpus, self.config, self.step + 1)
            if stop.again:
                break
            lr = step_update(self.engine, self.config, self.step + 1)
            self.step += 1
            pending.append((self.step, lr))
            last = self.step == loop.steps
            stands = last or any(
                map(self._due, (loop.eval_every, loop.sample_every, loop.checkpoint_every))
            )
            self._take(self.engine.results(wait=stands), pending)
            if self._due(loop.sample_every) and not last:
                self._set_aside(self._sample)
            if (self._due(loop.checkpoint_every) or self._is_best()) and not last:
                self._set_aside(self._save)
        self._take(self.engine.results(wait=True), pending)
        if not self.step:
            raise KeyboardInterrupt  # stopped before anything was computed: there is nothing to save
        finished = self.step >= loop.steps and not self._cut_short
        if finished:
            self._sample()  # before the checkpoint: a run that is killed here goes on from an earlier one and writes it again
        folder = self.journal.last_checkpoint(self.engine, self._state, stop)
        self.observer.saved(self.step, folder)
        outcome = Outcome(
            self.run.path,
            finished,
            self.step,
            self.losses,
            self._val_loss,
            self._verdict() if finished else None,
            folder,
            stopped=stop.requested,
        )
        self.observer.ended(outcome)
        return outcome

    # ---- before the first step ----------------------------------------------------------------

    def _start(self) -> Start:
        config = self.config
        return Start(
            run=self.run.path,
            config=config,
            corpus=self.corpus,
            engine=self.engine.info,
            parameters=config.model.parameters(),
            nbytes=self.engine.nbytes,
            tokens_per_step=config.tokens_per_step,
            first_step=self.step + 1,
            counting=self.counting,
            seconds_per_step=self._probe(),
        )

    @cached_property
    def counting(self) -> list[CountingLine]:
        """What counting reaches on this split."""
        train, val = self.corpus.train, self.corpus.val
        return counting_lines(train, val, self.config.model.n_vocab) if len(val) > 1 else []

    def _probe(self) -> float:
        """Seconds a step, from gradients of the next batch that are then thrown away: they change no state."""
        step = min(self.step + 1, self.config.training.steps)
        times: list[float] = []
        for _ in range(3):
            began = time.perf_counter()
            for index, batch in enumerate(training_batches(self.corpus, self.config, step)):
                self.engine.gradients(batch, inv_count=1.0, first=index == 0)
            self.engine.results(wait=True)
            times.append(time.perf_counter() - began)
            if sum(times) > 0.5:
                break
        return statistics.median(times[1:] or times)

    # ---- along the way ------------------------------------------------------------------------

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _is_best(self) -> bool:
        """Whether this step was evaluated, is the best so far, and is to be kept for that."""
        wanted = self.config.training.save_best and self._val_loss is not None
        return wanted and self._val_loss == self.best

    def _set_aside(self, action: Callable[[], None]) -> None:
        """Run something that is not training, and keep its time out of tokens per second."""
        began = time.monotonic()
        action()
        self._aside += time.monotonic() - began

    def _check(self, step: int, result: StepResult) -> None:
        """Stop at the first loss or gradient that is not a number. The update left it out of the weights already."""
        if result.finite:
            return
        odd = [
            name
            for name, values in self.engine.gradient_tensors().items()
            if not np.isfinite(values).all()
        ]
        first = f"; the first tensor with one is grad.{odd[0]}" if odd else ""
        kept = (
            f"the last good checkpoint is {self.journal.saved}"
            if self.journal.saved
            else "no checkpoint was written yet"
        )
        raise NonFiniteError(
            f"step {step}: a loss or gradient is not a finite number{first}",
            worded(
                "{kept}; try a lower {schedule.learning_rate} (it is {rate:g}) or a longer warm-up",
                kept=kept,
                rate=self.config.schedule.learning_rate,
            ),
        )

    def _take(self, results: list[StepResult], pending: deque[tuple[int, float]]) -> None:
        """Look at results as they come: one a step, or several at once from an engine that nobody waits for."""
        if not results:
            return
        now = time.monotonic()
        seconds = (now - self._taken_at) - (self._aside - self._aside_taken)
        self._taken_at, self._aside_taken = now, self._aside
        speed = len(results) * self.config.tokens_per_step / max(seconds, 1e-9)
        for result in results:
            step, lr = pending.popleft()
            self._check(step, result)
            self.losses.append(result.loss)
            self._log(step, result, lr, speed)

    def _log(self, step: int, result: StepResult, lr: float, speed: float) -> None:
        """Write a line of metrics where one is due; evaluations are due at the newest step alone, when nothing is pending."""
        loop, last = self.config.training, step == self.config.training.steps
        self._val_loss = None
        if evaluates(self.config, step):
            if len(self.corpus.val):
                self._set_aside(lambda: self._evaluate(last))
        elif step % loop.log_every:
            return
        record = Record(
            step, result.loss, self._val_loss, lr, result.grad_norm, speed, self._elapsed()
        )
        self.journal.append("metrics", asdict(record))
        self.observer.stepped(record)

    def _elapsed(self) -> float:
        return self._elapsed_before + time.monotonic() - self._began

    def _evaluate(self, last: bool) -> None:
        """Find the validation loss; none when it is given up, or fails: it must not cost the run."""
        loop, n_ctx = self.config.training, self.config.model.n_ctx
        windows = loop.final_windows if last else loop.eval_windows
        try:
            with self._stop.giving_up():
                found = evaluate(
                    self.engine,
                    self.corpus,
                    n_ctx=n_ctx,
                    batch=self.config.data.batch_size,
                    windows=windows,
                    check=self._stop.check,
                )
                self._val_loss = found.loss
                self.best = found.loss if self.best is None else min(self.best, found.loss)
        except (EngineError, MemoryError) as error:
            why = error.message if isinstance(error, EngineError) else "not enough memory"
            self.observer.noticed(f"no validation loss at step {self.step}: {why}")
        self._cut_short = self._val_loss is None and self._stop.requested

    def _make_up(self) -> None:
        """Evaluate where an interrupt cut that off, before training goes on from there."""
        record = cut_short_at(self.run, self.config, self.step)
        if record is None or not len(self.corpus.val):
            return
        last = self.step == self.config.training.steps
        self._set_aside(lambda: self._evaluate(last))
        if self._val_loss is not None:
            self.observer.stepped(make_up(self.run, record, self._val_loss))
            if not last:
                self._set_aside(self._save)

    def _sample(self) -> None:
        if not self.config.training.sample_tokens:
            return
        text = None
        try:
            prompt = self.tokenizer.decode(self._samples.prompt)
            with self._stop.giving_up():
                seed = self._samples.seed("sample", self.step)
                text = self._samples.write(seed, self._stop.check)
        except PosttrainError as error:  # a sample is decoration: it must not cost the run
            return self.observer.noticed(f"no sample at step {self.step}: {error.message}")
        if text is not None:
            self.journal.append("samples", {"step": self.step, "prompt": prompt, "text": text})
            self.observer.sampled(self.step, prompt, text)

    # ---- saving and judging -------------------------------------------------------------------

    def _state(self, corpus: CorpusIdentity, tokenizer: str) -> TrainerState:
        info = self.engine.info
        return TrainerState(
            step=self.step,
            seed=self.config.training.seed,
            engine=self.engine.name,
            engine_info=dict(info),
            threads=int(info.get("threads", 1)),
            corpus=corpus,
            tokenizer=tokenizer,
            val_loss=self._val_loss,
            best_val_loss=self.best,
            elapsed_s=self._elapsed(),
            config=self.config,
        )

    def _save(self) -> None:
        folder = self.journal.checkpoint_or_notice(self.engine, self._state)
        if folder is not None:
            self.observer.saved(self.step, folder)

    def _verdict(self) -> Verdict | None:
        """What the run came to; nothing when the user does not wait for it."""
        with self._stop.giving_up():
            texts = self._samples.for_verdict(self._stop.check)
            if texts:
                return verdict(
                    texts=texts,
                    corpus=self.corpus,
                    val_loss=self._val_loss,
                    counting=self.counting,
                    config=self.config,
                    best_val_loss=self.best,
                )
        return None
