"""The optimizer as a program: global gradient norm, clipping and AdamW over the arenas.

What this is: the ``update`` program. Parameters, gradients and moments lie in arenas with one common layout, so that the whole update is
two ranges: tensors that are decayed (two dimensions and more) and those that are not.
What this is not: the constants (``config.OptimizerConfig``) or the arithmetic (``engines/numpy_ops.py``).
Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019; Pascanu et al. 2013 for the clipping by global norm.
"""

from __future__ import annotations

from posttrainllm.config import OptimizerConfig
from posttrainllm.ops import CLIP, SCALARS
from posttrainllm.plan import PARTS
from posttrainllm.program import Program


def update_program(optimizer: OptimizerConfig) -> Program:
    """One AdamW step from the gradients in the arenas; lr and the bias corrections are data in ``scalars``."""
    p = Program("update")
    scalars = p.buffer("scalars", str(len(SCALARS)), role="input")
    clip = p.buffer("clip", str(len(CLIP)), role="state")
    squares = []
    for part in PARTS:
        grad = p.buffer(f"grad.{part}", f"P_{part}", role="grad")
        squares.append(p.buffer(f"squares.{part}", "1", role="scratch"))
        p.call("sum_squares", [squares[-1]], [grad])
    p.call("gradient_clip", [clip], list(squares), clip_norm=optimizer.clip_norm)
    for part, decay in zip(PARTS, (optimizer.weight_decay, 0.0), strict=True):
        moving = [
            p.buffer(f"param.{part}", f"P_{part}", role="param"),
            p.buffer(f"adam.m.{part}", f"P_{part}", role="moment"),
            p.buffer(f"adam.v.{part}", f"P_{part}", role="moment"),
        ]
        p.call(
            "adamw_step",
            moving,
            [f"grad.{part}", clip, scalars],
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            eps=optimizer.eps,
            weight_decay=decay,
        )
    return p
