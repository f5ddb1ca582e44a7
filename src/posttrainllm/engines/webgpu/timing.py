"""How long dispatches take on the GPU, by its own clock.

What this is: timestamps around compute passes, for the choice of kernels (``engines/webgpu/tuning.py``) and for measuring a step op by op.
What this is not: a benchmark of training, which is wall time over many steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from posttrainllm.engines.webgpu.device import GpuDevice
from posttrainllm.engines.webgpu.recorder import Recorded
from posttrainllm.errors import EngineError

MOST = 2048  # passes at a time: two timestamps each, and a query set holds 4096


def seconds(device: GpuDevice, passes: list[list[Recorded]]) -> NDArray[np.float64]:
    """The time of each pass of dispatches, run one after the other.

    Raises: EngineError where the adapter has no timestamps.
    """
    if not device.timestamps:
        raise EngineError(f"{device.name!r} has no timestamps")
    found = [_some(device, passes[start : start + MOST]) for start in range(0, len(passes), MOST)]
    return np.concatenate(found) if found else np.zeros(0)


def _some(device: GpuDevice, passes: list[list[Recorded]]) -> NDArray[np.float64]:
    flags = device.wgpu.BufferUsage
    count = 2 * len(passes)
    queries = device.device.create_query_set(type="timestamp", count=count)
    buffer = device.device.create_buffer(size=8 * count, usage=flags.QUERY_RESOLVE | flags.COPY_SRC)
    encoder = device.device.create_command_encoder()
    for index, items in enumerate(passes):
        writes: Any = {
            "query_set": queries,
            "beginning_of_pass_write_index": 2 * index,
            "end_of_pass_write_index": 2 * index + 1,
        }
        compute = encoder.begin_compute_pass(timestamp_writes=writes)
        for item in items:
            compute.set_pipeline(item.pipeline)
            compute.set_bind_group(0, item.group)
            compute.dispatch_workgroups(*item.grid)
        compute.end()
    encoder.resolve_query_set(queries, 0, count, buffer, 0)
    device.queue.submit([encoder.finish()])
    ticks = np.frombuffer(device.queue.read_buffer(buffer), np.uint64).reshape(-1, 2)
    buffer.destroy()
    result: NDArray[np.float64] = (ticks[:, 1] - ticks[:, 0]).astype(np.float64) * 1e-9
    return result
