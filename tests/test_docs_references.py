"""What the pages point at is there: links, headings, files, tests, commands with their options, settings, messages, names in the code."""

from __future__ import annotations

import ast
import functools
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from typer.main import get_command

from posttrainllm.cli import app
from posttrainllm.config import PRESETS, SETTINGS, load_config
from posttrainllm.engine_settings import EngineConfig
from posttrainllm.errors import ConfigError
from posttrainllm.model import gradients_program
from posttrainllm.optim import update_program
from posttrainllm.sections import SECTIONS

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    str(path.relative_to(ROOT))
    for folder in (".", "docs", "docs/ops", "docs/decisions", "bench", "examples")
    for path in (ROOT / folder).glob("*")
    if path.suffix in (".md", ".ipynb")
)
PAST = ("CHANGELOG.md", "docs/log.md", "docs/decisions/")  # may name what is gone
PRESENT = [page for page in PAGES if not page.startswith(PAST)]
MADE = {"docs/status.md"}  # lists tests and records by their names alone
ENGINES = {*get_args(EngineConfig.model_fields["name"].annotation), "torch-compile", "wasm-node"}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    .*$", re.MULTILINE)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")
FILE = re.compile(
    r"(\.\.\.)?[\w.*-]+(/[\w.*-]+)*(/|\.(py|md|cpp|h|wgsl|ts|json|toml|svelte|js|sh))"
)
BUILT = re.compile(
    r"web/(node_modules|dist|\.astro|public/data)/|src/posttrainllm/(site|kernels/lib)/|__pycache__|^\."
)
OF_RUNS = {  # what a run, a build or a browser makes, and what others have in their folders
    "runs", "checkpoints", "out", "_astro", "web", "__MACOSX", "config.toml", "config.json", "hashes.json", "tokenizer.json", "vocab.json",
    "tokenizer_config.json", "generation_config.json", "trainer_state.json", "model.safetensors.index.json", ".tab.json",
    "posttrainllm.json",
}  # fmt: skip
HIDES_FILES = re.compile(r"(model|optimizer)\.safetensors")  # looks like a setting


@functools.cache
def text_of(page: str) -> str:
    """A page as Markdown; of a notebook, its cells of text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if not page.endswith(".ipynb"):
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def spans(page: str) -> list[str]:
    """What stands in backticks, outside of blocks."""
    return [span.strip() for span in SPAN.findall(INDENTED.sub("", FENCE.sub("", text_of(page))))]


def links(page: str) -> Iterator[tuple[str, str]]:
    """(path, anchor) of every link of a page that leads to another page or file of ours."""
    for typed, picture in LINK.findall(FENCE.sub("", text_of(page))):
        if not (typed or picture).startswith(("http:", "https:", "mailto:")):
            path, _, anchor = (typed or picture).partition("#")
            yield path, anchor


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    lines = re.findall(r"^#+ +(.+)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.strip().lower()).replace(" ", "-") for line in lines}


@functools.cache
def sources() -> dict[str, str]:
    """Every text file of the source tree but the pages, by its path from the root."""
    found = {}
    for folder in (
        "src",
        "web/src",
        "web/test",
        "tests",
        "tools",
        "bench/gpu",
        "bench/cases",
        "web",
        "",
    ):
        for path in (ROOT / folder).glob("*" if folder in ("web", "") else "**/*"):
            name = str(path.relative_to(ROOT))
            if BUILT.search(name) or path.suffix in (".md", ".png", ".safetensors", ".txt"):
                continue
            if path.is_file() and path.stat().st_size < 500_000:
                found[name] = path.read_text(encoding="utf-8", errors="replace")
    return found


@functools.cache
def words() -> set[str]:
    """Every word of the sources, this file's own list of exceptions included."""
    return set(re.findall(r"\w+", "\n".join(sources().values())))


@functools.cache
def commands() -> dict[str, set[str]]:
    """Options of every command by its name: ``runs list`` is one."""
    found = {"": {"--help", "--version"}}
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        found[name] = {"--help"}
        for part, inner in getattr(command, "commands", {"": command}).items():
            options = {option for parameter in inner.params for option in parameter.opts}
            found[f"{name} {part}".strip()] = {"--help"} | options
    return found


def exists(name: str, page: str) -> bool:
    """Whether a path, or the end of one, is in the source tree; ``*`` and ``...`` stand for anything."""
    name = name.removeprefix("./").rstrip("/").replace("...", "*")
    package = ROOT / "src" / "posttrainllm"
    starts = ((ROOT / page).parent, ROOT, package, package / "kernels", ROOT / "web" / "src")
    if any(next(start.glob(name), None) for start in (*starts, ROOT / "bench" / "results")):
        return True
    return any(path.endswith(f"/{name}") for path in sources())


# ---- links, files, tests, names -----------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    wrong = []
    for path, anchor in links(page):
        place = (ROOT / page).parent / path if path else ROOT / page
        if not place.exists() or (anchor and anchor not in headings(place)):
            wrong.append(f"{path}#{anchor}")
    assert not wrong, f"{page} links to what is not there: {wrong}"


def test_every_page_is_linked_from_the_index() -> None:
    linked = {ROOT / "docs" / "README.md"} | {
        ((ROOT / index).parent / path).resolve()
        for index in ("docs/README.md", "docs/decisions/README.md")
        for path, _ in links(index)
    }
    missing = [p for p in PAGES if p.startswith("docs/") and (ROOT / p).resolve() not in linked]
    assert not missing, "add these to docs/README.md, or to docs/decisions/README.md"


@pytest.mark.parametrize("page", PRESENT)
def test_files_that_are_named_exist(page: str) -> None:
    wrong = []
    for span in spans(page):
        name = span.partition("::")[0]
        if not FILE.fullmatch(name) or re.search(r"NAME|^grad\.|^h\.", name):
            continue
        if name.partition("/")[0] not in OF_RUNS and not exists(name, page):
            wrong.append(span)
    assert not wrong, f"{page} names files that are not there: {wrong}"


@pytest.mark.parametrize("page", PAGES)
def test_tests_that_are_named_exist(page: str) -> None:
    wrong = []
    for file, _, test in re.findall(r"\b(test_\w+\.py)(::(test_\w+))?", text_of(page)):
        text = sources().get(f"tests/{file}", "")
        if not text or (test and f"def {test}(" not in text):
            wrong.append(f"{file}::{test}")
    assert not wrong, f"{page} rests on tests that are not there: {wrong}"


@pytest.mark.parametrize("page", [page for page in PRESENT if page not in MADE])
def test_names_in_backticks_are_in_the_code(page: str) -> None:
    wrong = []
    for span in spans(page):
        name = span.removesuffix("()").removesuffix("(...)")
        plain = name.islower() and "_" not in name
        if plain or not re.fullmatch(r"[A-Za-z]\w*(\.\w+)*", name):
            continue
        if name.rpartition(".")[2] not in words() and not exists(name, page):
            wrong.append(span)
    assert not wrong, f"{page} names what the code does not have: {wrong}"


def test_files_that_the_sources_name_exist() -> None:
    """In double backticks, as docstrings have them, and pages of docs/ anywhere."""
    theirs = {"src/encoder.py", "tests/e.py", "cases.json", "tab.json", "grad.h"}  # made in passing
    named = re.compile(r"``([\w./-]+\.(?:py|cpp|h|md|ts|json|wgsl|toml))``|\b(docs/[\w/-]+\.md)")
    wrong = []
    for source, text in sources().items():
        for found in named.finditer(text):
            name = (found.group(1) or found.group(2)).lstrip(".")
            known = name in theirs or name.partition("/")[0] in OF_RUNS
            if not known and not exists(name, source if "/" in source else "README.md"):
                wrong.append(f"{source}: {name}")
    assert not wrong, f"these name files that are not there: {wrong}"


# ---- commands and settings ----------------------------------------------------------------------


def typed(page: str) -> Iterator[list[str]]:
    """The words after ``posttrainllm`` of every command on a page, in blocks and in backticks."""
    text = text_of(page).replace("\\\n", " ")
    blocks = [body for kind, body in FENCE.findall(text) if kind in ("sh", "")]
    blocks += INDENTED.findall(FENCE.sub("", text))
    for line in [*"\n".join(blocks).splitlines(), *SPAN.findall(text)]:
        found = re.match(r"(.*-m |[$>]? *)?posttrainllm (.+)$", line.strip())
        if found:  # without what is said about it, further to the right
            yield shlex.split(re.split(r"\s{3,}| #", found.group(2).strip(), maxsplit=1)[0])


def refused(setting: str) -> Iterator[str]:
    """Why no configuration takes ``key=value``, if so."""
    said = f"no setting {setting}"
    if setting.partition("=")[0].strip() in SETTINGS:
        for engine in ("cpp", "torch", "webgpu"):
            try:
                load_config(overrides=[f"engine.name={engine}", setting])
                return
            except ConfigError as error:
                said = str(error)
    yield said


def problems(given: list[str]) -> Iterator[str]:
    """What is wrong with the words after ``posttrainllm``, if anything."""
    name = " ".join(given[:2]) if " ".join(given[:2]) in commands() else given[0]
    if given[0].startswith("-"):
        name = ""
    if name not in commands():
        yield f"there is no command {name}"
        return
    for word, value in zip(given, [*given[1:], ""], strict=True):
        if word.startswith("-") and word != "-" and word.partition("=")[0] not in commands()[name]:
            yield f"{name} has no {word}"
        if word == "--preset":
            yield from (f"no preset {v}" for v in value.split(",") if v not in PRESETS)
        elif word == "--engine":
            yield from (f"no engine {v}" for v in value.split(",") if v not in ENGINES)
        elif word == "--set":
            yield from refused(value)
        elif word == "--set-values" and value.partition("=")[0] not in SETTINGS:
            yield f"no setting {value}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_are_shown_can_be_typed(page: str) -> None:
    wrong = [f"{' '.join(given)}: {why}" for given in typed(page) for why in problems(given)]
    assert not wrong, f"{page} shows what posttrainllm does not take: {wrong}"


@pytest.mark.parametrize("page", PAGES)
def test_options_and_settings_that_are_named_exist(page: str) -> None:
    options = set().union(*commands().values())
    wrong = []
    for span in spans(page):
        if re.match(r"--[a-z]", span) and re.split("[ =]", span)[0] not in options:
            wrong.append(span)
        found = re.match(rf"(?:{'|'.join(SECTIONS)})\.[a-z]\w*( ?= ?\S.*)?$", span)
        if found and found.group(1):
            wrong += refused(span)
        elif found and span not in SETTINGS and not HIDES_FILES.match(span):
            wrong += [] if exists(span, page) else [span]
        if re.fullmatch(r"engine\.\w+=\w+", span):
            wrong += refused(span)
    assert not wrong, f"{page} names options or settings that are not there: {wrong}"


@pytest.mark.parametrize("page", PAGES)
def test_make_knows_the_targets_that_are_named(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", sources()["Makefile"], re.MULTILINE))
    named = set(re.findall(r"^    make ([a-z-]+)", text_of(page), re.MULTILINE))
    named |= {found for span in spans(page) for found in re.findall(r"^make ([a-z-]+)", span)}
    assert named <= targets, f"{page}: no target {named - targets}"


# ---- messages -----------------------------------------------------------------------------------


@functools.cache
def messages() -> list[list[str]]:
    """The pieces of every text of several words in the sources, cut where values are filled in."""
    found = []
    for name, text in sources().items():
        if name.startswith("web/src/"):
            found += [re.split(r"\$?\{[^}]*\}", line) for line in text.splitlines() if " " in line]
        if not name.startswith("src/") or not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", "\0") for part in node.values)
                found.append("".join(p if isinstance(p, str) else "\0" for p in parts).split("\0"))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.split(r"\{[^}]*\}", node.value))
    return [pieces for pieces in found if any(" " in piece for piece in pieces)]


def is_said(shown: str) -> bool:
    """Whether the sources say ``shown``: each part between ``...`` within a message, or a message's longest piece within it."""
    known = [(pieces, max(pieces, key=len).strip()) for pieces in messages()]
    return all(
        any((len(long) > 6 and long in part) or any(part in p for p in ps) for ps, long in known)
        for part in map(str.strip, shown.split("..."))
    )


@pytest.mark.parametrize("page", [p for p in PRESENT if "| what you see |" in text_of(p)])
def test_messages_in_tables_of_symptoms_are_said_somewhere(page: str) -> None:
    rows = re.findall(r"^\| (?:\d+ )?`([^`|]+)`.* \|.*\|.*\|$", text_of(page), re.MULTILINE)
    quoted = [row for row in rows if " " in row and not row.startswith(("posttrainllm", "--"))]
    wrong = [row for row in quoted if not is_said(row)]
    assert not wrong, f"{page} quotes what nobody says: {wrong}"


# ---- pages that repeat the code -----------------------------------------------------------------


def test_the_page_of_the_training_step_lists_its_calls_in_order() -> None:
    shown = re.findall(r"^\| `(\w+)` \|", text_of("docs/step.md"), re.MULTILINE)
    config = load_config("small")
    programs = (gradients_program(config.model), update_program(config.optimizer))
    calls = [op for p in programs for op in re.findall(r" = (\w+)\(", p.to_text())]
    assert shown == calls


def test_the_page_of_the_architecture_says_where_every_module_is() -> None:
    package = ROOT / "src" / "posttrainllm"
    made = {"__pycache__", "data", "site", "__init__.py", "__main__.py", "py.typed"}
    named = set(spans("docs/architecture.md"))
    names = {p.name + "/" * p.is_dir() for p in package.iterdir() if p.name not in made}
    assert not names - named, "say on docs/architecture.md what these are"


def test_pages_that_are_made_from_the_code_are_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "reference_pages.py"))["pages"]()
    old = [name for name, text in made.items() if text_of(f"docs/{name}") != text]
    assert not old, "run: python tools/reference_pages.py"


def test_seeded_faults_have_their_place_in_the_code_and_on_the_page_of_numerics() -> None:
    faults = runpy.run_path(str(ROOT / "tools" / "mutation_check.py"))["FAULTS"]
    odd = [f.what for f in faults if sources()[f"src/posttrainllm/{f.file}"].count(f.old) != 1]
    assert not odd, "tools/mutation_check.py seeds these nowhere, or in a place that is not theirs"
    table = text_of("docs/numerics.md").partition("## Mutation check")[2]
    assert len(faults) == table.count("\n| `")
    shown = [
        f.what
        for f in faults
        if not re.search(rf"`\S*{Path(f.file).name}`: .*{re.escape(f.what)}", table)
    ]
    assert not shown, "docs/numerics.md does not have these"


def test_environment_variables_that_are_read_are_on_the_page_of_settings() -> None:
    theirs = {"POSTTRAINLLM_REPORT", "POSTTRAINLLM_LISTEN_FD"}  # from process to process
    code = "\n".join(text for name, text in sources().items() if name.startswith("src/"))
    read = set(re.findall(r"POSTTRAINLLM_[A-Z_]+", code)) - theirs
    assert {name for name in read if f"`{name}`" not in text_of("docs/settings.md")} == set()
