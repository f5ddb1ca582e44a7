"""The wheel works where the source tree is not: built as pip builds it, used in an empty folder."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from needs import require
from posttrainllm.gallery import catalogue
from posttrainllm.kernels import build
from posttrainllm.kernels.build_wasm import WASM
from posttrainllm.text.datasets import TINY_SHAKESPEARE

ROOT = Path(__file__).parent.parent
SITE = (
    "site/index.html",
    "site/_astro/page.js",
    "site/_astro/page.js.gz",
    "site/data/wgsl/add.wgsl",
)

# What an installed package must know without its source tree.
LOOK = """
import hashlib, json, posttrainllm
from posttrainllm.text.datasets import shakespeare_path
from posttrainllm.kernels import build
from posttrainllm.kernels.build_wasm import WASM
print(json.dumps({
    "version": posttrainllm.__version__,
    "file": posttrainllm.__file__,
    "builds": build.available_builds(),
    "stale": build.stale_builds(),
    "text": hashlib.sha256(shakespeare_path().read_bytes()).hexdigest(),
}))
"""


def run(*command: str | Path, **options) -> str:
    """Run a command and return what it printed; its errors are the test's failure message."""
    result = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, **options
    )
    if result.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}", pytrace=False)
    return result.stdout


def copy_sources(destination: Path) -> None:
    """Copy what git tracks or would track: no build product of this tree comes along."""
    wanted = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in run(require("git"), "-C", ROOT, *wanted).split("\0"):
        if name and (ROOT / name).is_file():
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, destination / name)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Environment variables with an empty home, no path to this source tree, and the warm compiler cache."""
    home = tmp_path_factory.mktemp("home")
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "POSTTRAINLLM_CI")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"HOME": str(home), "ZIG_GLOBAL_CACHE_DIR": str(ROOT / "build" / "zig-cache")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, environment):
    """The wheel, built in isolation from a copy of the tracked files."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: what belongs to the source tree is not known")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    copy_sources(source)
    for name in SITE:
        (source / "src" / "posttrainllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (source / "src" / "posttrainllm" / name).write_text("a stand-in for the built site")
    pip = [sys.executable, "-m", "pip", "--no-input"]
    run(*pip, "wheel", ".", "--no-deps", "--wheel-dir", out, cwd=source, env=environment)
    [path] = out.glob("*.whl")
    return path


def test_the_wheel_is_for_this_platform_and_any_python(wheel):
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    names = zipfile.ZipFile(wheel).namelist()
    suffix = build.host_target().suffix
    libraries = {Path(name).name for name in names if name.endswith(suffix)}
    assert libraries == {f"libposttrain-{b}{suffix}" for b in build.host_target().processors}
    modules = {Path(name).name for name in names if name.endswith(".wasm")}
    assert modules == {f"posttrain-{b}.wasm" for b in WASM.processors}
    assert f"posttrainllm/data/{TINY_SHAKESPEARE.file_name}" in names
    assert {f"posttrainllm/{name}" for name in SITE} <= set(names), (
        "the site ships when it is built"
    )
    assert "posttrainllm/py.typed" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"posttrainllm"}


def test_the_installed_package_works_in_an_empty_folder(wheel, tmp_path, environment):
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--no-input", "--python", python]
    run(*pip, "install", "--no-deps", wheel, env=environment)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # Its dependencies are those of this environment; a .pth inside that folder (ours) has no effect.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    empty = tmp_path / "empty"
    empty.mkdir()
    seen = json.loads(run(python, "-c", LOOK, cwd=empty, env=environment))
    assert Path(seen["file"]).is_relative_to(site)
    assert seen["builds"] == list(build.host_target().processors)
    assert seen["stale"] == []
    assert seen["text"] == TINY_SHAKESPEARE.sha256
    command = folder / "bin" / "posttrainllm"
    assert "train" in run(command, "--help", cwd=empty, env=environment)
    for name in catalogue.names():  # the bundled models write at once, with no network and no run
        card = catalogue.card(name)
        written = run(command, *shlex.split(card.sample.command)[1:], cwd=empty, env=environment)
        assert written.rstrip("\n") == (card.sample.prompt + card.sample.text).rstrip("\n")
    assert list(empty.iterdir()) == []
    run(
        command,
        "train",
        "--preset",
        "tiny",
        "--steps",
        "3",
        "--name",
        "w",
        cwd=empty,
        env=environment,
    )
    asked = ("generate", "w", "--prompt", "ROMEO:", "--max-tokens", "5")
    assert run(command, *asked, cwd=empty, env=environment).startswith("ROMEO:")
