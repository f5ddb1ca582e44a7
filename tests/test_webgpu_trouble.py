"""What can be wrong with a GPU becomes one line that says what, and what to do; nothing hangs and nothing goes on with wrong numbers."""

from __future__ import annotations

import numpy as np
import pytest

from needs import require
from posttrainllm.config import EngineConfig, load_config, replace
from posttrainllm.engines.base import Batch
from posttrainllm.errors import EngineError
from posttrainllm.model import training_programs
from posttrainllm.training import selfcheck
from posttrainllm.training.engine_choice import initial_parameters, training_engine
from posttrainllm.training.observer import Silent
from posttrainllm.training.session import new_trainer

require("wgpu")

from posttrainllm.engines.webgpu import device as layer  # noqa: E402
from posttrainllm.engines.webgpu.engine import WebGpuEngine  # noqa: E402
from posttrainllm.engines.webgpu.timing import seconds  # noqa: E402
from webgpu_cases import device  # noqa: E402

CONFIG = load_config("tiny")


class FakeAdapter:
    """A GPU as the wgpu package describes one."""

    features = frozenset()

    def __init__(self, name="Some GPU", kind="DiscreteGPU", fails="", **limits):
        self.info = {
            "device": name,
            "vendor": "",
            "description": "1.0",
            "adapter_type": kind,
            "backend_type": "Vulkan",
        }
        self.limits = {
            **dict.fromkeys(layer.WANTED_LIMITS, 2**30),
            **layer.NEEDED_LIMITS,
            **{name.replace("_", "-"): value for name, value in limits.items()},
        }
        self.fails = fails

    def request_device_sync(self, **wanted):
        raise RuntimeError(self.fails)


@pytest.fixture
def engine():
    device()
    programs = training_programs(CONFIG.model, CONFIG.optimizer, CONFIG.data.batch_size)
    opened = WebGpuEngine(*programs)
    opened.load(initial_parameters(CONFIG.model, 1))
    yield opened
    opened.close()


def batch():
    shape = (CONFIG.data.batch_size, CONFIG.model.n_ctx)
    return Batch(np.zeros(shape, np.int32), np.ones(shape, np.int32))


def fails_with(*words):
    return pytest.raises(EngineError, match=".*".join(words))


def test_no_adapter_is_said_with_what_to_do(monkeypatch):
    monkeypatch.setattr(layer, "adapters", lambda: [])
    with fails_with("no WebGPU adapter") as caught:
        training_engine(replace(CONFIG, {"engine.name": "webgpu"}))
    assert 'engine="cpp"' in caught.value.hint


def test_an_adapter_that_is_not_there_is_said_with_those_that_are(monkeypatch):
    monkeypatch.setattr(layer, "adapters", lambda: [FakeAdapter("Card A"), FakeAdapter("Card B")])
    with fails_with("'Card C'") as caught:
        layer.choose_adapter("Card C")
    assert "'Card A', 'Card B'" in str(caught.value.hint)


def test_a_real_gpu_comes_before_a_software_one(monkeypatch):
    class Gpu:
        def enumerate_adapters_sync(self):
            kinds = ("CPU", "IntegratedGPU", "DiscreteGPU", "Strange")
            return [FakeAdapter(kind, kind) for kind in kinds]

    monkeypatch.setattr(layer, "_wgpu", lambda: type("wgpu", (), {"gpu": Gpu()}))
    names = [adapter.info["device"] for adapter in layer.adapters()]
    assert names == ["DiscreteGPU", "IntegratedGPU", "Strange", "CPU"]


def test_auto_never_chooses_a_software_adapter():
    assert EngineConfig(name="auto").chosen == "cpp"


def test_a_software_adapter_is_named_in_a_notice_and_trains(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if not device().software:
        pytest.skip("there is a real GPU here")
    notices = []

    class Watcher(Silent):
        def noticed(self, message):
            notices.append(message)

    changes = {
        "engine.name": "webgpu",
        "training.steps": 2,
        "schedule.warmup_steps": 0,
        "training.verdict_samples": 0,
    }
    changes |= {"training.eval_every": 0, "training.sample_every": 0}
    trainer = new_trainer(replace(CONFIG, changes), runs_dir=tmp_path / "runs", observer=Watcher())
    assert trainer.train().finished
    assert any(device().name in notice and "slow" in notice for notice in notices)


def test_a_missing_limit_is_named_with_both_numbers():
    few = FakeAdapter(max_storage_buffers_per_shader_stage=4)
    with fails_with("'Some GPU'", "4", "max-storage-buffers-per-shader-stage", "8"):
        layer.GpuDevice(few)


def test_a_device_that_the_driver_refuses_is_said_with_its_words():
    with fails_with("'Some GPU'", "feature not there"):
        layer.GpuDevice(FakeAdapter(fails="feature not there"))


def test_a_missing_feature_only_takes_another_kernel():
    class Plain:
        """The adapter here, without anything optional."""

        features = frozenset()

        def __getattr__(self, name):
            return getattr(device().adapter, name)

    one = layer.GpuDevice(Plain())
    assert not one.timestamps
    assert not one.limits.subgroups
    with fails_with("has no timestamps"):
        seconds(one, [])


def test_a_buffer_that_is_too_large_is_named_with_its_size_before_the_first_step(monkeypatch):
    device()
    programs = training_programs(CONFIG.model, CONFIG.optimizer, CONFIG.data.batch_size)
    opened = layer.GpuDevice.__init__

    def small(self, *args, **kwargs):
        opened(self, *args, **kwargs)
        self.buffer_bytes = 2**16

    monkeypatch.setattr(layer.GpuDevice, "__init__", small)
    with fails_with("buffer '", "MiB", "allows a buffer"):
        WebGpuEngine(*programs)


def test_a_binding_that_is_too_large_is_named_with_its_size_before_the_first_step(monkeypatch):
    device()
    programs = training_programs(CONFIG.model, CONFIG.optimizer, CONFIG.data.batch_size)
    opened = layer.GpuDevice.__init__

    def small(self, *args, **kwargs):
        opened(self, *args, **kwargs)
        self.binding_bytes = 2**14

    monkeypatch.setattr(layer.GpuDevice, "__init__", small)
    with fails_with("takes", "MiB", "binds at once"):
        WebGpuEngine(*programs)


def test_memory_that_the_gpu_does_not_have_is_said_with_the_buffer(monkeypatch):
    wgpu = require("wgpu")
    one = layer.GpuDevice(device().adapter)

    def full(**wanted):
        raise wgpu.GPUOutOfMemoryError("Not enough memory left.")

    monkeypatch.setattr(one.device, "create_buffer", full)
    with fails_with("no room", "'param.decayed'", "12.0 MiB") as caught:
        one.buffer("param.decayed", 12 * 2**20)
    assert "batch_size" in caught.value.hint


def test_a_lost_device_is_said_and_a_run_goes_on_from_its_checkpoint(engine):
    engine.gradients(batch(), inv_count=1.0, first=True)
    engine.device.device.destroy()
    with fails_with("stopped working", "lost") as caught:
        engine.gradient_tensors()
    assert "posttrainllm.resume" in caught.value.hint


def test_of_two_adapters_with_one_name_the_one_that_passed_is_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bad, good = FakeAdapter("Card"), FakeAdapter("Card")
    bad.info["description"], good.info["description"] = "driver 1", "driver 2"
    monkeypatch.setattr(layer, "adapters", lambda: [bad, good])
    monkeypatch.setattr(selfcheck, "_compare", lambda adapter: "wrong" if adapter is bad else "")
    assert selfcheck.checked_adapter("card") is good


def test_a_closed_engine_has_given_every_buffer_back(monkeypatch):
    device()
    made, gone = [], set()
    create = layer.GpuDevice.buffer

    def watched(self, name, nbytes, usage="storage"):
        buffer, number = create(self, name, nbytes, usage), len(made)
        made.append(name)
        destroy = buffer.destroy
        buffer.destroy = lambda: (gone.add(number), destroy())
        return buffer

    monkeypatch.setattr(layer.GpuDevice, "buffer", watched)
    programs = training_programs(CONFIG.model, CONFIG.optimizer, CONFIG.data.batch_size)
    opened = WebGpuEngine(*programs)
    opened.load(initial_parameters(CONFIG.model, 1))
    opened.gradients(batch(), inv_count=1.0, first=True)
    opened.gradient_tensors()
    opened.close()
    assert len(made) > 10
    assert not [name for number, name in enumerate(made) if number not in gone]


def test_an_adapter_with_wrong_numbers_is_named_and_not_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device()
    monkeypatch.setattr(
        selfcheck, "_compare", lambda adapter: "the loss of step 3 is 4, and should be 2"
    )
    for _ in range(2):  # computed, then remembered
        with fails_with("wrong numbers", "the loss of step 3"):
            selfcheck.checked_adapter()
    assert len(list(tmp_path.rglob("check-*.json"))) >= 1
