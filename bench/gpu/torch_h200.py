"""Checks and times the torch engine on a CUDA card, in one run on a bare machine; writes one JSON file and records.

    python bench/gpu/torch_h200.py --out FOLDER [--parts info,kernels,parity,steps,...]

info      the card, versions, copy bandwidth, peaks of matrix products
kernels   the Triton kernels against PyTorch's calls
parity    200 losses in float32 against the cpp engine, same weights and batches
bf16      200 losses in bf16 against float32 on the card
dropout   a resumed run draws the masks that it would have drawn
steps     time of training steps, precision by precision, compiled or not
first     seconds from nothing to the first step of a short run
profile   kernels of a step by time
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gpu_common import batches
from torch_probes import FORMS, first_steps, profile

from posttrainllm.config import TrainConfig, load_config
from posttrainllm.engines.base import Batch, StepScalars
from posttrainllm.lab.benchmark_record import make_record, write_record
from posttrainllm.lab.cost import step_bytes
from posttrainllm.training.engine_choice import initial_parameters, training_engine

BEGAN = time.monotonic()
GIVEN = argparse.Namespace(rows=32)
ROUNDS = 12


def within(seconds: float) -> bool:
    """Whether so many seconds are left of the time given on the command line."""
    return bool(time.monotonic() - BEGAN + seconds < GIVEN.seconds)


def config_of(preset: str, *settings: str) -> TrainConfig:
    """As for a long run; GPT-2 with the rows of the command line."""
    given = () if any("engine.triton" in one for one in settings) else ("engine.triton=on",)
    rows = (f"data.batch_size={GIVEN.rows}",) if preset == "gpt2" else ()
    return load_config(preset, overrides=(*rows, *settings, *given), flags={"engine.name": "torch"})


def opened(config: TrainConfig) -> Any:
    engine: Any = training_engine(config)
    engine.load(initial_parameters(config.model, 1))
    return engine


def random_batches(config: TrainConfig, count: int = 8) -> list[Batch]:
    random = np.random.default_rng(1)
    shape = (config.data.batch_size, config.model.n_ctx + 1)
    rows = [random.integers(0, config.model.n_vocab, shape, dtype=np.int32) for _ in range(count)]
    return [Batch(np.ascontiguousarray(r[:, :-1]), np.ascontiguousarray(r[:, 1:])) for r in rows]


def train(engine: Any, config: TrainConfig, steps: int, start: int = 0) -> list[float]:
    """Losses of steps start + 1 .. start + steps on the default text."""
    scale = 1.0 / (config.data.batch_size * config.model.n_ctx)
    source = batches(config)
    found = []
    for step in range(1, start + steps + 1):
        batch = next(source)
        if step <= start:
            continue
        engine.gradients(batch, inv_count=scale, first=True)
        engine.update(StepScalars(1e-3 * min(1.0, step / 20), 1 - 0.9**step, 1 - 0.95**step))
        found += engine.results(wait=False)
    found += engine.results(wait=True)
    assert all(result.finite for result in found)
    return [result.loss for result in found]


def relative(ours: list[float], theirs: list[float]) -> list[float]:
    """Largest relative differences: steps 1 to 10, to 50, to the end."""
    drift = np.abs(np.array(ours) - theirs) / np.abs(theirs)
    return [float(drift[:10].max()), float(drift[:50].max()), float(drift.max())]


# ---- parts ---------------------------------------------------------------------------------------


def info() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    a = torch.randn(1 << 30, device="cuda")
    b = torch.empty_like(a)
    found["copy_tb_s"] = 2 * a.nbytes / timed(lambda a=a, b=b: b.copy_(a)) / 1e12
    del a, b
    for name, dtype, high in (("bf16", torch.bfloat16, "highest"), ("tf32", torch.float32, "high"),
                              ("float32", torch.float32, "highest")):  # fmt: skip
        torch.set_float32_matmul_precision(high)
        n = 8192 if name != "float32" else 4096
        x, y = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
        found[f"{name}_tflops"] = 2 * n**3 / timed(lambda x=x, y=y: x @ y) / 1e12
    torch.set_float32_matmul_precision("highest")
    print("info", json.dumps(found), flush=True)
    return found


def timed(run: Callable[[], Any], count: int = 10) -> float:
    """Median seconds of a call, by events."""
    import torch

    for _ in range(3):
        run()
    times = []
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def kernels() -> dict[str, Any]:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short",
         *(["-k", GIVEN.k] if GIVEN.k else []), str(root / "tests/test_cuda.py"), str(root / "tests/test_triton_kernels.py")],
        capture_output=True, text=True,
    )  # fmt: skip
    print(done.stdout[-6000:], done.stderr[-1000:], flush=True)
    return {"rc": done.returncode, "tail": done.stdout[-1500:]}


def parity() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for preset in GIVEN.presets.split(",") if GIVEN.presets else ("tiny", "small"):
        ours = config_of(preset, "engine.precision=float32")
        theirs = load_config(preset)
        torch_losses = train(opened(ours), ours, 200)
        cpp_losses = train(opened(theirs), theirs, 200)
        found[preset] = {
            "drift": relative(torch_losses, cpp_losses),
            "losses": [torch_losses[0], torch_losses[-1]],
        }
        print("parity", preset, json.dumps(found[preset]), flush=True)
    return found


def bf16() -> dict[str, Any]:
    """Per precision: the largest difference of the mean of ten losses, and of the last fifty, from float32."""
    found: dict[str, Any] = {}
    wanted = GIVEN.presets.split(",") if GIVEN.presets else ["small", "large", "gpt2"]
    for preset, settings in (("small", ()), ("large", ()), ("gpt2", ("data.batch_size=4",))):
        if preset not in wanted:
            continue
        losses = {}
        for precision in ("float32", "tf32", "bf16"):
            config = config_of(preset, f"engine.precision={precision}", *settings)
            losses[precision] = train(opened(config), config, 200)
        found[preset] = {}
        for name in ("tf32", "bf16"):
            means = [np.reshape(losses[one], (20, 10)).mean(1) for one in (name, "float32")]
            found[preset][name] = {
                "single": relative(losses[name], losses["float32"])[2],
                "mean_of_10": float((np.abs(means[0] - means[1]) / means[1]).max()),
                "last": [float(means[0][-1]), float(means[1][-1])],
            }
        print("bf16", preset, json.dumps(found[preset]), flush=True)
    return found


def dropout() -> dict[str, Any]:
    found = {}
    for compiled in ("off", "on"):
        config = config_of("small", "model.dropout=0.2", f"engine.compile={compiled}")
        whole = opened(config)
        wanted = train(whole, config, 30)
        part = opened(config)
        train(part, config, 15)
        state = part.state()
        again = opened(config)
        again.load(state.params, state.m, state.v)
        rest = train(again, config, 15, start=15)
        plain = config_of("small")
        without = train(opened(plain), plain, 30)
        found[compiled] = {
            "drift after resume": relative(rest, wanted[15:])[2],
            "equal bits": rest == wanted[15:],
            "with dropout / without, last": [wanted[-1], without[-1]],
        }
        print("dropout", compiled, json.dumps(found[compiled]), flush=True)
    return found


CASES: list[tuple[str, str, tuple[str, ...]]] = [
    (preset, f"{precision} {form}",
     (f"engine.precision={precision}", *settings))
    for precision in ("bf16", "float32", "tf32")
    for form, settings in FORMS.items()
    for preset in ("small", "medium", "large", "xl", "huge", "mega", "gpt2")
]  # fmt: skip
"""Preset, form and settings of everything that can be timed."""


def steps() -> dict[str, Any]:
    found: dict[str, Any] = {}
    wanted = (
        GIVEN.presets.split(",") if GIVEN.presets else ["small", "medium", "large", "xl", "gpt2"]
    )
    forms = GIVEN.forms.split(",") if GIVEN.forms else ["bf16 fused", "bf16 compiled"]
    for preset, form, settings in CASES:
        if preset not in wanted or form not in forms:
            continue
        if not within(60 if "compiled" in form else 30):
            print("-- no time left for", preset, form, flush=True)
            continue
        config = config_of(preset, *settings)
        try:
            row = step_times(config)
        except Exception as error:
            traceback.print_exc()
            row = {"error": f"{type(error).__name__}: {error}"}
        found.setdefault(form, {})[preset] = row
    keep_records(found, GIVEN.out / "records")
    return found


def step_times(config: TrainConfig) -> dict[str, Any]:
    import torch

    torch.cuda.reset_peak_memory_stats()
    params = initial_parameters(config.model, 1)
    source = random_batches(config)
    scale = 1.0 / (config.data.batch_size * config.model.n_ctx)
    began = time.perf_counter()
    engine: Any = training_engine(config)
    engine.load(params)

    def step(number: int) -> None:
        engine.gradients(source[number % 8], inv_count=scale, first=True)
        engine.update(StepScalars(1e-4, 0.1, 0.05))
        engine.results(wait=False)

    step(0)
    engine.results(wait=True)
    first = time.perf_counter() - began
    flops = config.flops_per_step
    count = 50 if flops < 1e12 else 10
    times, host = [], []
    for turn in range(ROUNDS + 2):
        started = time.perf_counter()
        for index in range(count):
            step(index)
        middle = time.perf_counter()
        last = engine.results(wait=True)[-1]
        ended = time.perf_counter()
        if turn >= 2:
            times.append(1e3 * (ended - started) / count)
            host.append(1e3 * (middle - started) / count)
    median = statistics.median(times)
    row = {
        "median_ms": median, "min_ms": min(times), "max_ms": max(times), "host_ms": statistics.median(host),
        "first_step_s": round(first, 2), "repeats": len(times), "steps_a_repeat": count,
        "tokens_per_second": config.tokens_per_step / median * 1e3, "gflops": flops / median / 1e6,
        "flops_per_step": flops, "bytes_per_step": step_bytes(config), "planned_bytes": engine.nbytes,
        "peak_bytes": torch.cuda.max_memory_allocated(), "loss": last.loss, "info": engine.info,
    }  # fmt: skip
    print(f"steps {config.preset:7s} {engine.info['precision']:8s} {engine.info['kernels']:16s} compile {engine.info['compile']:3s} "
          f"{median:8.3f} ms  min {min(times):8.3f}  host {row['host_ms']:7.3f}  first {first:6.2f} s  "
          f"{row['tokens_per_second'] / 1e3:9.1f}k tok/s  {flops / median / 1e9:6.1f} TFLOP/s  loss {last.loss:.4f}",
          flush=True)  # fmt: skip
    engine.close()
    return row


def levers() -> dict[str, Any]:
    """One thing changed at a time, at GPT-2 124M."""
    from torch.nn.attention import SDPBackend

    import posttrainllm.pytorch.engine as module

    found: dict[str, Any] = {}
    usual = module.attention_kernels
    for name, kernels_ in (
        ("flash", [SDPBackend.FLASH_ATTENTION]),
        ("cudnn", [SDPBackend.CUDNN_ATTENTION]),
    ):
        module.attention_kernels = lambda model, kernels_=kernels_: kernels_
        try:
            print("lever", name, end=" ")
            found[name] = step_times(config_of("gpt2", "engine.compile=off"))["median_ms"]
        finally:
            module.attention_kernels = usual
    return found


def keep_records(found: dict[str, Any], out: Path) -> None:
    """One record a form."""
    for form, rows in found.items():
        good = {preset: row for preset, row in rows.items() if "error" not in row}
        if not good:
            continue
        names = form.replace(" ", "-")
        if GIVEN.rows != 32 and "gpt2" in good:
            names += f"-{GIVEN.rows}-rows"
        record = make_record(
            "step",
            f"step-h200-engine-{names}-{'-'.join(good)}",
            engine="torch",
            info=next(iter(good.values()))["info"],
            config=[
                config_of(preset, *next(s for p, f, s in CASES if (p, f) == (preset, form)))
                for preset in good
            ],
            rows=[
                {"preset": preset, "engine": "torch", **{k: v for k, v in row.items() if k not in ("info", "loss")}}
                for preset, row in good.items()
            ],
            method={"warmup": 2, "repeats": ROUNDS, "read back": "once a repeat", "tokens": "random"},
        )  # fmt: skip
        write_record(record, out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="info,kernels,parity,bf16,dropout,first,steps,profile")
    parser.add_argument("--presets", default="")
    parser.add_argument("--forms", default="")
    parser.add_argument("--k", default="", help="which tests of the part kernels, as pytest's -k")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--rows", type=int, default=32, help="rows of 1,024 tokens at GPT-2's size")
    parser.parse_args(namespace=GIVEN)
    GIVEN.out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "info": info, "kernels": kernels, "parity": parity, "bf16": bf16, "dropout": dropout,
        "steps": steps, "first": lambda: first_steps(GIVEN.out), "levers": levers,
        "profile": lambda: profile(opened, config_of, random_batches, within),
    }  # fmt: skip
    results: dict[str, Any] = {}
    for part in GIVEN.parts.split(","):
        began = time.perf_counter()
        if not within(15):
            print(f"-- {part}: no time left", flush=True)
            continue
        try:
            results[part] = parts[part]()
        except Exception as error:
            traceback.print_exc()
            results[part] = {"error": f"{type(error).__name__}: {error}"}
        (GIVEN.out / "torch_parts.json").write_text(json.dumps(results, indent=1, default=str))
        print(f"-- {part}: {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
