"""A matrix product whose result goes straight into the gradients' arena, in the arena's own precision.

What this is: ``add_product``, for gradients of weights. The products of bfloat16 are added up in float32 inside the tensor cores
anyway, so writing float32 costs no time and saves a rounding and two passes over the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_product(place: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """place = left @ right when ``first``, else place += left @ right.

    Shapes: left (I, N); right (N, O), in one type; place (I, O), in that type or a wider one.
    """
    if left.dtype == place.dtype:
        torch.mm(left, right, out=place) if first else place.addmm_(left, right)
    elif left.is_cuda and torch.version.hip is None:  # AMD's PyTorch had it later than 2.8
        kind = place.dtype
        if first:
            torch.mm(left, right, out_dtype=kind, out=place)
        else:
            torch.addmm(place, left, right, out_dtype=kind, out=place)
    else:
        product = left @ right
        place.copy_(product) if first else place.add_(product)
