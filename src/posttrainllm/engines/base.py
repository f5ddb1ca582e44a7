"""What an engine is: the protocol that the trainer, the generator and the checks speak.

An engine runs training and inference of one model: it is given a state, gives it back, and computes in between. It is not a trainer (no
schedule, no data, no files), and it holds no model: four of the five run programs (``ProgramEngine`` here is what those share), torch
brings an nn.Module of its own.

Guarantees: same build, machine and inputs give bit-identical results for any number of threads (torch: for the same number); nothing is
allocated from step to step; a non-finite gradient never reaches the parameters, and the flag that says so is sticky.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from posttrainllm.control import token_index
from posttrainllm.errors import EngineError
from posttrainllm.machine import available_memory
from posttrainllm.ops import CLIP, SCALARS
from posttrainllm.plan import ARENAS, BoundCall, Place, Plan, make_plan
from posttrainllm.program import Program

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Array = NDArray[Any]
Tensors = Mapping[str, F32]


class TooLargeError(EngineError):
    """A plan that needs more memory than an engine may take; ``engine_choice`` adds which preset would fit."""

    def __init__(self, engine: str, needed: int, allowed: int) -> None:
        """Say both numbers in bytes."""
        super().__init__(
            f"{engine} needs {needed:,} bytes of memory and may take {allowed:,} here",
            "close other programs, or use a smaller model",
        )
        self.needed, self.allowed = needed, allowed


def check_memory(engine: str, needed: int) -> None:
    """Refuse what this machine does not have, before it is taken: asked afterwards, the system ends the process instead.

    Raises: TooLargeError.
    """
    allowed = available_memory()
    if 0 < allowed < needed:
        raise TooLargeError(engine, needed, allowed)


def copied_bytes(plan: Plan) -> int:
    """Bytes of what ``Engine.load`` takes and ``Engine.state`` gives back."""
    return sum(r.nbytes for r in plan.regions.values() if r.name.startswith(("param.", "adam.")))


@dataclass(frozen=True)
class Batch:
    """Token ids and the ids that follow them, (B, T) int32 each; a target of -1 is not trained."""

    tokens: I32
    targets: I32

    @property
    def trained(self) -> int:
        """How many targets count."""
        return int(np.count_nonzero(self.targets >= 0))


@dataclass(frozen=True)
class StepScalars:
    """What changes from update to update: the learning rate and 1 - beta^t of both moments."""

    lr: float
    correction1: float
    correction2: float


@dataclass(frozen=True)
class StepResult:
    """What an update leaves to look at: the step's loss in nats per token, the gradients' norm before clipping, whether all was finite."""

    loss: float
    grad_norm: float
    finite: bool


@dataclass(frozen=True)
class State:
    """Everything that training changes, float32 by parameter name: parameters and AdamW's moments.

    Where no process holds all moments, ``m`` and ``v`` are empty and ``write_moments`` puts them into a folder.
    """

    params: dict[str, F32]
    m: dict[str, F32]
    v: dict[str, F32]
    write_moments: Callable[[Path], None] | None = field(default=None, kw_only=True)


class Engine(Protocol):
    """The five engines to the rest of the package."""

    name: str

    @property
    def info(self) -> dict[str, str | int]:
        """What runs: build, instruction set, threads, versions; goes into checkpoints and records."""
        ...

    @property
    def nbytes(self) -> int:
        """Planned memory."""
        ...

    def load(self, params: Tensors, m: Tensors | None = None, v: Tensors | None = None) -> None:
        """Take over parameters and moments (zeros when not given); clears the non-finite flag."""
        ...

    def state(self) -> State:
        """Copies of parameters and moments."""
        ...

    def gradients(self, batch: Batch, *, inv_count: float, first: bool) -> None:
        """Compute loss and gradients of one micro-batch; unless ``first``, add them to what is there."""
        ...

    def gradient_tensors(self) -> dict[str, F32]:
        """Copies of the gradients, by parameter name."""
        ...

    def update(self, scalars: StepScalars) -> None:
        """Clip and take one AdamW step."""
        ...

    def results(self, wait: bool = True) -> list[StepResult]:
        """Results of the updates since the last time, in order; without ``wait``, those that are there already."""
        ...

    def loss(self, batch: Batch) -> float:
        """Mean loss of a batch in nats per token, without gradients."""
        ...

    def logits(self, tokens: I32) -> F32:
        """Logits (B, T, V) of tokens (B, T)."""
        ...

    def prefill(self, tokens: I32, lengths: I32 | None = None) -> F32:
        """Start the cache with prompts (B, T), right-padded to T; logits (B, V) of the last token of each."""
        ...

    def decode(self, tokens: I32) -> F32:
        """Take one token (B,) on; logits (B, V)."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


class ProgramEngine(ABC):
    """An engine that runs programs: inputs in, one run a program, results out. A subclass brings memory and the run."""

    name: str
    fused_ops: frozenset[str] = frozenset()  # what ``fuse.py`` may put into its programs

    def __init__(
        self, programs: Mapping[str, Program], dims: Mapping[str, Mapping[str, int]]
    ) -> None:
        """Plan the programs; the subclass takes the memory."""
        self.plan: Plan = make_plan(programs, dims)
        self._prepared: dict[tuple[str, tuple[tuple[str, int], ...]], Any] = {}
        self._results: list[StepResult] = []
        self._positions = np.zeros(0, np.int32)
        self._position_index: tuple[I32, I32, I32] | None = None
        self._scalars = np.zeros(len(SCALARS), np.float64)  # rounded where the engine keeps float32

    # ---- what a subclass brings ---------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def info(self) -> dict[str, str | int]:
        """See ``Engine.info``."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The plan's bytes and the engine's own workspace."""

    @abstractmethod
    def write(self, place: Place, values: Array) -> None:
        """Copy values into a place."""

    @abstractmethod
    def read(self, place: Place) -> Array:
        """Copy a place's content out."""

    @abstractmethod
    def prepare(self, calls: list[BoundCall]) -> Any:
        """Turn bound calls into whatever ``run`` takes."""

    @abstractmethod
    def run(self, prepared: Any) -> None:
        """Run prepared calls to their end."""

    def close(self) -> None:
        """Free what the engine holds."""
        self._prepared.clear()

    def check_memory(self, nbytes: int) -> None:
        """Before taking ``nbytes``: are they there, with the copies of the state that loading and saving take? Raises: TooLargeError."""
        check_memory(self.name, nbytes + copied_bytes(self.plan))

    # ---- running programs ---------------------------------------------------------------------------------------------------------

    def run_program(self, name: str, **smaller: int) -> None:
        """Run a program of the set, prepared once for each choice of dims."""
        key = (name, tuple(sorted(smaller.items())))
        if key not in self._prepared:
            self._planned(name)
            self._prepared[key] = self.prepare(self.plan.bind(name, **smaller))
        self.run(self._prepared[key])

    def _planned(self, program: str) -> Mapping[str, int]:
        """The dims that a program was planned with."""
        if program not in self.plan.dims:
            raise EngineError(f"the {self.name} engine was set up without the program {program!r}")
        return self.plan.dims[program]

    def _input(self, program: str, name: str, values: Array) -> None:
        place = self.plan.places[program].get(name)
        if place is not None:
            self.write(Place(place.region, place.offset, values.shape), values)

    def _set_batch(self, program: str, batch: Batch) -> None:
        planned = self._planned(program)
        if not batch.tokens.shape == batch.targets.shape == (planned["B"], planned["T"]):
            raise EngineError(
                f"tokens {batch.tokens.shape} and targets {batch.targets.shape} are not the planned "
                f"({planned['B']}, {planned['T']})"
            )
        if int(batch.targets.max()) >= planned["V"]:
            raise EngineError(
                f"targets must lie in 0 .. {planned['V'] - 1}, or be -1; got {batch.targets.max()}"
            )
        self._set_tokens(program, batch.tokens, np.arange(planned["T"], dtype=np.int32))
        self._input(program, "targets", batch.targets.ravel())
        if program == "gradients":
            if self._position_index is None:  # the same for every batch
                positions = np.arange(planned["T"], dtype=np.int32)
                self._position_index = token_index(np.tile(positions, planned["B"]))
            for index, lists in (
                ("token_index", token_index(batch.tokens.ravel())),
                ("position_index", self._position_index),
            ):
                for part, values in zip(("rows", "starts", "order"), lists, strict=True):
                    self._input(program, f"{index}.{part}", values)

    def _set_tokens(self, program: str, tokens: I32, positions: I32) -> None:
        """Tokens (B, T) at positions (T,) or (B, T); every row is one segment."""
        (batch, time), planned = tokens.shape, self._planned(program)
        if not (0 < batch <= planned["B"] and 0 < time <= planned["T"]):
            raise EngineError(
                f"tokens {tokens.shape} do not fit the planned ({planned['B']}, {planned['T']})"
            )
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < planned["V"]:
            raise EngineError(
                f"token ids must lie in 0 .. {planned['V'] - 1}, got {tokens.min()} .. {tokens.max()}"
            )
        self._input(program, "tokens", tokens.ravel())
        self._input(program, "positions", np.broadcast_to(positions, tokens.shape).ravel())
        self._input(program, "segment_start", np.zeros(tokens.size, np.int32))

    def _set_scalars(self, **slots: float) -> None:
        for slot, value in slots.items():
            self._scalars[SCALARS.index(slot)] = value
        self.write(Place("in.scalars", 0, self._scalars.shape), self._scalars)

    # ---- the protocol -------------------------------------------------------------------------------------------------------------

    def load(self, params: Tensors, m: Tensors | None = None, v: Tensors | None = None) -> None:
        """See ``Engine.load``.

        Raises: EngineError for a missing, unexpected or misshapen tensor; nothing is changed then.
        """
        given = {
            kind: tensors
            for kind, tensors in (("param", params), ("adam.m", m), ("adam.v", v))
            if f"{kind}.decayed" in self.plan.regions
        }
        for kind, tensors in given.items():
            self._check_tensors(kind, tensors)
        for kind, tensors in given.items():
            for name, (_, place) in self.plan.layout.items():
                values = np.zeros(place.shape, np.float32) if tensors is None else tensors[name]
                self.write(self.plan.tensor(kind, name), values)
        if "state.clip" in self.plan.regions:
            self.write(Place("state.clip", 0, (len(CLIP),)), np.zeros(len(CLIP), np.float32))
        self._results.clear()
        self._positions = np.zeros(0, np.int32)  # what the cache holds is of other parameters

    def _check_tensors(self, kind: str, tensors: Tensors | None) -> None:
        if tensors is None:
            return
        odd = sorted(set(tensors) ^ set(self.plan.layout))
        if odd:
            raise EngineError(
                f"{kind} tensors do not fit the model: {odd[0]!r} is missing or unexpected"
            )
        for name, values in tensors.items():
            shape = self.plan.layout[name][1].shape
            if values.shape != shape:
                raise EngineError(f"{name!r} is {values.shape} but the model has {shape}")

    def _tensors(self, kind: str) -> dict[str, F32]:
        if f"{kind}.decayed" not in self.plan.regions:
            return {}
        return {
            name: self.read(self.plan.tensor(kind, name)).astype(np.float32)
            for name in self.plan.layout
        }

    def state(self) -> State:
        """See ``Engine.state``."""
        params, _, m, v = (self._tensors(kind) for kind in ARENAS)
        return State(params, m, v)

    def gradient_tensors(self) -> dict[str, F32]:
        """See ``Engine.gradient_tensors``."""
        return self._tensors("grad")

    def gradients(self, batch: Batch, *, inv_count: float, first: bool) -> None:
        """See ``Engine.gradients``."""
        self._set_batch("gradients", batch)
        self._set_scalars(inv_count=inv_count, beta=0.0 if first else 1.0)
        self.run_program("gradients")

    def update(self, scalars: StepScalars) -> None:
        """See ``Engine.update``."""
        self._set_scalars(
            lr=scalars.lr, correction1=scalars.correction1, correction2=scalars.correction2
        )
        self.run_program("update")
        clip = self.read(Place("state.clip", 0, (len(CLIP),)))
        loss = float(self.read(Place("out.loss", 0, (1,)))[0])
        finite = not clip[CLIP.index("nonfinite")] and bool(np.isfinite(loss))
        self._results.append(StepResult(loss, float(clip[CLIP.index("norm")]), finite))

    def results(self, wait: bool = True) -> list[StepResult]:
        """See ``Engine.results``."""
        taken, self._results = self._results, []
        return taken

    def loss(self, batch: Batch) -> float:
        """See ``Engine.loss``."""
        self._set_batch("loss", batch)
        self._set_scalars(inv_count=1.0 / max(1, batch.trained), beta=0.0)
        self.run_program("loss")
        return float(self.read(Place("out.loss", 0, (1,)))[0])

    def logits(self, tokens: I32) -> F32:
        """See ``Engine.logits``."""
        batch, time = tokens.shape
        self._set_tokens("logits", tokens, np.arange(time, dtype=np.int32))
        self.run_program("logits", B=batch, T=time)
        return self.read(Place("out.logits", 0, (batch, time, self.plan.dims["logits"]["V"])))

    def prefill(self, tokens: I32, lengths: I32 | None = None) -> F32:
        """See ``Engine.prefill``."""
        batch, time = tokens.shape
        self._set_tokens("prefill", tokens, np.arange(time, dtype=np.int32))
        filled = np.full(batch, time, np.int32) if lengths is None else lengths.astype(np.int32)
        if filled.shape != (batch,) or not 1 <= int(filled.min()) <= int(filled.max()) <= time:
            raise EngineError(
                f"prompts in {tokens.shape} tokens need {batch} lengths in 1 .. {time}, got {filled.tolist()}"
            )
        self._positions = filled
        last = np.arange(batch, dtype=np.int32) * time + self._positions - 1
        self._input("prefill", "last", last)
        self.run_program("prefill", B=batch, T=time)
        return self.read(Place("out.next_logits", 0, (batch, self.plan.dims["prefill"]["V"])))

    def decode(self, tokens: I32) -> F32:
        """See ``Engine.decode``. Raises: EngineError when the cache is full (``training/generate.py`` starts it again before that)."""
        batch = len(tokens)
        capacity = self._planned("decode")["S"]
        if len(self._positions) != batch or int(self._positions.max()) >= capacity:
            raise EngineError(
                f"decode needs a prefill of {batch} prompts and room in the cache of {capacity} tokens"
            )
        self._set_tokens("decode", tokens.reshape(batch, 1), self._positions.reshape(batch, 1))
        self._input("decode", "last", np.arange(batch, dtype=np.int32))
        self.run_program("decode", B=batch)
        self._positions = self._positions + 1
        return self.read(Place("out.next_logits", 0, (batch, self.plan.dims["decode"]["V"])))
