"""How far the engines may drift apart over whole training steps: one home for the limits.

What this is: limits on step-0 gradients and on losses, for ``parity.py`` and for the tests.
What this is not: limits on single ops; those are in ``tests/tolerances.py``, in units of rounding.

Why parity trains at a rate of its own: a loss curve amplifies rounding, the more the higher the rate. Against float64, 200 steps
of tiny drift by 7e-8 (cpp) and 2e-7 (torch) at a constant 3e-4, by 2e-7 and 1e-6 at 1e-3, and by 1e-4 at 3e-3, where
numpy's own float32 is off by 9e-5. A limit that lets the last pass would hide a wrong constant.
"""

from __future__ import annotations

from typing import Final

PARITY_RATE: Final = 3e-4
"""Constant learning rate of a parity run, without warm-up: from step 1 on, every fault in the update moves the loss."""

JUDGED_STEPS: Final = 200
"""Losses are held to a limit up to this step; beyond it they must only be finite."""

EARLY_STEPS: Final = 10

# Largest relative differences: of step-0 gradients (per tensor, max norm), of the losses of steps 1-10, of the losses to step 200,
# of the update (per tensor, max norm, in units of the rate).
_LIMITS: Final = {
    "webgpu": (5e-5, 1e-4, 1e-3, 1e-4),  # other orders of summation, and an exp of the driver's
}
_USUAL: Final = (1e-5, 1e-6, 1e-5, 2e-5)


def gradient_limit(engine: str) -> float:
    """Largest relative difference of a gradient tensor before the first update: max abs(got - ref) / max abs(ref)."""
    return _LIMITS.get(engine, _USUAL)[0]


def loss_limit(engine: str, step: int) -> float | None:
    """Largest relative difference of the loss of a step, counted from 1; None where it is not judged."""
    if step > JUDGED_STEPS:
        return None
    return _LIMITS.get(engine, _USUAL)[1 if step <= EARLY_STEPS else 2]


def update_limit(engine: str) -> float:
    """Largest difference of a tensor after one update from a common state, in units of the rate (``update_check.py``).

    Sound engines reach 1.2e-6, faults in a constant 1e-4 and more.
    """
    return _LIMITS.get(engine, _USUAL)[3]
