"""The page of the project's state: it names what there is, and it is made from a report as it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from posttrainllm.config import PRESETS
from posttrainllm.engine_settings import ENGINES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "status.md"
REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_plan" name="test_one"/>
<testcase classname="tests.test_plan" name="test_two[a|b]"><failure message="no">text</failure></testcase>
<testcase classname="tests.test_config.TestIt" name="test_three"><skipped message="needs a|b">x</skipped></testcase>
<testcase classname="" name="tests.test_oracle"><skipped message="needs torch">x</skipped></testcase>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("status")
    (folder / "report.xml").write_text(REPORT)
    script = [sys.executable, str(ROOT / "tools" / "status.py"), str(folder / "report.xml")]
    subprocess.run([*script, "--output", str(folder / "status.md")], check=True)
    return (folder / "status.md").read_text()


def row(page: str, start: str) -> list[str]:
    [line] = [line for line in page.splitlines() if line.startswith(f"| `{start}` |")]
    return line.strip("| ").split(" | ")


def test_the_page_names_every_case_every_engine_and_every_preset() -> None:
    page = PAGE.read_text()
    for path in (ROOT / "bench" / "results").glob("*.json"):
        record = json.loads(path.read_text())
        assert f"| {record['case']} | {record['engine']} |" in page, "run `make status`"
    assert all(f"| `{name}` |" in page for name in (*ENGINES, *PRESETS))


def test_a_report_becomes_counts_and_reasons(made: str) -> None:
    verified, _, rest = made.partition("## Open")
    assert row(verified, "test_plan")[2:] == ["1", "1", "0"]
    assert row(verified, "test_config")[2:] == ["0", "0", "1"]
    assert row(verified, "test_oracle")[2:] == ["0", "0", "1"]
    assert row(verified, "test_ops")[2:] == ["not run"] * 3
    assert "1 passed, 1 failed, 2 skipped." in verified
    assert "- FAILED: `test_plan`, test_two[a|b]" in verified
    assert row(rest, "test_oracle")[1:] == ["1", "needs torch"]
    assert row(rest, "test_config")[1:] == ["1", r"needs a\|b"]


def test_the_links_of_the_page_lead_to_records(made: str) -> None:
    links = [part.partition(")")[0] for part in made.split("](")[1:]]
    assert links
    assert all((ROOT / "docs" / link).is_file() for link in links)
