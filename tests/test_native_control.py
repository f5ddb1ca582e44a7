"""Initial values drawn by the native library: the bits of the definition, for any size and kind, and without the library too."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from needs import missing
from posttrainllm import control
from posttrainllm.engines import native_control


@pytest.mark.parametrize("kind", get_args(control.Init))
@pytest.mark.parametrize("count", [1, 7, 1000, 4099])
def test_native_values_are_those_of_the_definition(kind, count, monkeypatch):
    if native_control._native_draw() is None:
        missing("the C++ kernels are not built")
    monkeypatch.setattr(native_control, "PIECE", 1000)
    found = native_control.initial_values(7, "h.1.mlp.c_fc.weight", count, kind, n_layer=3)
    wanted = control.initial_values(7, "h.1.mlp.c_fc.weight", count, kind, n_layer=3)
    assert found.dtype == np.float32
    assert found.tobytes() == wanted.tobytes()


def test_without_kernels_the_definition_draws(monkeypatch):
    monkeypatch.setattr(native_control, "_native_draw", lambda: None)
    found = native_control.initial_values(1, "wte.weight", 50, "normal", n_layer=1)
    assert np.array_equal(found, control.initial_values(1, "wte.weight", 50, "normal", n_layer=1))
