"""Take the picture of a run in a notebook: docs/images/notebook.png.

    python tools/notebook_picture.py       trains preset small for STEPS steps; about a minute

It is the first page that ``posttrainllm.train`` really showed from step SHOWN on.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from posttrainllm.config import load_config
from posttrainllm.notebook.live import Bundle, LiveOutput
from posttrainllm.training.session import new_trainer

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "notebook.png"
STEPS = 1500
SHOWN = 1260  # the last evaluation but one has been made
LOOK = "background:#fff;color:#111;font:14px system-ui,sans-serif;margin:16px"


def step_of(shown: Bundle) -> int:
    """The step of a page, from its plain form: "small-001: step 1,250 of 1,500, loss 1.662"."""
    found = re.search(r"step ([\d,]+) of", shown["text/plain"])
    return int(found[1].replace(",", "")) if found else 0


def main() -> None:
    """Train, keep the pages, and draw one of them."""
    from playwright.sync_api import sync_playwright

    pages: list[Bundle] = []
    with tempfile.TemporaryDirectory() as runs:
        config = load_config("small", flags={"training.steps": STEPS})
        with LiveOutput(pages.append) as output:
            new_trainer(config, runs_dir=Path(runs), observer=output).train()
    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    )
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=chromium)
        page = browser.new_page(viewport={"width": 652, "height": 400}, device_scale_factor=2)
        chosen = next(shown["text/html"] for shown in pages if step_of(shown) >= SHOWN)
        page.set_content(f'<body style="{LOOK}">{chosen}</body>')
        page.screenshot(path=IMAGE, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
