"""What wgpu-native can do and the Python package wgpu has no method for: shader modules without run-time checks, and fast recording.

What this is: an optimisation. Each function reaches below the package's public surface, falls back to it when something there has
changed, and gives the same results either way.
What this is not: needed. In a browser these do not exist, and the kernels check their own bounds everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

NO_CHECKS = 0

Item = tuple[Any, Any, int, int, int]  # pipeline (None: the one before), bind group, workgroups


def unchecked_module(device: Any, label: str, code: str) -> Any:
    """A shader module without clamped indices and counted loops; by the usual way, with them, where this one is closed.

    naga clamps every index into workgroup memory and counts the turns of every loop, which keeps drivers from unrolling.
    """
    try:
        from wgpu.backends.wgpu_native import _api as api

        source = api.new_struct_p("WGPUShaderSourceWGSL *", code=api.to_c_string_view(code))
        source[0].chain.next = api.ffi.NULL
        source[0].chain.sType = api.lib.WGPUSType_ShaderSourceWGSL
        descriptor = api.new_struct_p(
            "WGPUShaderModuleDescriptor *",
            nextInChain=api.ffi.cast("WGPUChainedStruct *", source),
            label=api.to_c_string_view(label),
        )
        create = api.libf.wgpuDeviceCreateShaderModuleTrusted
        module = create(device._internal, descriptor, NO_CHECKS)
        return api.GPUShaderModule(label, module, device)
    except (ImportError, AttributeError, TypeError):
        return device.create_shader_module(label=label, code=code)


class FastPass:
    """Sets pipelines and bind groups and dispatches, without the package's checks of each call.

    Errors are not lost: wgpu reports them when the encoder is finished, which goes through the package.
    """

    def __init__(self) -> None:
        """Look the functions up once."""
        try:
            from wgpu.backends.wgpu_native import _api as api

            self._null = api.ffi.NULL
            self._set_pipeline = api.lib.wgpuComputePassEncoderSetPipeline
            self._set_group = api.lib.wgpuComputePassEncoderSetBindGroup
            self._dispatch = api.lib.wgpuComputePassEncoderDispatchWorkgroups
            self.works = True
        except (ImportError, AttributeError):
            self.works = False

    def lay_out(self, items: Iterable[tuple[Any, Any, tuple[int, int, int]]]) -> list[Item]:
        """(pipeline, bind group, grid) as ``replay`` takes them: no pipeline where it is that of the item before."""
        found: list[Item] = []
        last = None
        for pipeline, group, grid in items:
            kept = None if pipeline is last else pipeline
            last = pipeline
            if self.works:
                kept, group = kept and kept._internal, group._internal
            found.append((kept, group, *grid))
        return found

    def replay(self, compute: Any, items: list[Item]) -> None:
        """Record items into a compute pass."""
        if not self.works:
            for pipeline, group, x, y, z in items:
                if pipeline is not None:
                    compute.set_pipeline(pipeline)
                compute.set_bind_group(0, group)
                compute.dispatch_workgroups(x, y, z)
            return
        native, null = compute._internal, self._null
        set_pipeline, set_group, dispatch = self._set_pipeline, self._set_group, self._dispatch
        for pipeline, group, x, y, z in items:
            if pipeline is not None:
                set_pipeline(native, pipeline)
            set_group(native, 0, group, 0, null)
            dispatch(native, x, y, z)
