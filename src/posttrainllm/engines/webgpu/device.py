"""The GPU behind the webgpu engine: adapter, device, buffers, shader modules and pipelines, and what can go wrong with each.

What this is: the only file that knows the ``wgpu`` package's calls for creating things. Every creation names what it creates, and what the
driver refuses comes back as an EngineError with that name.
What this is not: programs or plans (``engines/webgpu/recorder.py``, ``engines/webgpu/memory.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from posttrainllm.engines.webgpu.dispatch import Dispatch, Limits, extensions, source
from posttrainllm.engines.webgpu.native import unchecked_module
from posttrainllm.errors import EngineError
from posttrainllm.wording import worded

INSTALL = "run: pip install 'posttrainllm[webgpu]'"
ORDER = ("DiscreteGPU", "IntegratedGPU", "VirtualGPU", "Unknown", "CPU")  # a real GPU first
BACKENDS = ("Vulkan", "Metal", "D3D12")  # OpenGL lacks what compute needs
WANTED_FEATURES = ("subgroup", "timestamp-query", "shader-f16")
WANTED_LIMITS = (
    "max-buffer-size",
    "max-storage-buffer-binding-size",
    "max-compute-workgroup-storage-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
)
UNDECLARED = ("subgroups",)  # extensions whose functions naga has and whose name it does not know
NEEDED_LIMITS = {  # what every WebGPU adapter offers, by the standard
    "max-storage-buffers-per-shader-stage": 8,
    "max-storage-buffer-binding-size": 2**27,
    "max-compute-workgroup-storage-size": 16_384,
    "max-compute-invocations-per-workgroup": 256,
}


def _wgpu() -> Any:
    try:
        import wgpu
    except ImportError as error:
        raise EngineError("the webgpu engine needs the package wgpu", INSTALL) from error
    return wgpu


def adapters() -> list[Any]:
    """All adapters that can compute, real GPUs before software ones.

    Raises: EngineError when the package wgpu is missing.
    """
    found = [
        adapter
        for adapter in _wgpu().gpu.enumerate_adapters_sync()
        if adapter.info["backend_type"] in BACKENDS
    ]
    return sorted(found, key=lambda adapter: ORDER.index(_kind(adapter)))


def _kind(adapter: Any) -> str:
    kind = str(adapter.info["adapter_type"])
    return kind if kind in ORDER else "Unknown"


def is_software(adapter: Any) -> bool:
    """Whether an adapter is a program that runs on the processor (llvmpipe, SwiftShader): right, but slow."""
    return _kind(adapter) == "CPU"


def describe(adapter: Any) -> dict[str, str | int]:
    """Adapter, driver and backend by name; ``software`` is 1 for one that runs on the processor."""
    return {
        "adapter": str(adapter.info["device"]),
        "driver": str(adapter.info["description"]),
        "backend": str(adapter.info["backend_type"]),
        "software": int(is_software(adapter)),
        "wgpu": str(_wgpu().__version__),
    }


def matching_adapters(wanted: str = "") -> list[Any]:
    """The adapters whose names contain ``wanted``, the best one first; one at least.

    Raises: EngineError when there is none, with the names of those that are there.
    """
    found = adapters()
    if not found:
        raise EngineError(
            "no WebGPU adapter: neither a GPU driver nor a software one is installed",
            worded(
                "use {engine.name=cpp}; on Debian, a software adapter is: apt-get install mesa-vulkan-drivers"
            ),
        )
    matching = [
        adapter
        for adapter in found
        if wanted.lower() in f"{adapter.info['device']} {adapter.info['vendor']}".lower()
    ]
    if not matching:
        names = ", ".join(repr(adapter.info["device"]) for adapter in found)
        raise EngineError(f"no WebGPU adapter is called {wanted!r}", f"there are {names}")
    return matching


def choose_adapter(wanted: str = "") -> Any:
    """The best of ``matching_adapters``. Raises: EngineError when there is none."""
    return matching_adapters(wanted)[0]


class GpuDevice:
    """A device with the limits that its adapter has, and all that is made on it."""

    def __init__(self, adapter: Any, *, checked: bool = False, half: bool = False) -> None:
        """Open the device; ``checked`` shaders have the run-time checks that a browser gives them, ``half`` allows kernels in f16.

        Raises: EngineError when the driver refuses, or has no f16 and is asked for it.
        """
        self.wgpu = _wgpu()
        self.adapter = adapter
        self.checked = checked
        self.name = str(adapter.info["device"])
        self.software = is_software(adapter)
        features = [name for name in WANTED_FEATURES if name in adapter.features]
        for name, least in NEEDED_LIMITS.items():
            if adapter.limits[name] < least:
                raise EngineError(
                    f"the adapter {self.name!r} allows {adapter.limits[name]:,} for {name}, and the kernels need {least:,}",
                    worded(
                        "choose another adapter with {engine.adapter=NAME}, or use {engine.name=cpp}"
                    ),
                )
        if half and "shader-f16" not in features:
            raise EngineError(
                f"the adapter {self.name!r} has no half precision (shader-f16)",
                worded("leave {engine.precision} out"),
            )
        limits = {name: adapter.limits[name] for name in WANTED_LIMITS}
        try:
            self.device = adapter.request_device_sync(
                required_features=features, required_limits=limits
            )
        except Exception as error:  # wgpu raises bare RuntimeErrors, too
            raise EngineError(f"the adapter {self.name!r} gives no device: {error}") from error
        self.queue = self.device.queue
        have = self.device.limits
        self.binding_bytes = min(int(have["max-storage-buffer-binding-size"]), 2**31 - 4)
        self.buffer_bytes = int(have["max-buffer-size"])
        self.timestamps = "timestamp-query" in features
        self.limits = Limits(
            workgroup_bytes=int(have["max-compute-workgroup-storage-size"]),
            invocations=int(have["max-compute-invocations-per-workgroup"]),
            subgroups=int("subgroup" in features),
            binding_bytes=self.binding_bytes,
            half=int(half),
            checked=int(checked),
        )
        self._modules: dict[str, Any] = {}
        self._layouts: dict[tuple[str, ...], tuple[Any, Any]] = {}
        self._pipelines: dict[tuple[Any, ...], Any] = {}

    @property
    def info(self) -> dict[str, str | int]:
        """See ``describe``."""
        return describe(self.adapter)

    def buffer(self, name: str, nbytes: int, usage: str = "storage") -> Any:
        """A buffer of zeros. Usage is ``storage``, ``uniform`` or ``readback``.

        Raises: EngineError, with the buffer's name and size, where the device does not hold it.
        """
        if nbytes > self.buffer_bytes:
            raise EngineError(
                f"buffer {name!r} takes {nbytes / 2**20:,.0f} MiB, over the {self.buffer_bytes / 2**20:,.0f} MiB that "
                f"{self.name!r} allows a buffer",
                worded("use a smaller preset, a smaller {data.batch_size}, or {engine.name=cpp}"),
            )
        flags = self.wgpu.BufferUsage
        bits = {
            "storage": flags.STORAGE | flags.COPY_SRC | flags.COPY_DST,
            "uniform": flags.UNIFORM | flags.COPY_DST,
            "readback": flags.MAP_READ | flags.COPY_DST,
        }
        try:
            return self.device.create_buffer(label=name, size=nbytes, usage=bits[usage])
        except Exception as error:  # the same
            raise EngineError(
                f"{self.name!r} has no room for buffer {name!r} of {nbytes / 2**20:,.1f} MiB",
                worded("use a smaller preset, a smaller {data.batch_size}, or {engine.name=cpp}"),
            ) from error

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Whatever the driver says against work for the GPU becomes an EngineError: most often, that the device is lost."""
        try:
            yield
        except self.wgpu.GPUError as error:
            said = str(error).strip().splitlines()
            raise EngineError(
                f"the GPU {self.name!r} stopped working: {said[-1].strip() if said else error}",
                worded(
                    "its driver may have been reset or be out of memory; a run goes on from its last checkpoint with {resume}"
                ),
            ) from error

    def layout(self, access: tuple[str, ...]) -> tuple[Any, Any]:
        """Bind group layout and pipeline layout for bindings of these types; the last one is the uniform."""
        if access not in self._layouts:
            stage = self.wgpu.ShaderStage.COMPUTE
            entries = [
                {"binding": index, "visibility": stage, "buffer": {"type": kind}}
                for index, kind in enumerate(access)
            ]
            group = self.device.create_bind_group_layout(entries=entries)
            pipeline = self.device.create_pipeline_layout(bind_group_layouts=[group])
            self._layouts[access] = (group, pipeline)
        return self._layouts[access]

    def pipeline(self, dispatch: Dispatch, access: tuple[str, ...]) -> Any:
        """The pipeline of a dispatch, made once for each entry point and set of override constants.

        Raises: EngineError, with file and entry point, when the driver refuses the shader.
        """
        key = (dispatch.file, dispatch.entry, dispatch.overrides, access)
        if key not in self._pipelines:
            try:
                self._pipelines[key] = self.device.create_compute_pipeline(
                    label=dispatch.entry,
                    layout=self.layout(access)[1],
                    compute={
                        "module": self._module(dispatch.file),
                        "entry_point": dispatch.entry,
                        "constants": dict(dispatch.overrides),
                    },
                )
            except self.wgpu.GPUError as error:
                raise EngineError(
                    f"{self.name!r} refuses {dispatch.file}.wgsl, {dispatch.entry}: {error}"
                ) from error
        return self._pipelines[key]

    def _module(self, file: str) -> Any:
        if file not in self._modules:
            needed = [name for name in extensions(file) if name not in UNDECLARED]
            code = "".join(f"enable {name};\n" for name in needed) + source(file)
            if self.checked:
                self._modules[file] = self.device.create_shader_module(label=file, code=code)
            else:
                self._modules[file] = unchecked_module(self.device, file, code)
        return self._modules[file]

    def bind(self, access: tuple[str, ...], resources: Sequence[tuple[Any, int, int]]) -> Any:
        """A bind group of (buffer, byte offset, bytes)."""
        entries = [
            {"binding": index, "resource": {"buffer": buffer, "offset": offset, "size": size}}
            for index, (buffer, offset, size) in enumerate(resources)
        ]
        return self.device.create_bind_group(layout=self.layout(access)[0], entries=entries)
