"""What is said in the words of each face: no flag or command of the terminal reaches Python, and neither these nor code reaches a page."""

from __future__ import annotations

import ast
import copy
import errno
import inspect
import pickle
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

import posttrainllm
from posttrainllm import api, wording
from posttrainllm.cli import app
from posttrainllm.config import SETTINGS
from posttrainllm.errors import ConfigError, PosttrainError
from posttrainllm.runs.folder import resuming
from posttrainllm.server.answers import refusal_of
from posttrainllm.storage import write_error
from posttrainllm.training.exporting import export_model
from posttrainllm.wording import FLAGS, LABELS, SPELLED, Wording, in_tab, in_terminal, worded
from test_architecture import TREES

COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
OPTIONS = {
    name for command in COMMANDS.values() for each in command.params for name in each.opts
} - {"--help"}

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
COMMAND = re.compile(rf"\bposttrainllm (?:{'|'.join(COMMANDS)})\b")
CODE = re.compile(r'posttrainllm|\w=|"|\(\)')

TERMINAL_ALONE = ("cli.", "lab.", "kernels.", "server.serve.")  # only commands come there
OTHER_PROGRAMS = ("--master-port", "--local-dir")  # of torchrun and hf
NOT_IN_PYTHON = (
    # the texts after --set
    "--set ",
    "write it as --set section.key=value",
    " (from --set)",
    "from --set",
    "from --preset",
    # a command that Python has no function for, and it says where it runs
    "posttrainllm diagnose ",
)


def is_for_a_terminal(text: str) -> bool:
    return bool(COMMAND.search(text)) or any(
        flag in OPTIONS and flag not in OTHER_PROGRAMS for flag in FLAG.findall(text)
    )


# ---- what a wording is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "python", "terminal", "tab"),
    [
        ("a smaller {data.batch_size}", "a smaller batch_size", "a smaller --batch-size", "a smaller batch_size"),
        ("use {engine.name=cpp}", 'use engine="cpp"', "use --engine cpp", "use engine cpp"),
        ("{data.val_fraction=0}", "val_fraction=0", "--val-fraction 0", "val_fraction 0"),
        ("{model.dropout=0}", "dropout=0", "--set model.dropout=0", "dropout 0"),
        ("{optimizer.kind=adamw}", 'optimizer__kind="adamw"', "--set optimizer.kind=adamw", "kind adamw"),
        ("leave {engine.precision} out", "leave precision out", "leave engine.precision out", "leave precision out"),
        ("add {allow_change=True}", "add allow_change=True", "add --allow-change", "add allow_change"),
        ("another {runs_dir}", "another runs_dir", "another --runs-dir", "another folder of runs"),
        ("from {training.start_from}", "from start_from", "from --from", "from start_from"),
        ("with {resume}", "with posttrainllm.resume", "with --resume", "with resume"),
    ],
)  # fmt: skip
def test_each_face_has_its_words(text, python, terminal, tab):
    said = worded(text)
    assert (str(said), in_terminal(said), in_tab(said)) == (python, terminal, tab)


def test_a_plain_text_is_the_same_everywhere():
    assert in_terminal("a {brace} stays") == in_tab("a {brace} stays") == "a {brace} stays"


def test_a_text_that_looks_like_a_number_stays_a_text():
    said = resuming(Path("20/26"), 1000)
    assert said == 'posttrainllm.resume("26", steps=1000, runs_dir="20")'
    assert said.terminal == "posttrainllm train --resume 26 --steps 1000 --runs-dir 20"


def test_what_a_shell_would_take_apart_is_quoted():
    said = resuming(Path("my runs/it's"))
    assert said == 'posttrainllm.resume("it\'s", runs_dir="my runs")'
    assert shlex.split(said.terminal)[3:] == ["it's", "--runs-dir", "my runs"]


def test_values_are_said_as_they_are_and_other_wordings_in_their_face():
    inner = worded("lower {schedule.learning_rate} (it is {rate:g})", rate=0.0030)
    said = worded("{file}; {then}", file="{data.batch_size}", then=inner)
    assert said == "{data.batch_size}; lower learning_rate (it is 0.003)"
    assert said.terminal == "{data.batch_size}; lower --learning-rate (it is 0.003)"


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])  # fmt: skip
def test_an_error_keeps_all_faces_of_its_hint(again):
    error = again(ConfigError("no", worded("use {engine.name=cpp}")))
    assert str(error) == 'no\nuse engine="cpp"'
    assert in_terminal(error.hint) == "use --engine cpp"


# ---- the names of the faces are those of the faces -------------------------------------------------


def test_flags_are_those_of_the_command_line():
    of_commands = {
        name for command in ("train", "export") for each in COMMANDS[command].params for name in each.opts
    }  # fmt: skip
    assert set(FLAGS.values()) <= of_commands


@pytest.mark.parametrize("key", sorted({*SETTINGS, *FLAGS} - {"data.corpus", "resume"}))
def test_what_python_is_told_to_write_is_an_argument_there(key):
    name = SPELLED.get(key, key.rpartition(".")[2])
    functions = (posttrainllm.train, posttrainllm.resume, export_model)
    named = {each for function in functions for each in inspect.signature(function).parameters}
    assert name in named or key in SETTINGS
    if key in SETTINGS:
        assert api._by_section({name: 0}, {}) == {key: 0}, "resume takes it too"


def test_nothing_in_the_tables_is_unknown():
    assert {key for key in (*FLAGS, *SPELLED, *LABELS) if "." in key} <= set(SETTINGS)


# ---- every text of the package ----------------------------------------------------------------------


def sources() -> Iterator[tuple[str, ast.Module]]:
    yield from (
        (name, tree)
        for name, tree in TREES.items()
        if name != "wording" and not f"{name}.".startswith(TERMINAL_ALONE)
    )


def texts(node: ast.AST) -> Iterator[ast.Constant]:
    """Text in code, without docstrings, and without what is said to a terminal alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.keyword) and child.arg == "terminal":
            continue
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child
        yield from texts(child)


def calls_of(name: str) -> Iterator[tuple[str, ast.Call]]:
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name:
                yield f"{module}:{node.lineno}", node


def test_no_text_outside_the_command_line_has_a_flag_or_a_command():
    found = [
        f"{name}:{text.lineno}: {text.value!r}"
        for name, tree in sources()
        for text in texts(tree)
        if " " in text.value and is_for_a_terminal(text.value) and text.value not in NOT_IN_PYTHON
    ]
    assert not found, "use worded(...)"


def test_every_place_in_a_wording_is_a_setting_an_argument_or_a_value():
    calls = list(calls_of("worded"))
    assert len(calls) > 40
    for where, call in calls:
        if where.startswith("text.files:") and isinstance(call.args[0], ast.Name):
            continue  # the table of SIGNATURES: see test_textfiles.py
        assert isinstance(call.args[0], ast.Constant), f"{where}: values go in by name"
        given = {each.arg for each in call.keywords}
        fields = set(re.findall(r"{([^}=:]*)", str(call.args[0].value)))
        assert given <= fields, where
        assert fields - given <= {*SETTINGS, *FLAGS}, where


def test_each_wording_is_right_in_each_face():
    for where, call in calls_of("worded"):
        if not isinstance(call.args[0], ast.Constant):
            continue
        values = {str(each.arg): 1 for each in call.keywords}
        said = worded(str(call.args[0].value), **values)
        assert not is_for_a_terminal(said), f"{where}: {said}"
        assert not FLAG.search(said.tab), f"{where}: {said.tab}"
        assert not CODE.search(said.tab), f"{where}: {said.tab}"


def test_no_hint_is_put_into_a_text_that_has_no_faces():
    wrong = [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FormattedValue)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "hint"
    ]
    assert not wrong, 'use worded("{what}; {then}", ...)'


# ---- as users get them ------------------------------------------------------------------------------


def test_the_command_line_says_it_in_its_own_words(capfd):
    from posttrainllm.cli import main

    assert main(["train", "--set", "model.dropout=0.1"]) == 2
    said = capfd.readouterr().err
    assert "use --engine torch or --set model.dropout=0" in said


def test_python_says_it_in_its_own_words():
    with pytest.raises(PosttrainError) as caught:
        posttrainllm.train(dropout=0.1)
    assert str(caught.value).endswith('use engine="torch" or dropout=0')
    assert isinstance(caught.value.hint, Wording)
    assert caught.value._render_traceback_() == [f"ConfigError: {caught.value}"]


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EEXIST, errno.EIO]
)
def test_a_page_gets_neither_flags_nor_code(number, tmp_path):
    refused = refusal_of(write_error("change a run", tmp_path, OSError(number, "no")))
    assert refused.hint
    assert not FLAG.search(refused.hint)
    assert not CODE.search(refused.hint)


def test_the_module_says_what_it_does():
    example = re.search(r'worded\("(.*)"\)', wording.__doc__ or "")
    assert example is not None
    said = worded(example.group(1))
    for line in (f"Python     {said}", f"terminal   {said.terminal}", f"browser    {said.tab}"):
        assert line in (wording.__doc__ or "")
