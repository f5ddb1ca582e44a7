"""Folders of checkpoints: which one is the newest, which are kept, and whether there is room."""

from __future__ import annotations

import shutil

import pytest

from posttrainllm.errors import CheckpointError
from posttrainllm.formats.huggingface import parameter_shapes
from posttrainllm.runs.checkpoint import (
    check_space,
    checkpoint_bytes,
    clean_up,
    discard_after,
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from posttrainllm.storage import show_bytes
from posttrainllm.text.tokenizer import ByteTokenizer
from saved import make_state, make_values, save, small_config


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_newest_checkpoints_are_kept(tmp_path):
    for step in (100, 200, 300, 1_000_000):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-000300", "step-1000000"]


def test_best_checkpoint_is_kept_when_asked_for(tmp_path):
    config = small_config()
    for step, loss in {100: 2.5, 200: 1.9, 300: 2.1, 400: None, 500: 2.0}.items():
        write_checkpoint(
            tmp_path,
            state=make_state(step, config, val_loss=loss),
            **make_values(config),
            tokenizer=ByteTokenizer(),
            keep=1,
            keep_best=True,
        )
    assert names(tmp_path) == ["step-000200", "step-000500"]


def test_checkpoint_of_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 500, seed=1)
    save(tmp_path, 500, seed=2)
    assert names(tmp_path) == ["step-000500"]
    wanted = make_values(small_config(), seed=2)["params"]["wte.weight"]
    got = read_checkpoint(tmp_path / "step-000500").params["wte.weight"]
    assert got.tobytes() == wanted.tobytes()


def test_newest_valid_checkpoint_is_used_when_later_ones_are_damaged(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path / "checkpoints", step)
    weights = tmp_path / "checkpoints" / "step-000300" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    (tmp_path / "checkpoints" / "step-000200" / "hashes.json").unlink()
    back = read_checkpoint(tmp_path)
    assert back.state.step == 100
    assert len(back.notices) == 2
    assert "step-000300/model.safetensors has changed" in back.notices[0]
    assert "step-000200 is not complete" in back.notices[1]
    assert all(notice.endswith("; using step-000100") for notice in back.notices)
    assert "\n" not in "".join(back.notices)


def test_newest_is_decided_by_step_when_clocks_were_set_back(tmp_path):
    save(tmp_path, 300)
    save(tmp_path, 200)
    assert newest_checkpoint(tmp_path)[0].name == "step-000300"


def test_run_without_a_whole_checkpoint_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        newest_checkpoint(tmp_path)
    (save(tmp_path) / "hashes.json").write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError, match="no checkpoint that is whole: .*hashes.json"):
        newest_checkpoint(tmp_path)


def test_clean_up_removes_what_a_killed_process_left(tmp_path):
    save(tmp_path, 100)
    save(tmp_path, 200)
    (tmp_path / ".tmp-000300-77").mkdir()
    (tmp_path / ".tmp-000300-77" / "config.json").write_text("{")
    shutil.copytree(tmp_path / "step-000100", tmp_path / ".old-000100-77")
    (tmp_path / "step-000200").rename(tmp_path / ".old-000200-77")  # killed between two renames
    assert newest_checkpoint(tmp_path)[0].name == ".old-000200-77"
    clean_up(tmp_path)
    assert names(tmp_path) == ["step-000100", "step-000200"]
    assert newest_checkpoint(tmp_path)[0].name == "step-000200"


def test_checkpoints_beyond_a_step_are_discarded(tmp_path):
    for step in (100, 200, 300):
        save(tmp_path, step)
    discard_after(tmp_path, 200)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000100", "step-000200"]
    assert len(names(tmp_path)) == 2


# --- room on the disk ------------------------------------------------------------------------


@pytest.mark.parametrize("model", [{}, {"n_layer": 40}, {"tied": False, "n_vocab": 5000}], ids=str)
def test_need_of_a_checkpoint_is_an_upper_bound_and_close(tmp_path, model):
    saved, config = save(tmp_path, **model), small_config(**model).model
    taken = sum(path.stat().st_size for path in saved.iterdir())
    need = checkpoint_bytes(config)
    slack = 50_000 + 128 * config.n_vocab + 300 * len(parameter_shapes(config))
    assert taken <= need <= taken + slack


def test_room_for_all_planned_checkpoints_is_checked_before_training(tmp_path, monkeypatch):
    config = small_config().model
    one = checkpoint_bytes(config)

    def refused(free, **plan):
        monkeypatch.setattr("posttrainllm.runs.checkpoint_folder.free_bytes", lambda _: free)
        try:
            check_space(tmp_path / "not" / "yet", config, **plan)
        except CheckpointError as error:
            return error.message
        return None

    assert refused(3 * one, saves=10, keep=2) is None
    message = refused(3 * one - 1, saves=10, keep=2)
    assert message is not None
    assert f"needs {show_bytes(3 * one)} for 3 planned checkpoints, the disk has" in message
    assert refused(one, saves=1, keep=2) is None
    assert "for 1 planned checkpoint, " in refused(one - 1, saves=1, keep=2)
    assert refused(4 * one, saves=10, keep=2, keep_best=True) is None
    assert refused(4 * one - 1, saves=10, keep=2, keep_best=True) is not None
    assert refused(0, saves=0, keep=2) is None
    assert refused(None, saves=10, keep=2) is None


def test_existing_checkpoints_count_as_paid_for(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)
    one = checkpoint_bytes(small_config().model)
    monkeypatch.setattr("posttrainllm.runs.checkpoint_folder.free_bytes", lambda _: one)
    check_space(tmp_path, small_config().model, saves=10, keep=2)


def test_sizes_are_written_for_people():
    sizes = [0, 999, 1000, 99_900, 100_000, 999_400, 999_600, 1_234_567_890, 7 * 10**15]
    assert [show_bytes(size) for size in sizes] == [
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "99.9 kB",
        "100 kB",
        "999 kB",
        "1.0 MB",
        "1.2 GB",
        "7,000.0 TB",
    ]
