"""The warning before a run and the verdict after it."""

from __future__ import annotations

import json
import math

import pytest

from posttrainllm.config import load_config
from posttrainllm.presets import PRESETS
from posttrainllm.text.corpus import open_corpus
from posttrainllm.text.counting import CountingLine
from posttrainllm.text.likeness import Copy, WordShare
from posttrainllm.training.writing import Advice, memorisation_warning, show_ratio, verdict

LINES = [
    CountingLine("guessing", 5.545, 1_003_854),
    CountingLine("letter frequencies", 3.347, 1_003_854),
    CountingLine("pairs", 2.484, 1_003_854),
    CountingLine("triples", 2.046, 1_003_854),
    CountingLine("quadruples", 1.784, 1_003_854),
]
SAMPLES = ["ROMEO:\nWhat the love of the king, I wis glorb and the", "And so the queen quib. "]


@pytest.fixture(scope="module")
def shakespeare():
    return open_corpus([], val_fraction=0.1)


@pytest.fixture
def judge(shakespeare):
    def judge(val_loss=1.88, *, preset="small", **options):
        given = {"texts": SAMPLES, "corpus": shakespeare, "counting": LINES} | options
        return verdict(val_loss=val_loss, config=load_config(preset=preset), **given)

    return judge


# Before the run


@pytest.mark.parametrize("name", ["tiny", "small", "medium", "large", "xl"])
def test_the_smaller_presets_are_not_warned_about_on_the_default_text(shakespeare, name):
    config = load_config(preset=name)
    tokens = config.training.steps * config.data.batch_size * config.model.n_ctx
    n_bytes = len(shakespeare.train_text)
    assert memorisation_warning(config.model.parameters(), n_bytes, tokens / n_bytes) is None


def test_many_passes_over_a_text_that_fits_into_the_weights_are_warned_about():
    warning = memorisation_warning(366_432, 18_000, 85.3)
    assert warning == (
        "0.049 bytes of text a parameter, read 85.3 times: this model can memorise the text. "
        "Take a text of 660 kB or more, or a smaller preset, and watch whether the validation loss rises"
    )
    assert memorisation_warning(366_432, 660_000, 85.3) is None
    assert memorisation_warning(366_432, 600_000, 4.0) is None


def test_a_model_far_too_large_for_its_text_is_warned_about_even_for_one_pass():
    warning = memorisation_warning(473_244_160, 1_003_854, 0.03)
    assert warning is not None
    assert "far too large for the text" in warning
    assert "Take a text of 852 MB or more, or a smaller preset" in warning


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.5, "1,234"), (12.3, "12"), (2.74, "2.7"), (0.368, "0.37"), (0.00212, "0.0021")],
)
def test_ratios_show_two_digits(value, text):
    assert show_ratio(value) == text


# After the run


def test_a_verdict_reads_as_findings_and_advice(judge):
    found = judge()
    assert found.words == WordShare(13, 11)
    assert found.unseen_words is not None
    assert found.unseen_words.n_words > 0
    assert found.copy.piece.decode() in "\n".join(SAMPLES)
    lines = found.lines()
    assert lines[0] == "validation loss: 1.880 nats a token, below triples (2.05)"
    assert lines[1] == (
        "counting reaches: guessing (5.54), letter frequencies (3.35), pairs (2.48), "
        "triples (2.05), quadruples (1.78)"
    )
    assert lines[2].startswith("real words: 85 % of 13 written are in the corpus (of unseen text:")
    assert lines[3].startswith(f"longest copy: {found.copy.n_bytes} bytes, ")
    assert len(lines) == 4
    assert [advice.terminal for advice in found.actions] == [
        "more steps: --steps 3000",
        "a larger model: --preset medium",
        "a text of your own: posttrainllm train FILE",
    ]


def test_a_verdict_in_figures_is_json(judge):
    figures = json.loads(json.dumps(judge().figures(), allow_nan=False))
    assert figures["val_loss"] == 1.88
    assert figures["standing"] == "below triples (2.05)"
    assert figures["counting"]["pairs"] == 2.484
    assert (figures["n_words"], figures["word_share"]) == (13, 11 / 13)
    assert figures["longest_copy"] == len(figures["longest_copy_text"].encode())
    assert len(figures["next"]) == 3


def test_nothing_measured_is_said_and_not_invented(judge):
    found = judge(None, texts=[])
    assert found.lines()[0] == "validation loss: not measured (no text was kept for it)"
    assert found.lines()[2] == "real words: none written"
    assert found.lines()[3] == "longest copy: none"
    figures = json.loads(json.dumps(found.figures(), allow_nan=False))
    assert (figures["val_loss"], figures["word_share"]) == (None, None)
    assert (figures["word_share_unseen"], figures["longest_copy_unseen"]) == (None, None)


def test_without_a_validation_part_there_is_no_unseen_text(judge):
    found = judge(None, corpus=open_corpus([], val_fraction=0))
    assert found.unseen_words is None
    assert found.unseen_copy is None
    assert "unseen" not in "".join(found.lines())


def test_a_model_that_recites_is_told_so(judge, shakespeare):
    piece = shakespeare.train_text[5000:5200].tobytes()
    found = judge(texts=[piece.decode()])
    assert found.copy == Copy(piece, 5000)
    [advice] = found.actions
    assert advice.terminal == ("a larger text or a smaller preset: it recites, 200 bytes in a row")
    assert found.lines()[3].startswith("longest copy: 200 bytes, ")
    assert "...' (of unseen text: " in found.lines()[3]


def test_a_loss_that_rose_again_asks_for_fewer_steps(judge):
    assert judge(1.95, best_val_loss=1.9).actions[0].name == "more_steps"
    [action] = judge(2.2, best_val_loss=1.9).actions
    assert action.terminal == (
        "fewer steps or a larger text: the validation loss was 1.900 on the way and rose to 2.200"
    )


def test_a_model_behind_a_counting_table_is_sent_to_diagnose(judge):
    actions = judge(2.6).actions
    assert actions[0].terminal == "more steps: --steps 3000"
    assert actions[1].terminal.startswith("find out why counting pairs (2.48) is still ahead: ")
    assert actions[1].terminal.endswith(": posttrainllm diagnose")
    assert "triples (2.05)" in judge(2.1).actions[1].why
    assert len(judge(1.79).actions) == 3


def test_a_loss_that_is_no_number_asks_for_a_lower_learning_rate(judge):
    found = judge(math.nan)
    assert found.lines()[0] == "validation loss: nan nats a token, not a number"
    assert [advice.name for advice in found.actions] == ["lower_rate"]
    json.dumps(found.figures(), allow_nan=False)


def test_the_larger_preset_is_one_that_the_text_can_teach(judge):
    names = list(PRESETS)
    assert Advice("larger", {"preset": names[1]}) in judge(preset=names[0]).actions
    assert "larger" not in [each.name for each in judge(preset="huge").actions]
    assert "larger" not in [each.name for each in judge(preset="behemoth").actions]
