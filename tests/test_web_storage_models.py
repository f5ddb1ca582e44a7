"""Model files in the tab: .tinygpt and model.safetensors, read bit for bit, written as others expect them, and hostile files refused.

Files are built and taken apart by ``tinygpt_files.py``, which shares nothing with the package; what the tab writes is read by the package
and by transformers. The lines of Python that the Runs page shows beside its buttons run here as they stand there.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinygpt_files as files
from hostile_tinygpt import TINYGPT
from hostile_zip_cases import ZIPS
from needs import require
from posttrainllm.formats.tinygpt import read_tinygpt
from posttrainllm.runs.checkpoint import read_checkpoint
from web import WEB, assets
from web_storage import perform, python_run, unzipped, zipped

require("wasmtime")
SIZES = files.Sizes(dMlp=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the terminal whose activation a .tinygpt file can say."""
    return python_run(tmp_path_factory.mktemp("runs"), "run", model__activation="gelu").path


def converted(
    folder: Path, place: Path, content: bytes, name: str, to: str, **more: Any
) -> tuple[dict[str, Any], Path]:
    job = {"kind": "convert", "name": name, "content": content, "to": to, **more}
    return perform(folder, place, job)[0], place / "0.zip"


def moments(sizes: files.Sizes) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    m = files.random_weights(sizes, 1)
    return m, {name: array**2 for name, array in files.random_weights(sizes, 2).items()}


@pytest.mark.parametrize("version", [1, 2])
def test_fp32_becomes_a_run_with_weights_and_moments_bit_for_bit(
    folder: Path, tmp_path: Path, version: int
) -> None:
    sizes = files.Sizes()  # an MLP that is not four times as wide
    weights, (m, v) = files.random_weights(sizes), moments(sizes)
    content = bytearray(files.fp32(sizes, weights, m, v))
    struct.pack_into("<I", content, 4, version)
    done, archive = converted(folder, tmp_path / "work", bytes(content), "x.tinygpt", "zip")
    checkpoint = read_checkpoint(unzipped(archive, tmp_path / "runs"))
    state = checkpoint.state
    assert state is not None
    assert (done["name"], state.step, state.corpus) == ("x", 200, None)
    for got, wanted in ((checkpoint.params, weights), (checkpoint.m, m), (checkpoint.v, v)):
        assert got is not None
        for name, array in files.as_gpt2(sizes, wanted).items():
            assert got[name].tobytes() == array.tobytes(), name
    config = state.config
    assert (config.model.activation, config.model.n_inner) == ("gelu", 20)
    assert (config.data.batch_size, config.schedule.learning_rate) == (4, 0.003)
    assert (config.training.steps, config.training.seed) == (3000, 42)


@pytest.mark.parametrize("block", [64, 32])
def test_fp16_and_int4_are_widened_exactly(folder: Path, tmp_path: Path, block: int) -> None:
    weights = files.random_weights(SIZES)
    weights["ln_final.bias"][:4] = [6e-8, -6.1e-5, 65504, 0]  # smallest numbers and the largest
    half = {name: array.astype("<f2").astype(np.float32) for name, array in weights.items()}
    packed, quarter = files.int4(SIZES, weights, block)
    for content, wanted in ((files.fp16(SIZES, weights), half), (packed, quarter)):
        place = tmp_path / f"work-{len(content)}"
        _, archive = converted(folder, place, content, "x.tinygpt", "zip")
        checkpoint = read_checkpoint(unzipped(archive, place / "runs"))
        for name, array in files.as_gpt2(SIZES, wanted).items():
            assert checkpoint.params[name].tobytes() == array.tobytes(), name


def test_a_run_is_written_as_tinygpt_as_a_reader_of_the_layout_expects(
    folder: Path, tmp_path: Path, run: Path
) -> None:
    kept = read_checkpoint(run)
    for dtype in ("fp32", "fp16"):
        place = tmp_path / dtype
        done, archive = converted(folder, place, zipped(run), "run.zip", dtype)
        assert done["notices"] == []
        version, header, state = files.take_apart(archive.read_bytes())
        assert (version, header["version"]) == (2, 2)
        assert header["stateByteLength"] == len(state)
        assert header["lossHistory"][-1]["step"] == 10
        shutil.copy(archive, place / "x.tinygpt")
        back = read_tinygpt(place / "x.tinygpt")
        assert (back.dtype, back.step, back.config) == (dtype, 10, kept.config)
        for name, array in kept.params.items():
            wanted = array if dtype == "fp32" else array.astype("<f2").astype(np.float32)
            assert back.params[name].tobytes() == wanted.tobytes(), name
        if dtype == "fp32":
            assert back.m is not None
            assert kept.m is not None
            assert all(back.m[name].tobytes() == kept.m[name].tobytes() for name in kept.m)


def test_a_tanh_model_as_tinygpt_says_what_differs(folder: Path, tmp_path: Path) -> None:
    tanh = python_run(tmp_path / "runs").path
    done, _ = converted(folder, tmp_path / "work", zipped(tanh), "run.zip", "fp16")
    assert done["notices"] == ['model.activation is "gelu_new", and a .tinygpt model has "gelu"']


def test_model_safetensors_is_the_whole_model_and_opens_again(
    folder: Path, tmp_path: Path, run: Path
) -> None:
    kept = read_checkpoint(run)
    _, file = converted(folder, tmp_path / "a", zipped(run), "run.zip", "safetensors")
    one = file.read_bytes()
    _, archive = converted(folder, tmp_path / "b", one, "model.safetensors", "zip")
    back = read_checkpoint(unzipped(archive, tmp_path / "runs"))
    assert back.config == kept.config
    assert all(back.params[name].tobytes() == kept.params[name].tobytes() for name in kept.params)
    plain = (kept.path / "model.safetensors").read_bytes()
    config = (kept.path / "config.json").read_bytes()
    _, archive = converted(folder, tmp_path / "c", plain, "model.safetensors", "zip", config=config)
    again = read_checkpoint(unzipped(archive, tmp_path / "again"))
    assert all(again.params[name].tobytes() == kept.params[name].tobytes() for name in kept.params)


def snippets() -> dict[str, str]:
    """The lines of Python that the Runs page shows, by the kind of file."""
    source = (WEB / "src" / "components" / "runs" / "python_lines.ts").read_text()
    found = re.findall(r"^  (\w+): \[\n((?:    .*\n)+?)  \]", source, re.MULTILINE)
    return {
        kind: "\n".join(map(json.loads, re.findall(r'"(?:\\.|[^"\\])*"', lines)))
        for kind, lines in found
    }


@pytest.mark.parametrize("kind", ["zip", "safetensors", "fp32"])
def test_the_lines_of_python_beside_a_download_load_it(
    folder: Path, tmp_path: Path, run: Path, kind: str
) -> None:
    if kind == "safetensors":
        require("transformers")
    _, made = converted(folder, tmp_path / "work", zipped(run), "run.zip", kind)
    name = {"zip": "NAME.zip", "safetensors": "model.safetensors", "fp32": "NAME.tinygpt"}[kind]
    shutil.copy(made, tmp_path / name)
    lines = snippets()[{"fp32": "tinygpt"}.get(kind, kind)]
    assert len(lines.splitlines()) == 3
    printed = io.StringIO()
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(printed):
        names: dict[str, Any] = {}
        exec(lines, names)
    if kind == "safetensors":
        kept, model = read_checkpoint(run), names["model"]
        assert model.num_parameters() == kept.config.parameters()
        weights = model.state_dict()["lm_head.weight"].numpy()
        np.testing.assert_array_equal(weights, kept.params["wte.weight"])
    else:
        assert printed.getvalue().strip()


# ---- hostile files --------------------------------------------------------------------------------


def archive_of(entries: list[tuple[Any, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return stream.getvalue()


def link(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.external_attr = 0o120777 << 16
    return entry


def hostile_zips(run: Path) -> dict[str, tuple[bytes, str]]:
    """{what: (archive, part of the refusal)}."""
    config = (run / "config.toml").read_bytes()
    whole = zipped(run)
    inside = [
        (f"run/{path.relative_to(run)}", path.read_bytes())
        for path in sorted(run.rglob("*"))
        if path.is_file()
    ]
    step = "run/checkpoints/step-000010"
    changed = dict(inside)

    def with_file(name: str, content: bytes) -> bytes:
        return archive_of(list({**changed, name: content}.items()))

    stored = archive_of([("run/config.toml", config), ("run/metrics.jsonl", b"{}\n")])
    lying = bytearray(stored)
    lying[lying.rfind(b"PK\x01\x02") + 24] = 200  # the size in the directory
    flipped = bytearray(stored)
    flipped[stored.find(b"format =")] ^= 1
    twice = stored.replace(b"run/metrics.jsonl", b"run/config.toml\0\0")
    weights = dict(inside)[f"{step}/model.safetensors"]
    bad_weights = bytearray(weights)
    bad_weights[-1] ^= 1
    toml = config.decode()
    return {
        "no zip": (b"PK\x03\x04 and nothing else", "no zip archive"),
        "empty": (b"", "no zip archive"),
        "cut off": (whole[: len(whole) // 2], "no zip archive"),
        "no run": (archive_of([("readme.txt", b"hello")]), "holds no config.toml"),
        "two runs": (
            archive_of([("a/config.toml", config), ("b/config.toml", config)]),
            "holds 2 runs",
        ),
        "parent": (archive_of([("../config.toml", config)]), "leads out of its folder"),
        "absolute": (archive_of([("/run/config.toml", config)]), "leads out of its folder"),
        "backslash": (archive_of([("run\\..\\config.toml", config)]), "leads out of its folder"),
        "drive": (archive_of([("C:/run/config.toml", config)]), "leads out of its folder"),
        "dot": (archive_of([("run/./config.toml", config)]), "leads out of its folder"),
        "link": (archive_of([(link("run/config.toml"), b"/etc/passwd")]), "holds the link"),
        "twice": (twice, "leads out of its folder"),
        "case": (archive_of([("run/config.toml", config), ("run/CONFIG.toml", config)]), "twice"),
        "wrong size": (bytes(lying), "that cannot be"),
        "wrong sum": (bytes(flipped), "check sum"),
        "other method": (
            archive_of([("run/config.toml", config)], zipfile.ZIP_LZMA),
            "with method 14",
        ),
        "bomb": (
            archive_of(
                [("run/config.toml", config), ("run/corpus.txt", bytes(300 << 20))],
                zipfile.ZIP_DEFLATED,
            ),
            "more than the",
        ),
        "large checkpoint": (with_file(f"{step}/junk.bin", bytes(1 << 20)), "more than the"),
        "damaged weights": (with_file(f"{step}/model.safetensors", bytes(bad_weights)), ""),
        "no TOML": (archive_of([("run/config.toml", b"= nonsense")]), "config.toml, line 1"),
        "no UTF-8": (archive_of([("run/config.toml", b"\xff\xfe")]), "config.toml"),
        "unknown preset": (
            archive_of([("run/config.toml", toml.replace('"tiny"', '"enormous"').encode())]),
            "unknown preset",
        ),
        "absurd size": (
            archive_of(
                [
                    (
                        "run/config.toml",
                        toml.replace("n_embd = 24", "n_embd = 1000000000000000000").encode(),
                    )
                ]
            ),
            "model.n_embd must be a whole number",
        ),
        "text for a number": (
            archive_of(
                [("run/config.toml", toml.replace("n_layer = 1", 'n_layer = "1"').encode())]
            ),
            "model.n_layer must be a whole number",
        ),
        "unknown setting": (
            archive_of([("run/config.toml", toml.replace("n_layer", "n_layers").encode())]),
            "unknown setting",
        ),
        "heads": (
            archive_of([("run/config.toml", toml.replace("n_head = 3", "n_head = 5").encode())]),
            "not divisible",
        ),
        "newer": (archive_of([("run/config.toml", b"format = 99\n")]), "format 99"),
        "prototype": (
            archive_of([("run/config.toml", b'[__proto__]\npolluted = "yes"\n')]),
            "",
        ),
    }


def hostile_models() -> dict[str, tuple[bytes, str]]:
    weights, (m, v) = files.random_weights(SIZES), moments(SIZES)
    fine = files.fp32(SIZES, weights, m, v)
    nan = {**weights, "ln_final.bias": np.full(SIZES.dModel, np.nan, np.float32)}
    negative = {**v, "ln_final.bias": np.full(SIZES.dModel, -1, np.float32)}
    _, header, state = files.take_apart(fine)

    def with_header(**changes: Any) -> bytes:
        return files.file_bytes({**header, **changes}, state)

    def with_config(**changes: Any) -> bytes:
        return with_header(config={**header["config"], **changes})

    return {
        "empty": (b"", "no .tinygpt file"),
        "other": (b"GGUF" + bytes(100), "no .tinygpt file"),
        "version": (b"TGPT" + struct.pack("<II", 9, 2) + b"{}", "version 9"),
        "long header": (b"TGPT" + struct.pack("<II", 2, 2**32 - 1) + b"{}", "cut off"),
        "no JSON": (files.file_bytes(b"{nonsense", state), "is not JSON"),
        "a list": (files.file_bytes(b"[]", state), "must hold a JSON object"),
        "cut off": (fine[:-5], "is cut off"),
        "longer": (fine + b"x", "belong to no tensor"),
        "NaN": (files.fp32(SIZES, nan, m, v), "holds NaN values"),
        "negative square": (files.fp32(SIZES, weights, m, negative), "negative mean square"),
        "absurd": (with_config(dModel=10**18), "must be a whole number"),
        "many layers": (with_config(layers=1000, dModel=60000), "does not fit into a tab"),
        "text": (with_config(layers="2"), "config.layers must be a whole number"),
        "heads": (with_config(heads=3), "not divisible"),
        "variant": (with_config(useRope=True), "config.useRope"),
        "dtype": (with_header(weightDtype="fp8"), "weightDtype"),
        "moments": (
            with_header(includesOptimizerState=False, weightDtype="fp32"),
            "includesOptimizerState",
        ),
        "length": (with_header(stateByteLength=5), "stateByteLength is 5"),
        "manifest": (with_header(manifest=header["manifest"][:-1]), "manifest entry"),
        "offset": (
            with_header(
                manifest=[{**header["manifest"][0], "floatOffset": 7}, *header["manifest"][1:]]
            ),
            "floatOffset",
        ),
        "no config": (with_header(config=[]), "config must be an object"),
        "negative step": (
            files.file_bytes(header, struct.pack("<i", -1) + state[4:]),
            "step is -1",
        ),
    }


def hostile_weights() -> dict[str, tuple[bytes, str]]:
    def tensors(header: Any, data: bytes = b"") -> bytes:
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data

    def one(**changes: Any) -> Any:
        return {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}}

    return {
        "empty": (b"", "is cut off"),
        "huge header": (struct.pack("<Q", 2**63) + b"{}", "is cut off"),
        "hole": (tensors(one(data_offsets=[4, 8]), bytes(8)), "follows a hole"),
        "overlap": (
            tensors({**one(), "y": one()["x"]}, bytes(8)),
            "overlaps the one before it",
        ),
        "shape": (tensors(one(shape=[2]), bytes(4)), "does not fill data_offsets"),
        "absurd shape": (tensors(one(shape=[10**18]), bytes(4)), ""),
        "dtype": (tensors(one(dtype="Q7"), bytes(4)), "unknown dtype"),
        "dims": (tensors(one(shape=[1] * 9), bytes(4)), "at most 8 sizes"),
        "longer": (tensors(one(), bytes(9)), "belong to no tensor"),
        "no config": (tensors(one(), bytes(4)), "does not say how many heads"),
        "pickle": (b"\x80\x04\x95\x0e" + bytes(60), "is cut off"),
    }


def test_hostile_files_are_refused_in_one_line_that_names_what_is_wrong(
    folder: Path, tmp_path: Path, run: Path
) -> None:
    cases = [(f"{what}.zip", *case) for what, case in hostile_zips(run).items()]
    cases += [(f"{what}.tinygpt", *case) for what, case in hostile_models().items()]
    cases += [(f"{what}.safetensors", *case) for what, case in hostile_weights().items()]
    for kind, table in (("zip", ZIPS), ("tinygpt", TINYGPT)):  # those that the terminal refuses
        for what, (make, _) in table.items():
            place = tmp_path / f"{kind} {what}"
            place.mkdir()
            cases.append((f"terminal: {what}.{kind}", make(place).read_bytes(), ""))
    assert len(cases) > 140
    given = [{"name": name, "content": content} for name, content, _ in cases]
    found = perform(folder, tmp_path / "work", {"kind": "import", "zips": given})[0]
    for (name, _, wanted), refusal in zip(cases, found["refusals"], strict=True):
        if name == "damaged weights.zip":
            assert refusal is None  # the checkpoint before it is whole
            continue
        assert refusal is not None, name
        assert refusal.startswith("StorageError: "), (name, refusal)
        assert wanted in refusal, (name, refusal)
        assert "\n" not in refusal, (name, refusal)
        assert len(refusal) < 400, (name, refusal)
    assert found["names"] == ["run"]
