"""Checks and times training on two GPUs, in one run on a bare machine; writes one JSON file and records of bench/results' form.

    python bench/gpu/two_gpus.py --out FOLDER [--parts info,parity,speed,product] [--seconds 300]

info      cards, driver, link, versions, the all-reduce alone
parity    50 float32 steps by replicas and sharded, against one GPU
speed     GPT-2 124M and preset behemoth in bf16 on one and two GPUs: tokens a second, efficiency, memory
product   the command itself: checkpoints of two processes go on in one and the other way round, a killed rank

The parts parity and speed run under torchrun, the product starts its own processes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from two_gpus_ranks import REPEATS, ROWS, STEPS, VARIANTS

from posttrainllm.config import load_config
from posttrainllm.lab.benchmark_record import make_record, write_record

BEGAN = time.monotonic()
SMALL = [
    "--preset=small", "--engine=torch", "--steps=20", "--set=training.checkpoint_every=10",
    "--set=training.keep_checkpoints=4", "--set=training.eval_every=0", "--set=training.sample_every=0",
    "--set=training.sample_tokens=0", "--set=training.final_windows=16", "--set=engine.precision=float32",
    "--set=schedule.learning_rate=1e-3", "--set=schedule.warmup_steps=10",
]  # fmt: skip


# ---- around them ----------------------------------------------------------------------------------


def torchrun(job: str, preset: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Run ``two_gpus_ranks.py`` on both cards and return what rank 0 found."""
    out = folder / f"{job}-{preset}.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(Path(__file__).with_name("two_gpus_ranks.py")), "--job", job, "--preset", preset, "--out", str(out),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "8", "GLOO_SOCKET_IFNAME": "lo"}
    began, log = time.monotonic(), folder / f"{job}-{preset}.log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # its agent ends the ranks
            with suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()
            process.wait()
    said = log.read_text()[-3000:]
    found: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
    found["seconds"] = time.monotonic() - began
    if "error" in found or process.returncode:
        found["said"] = said
    print(job, preset, f"{found['seconds']:.0f} s", json.dumps(found)[:1500], flush=True)
    return found


def shown(command: str) -> str:
    """What a command prints, without colours, legends and what identifies a card."""
    try:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20)
        plain = re.sub(r"\x1b\[[0-9;]*m| \(UUID: [^)]*\)", "", done.stdout)
        return plain.partition("\n\nLegend:")[0].strip()[:4000]
    except subprocess.TimeoutExpired:
        return "timeout"


def information() -> dict[str, Any]:
    query = "name,driver_version,memory.total,clocks.max.sm"
    return {
        "cards": shown(f"nvidia-smi --query-gpu={query} --format=csv,noheader"),
        "topology": shown("nvidia-smi topo -m"),
        "nvlink": shown("nvidia-smi nvlink -s -i 0"),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_"))},
    }


def train(runs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "posttrainllm",
        "train",
        f"--runs-dir={runs}",
        "--quiet",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=150)


def curve(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def from_step_10(runs: Path, name: str, new: str) -> None:
    """A copy of a run as it was at its checkpoint of step 10."""
    shutil.copytree(runs / name, runs / new)
    shutil.rmtree(runs / new / "checkpoints" / "step-000020")


def drift(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def checkpoints(runs: Path, parallel: str) -> dict[str, Any]:
    """A run of two processes, and of one, each gone on with by two and by one from its middle."""
    flags = [*SMALL, f"--parallel={parallel}"]
    names = {1: f"{parallel}-one", 2: f"{parallel}-two"}
    found: dict[str, Any] = {"said": []}
    for count, name in names.items():
        done = train(runs, *flags, f"--name={name}", f"--nproc={count}")
        if done.returncode:
            return {"said": done.stderr[-1500:], "code": done.returncode, "run": name}
    for before, after in ((2, 2), (2, 1), (1, 2)):
        new = f"{parallel}-{before}-{after}"
        from_step_10(runs, names[before], new)
        done = train(runs, f"--resume={new}", f"--nproc={after}")
        found["said"] += [done.stderr] if done.returncode else []
        found[f"{before} -> {after}"] = drift(curve(runs / new), curve(runs / names[before]))
    found["one against two"] = drift(curve(runs / names[2]), curve(runs / names[1]))
    return found


def killed(runs: Path) -> dict[str, Any]:
    """SIGKILL for the second rank of a run."""
    arguments = [*SMALL, "--steps=100000", "--name=killed", "--nproc=2", f"--runs-dir={runs}", "-q"]
    command = [sys.executable, "-m", "posttrainllm", "train", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines, end = runs / "killed" / "metrics.jsonl", time.monotonic() + 90
    while time.monotonic() < end and not (lines.is_file() and len(curve_of(lines)) > 100):
        time.sleep(0.2)
    children = shown(f"pgrep -P {process.pid}").split()
    began = time.monotonic()
    os.kill(max(map(int, children)), signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    steps = [int(path.name[-6:]) for path in (runs / "killed" / "checkpoints").glob("step-*")]
    return {
        "seconds_to_the_end": time.monotonic() - began, "code": process.returncode, "said": said,
        "logged": len(curve_of(lines)), "newest_checkpoint": max(steps, default=0),
    }  # fmt: skip


def curve_of(lines: Path) -> list[str]:
    return lines.read_text().splitlines()


def product(folder: Path) -> dict[str, Any]:
    """All of the command's own checks at once: they are small, and there is room on the cards."""
    runs = folder / "runs"
    runs.mkdir(parents=True)
    jobs: dict[str, Callable[[], Any]] = {
        "ddp": lambda: checkpoints(runs, "ddp"),
        "fsdp": lambda: checkpoints(runs, "fsdp"),
        "killed": lambda: killed(runs),
    }
    with ThreadPoolExecutor(3) as pool:
        futures = {name: pool.submit(job) for name, job in jobs.items()}
    found = {}
    for name, future in futures.items():
        try:
            found[name] = future.result()
        except Exception:
            found[name] = {"error": traceback.format_exc()[-1500:]}
    print("product", json.dumps(found), flush=True)
    return found


# ---- records --------------------------------------------------------------------------------------


def record_speed(found: dict[str, Any], extra: dict[str, Any], folder: Path) -> None:
    configs, rows, results = [], [], {}
    info: dict[str, Any] = {}
    for preset, rows_of in ROWS.items():
        measured = found.get(preset, {})
        alone = [measured[name] for name in ("one", "one-compiled") if name in measured]
        one = max(alone, key=lambda row: row["tokens_per_second"], default=None)
        for name in VARIANTS[preset]:
            if name not in measured:
                continue
            gpus = 1 if name.startswith("one") else 2
            row = {k: v for k, v in measured[name].items() if k != "info"}
            info = info or measured[name]["info"]
            efficiency = (
                row["tokens_per_second"] / (gpus * one["tokens_per_second"]) if one else None
            )
            rows.append({"preset": preset, "how": name, "gpus": gpus, "rows_a_gpu": rows_of, **row,
                         "efficiency": efficiency, "engine_info": measured[name]["info"]})  # fmt: skip
            if efficiency is not None:
                results[f"efficiency of {preset} {name}"] = efficiency
        configs.append(
            load_config(preset, flags={"engine.name": "torch", "data.batch_size": rows_of})
        )
    method = {"warmup": 5, "repeats": REPEATS, "steps_a_repeat": STEPS,
              "scaling": "weak: rows_a_gpu on every GPU; efficiency against the fastest way on one",
              "command": "python bench/gpu/two_gpus.py --out FOLDER", **extra}  # fmt: skip
    write_record(
        make_record(
            "step",
            "two-gpus",
            engine="torch",
            info=info,
            config=configs,
            rows=rows,
            method=method,
            results=results,
        ),
        folder / "records",
    )


def record_checks(found: dict[str, Any], extra: dict[str, Any], folder: Path) -> None:
    rows = [{"part": part, **found[part]} for part in ("parity", "product") if part in found]
    method = {"command": "python bench/gpu/two_gpus.py --out FOLDER", **extra}
    config = load_config("small", flags={"engine.name": "torch"})
    checks = found.get("product", {})
    results = {
        f"{preset} {parallel}, worst of 50 losses": both[parallel]["worst"]
        for preset, both in found.get("parity", {}).items()
        for parallel in ("ddp", "fsdp")
        if parallel in both
    } | {
        f"{parallel} {way}": checks[parallel][way]
        for parallel in ("ddp", "fsdp")
        for way in ("2 -> 2", "2 -> 1", "1 -> 2")
        if way in checks.get(parallel, {})
    }
    write_record(
        make_record(
            "gpu-checks",
            "two-gpus-checks",
            engine="torch",
            info={},
            config=config,
            rows=rows,
            method=method,
            results=results,
        ),
        folder / "records",
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="info,parity,speed,product")
    parser.add_argument("--seconds", type=float, default=290)
    parser.add_argument("--presets", default="gpt2,behemoth")
    parser.add_argument("--parity-presets", default="gpt2")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"two-gpus-{os.getpid()}"
    folder.mkdir(parents=True)
    found: dict[str, Any] = {}

    def left() -> float:
        return float(given.seconds - (time.monotonic() - BEGAN))

    def save() -> None:
        (given.out / "two_gpus.json").write_text(json.dumps(found, indent=1))

    parts = given.parts.split(",")
    if "info" in parts:
        found["info"] = information()
        print(json.dumps(found["info"])[:3000], flush=True)
    if "parity" in parts:
        found["parity"] = {}
        for preset in given.parity_presets.split(","):
            found["parity"][preset] = torchrun("parity", preset, folder, min(70, left()))
            save()
    if "product" in parts and left() > 20:
        found["product"] = product(folder)
        save()
    if "speed" in parts:
        for preset in given.presets.split(","):
            if left() > 40:
                found[preset] = torchrun("speed", preset, folder, min(150, left()))
                save()
    extra = {"link": found.get("info", {}), "nccl": found.get("gpt2", {}).get("nccl")}
    if any(preset in found for preset in ROWS):
        record_speed(found, extra, given.out)
    record_checks(found, extra, given.out)


if __name__ == "__main__":
    main()
