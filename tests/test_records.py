"""JSON lines: whole lines survive whatever happens to the last one."""

from __future__ import annotations

import errno
import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrainllm.errors import CheckpointError
from posttrainllm.runs.records import Records


@pytest.fixture
def records(tmp_path):
    with Records(tmp_path / "metrics.jsonl") as opened:
        yield opened


def steps(records):
    return [record["step"] for record in records.read()]


def test_records_come_back_as_they_were_appended(records):
    assert records.read() == []
    wanted = [{"step": 1, "loss": 0.1, "val_loss": None}, {"step": 2, "text": "\u2028\n\r\ud800\0"}]
    for record in wanted:
        records.append(record)
        assert records.path.read_bytes().endswith(b"}\n")  # at once, without a close
    assert records.read() == wanted
    assert records.path.read_bytes().count(b"\n") == 2
    records.sync()
    records.close()
    records.append({"step": 3})
    assert steps(records) == [1, 2, 3]


def test_numbers_that_json_lacks_become_null(records):
    records.append({"step": 1, "loss": math.nan, "more": [math.inf, {"a": -math.inf}]})
    assert records.read() == [{"step": 1, "loss": None, "more": [None, {"a": None}]}]
    assert "NaN" not in records.path.read_text()


@pytest.mark.parametrize("torn", [b"{", b'{"step": 3}', b'{"step"', b"\0\0\0", b"\xff"])
def test_torn_last_line_is_left_out_and_replaced(records, torn):
    records.path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    assert steps(records) == [1, 2]
    records.append({"step": 3})
    assert records.path.read_text().splitlines() == ['{"step": 1}', '{"step": 2}', '{"step": 3}']


@pytest.mark.parametrize("bad", [b"{", b"[1]", b'{"step": NaN}', b"\0", b'{"a":1,"a":2}', b"\xff"])
def test_damaged_line_that_is_not_the_last_is_named(records, bad):
    records.path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 3}\n')
    for action in (records.read, lambda: records.cut_back(9)):
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 2") as caught:
            action()
        assert "\n" not in caught.value.message


@given(
    have=st.lists(st.integers(0, 30), unique=True).map(sorted),
    step=st.integers(0, 30),
    torn=st.binary(max_size=8).filter(lambda text: b"\n" not in text),
)
def test_cut_back_removes_exactly_the_lines_beyond_a_step(tmp_path_factory, have, step, torn):
    records = Records(tmp_path_factory.mktemp("cut") / "metrics.jsonl")
    for one in have:
        records.append({"step": one})
    records.close()
    with records.path.open("ab") as stream:
        stream.write(torn)
    records.cut_back(step)
    assert steps(records) == [one for one in have if one <= step]
    whole = records.path.read_bytes()
    assert whole == b"".join(json.dumps({"step": s}).encode() + b"\n" for s in steps(records))
    records.append({"step": step + 1})
    assert steps(records)[-1] == step + 1
    records.close()


def test_cut_back_of_an_open_file_goes_on_at_the_right_place(records):
    for step in (1, 2, 3):
        records.append({"step": step})
    records.cut_back(1)
    records.append({"step": 2, "again": True})
    assert records.read() == [{"step": 1}, {"step": 2, "again": True}]


def test_cut_back_without_a_file_makes_none(records):
    records.cut_back(5)
    assert not records.path.exists()


def test_line_without_a_step_is_refused_on_resume(records):
    records.append({"step": 1})
    records.append({"step": None})
    with pytest.raises(CheckpointError, match="no whole number as step, got None"):
        records.cut_back(5)


def test_failed_append_leaves_no_part_of_its_line(records, monkeypatch):
    records.append({"step": 1})
    write = os.write

    def full_after_five(descriptor, content):
        if len(content) < 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content[:5])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_after_five)
        with pytest.raises(CheckpointError, match=r"append to metrics\.jsonl .*the disk is full"):
            records.append({"step": 2})
    assert records.path.read_text() == '{"step": 1}\n'
    records.append({"step": 2})
    assert steps(records) == [1, 2]


def test_folder_that_vanished_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="the folder is gone"):
        Records(tmp_path / "gone" / "metrics.jsonl").append({"step": 1})


def test_pipe_in_place_of_the_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    records = Records(tmp_path / "metrics.jsonl")
    for use in (records.read, lambda: records.append({"step": 1}), lambda: records.cut_back(0)):
        with pytest.raises(CheckpointError, match="is not a regular file"):
            use()
