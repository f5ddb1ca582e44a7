"""Take the pictures of the pages that the README shows: docs/images/{write,train}.png.

    python tools/screenshots.py            of the site in the package (make play, or python tools/site.py)

They are of the real pages: the bundled model's text with a letter looked into, and a run of preset small.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
LETTER = 120  # of the text: far enough into it that a head has something to look at
STEPS = 700


def main() -> None:
    """Serve the site, visit it, and write the pictures."""
    from playwright.sync_api import sync_playwright

    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    )
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as runs, sync_playwright() as tools:
        command = [
            sys.executable,
            "-m",
            "posttrainllm",
            "play",
            "--no-open",
            "--port",
            "0",
            "--runs-dir",
            runs,
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        server = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        browser = tools.chromium.launch(
            executable_path=chromium, args=["--headless=new", "--no-sandbox"]
        )
        try:
            assert server.stdout is not None
            address = next(
                found[0] for line in server.stdout if (found := re.search(r"http://\S+", line))
            )
            page = browser.new_page(
                viewport={"width": 1280, "height": 800}, reduced_motion="reduce"
            )
            page.goto(address)
            page.locator("button[type=submit]:not([disabled])").wait_for()
            page.locator(".best b").wait_for()
            page.locator(".paper .text").evaluate("(text) => (text.scrollTop = 0)")
            page.locator(f'.text [data-i="{LETTER}"]').click()
            page.locator(".arcs path").first.wait_for()
            page.mouse.move(0, 0)
            page.screenshot(path=IMAGES / "write.png")
            page.goto(f"{address}train/?preset=small&training.steps={STEPS}")
            page.locator("button.start:not([disabled])").click()
            page.locator(".verdict").wait_for(timeout=300_000)
            page.screenshot(path=IMAGES / "train.png", full_page=True)
        finally:
            browser.close()
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
