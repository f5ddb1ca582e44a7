#!/usr/bin/env python3
"""Does the suite notice? Forty one-line faults, seeded one at a time, each with the tests that must fail.

    git clone . /tmp/tree && cp -r src/posttrainllm/kernels/lib /tmp/tree/src/posttrainllm/kernels/
    python tools/mutation_check.py /tmp/tree            # all of them; --part 0/2 and 1/2 in two trees

It changes the files of the tree that is given (a copy, never the work tree), builds the kernels again where
a C++ file changed, runs the fast tests of that area and puts the file back. A fault is caught when a test
fails; with --wider, one that survives its area meets more of the fast suite. A run over the limit counts as
survived, and --baseline runs the same tests without a fault. Last comes the table of ``docs/numerics.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

CPP = "kernels/cpp/"
LIMIT_S = 240  # an area's tests take half of it at most, on a busy machine
BUILD = "avx512"  # the build that the tests of C++ faults run

OPS = ("tests/test_ops.py",)
DRIVER = ("tests/test_cpp_driver.py", "tests/test_ops.py")
MODEL = ("tests/test_step.py", "tests/test_oracle.py")
PROGRAM = (
    "tests/test_program.py",
    "tests/test_plan.py",
    "tests/test_validate.py",
    "tests/test_step.py",
)
GOLDEN = ("tests/test_golden.py",)
DEFINITION = ("tests/test_gradients.py", "tests/test_oracle.py")
CONTROL = ("tests/test_control.py",)
FUSE = ("tests/test_fuse.py",)
DEFAULTS = ("tests/test_config.py",)
RUN = ("tests/test_session.py", "tests/test_api.py", "tests/test_checkpoint.py")
WIDER = (
    *(
        "tests/test_program.py",
        "tests/test_plan.py",
        "tests/test_validate.py",
        "tests/test_fuse.py",
    ),
    *(
        "tests/test_step.py",
        "tests/test_oracle.py",
        "tests/test_gradients.py",
        "tests/test_golden.py",
    ),
    *("tests/test_config.py", "tests/test_control_cpp.py", "tests/test_torch_engine.py"),
    *("tests/test_runs.py", "tests/test_lab_resume.py", "tests/test_program_engine.py"),
)


class Fault(NamedTuple):
    """One fault: ``old`` occurs once in the file, ``new`` takes its place."""

    file: str
    old: str
    new: str
    kind: str
    what: str
    tests: tuple[str, ...]
    names: str = ""  # pytest -k


# fmt: off
FAULTS = (
    Fault(CPP + "gelu.h", "(y * s * (e * s), dz, s)", "(y * s * (e * s), dz, -s)",
          "sign", "gelu's slope", OPS, "gelu_backward"),
    Fault(CPP + "layernorm.cpp", "mu += row_sum(C, centred)", "mu -= row_sum(C, centred)",
          "sign", "layernorm: the mean's own rounding", OPS, "layernorm_forward or layernorms"),
    Fault(CPP + "attention.cpp", "if (j == j0 || shrink == 1.0f) continue;", "if (j >= j0) continue;",
          "missing scale", "attention: out not rescaled as the maximum grows", OPS, "attention_forward"),
    Fault(CPP + "attention.cpp", "(lane <= high)", "(lane < high)",
          "off by one", "attention: a token does not see itself", OPS, "attention_forward"),
    Fault(CPP + "attention.cpp", "(load(s_row + s) - row_sum) * splat(a.scale)",
          "(load(s_row + s) - row_sum)",
          "missing scale", "attention backward: 1 / sqrt(D)", OPS, "attention_backward"),
    Fault(CPP + "attention.cpp", "float* v = k + B * S * C;", "float* v = k + S * C;",
          "wrong axis", "the cache's values among its keys", OPS, "attention_append"),
    Fault(CPP + "attention.cpp", "min(BLOCK, last + 1 - s0)", "min(BLOCK, last + 2 - s0)",
          "off by one", "decoding reads one key too many", OPS, "attention_decode"),
    Fault(CPP + "linear.cpp", "n < rows; n++) sum[0] +=", "n < rows; n++) sum[0] =",
          "wrong accumulate", "bias gradient: rows behind the last four", OPS, "linear_backward"),
    Fault(CPP + "embedding.cpp", "j + 1 < N ? starts[j + 1] : N", "j + 1 < N ? starts[j + 1] : N - 1",
          "off by one", "embedding gradient: the last position", OPS, "embedding_backward"),
    Fault(CPP + "cross_entropy.cpp", "dz[targets[n]] -= inv_count;", "dz[targets[n]] -= 1.0f;",
          "missing scale", "the target's gradient", OPS, "cross_entropy_backward"),
    Fault(CPP + "optimizer.cpp", "sqrt(v_new * unbias2)", "sqrt(v_new * unbias1)",
          "swapped buffers", "AdamW's bias corrections", OPS, "adamw_step"),
    Fault(CPP + "fused.cpp", "get(residual + at, lanes) + get(out", "get(residual + at, lanes) - get(out",
          "sign", "fused residual, few rows", OPS, "linear_residual"),
    Fault(CPP + "run.cpp", "embedding_forward(a.f(0), a.ids(1), a.ids(2), a.f(3), a.f(4)",
          "embedding_forward(a.f(0), a.ids(1), a.ids(2), a.f(4), a.f(3)",
          "swapped buffers", "call table: the two embedding tables", DRIVER, "embedding_forward"),
    Fault("model.py", '"C")], ["h.{i}.in", proj]', '"C")], ["h.{i}.ln_1.out", proj]',
          "swapped buffers", "attention's residual is taken after ln_1", MODEL),
    Fault("model.py", '_layernorm_backward(b, "h.{i}.ln_2", "h.{i}.mid"',
          '_layernorm_backward(b, "h.{i}.ln_2", "h.{i}.in"',
          "swapped buffers", "ln_2's backward reads the block's input", MODEL),
    Fault("model.py", "ADD if b.config.tied else BETA", "BETA",
          "wrong accumulate", "tied table: the head's gradient is lost", MODEL),
    Fault("model.py", "accumulate=BETA if trains else WRITE", "accumulate=WRITE",
          "wrong accumulate", "loss of the last micro-batch alone", MODEL),
    Fault("model.py", '("h.{i}.attn.c_proj", "C", "C", "residual")',
          '("h.{i}.attn.c_proj", "C", "C", "normal")',
          "missing scale", "initial values of attention's projection", GOLDEN, "initial"),
    Fault("optim.py", "(optimizer.weight_decay, 0.0)", "(0.0, optimizer.weight_decay)",
          "swapped buffers", "decay on biases, none on matrices", MODEL),
    Fault("optim.py", "beta2=optimizer.beta2", "beta2=optimizer.beta1",
          "wrong constant", "the second moment's beta", MODEL),
    Fault("plan.py", "taken[0][0] < first", "taken[0][0] <= first",
          "off by one", "work space given away a call too early", PROGRAM[1:2]),
    Fault("plan.py", "offset += step.chunk * math.prod(shape)", "offset += step.chunk * shape[0]",
          "wrong axis", "windows of rows in the head", PROGRAM),
    Fault("validate.py", "if name in outputs:", "if name in outputs[1:]:",
          "off by one", "aliases of the first output pass", PROGRAM),
    Fault("engines/numpy_ops.py", "GELU_CUBIC = 0.044715", "GELU_CUBIC = 0.044175",
          "wrong constant", "the definition of gelu", DEFINITION, "gelu or gpt or torch"),
    Fault("engines/numpy_ops.py", "g.mean(axis=1, keepdims=True) - xhat",
          "g.mean(axis=0, keepdims=True) - xhat",
          "wrong axis", "the definition of layernorm's backward", DEFINITION, "layernorm"),
    Fault("engines/numpy_ops.py", "(np.sqrt(vhat) + number(eps))", "(np.sqrt(v) + number(eps))",
          "missing scale", "the definition of AdamW: v is not corrected", MODEL),
    Fault("engines/numpy_ops.py", "np.maximum(targets, 0)] -= 1", "np.maximum(targets, 0)] += 1",
          "sign", "the definition of the loss's gradient", DEFINITION, "entropy or head"),
    Fault("control.py", "0xCD9E8D57", "0xCD9E8D75",
          "wrong constant", "philox's second multiplier", CONTROL),
    Fault("control.py", "np.uint64(high - low))", "np.uint64(high - low + 1))",
          "off by one", "a window behind the text's end", CONTROL),
    Fault("control.py", "float(steps - step) / float(steps - ramp)", "float(steps - step) / float(steps)",
          "wrong constant", "the cosine forgets the warm-up", CONTROL),
    Fault("control.py", "1.0 - _power(beta2, step)", "1.0 - _power(beta2, step - 1)",
          "off by one", "bias correction of step t - 1", CONTROL),
    Fault("control.py", "order[: enough[0] + 1]", "order[: enough[0]]",
          "off by one", "top_p drops the token that fills the share", CONTROL),
    Fault("fuse.py", "or linear.inputs[0] != dout:", "or linear.inputs[0] is None:",
          "missing check", "fusing gradients of two different outputs", FUSE),
    Fault("fuse.py", "inputs.outputs + weight.outputs", "weight.outputs + inputs.outputs",
          "swapped buffers", "fused layernorm's three gradients", FUSE),
    Fault("sections.py", "weight_decay: float = Field(\n        default=0.1",
          "weight_decay: float = Field(\n        default=0.01",
          "wrong constant", "default of weight_decay", DEFAULTS),
    Fault("sections.py", "beta2: float = Field(\n        default=0.95", "beta2: float = Field(\n        default=0.999",
          "wrong constant", "default of beta2", DEFAULTS),
    Fault("presets.py", "steps=1500,\n        learning_rate=6e-3", "steps=1500,\n        learning_rate=6e-4",
          "wrong constant", "learning rate of preset small", DEFAULTS),
    Fault("training/step.py", "inv_count=1.0 / tokens",
          "inv_count=config.data.accumulation / tokens",
          "missing scale", "accumulated gradients are summed, not averaged", RUN),
    Fault("training/trainer.py", "step=self.step,\n            seed", "step=self.step + 1,\n            seed",
          "off by one", "the step that a checkpoint says", RUN),
    Fault("training/journal.py", "v=tensors.v,", "v=tensors.m,",
          "swapped buffers", "a checkpoint's second moment", RUN),
)
# fmt: on


def run_tests(tree: Path, tests: tuple[str, ...], names: str = "") -> tuple[bool, str, float]:
    """Whether these tests fail, the first that does, and the seconds."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
    ]
    command += [*tests, *(["-k", names] if names else [])]
    environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return False, "over the time limit", LIMIT_S
    first = [
        line.split(" ", 1)[1].split(" - ")[0]
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    said = first[0] if first else f"exit status {done.returncode}"
    # 1: tests failed; below 0: a signal; 2: an error while the tests were collected
    return done.returncode in (1, 2) or done.returncode < 0, said, time.monotonic() - began


def build(tree: Path) -> None:
    """Compile the one build that the tests use."""
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    command = [sys.executable, "-m", "posttrainllm.kernels", "--no-warnings", BUILD]
    subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)


def try_fault(tree: Path, fault: Fault, wider: bool) -> tuple[bool, str, float]:
    """Seed one fault, run its tests, put the file back."""
    path = tree / "src/posttrainllm" / fault.file
    good = path.read_text()
    if good.count(fault.old) != 1:
        raise SystemExit(f"{fault.file}: {fault.old!r} occurs {good.count(fault.old)} times")
    try:
        path.write_text(good.replace(fault.old, fault.new))
        if fault.file.startswith(CPP):
            build(tree)
        result = run_tests(tree, fault.tests, fault.names)
        return result if result[0] or not wider else run_tests(tree, WIDER)
    finally:
        path.write_text(good)
        if fault.file.startswith(CPP):
            build(tree)


def table(lines: list[dict[str, str]]) -> str:
    """The rows of ``docs/numerics.md``."""
    rows = ["| fault | kind | caught by |", "|---|---|---|"]
    for line in lines:
        rows.append(f"| `{line['file']}`: {line['what']} | {line['kind']} | {line['by']} |")
    return "\n".join(rows)


def main() -> int:
    """Run the faults that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("tree", type=Path, help="a copy of the project, with its kernels")
    parser.add_argument("--part", default="0/1", help="every n-th fault, from the k-th on: k/n")
    parser.add_argument("--match", default="", help="only faults with this in file or description")
    parser.add_argument("--baseline", action="store_true", help="run the tests without any fault")
    parser.add_argument("--skip", type=int, default=0, help="how many of the first faults to skip")
    parser.add_argument("--wider", action="store_true", help="survivors meet the wider fast suite")
    parser.add_argument("--log", type=Path, help="add a JSON line a fault to this file")
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    if tree == Path(__file__).resolve().parent.parent:
        raise SystemExit("this is the work tree: give a copy")
    first, step = map(int, arguments.part.split("/"))
    chosen = [
        fault
        for fault in FAULTS[arguments.skip :]
        if arguments.match in f"{fault.file} {fault.what}"
    ]
    build(tree)
    if arguments.baseline:
        for tests, names in dict.fromkeys(
            (fault.tests, fault.names) for fault in chosen[first::step]
        ):
            print(*run_tests(tree, tests, names), *tests, names, flush=True)
        return 0
    lines = []
    for fault in chosen[first::step]:
        caught, by, seconds = try_fault(tree, fault, arguments.wider)
        by = f"`{Path(by).name}`" if caught else f"**survived** ({by})"
        line = {"file": fault.file, "what": fault.what, "kind": fault.kind, "by": by}
        lines.append(line)
        print(f"{time.strftime('%H:%M:%S')} {seconds:4.0f} s  {line}", flush=True)
        if arguments.log:
            with arguments.log.open("a") as log:
                log.write(json.dumps(line) + "\n")
    print(table(lines))
    print(f"{sum('survived' not in line['by'] for line in lines)} of {len(lines)} caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
