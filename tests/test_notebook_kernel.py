"""A real notebook: the example is run cell by cell, and a kernel is interrupted while it trains."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import needs

nbclient = needs.require("nbclient")
needs.require("ipykernel")

import nbformat  # noqa: E402 - comes with nbclient
from jupyter_client.manager import KernelManager  # noqa: E402

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "first-steps.ipynb"
PATIENCE_S = 120

# What zmq, tornado and jupyter_client warn about is theirs.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[KernelManager]:
    """A manager of kernels that import this package from here, and keep their files to themselves."""
    found = KernelManager(kernel_name="python3")
    spec = found.kernel_spec
    assert spec is not None, "ipykernel brings the kernel python3"
    spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
    }
    yield found
    if found.has_kernel:
        found.shutdown_kernel(now=True)
    found.cleanup_resources()


class Kernel:
    """A kernel that runs one cell at a time, as a notebook's page does."""

    def __init__(self, manager: KernelManager, folder: Path) -> None:
        manager.start_kernel(cwd=str(folder))
        self.manager = manager
        self.client = manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_S)

    def run(self, code: str, *, interrupt_when: str = "") -> list[dict[str, Any]]:
        """The outputs of a cell in order, updates in place of what they update. ``interrupt_when`` an output holds that, once."""
        asked = self.client.execute(code)
        outputs: list[dict[str, Any]] = []
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            message = self.client.get_iopub_msg(timeout=PATIENCE_S)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != asked:
                continue
            if kind == "status" and content["execution_state"] == "idle":
                return outputs
            if kind == "update_display_data":
                same = [each.get("transient") == content["transient"] for each in outputs]
                outputs[same.index(True)] = content
            elif kind in ("display_data", "execute_result", "stream", "error"):
                outputs.append(content)
            if interrupt_when and interrupt_when in str(content):
                interrupt_when = ""
                self.manager.interrupt_kernel()
        raise AssertionError(f"the cell did not end: {code}")

    def value(self, expression: str) -> str:
        [output] = self.run(expression)
        assert "data" in output, output
        return str(output["data"]["text/plain"])


def test_the_example_runs_and_its_outputs_teach_what_it_says(tmp_path, manager):
    notebook = nbformat.read(EXAMPLE, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    manager.start_kernel(cwd=str(tmp_path))
    client = nbclient.NotebookClient(notebook, km=manager, timeout=PATIENCE_S)
    try:
        client.execute()
    finally:
        client.kc.stop_channels()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    nothing, training, run, losses, other, comparison, more, written, bard, further, looked = (
        outputs
    )
    assert nothing == []
    expected = (
        (training, "finished 400 steps"),
        (other, "finished 400 steps"),
        (more, "finished 600 steps"),
        (further, "finished 10 steps"),
    )
    for shown, words in expected:
        assert [output.output_type for output in shown] == ["display_data"], (
            "one output, drawn again"
        )
        html = shown[0].data["text/html"]
        assert words in html
        assert "<svg" in html
        assert "triples 2.05" in html or "quadruples 1.78" in html
        assert "posttrainllm.resume(" in shown[0].data["text/plain"]
    assert "<svg" in run[0].data["text/html"]
    assert run[0].data["text/plain"].startswith("Run('runs/tiny-001'")
    assert losses[0].data["text/plain"].startswith("(2.")
    table = comparison[0].data["text/plain"].splitlines()
    assert "learning rate" in table[0]
    assert [line.split()[0] for line in table[1:]] == ["tiny-001", "tiny-002"]
    best = [float(line.split()[-2]) for line in table[1:]]
    assert best[0] < best[1], "the text says that the preset's learning rate is better"
    assert comparison[0].data["text/html"].count("<svg") == 4
    assert len(written[0].text) > 150
    assert len(bard[0].text) > 100
    assert looked[0].data["text/plain"].startswith("Inspection(57 tokens")
    assert "what comes next" in looked[0].data["text/html"]
    assert "<svg" in looked[0].data["text/html"]


def test_an_interrupt_saves_says_how_to_go_on_and_returns_the_run(tmp_path, manager):
    kernel = Kernel(manager, tmp_path)
    try:
        assert kernel.run("import posttrainllm") == []
        assert (
            kernel.run("quiet = posttrainllm.train(preset='tiny', steps=3, progress=False)") == []
        )
        [output] = kernel.run(
            "run = posttrainllm.train(preset='tiny', steps=1_000_000, warmup_steps=1, name='long')",
            interrupt_when="training loss",
        )
        html = output["data"]["text/html"].replace("&quot;", '"')
        step = int(kernel.value("run.metrics[-1]['step']"))
        assert 0 < step < 1_000_000
        assert f"long: stopped after {step:,} step" in html
        assert "saved" in html
        assert 'run = posttrainllm.resume("long")' in html
        assert kernel.value("(quiet.finished, run.finished)") == "(True, False)"
        assert kernel.value("len(run.generate('ROMEO:', max_tokens=5)) > 0") == "True"

        [output] = kernel.run(
            f"run = posttrainllm.resume('long', steps={step + 5}, allow_change=True)"
        )
        assert "data" in output, output
        assert f"long: finished {step + 5:,} steps" in output["data"]["text/html"]
        assert kernel.value("run.metrics[-1]['step']") == str(step + 5)
        [error] = kernel.run("posttrainllm.resume('lnog')")
        assert error["ename"] == "CheckpointError"
        assert "did you mean" in error["evalue"]
        assert error["traceback"] == [f"CheckpointError: {error['evalue']}"]
    finally:
        kernel.client.stop_channels()
