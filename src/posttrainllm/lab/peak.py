"""How fast a device can multiply matrices: by its data sheet, and as measured here.

What this is: the two numbers that a model FLOP utilisation (MFU) is a share of. MFU is 6N + 12LCT operations a token
(``TrainConfig.flops_per_step``) times tokens per second, over a peak; it is n/a where the peak is not known, and never guessed.
What this is not: a benchmark of matrix products; one large square product is timed.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping
from typing import Any, Final

PEAKS: Final[Mapping[str, Mapping[str, float]]] = {
    "H200": {"bf16": 989e12, "tf32": 494e12, "float32": 67e12},
    "H100 PCIe": {"bf16": 756e12, "tf32": 378e12, "float32": 51e12},
    "H100": {"bf16": 989e12, "tf32": 494e12, "float32": 67e12},
    "A100": {"bf16": 312e12, "tf32": 156e12, "float32": 19.5e12},
    "L40S": {"bf16": 362e12, "tf32": 183e12, "float32": 91.6e12},
    "RTX 4090": {"bf16": 165e12, "tf32": 82.6e12, "float32": 82.6e12},
    "RTX 3090": {"bf16": 71e12, "tf32": 35.6e12, "float32": 35.6e12},
}
"""Operations a second of dense products with float32 sums, from NVIDIA's data sheets, by words of the device's name.

The first match counts."""

OTHER_CARDS: Final = r"(?! (?:Ti|SUPER|D|NVL|Laptop|Mobile|Max-Q)\b)"
"""Words behind a name that make it another, slower card."""

SIZE: Final = {"cuda": 8192, "mps": 2048, "cpu": 1024}


def sheet_flops(device_name: str, precision: str) -> float | None:
    """The data sheet's peak of a device in operations a second; None for a device that is not in the table."""
    for part, peaks in PEAKS.items():
        if re.search(rf"\b{part}\b{OTHER_CARDS}", device_name, re.IGNORECASE):
            return peaks.get(precision)
    return None


def measured_flops(device: str, precision: str) -> float:
    """Time a square product of random numbers in a precision on a device of torch; operations a second, median of ten.

    Raises: ModuleNotFoundError without torch.
    """
    import torch

    n = SIZE.get(device, 1024)
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(n, n, device=device).to(kind) for _ in range(2))
    out = torch.empty_like(a)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    wait: Any = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device)
    times = []
    try:
        for _ in range(13):
            began = time.perf_counter()
            torch.mm(a, b, out=out)
            if wait is not None:
                wait()
            times.append(time.perf_counter() - began)
    finally:
        torch.set_float32_matmul_precision(before)
    return float(2 * n**3 / statistics.median(times[3:]))
