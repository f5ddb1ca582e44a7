"""A stock Hugging Face GPT-2: which fields its config.json has and which tensors its weights file.

Inside the program a parameter has GPT-2's own name ("h.0.attn.c_attn.weight"); in the file it
stands as ``GPT2LMHeadModel`` saves it, with "transformer." in front. Values and layout are the
same, nothing is transposed, and a tied head is not stored.
A folder whose meaning differs from what the engines compute is refused by the name of the field:
loading it as something similar would give wrong text and no error.
Read next: ``runs/checkpoint.py``, which reads and writes whole folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrainllm.config import GPTConfig
from posttrainllm.errors import CheckpointError, ConfigError
from posttrainllm.formats.shards import WEIGHTS_FILE as WEIGHTS_FILE
from posttrainllm.formats.tensor_file import Entry
from posttrainllm.formats.untrusted import DAMAGED
from posttrainllm.settings import show

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

PREFIX = "transformer."
HEAD = "lm_head.weight"

# Fields that change what GPT2LMHeadModel computes, with the one value that the engines compute.
# An absent field has this value too. reorder_and_upcast_attn is not here: it only says in which
# precision half-precision attention is computed.
_FIXED: dict[str, object] = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "quantization_config": None,
    "pruned_heads": {},
}

# transformers' names of activations -> ours; the last two are the tanh form under other names.
_ACTIVATIONS = {
    "gelu_new": "gelu_new",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
}

# config.json's name of a size -> ours.
_SIZES = {
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "n_positions": "n_ctx",
    "vocab_size": "n_vocab",
}


def parameter_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of every parameter of a GPT-2, in the order of the model."""
    width, inner = config.n_embd, config.inner
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (config.n_vocab, width),
        "wpe.weight": (config.n_ctx, width),
    }
    for i in range(config.n_layer):
        shapes |= {
            f"h.{i}.ln_1.weight": (width,),
            f"h.{i}.ln_1.bias": (width,),
            f"h.{i}.attn.c_attn.weight": (width, 3 * width),
            f"h.{i}.attn.c_attn.bias": (3 * width,),
            f"h.{i}.attn.c_proj.weight": (width, width),
            f"h.{i}.attn.c_proj.bias": (width,),
            f"h.{i}.ln_2.weight": (width,),
            f"h.{i}.ln_2.bias": (width,),
            f"h.{i}.mlp.c_fc.weight": (width, inner),
            f"h.{i}.mlp.c_fc.bias": (inner,),
            f"h.{i}.mlp.c_proj.weight": (inner, width),
            f"h.{i}.mlp.c_proj.bias": (width,),
        }
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    return shapes if config.tied else {**shapes, HEAD: (config.n_vocab, width)}


def stored_name(name: str) -> str:
    """Return the name under which ``GPT2LMHeadModel`` stores a parameter."""
    return name if name == HEAD else PREFIX + name


def config_document(config: GPTConfig, end: int | None = None) -> dict[str, Any]:
    """Return a config.json that transformers loads without a warning.

    ``end`` is the id that ends a text. Without one it is null, as is what begins a text:
    transformers' default for both, 50256, is no id of a small vocabulary.
    """
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "dtype": "float32",
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_positions": config.n_ctx,
        "n_ctx": config.n_ctx,
        "n_inner": config.n_inner,
        "vocab_size": config.n_vocab,
        "activation_function": config.activation,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
        "tie_word_embeddings": config.tied,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": None,
    }


def generation_document(end: int | None = None) -> dict[str, Any]:
    """Return a generation_config.json: which id ends a text, and that no other has a meaning of its own."""
    return {
        "_from_model_config": True,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": None,
        "use_cache": True,
    }


def parse_config(document: Mapping[str, Any], source: Path) -> GPTConfig:
    """Turn a config.json into the shape of the model, or refuse it by the name of a field.

    Dropout is left out: it belongs to the training run that is over, not to the model.

    Raises: CheckpointError.
    """
    kind = document.get("model_type")
    if kind != "gpt2":
        raise CheckpointError(
            f"{source}: model_type is {show(kind)}, wanted 'gpt2'",
            "only models of GPT-2's architecture can be loaded",
        )
    for field, wanted in _FIXED.items():
        value = document.get(field, wanted)
        # true == 1 in Python, so the types are compared too
        if value != wanted or isinstance(value, bool) != isinstance(wanted, bool):
            raise CheckpointError(
                f"{source}: {field} is {show(value)}, and this package computes {wanted!r} only",
                "this variant of GPT-2 cannot be loaded",
            )
    activation = document.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise CheckpointError(
            f"{source}: activation_function is {show(activation)}, wanted one of "
            + ", ".join(_ACTIVATIONS),
            "this variant of GPT-2 cannot be loaded",
        )
    tied = document.get("tie_word_embeddings", True)
    if not isinstance(tied, bool):
        raise CheckpointError(
            f"{source}: tie_word_embeddings must be true or false, got {show(tied)}",
            DAMAGED,
        )
    shape: dict[str, Any] = {ours: _size(document, field, source) for field, ours in _SIZES.items()}
    if document.get("n_inner") is not None:
        shape["n_inner"] = _size(document, "n_inner", source)
    if "layer_norm_epsilon" in document:
        shape["layer_norm_epsilon"] = document["layer_norm_epsilon"]
    try:
        return GPTConfig.model_validate(
            {**shape, "activation": _ACTIVATIONS[activation], "tied": tied}
        )
    except ConfigError as error:
        raise CheckpointError(f"{source}: {error.message}", "the model cannot be loaded") from None


def _size(document: Mapping[str, Any], field: str, source: Path) -> int:
    value = document.get(field)
    if type(value) is not int or value < 1:
        what = (
            "is missing"
            if value is None
            else f"must be a whole number from 1 on, got {show(value)}"
        )
        raise CheckpointError(f"{source}: {field} {what}", "is this the config.json of a GPT-2?")
    return value


def pick_parameters(
    entries: Mapping[str, Entry], config: GPTConfig, source: Path
) -> dict[str, Entry]:
    """Find every parameter in a weights file, under its name with or without "transformer.".

    Left aside are the mask buffers of old files, and a stored copy of a tied head: the result holds
    that copy under "lm_head.weight", for the caller to compare.

    Raises: CheckpointError for a name that is missing, unexpected or there twice, or another shape.
    """
    shapes = parameter_shapes(config)
    found: dict[str, Entry] = {}
    for stored, entry in entries.items():
        name = stored.removeprefix(PREFIX)
        if name in found:
            raise CheckpointError(
                f"{source} holds {show(name)} twice, with and without {PREFIX!r} in front",
                "save the model again with transformers' save_pretrained",
            )
        if name in shapes or name == HEAD:
            found[name] = entry
        elif not _is_mask(name, config.n_layer):
            raise CheckpointError(
                f"{source} holds the tensor {show(stored)}, which no GPT-2 of "
                f"{config.n_layer} layers has",
                "is config.json of the same model?",
            )
    wanted = shapes if HEAD not in found else {**shapes, HEAD: shapes["wte.weight"]}
    for name, shape in wanted.items():
        if name not in found:
            raise CheckpointError(
                f"{source} lacks the tensor {stored_name(name)!r}",
                "is config.json of the same model?",
            )
        if found[name].shape != shape:
            raise CheckpointError(
                f"{found[name].path}: tensor {stored_name(name)!r} is "
                f"{show(list(found[name].shape))}, and "
                f"config.json says {list(shape)}",
                "is config.json of the same model?",
            )
    return {name: found[name] for name in wanted}


def _is_mask(name: str, layers: int) -> bool:
    """Tell whether a name is "h.<i>.attn.bias" or "h.<i>.attn.masked_bias": the causal mask, stored."""
    start, _, rest = name.removeprefix("h.").partition(".")
    return (
        name.startswith("h.")
        and rest in ("attn.bias", "attn.masked_bias")
        and start in {str(i) for i in range(layers)}
    )
