"""What every test shares: the ``require`` fixture, the built site and a browser in front of it, hypothesis without
deadlines, one thread a worker, and Triton without a card.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import needs

# With several workers the libraries' own threads would only fight for the processors. This runs before
# any test imports numpy or torch, which read the variables once.
if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")

# Started in a script's background, the tests would hand ignored signals on to the commands that they interrupt.
for name, usual in (
    ("SIGINT", signal.default_int_handler),
    ("SIGQUIT", signal.SIG_DFL),
    ("SIGHUP", signal.SIG_DFL),
):
    number = getattr(signal, name, None)  # Windows has SIGINT alone
    if number is not None and signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)

# Where there is no NVIDIA card, Triton's kernels run in its interpreter. Triton asks for this when it is imported, whoever does so first.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples every time, and no time limit: the machines that run this are shared and slow.
hypothesis.settings.register_profile("posttrainllm", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("posttrainllm")


@pytest.fixture
def require() -> Callable[[str], Any]:
    """``require("torch")``: the module, or a skip with the command that installs it."""
    return needs.require


# ---- the built site; what these need is imported by the tests that ask for them ----------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    from site_visits import built_site

    return built_site(tmp_path_factory)


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    from browser import served

    with served(site) as found:
        yield found


@pytest.fixture(scope="module")
def tools() -> Iterator[Any]:
    """Playwright."""
    from site_visits import playwright

    with playwright() as opened:
        yield opened


@pytest.fixture(scope="module")
def browser(tools: Any) -> Iterator[Any]:
    """A Chromium without a GPU."""
    from site_visits import chromium

    with chromium(tools) as opened:
        yield opened


@pytest.fixture
def visitor(browser: Any, address: str) -> Iterator[Any]:
    """A page of the site, in a context of its own."""
    from site_visits import visit

    with visit(browser, address) as opened:
        yield opened
