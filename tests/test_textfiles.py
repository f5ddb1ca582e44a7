"""Which files are read, and what is refused or noticed in them."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from posttrainllm.errors import CorpusError
from text_fixtures import TEXT, refusal, whole

pytest_plugins = ("text_fixtures",)


# Which files


def test_a_file_is_read_as_it_is(open_text, write):
    path = write("alice.txt")
    text = open_text(path)
    assert (text.name, text.sources) == ("alice.txt", (path,))
    assert whole(text) == TEXT
    assert text.sha256 == hashlib.sha256(TEXT).hexdigest()
    assert not text.train.flags.writeable
    assert text.train_text is text.train


@pytest.mark.usefixtures("big_files")
def test_a_large_file_is_mapped_and_not_copied(open_text, write, cache):
    text = open_text(write("big.txt"))
    assert isinstance(text.train.base.base, np.memmap) or isinstance(text.train.base, np.memmap)
    assert whole(text) == TEXT
    assert not (cache / "text").exists()


def test_a_small_file_can_be_rewritten_during_a_run(open_text, write):
    path = write("notes.txt")
    text = open_text(path)
    write("notes.txt", b"")
    assert whole(text) == TEXT


@pytest.mark.parametrize("large", [False, True])
def test_several_files_are_joined_in_order_with_a_line_feed_where_one_is_missing(
    open_text, write, request, large
):
    if large:
        request.getfixturevalue("big_files")
    sources = [write("b.txt", b"second\n"), write("a.txt", b"first"), write("c.txt", b"third")]
    text = open_text(*sources)
    assert whole(text) == b"second\nfirst\nthird"
    assert text.sha256 == hashlib.sha256(b"second\nfirst\nthird").hexdigest()
    assert (text.name, text.sources) == ("3 files", tuple(sources))


def test_a_folder_gives_its_txt_files_sorted(open_text, write, tmp_path):
    for name, content in [("z.txt", b"Z"), ("a/b.TXT", b"B"), ("a.txt", b"A"), ("a/c.md", b"no")]:
        write(f"books/{name}", content)
    assert whole(open_text(str(tmp_path / "books"))) == b"A\nB\nZ"


def test_an_empty_file_in_a_folder_is_passed_over_with_a_notice(open_text, write, tmp_path):
    write("books/a.txt", TEXT)
    write("books/b.txt", b"")
    text = open_text(str(tmp_path / "books"))
    assert whole(text) == TEXT
    assert text.notices == (f"empty, passed over: {tmp_path / 'books' / 'b.txt'}",)


def test_a_home_folder_and_a_relative_path_are_understood(open_text, write, tmp_path, monkeypatch):
    path = write("alice.txt")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert open_text("~/alice.txt").sources == (path,)
    assert open_text("alice.txt").sources == (path,)


# Standard input and pipes


def test_standard_input_is_kept_in_the_cache_for_resuming(open_text, pipe, cache):
    pipe(TEXT)
    text = open_text("-")
    assert (text.name, text.sources) == ("standard input", ("-",))
    assert whole(text) == TEXT
    assert not sys.stdin.buffer.closed
    assert [path.name for path in (cache / "text").iterdir()] == [f"{text.sha256}.txt"]
    pipe(b"something else that is not read")
    again = open_text("-", sha256=text.sha256)
    assert whole(again) == TEXT
    assert sys.stdin.buffer.read(9) == b"something"


def test_standard_input_joins_with_files(open_text, pipe, write):
    pipe(b"piped")
    assert whole(open_text(write("a.txt", b"a"), "-")) == b"a\npiped"


def test_a_refused_pipe_leaves_nothing_behind(open_text, pipe, cache):
    pipe(b"text and then\0")
    refusal(open_text, "-")
    assert list((cache / "text").iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_named_pipe_is_read_once(open_text, tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with subprocess.Popen([sys.executable, "-c", f"open({str(path)!r}, 'wb').write(b'x' * 99)"]):
        assert whole(open_text(str(path))) == b"x" * 99


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no endless devices on this system")
@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom"])
def test_an_endless_device_is_refused_at_once(open_text, device):
    assert "is binary" in refusal(open_text, device)


def test_a_closed_standard_input_is_refused(open_text, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed" in refusal(open_text, "-")


# What is refused


def test_a_missing_file_is_named(open_text, tmp_path):
    message = refusal(open_text, str(tmp_path / "none.txt"))
    assert f"{tmp_path / 'none.txt'} does not exist / give a text file" in message


def test_a_preset_given_as_a_text_is_recognised(open_text):
    assert "tiny is a preset, no text: --preset tiny" in refusal(open_text, "tiny")


def test_an_empty_file_is_named(open_text, write):
    assert "empty.txt is empty" in refusal(open_text, write("empty.txt", b""))
    assert "has no text" in refusal(open_text, write("mark.txt", codecs.BOM_UTF8))


def test_empty_standard_input_is_named(open_text, pipe):
    pipe(b"")
    assert "standard input is empty" in refusal(open_text, "-")


def test_a_folder_without_text_is_named(open_text, tmp_path):
    assert "is a folder with no .txt file in it" in refusal(open_text, str(tmp_path))


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 5000])
def test_an_impossible_name_is_refused(open_text, name):
    with pytest.raises(CorpusError):
        open_text(name)


def test_a_file_named_twice_is_refused(open_text, write, tmp_path):
    path = write("a.txt")
    assert "named twice" in refusal(open_text, path, path)
    assert "named twice" in refusal(open_text, str(tmp_path), path)
    assert "named twice" in refusal(open_text, "-", "-")


def test_an_unreadable_file_says_how_to_allow_it(open_text, write, monkeypatch):
    def refused(self, mode):
        raise PermissionError(13, "Permission denied", str(self))

    path = write("secret.txt")
    monkeypatch.setattr("pathlib.Path.open", refused)
    assert f"Permission denied / allow it: chmod u+r {path}" in refusal(open_text, path)


def test_a_disk_error_is_named(open_text, pipe):
    class Failing(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, buffer):
            raise OSError(5, "Input/output error")

    pipe(b"")
    sys.stdin = io.TextIOWrapper(io.BufferedReader(Failing()))
    assert "standard input cannot be read: Input/output error" in refusal(open_text, "-")


def test_a_few_control_bytes_are_still_text(open_text, write):
    assert whole(open_text(write("dos.txt", b"end\x1a"))) == b"end\x1a"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("text".encode("utf-16"), ["is UTF-16, not UTF-8", "iconv -f UTF-16 -t UTF-8"]),
        (b"\xfe\xff\0t", ["is UTF-16, not UTF-8", "iconv -f UTF-16 -t UTF-8"]),
        ("text".encode("utf-32"), ["is UTF-32, not UTF-8", "iconv -f UTF-32 -t UTF-8"]),
        ("text, longer".encode("utf-16-le"), ["looks like UTF-16", "iconv -f UTF-16LE"]),
        ("text, longer".encode("utf-16-be"), ["looks like UTF-16", "iconv -f UTF-16BE"]),
        (b"%PDF-1.7 ...", ["is a PDF file, not text", "pdftotext"]),
        (gzip.compress(TEXT), ["is gzip-compressed, not text", "gzip -dc", "train -"]),
        (b"some text\0more", ["is binary: byte 9 is NUL", "tr -d"]),
        (bytes(range(1, 256)) * 40, ["is binary: 9% of its bytes are control characters"]),
    ],
)
def test_what_is_not_text_is_refused_by_name(open_text, write, content, words):
    path = write("it's mine.dat", content)
    message = refusal(open_text, path)
    assert path in message
    for word in words:
        assert word in message


def test_a_word_document_is_refused_by_name(open_text, tmp_path):
    path = tmp_path / "letter.docx"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "<xml/>")
    assert "is a ZIP file" in refusal(open_text, str(path))


def test_binary_is_taken_byte_for_byte_when_allowed(open_text, write):
    content = codecs.BOM_UTF8 + bytes(range(256)) * 8
    assert whole(open_text(write("a.bin", content), allow_binary=True)) == content


def test_an_unwritable_cache_is_named(open_text, pipe, write):
    pipe(TEXT)
    message = refusal(open_text, "-", cache_dir=Path(write("a file")))
    assert "cannot be written" in message
    assert "XDG_CACHE_HOME" in message


# What is noticed


def test_a_utf8_mark_is_left_out(open_text, write, request):
    path = write("mark.txt", codecs.BOM_UTF8 + TEXT)
    plain = open_text(path)
    request.getfixturevalue("big_files")
    mapped = open_text(path)
    assert whole(plain) == whole(mapped) == TEXT
    assert plain.sha256 == mapped.sha256 == hashlib.sha256(TEXT).hexdigest()
    assert plain.notices == ()


def test_crlf_is_kept_with_a_notice(open_text, write):
    content = TEXT.replace(b"\n", b"\r\n")
    text = open_text(write("dos.txt", content))
    assert whole(text) == content
    [notice] = text.notices
    assert "CRLF line ends" in notice
    assert "dos.txt; kept" in notice


def test_latin1_is_taken_with_a_notice_of_the_first_byte(open_text, write):
    content = TEXT + "caf\u00e9 ".encode("latin-1") + TEXT
    text = open_text(write("latin.txt", content))
    assert whole(text) == content
    [notice] = text.notices
    assert f"not UTF-8: {text.sources[0]} (byte {len(TEXT) + 3:,} is 0xE9)" in notice


def test_a_file_cut_inside_a_character_is_noticed(open_text, write):
    content = TEXT + "\u6f22".encode()[:2]
    [notice] = open_text(write("cut.txt", content)).notices
    assert f"(byte {len(TEXT):,} is 0xE6)" in notice


@pytest.mark.parametrize("piece", [1, 2, 3, 5])
def test_notices_do_not_depend_on_how_a_file_is_read(open_text, write, monkeypatch, piece):
    monkeypatch.setattr("posttrainllm.text.files.PIECE", piece)
    good = "caf\u00e9 \u6f22\u5b57 \U0001f600\n".encode()
    assert open_text(write("good.txt", good)).notices == ()
    notices = open_text(write("bad.txt", good + b"\r\n\xe6\xbc!")).notices
    assert len(notices) == 2
    assert f"(byte {len(good) + 2:,} is 0xE6)" in notices[0]


def test_notices_of_many_files_are_one_sentence(open_text, write):
    sources = [write(f"{number}.txt", b"a\r\n" * 9) for number in range(5)]
    [notice] = open_text(*sources).notices
    assert "0.txt and 4 more" in notice
