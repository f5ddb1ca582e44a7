"""Model folders that are damaged or meant to do harm, and what their refusals must say.

``FOLDERS`` maps a name to (make, words): ``make(folder)`` writes into an empty folder and returns what is to be imported, and the
refusal's one line must contain ``words``.
"""

from __future__ import annotations

import shutil
import struct

from hostile_folders import (
    BIAS,
    HUGE,
    WTE,
    config,
    entry,
    hf,
    holes,
    link,
    only_pickle,
    pipe,
    raw,
    rename,
    sharded,
    tokenizer,
    value,
    weights,
)
from hostile_pickle import Case, pickled

FOLDERS: dict[str, Case] = {
    "not gpt2": (config(model_type="llama"), "model_type is 'llama'"),
    "inverse layer": (
        config(scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx is True",
    ),
    "unscaled": (config(scale_attn_weights=False), "scale_attn_weights is False"),
    "cross attention": (config(add_cross_attention=True), "add_cross_attention is True"),
    "quantised": (config(quantization_config={"bits": 4}), "quantization_config is"),
    "relu": (config(activation_function="relu"), "activation_function is 'relu'"),
    "epsilon": (config(layer_norm_epsilon=0.5), "layer_norm_epsilon must be"),
    "huge layers": (config(n_layer=HUGE), "n_layer must be"),
    "huge width": (config(n_embd=HUGE), "n_embd must be"),
    "huge vocabulary": (config(vocab_size=HUGE), "n_vocab must be"),
    "huge context": (config(n_positions=HUGE), "n_ctx must be"),
    "huge inner": (config(n_inner=HUGE), "n_inner must be"),
    "heads": (config(n_head=3), "not divisible"),
    "float size": (config(n_layer=2.0), "n_layer must be a whole number"),
    "deep config": (raw("config.json", b"[" * 10**5), "nested too deeply"),
    "config of another kind": (raw("config.json", b"[]"), "must hold a JSON object"),
    "config not UTF-8": (raw("config.json", b"\xff\xfe{}"), "is not UTF-8"),
    "config with NaN": (raw("config.json", b'{"n_layer": NaN}'), "NaN is not a JSON number"),
    "config twice": (raw("config.json", b'{"a": 1, "a": 2}'), "stands there twice"),
    "endless config": (raw("config.json", b" " * (17 * 2**20)), "too large for its kind"),
    "config of a million lists": (
        raw("config.json", b'{"a": [' + b"[]," * 10**6 + b"0]}"),
        "more than 200,000 lists and objects",
    ),
    "header of a million lists": (
        raw(
            "model.safetensors",
            struct.pack("<Q", 3 * 10**6 + 9) + b'{"a": [' + b"[]," * 10**6 + b"]}",
        ),
        "more than 200,000 lists and objects",
    ),
    "tokenizer of millions of lists": (
        raw("tokenizer.json", b"[" + b"[]," * 5 * 10**6 + b"0]"),
        "more than 1,000,000 lists and objects",
    ),
    "tokenizer of 40 MB": (raw("tokenizer.json", b" " * (40 * 2**20)), "too large for its kind"),
    "huge number": (raw("config.json", b'{"a": ' + b"9" * 10**5 + b"}"), "Exceeds the limit"),
    "nan": (value(BIAS, float("nan")), "holds NaN values"),
    "infinite": (value(BIAS, float("-inf")), "holds infinite values"),
    "missing tensor": (rename(BIAS, "h.0.attn.bias"), f"lacks the tensor '{BIAS}'"),
    "unknown tensor": (rename(BIAS, "score.weight"), "'score.weight', which no GPT-2"),
    "tensor of a layer that is not": (rename(BIAS, "h.7.ln_1.bias"), "'h.7.ln_1.bias'"),
    "transposed": (entry(shape=[8, 256]), "is [8, 256], and config.json says [256, 8]"),
    "shape of 10^18": (entry(shape=[HUGE, HUGE]), "does not fill data_offsets"),
    "offsets of 10^18": (entry(shape=[HUGE], data_offsets=[0, 4 * HUGE]), "overlaps"),
    "negative shape": (entry(shape=[-256, -8]), "shape must be a list"),
    "long shape": (entry(shape=[1] * 10**5), "at most 8 sizes"),
    "wrong dtype": (entry(dtype="I32"), "is I32, wanted F32, F16 or BF16"),
    "unknown dtype": (entry(dtype="F128"), "unknown dtype"),
    "overlap": (
        weights(lambda h, d: ({**h, WTE: {**h[WTE], "data_offsets": [0, 8192]}}, d)),
        "overlaps the one before it",
    ),
    "more bytes": (weights(lambda h, d: (h, d + b"\0")), "belong to no tensor"),
    "cut off": (weights(lambda h, d: (h, d[:-1])), "is cut off"),
    "huge header": (
        raw("model.safetensors", struct.pack("<Q", 2**63) + b"{}"),
        "its header alone should have",
    ),
    "long header": (
        raw("model.safetensors", struct.pack("<Q", 9 * 2**20) + b" " * (9 * 2**20)),
        "over the limit of 8.4 MB",
    ),
    "deep header": (
        raw("model.safetensors", struct.pack("<Q", 10**5) + b"[" * 10**5),
        "nested too deeply",
    ),
    "pickle named safetensors": (
        hf(lambda m: (m / "model.safetensors").write_bytes(pickled(m.parent))),
        "is cut off",
    ),
    "pointer of Git LFS": (
        raw("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "is a pointer of Git LFS",
    ),
    "a file of holes": (holes, "of memory"),
    "pickle": (only_pickle("pytorch_model.bin"), "pytorch_model.bin is a pickle"),
    "pickle with another name": (only_pickle("consolidated.00.pth"), "is a pickle"),
    "shard missing": (
        sharded(lambda d, m: (m / "model-00002-of-00002.safetensors").unlink()),
        "has no model-00002-of-00002.safetensors",
    ),
    "shard outside": (
        sharded(lambda d, m: d["weight_map"].update({WTE: "../secret.safetensors"})),
        "is not the name of a file",
    ),
    "shard absolute": (
        sharded(lambda d, m: d["weight_map"].update({WTE: "/etc/x.safetensors"})),
        "is not the name of a file",
    ),
    "shard is a pickle": (
        sharded(lambda d, m: d["weight_map"].update({WTE: "pytorch_model.bin"})),
        "wanted a .safetensors file",
    ),
    "tensor in another shard": (
        sharded(lambda d, m: d["weight_map"].update({WTE: "model-00001-of-00002.safetensors"})),
        "stands in model-00002-of-00002.safetensors, and model.safetensors.index.json says",
    ),
    "tensor that the index leaves out": (
        sharded(lambda d, m: d["weight_map"].pop(WTE)),
        "says nothing of it",
    ),
    "tensor in no shard": (
        sharded(lambda d, m: d["weight_map"].update(x="model-00001-of-00002.safetensors")),
        "is not there",
    ),
    "tensor in two shards": (
        sharded(
            lambda d, m: shutil.copy(
                m / "model-00001-of-00002.safetensors", m / "model-00002-of-00002.safetensors"
            )
        ),
        "stands in both",
    ),
    "index without a map": (sharded(lambda d, m: d.pop("weight_map")), "weight_map must name"),
    "index of numbers": (
        sharded(lambda d, m: d.update(weight_map={WTE: 7})),
        "weight_map must name",
    ),
    "ten thousand shards": (
        sharded(
            lambda d, m: d["weight_map"].update({str(i): f"{i}.safetensors" for i in range(10_000)})
        ),
        "over the limit of 1,000",
    ),
    "config is a link": (link("config.json"), "is a link that leaves its folder"),
    "weights are a link": (link("model.safetensors"), "is a link that leaves its folder"),
    "tokenizer is a link": (link("tokenizer.json"), "is a link that leaves its folder"),
    "config is a pipe": (pipe("config.json"), "is not a regular file"),
    "weights are a pipe": (pipe("model.safetensors"), "is not a regular file"),
    "tokenizer is a pipe": (pipe("tokenizer.json"), "is not a regular file"),
    "no tokenizer": (hf(lambda m: (m / "tokenizer.json").unlink()), "has no tokenizer.json"),
    "tokenizer of another vocabulary": (
        tokenizer(lambda d: d["model"]["vocab"].update(zz=400)),
        "400",
    ),
    "two tokens with one id": (
        tokenizer(lambda d: d["model"]["vocab"].update(zz=5)),
        "gives one id to two tokens",
    ),
    "token of 10^18": (
        tokenizer(lambda d: d["model"]["vocab"].update(zz=HUGE)),
        "model.vocab['zz']",
    ),
    "negative token": (tokenizer(lambda d: d["model"]["vocab"].update(zz=-1)), "model.vocab['zz']"),
    "a byte is missing": (
        tokenizer(lambda d: d["model"]["vocab"].pop("\u0100")),
        "no token for byte 0",
    ),
    "merge of nothing": (
        tokenizer(lambda d: d["model"]["merges"].append(["q", "zz"])),
        "model.merges",
    ),
    "merge of three": (tokenizer(lambda d: d["model"]["merges"].append("t h e")), "model.merges"),
    "random tokens": (tokenizer(lambda d: d["model"].update(dropout=0.5)), "model.dropout is 0.5"),
    "pattern": (
        tokenizer(
            lambda d: d.update(
                pre_tokenizer={
                    "type": "Split",
                    "pattern": {"Regex": "(a+)+$"},
                    "behavior": "Isolated",
                }
            )
        ),
        "pre_tokenizer is",
    ),
    "replacing normalizer": (
        tokenizer(
            lambda d: d.update(normalizer={"type": "Replace", "pattern": {"Regex": "(a+)+$"}})
        ),
        "normalizer is",
    ),
    "added token elsewhere": (
        tokenizer(lambda d: d["added_tokens"][0].update(id=3)),
        "added token '<|endoftext|>' has id 3",
    ),
    "empty added token": (
        tokenizer(lambda d: d["added_tokens"][0].update(content="")),
        "added_tokens",
    ),
    "deep tokenizer": (raw("tokenizer.json", b"[" * 10**5), "is not valid JSON"),
    "tokenizer of another kind": (
        raw("tokenizer.json", b'{"model": {"type": "Unigram"}}'),
        "model.type is 'Unigram'",
    ),
}
