"""Starting several processes where PyTorch is not installed is refused before any is started, with what to install."""

from __future__ import annotations

import pytest

from posttrainllm.cli import launch
from posttrainllm.errors import EngineError
from posttrainllm.pytorch import needed


def test_several_processes_without_torch_are_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(needed, "find_spec", lambda name: None)
    monkeypatch.setattr(launch, "_start", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(EngineError, match="needs PyTorch, which is not installed") as refused:
        launch.launch(2, ["train"])
    assert refused.value.hint == "pip install 'posttrainllm[torch]'"
