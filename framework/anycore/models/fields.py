"""The fields of `config.json` that families share, checked as they are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from anycore.contract.declare import DTYPES
from anycore.errors import ConfigError, Unsupported

Config = dict[str, Any]

LARGEST = 2**31 - 1
"""No size in a config is larger; what is would be a plan of more memory than there is."""
MOST_LAYERS = 4096

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _whole(least: int, most: int = LARGEST) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _positive(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value <= sys.float_info.max


def _ids(value: Any) -> bool:
    one = _whole(-1)  # some of the first Llamas say that the padding is -1
    return one(value) or (isinstance(value, list) and all(map(one, value)))


def _listed(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


KINDS: dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {
    "a positive whole number": (
        _whole(1),
        ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
         "max_position_embeddings", "original_max_position_embeddings", "sliding_window_pattern", "num_labels",
         "max_seq_length", "truncate_dim"),
    ),
    "a whole number that is not negative": (_whole(0), ("sliding_window", "max_window_layers", "type_vocab_size")),
    f"a whole number from 1 to {MOST_LAYERS}": (_whole(1, MOST_LAYERS), ("num_hidden_layers",)),
    "a token id": (_whole(-1), ("pad_token_id", "bos_token_id")),
    "a token id or a list of them": (_ids, ("eos_token_id",)),
    "a number above 0": (
        _positive,
        ("rms_norm_eps", "layer_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar",
         "final_logit_softcapping", "partial_rotary_factor"),
    ),
    "true or false": (
        _is(bool),
        ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window", "is_decoder", "is_causal",
         "do_lower_case"),
    ),
    "a JSON object": (
        _is(dict),
        ("rope_scaling", "rope_parameters", "id2label", "auto_map", "sentence_transformers", "text_config",
         "modality_config", "processing_kwargs"),
    ),
    "a JSON object of texts": (_texts, ("prompts",)),
    "a list of names": (_listed(str), ("architectures", "layer_types", "classifier_from_token")),
    "a list of whole numbers": (_listed(int), ("matryoshka_dimensions", "matryoshka_dims")),
    "a name": (
        _is(str),
        ("hidden_act", "hidden_activation", "position_embedding_type", "problem_type", "default_prompt_name",
         "similarity_fn_name"),
    ),
}  # fmt: skip
"""What the fields that are read must be, where they are there and not null; and the fields, also of other files."""


def check(config: Config, only: tuple[str, ...] = (), file: str = "config.json") -> None:
    """Refuse fields of another type or out of range, before anything is computed with them; of `only` these, or all.

    Raises:
        ConfigError: naming the field, what it is and what it must be.
    """
    for kind, (fits, names) in KINDS.items():
        for name in names:
            value = None if only and name not in only else config.get(name)
            if value is not None and not fits(value):
                raise ConfigError(f"{file}: {name} must be {kind}, not {json.dumps(value)[:80]}")


def given(config: Config, name: str, default: Any) -> Any:
    """A field, or the default where it is not there or null."""
    value = config.get(name)
    return default if value is None else value


def flatten(config: Config) -> Config:
    """Lift a nested text_config to the top. What both levels set is the text model's, but for the tied flag."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return config
    outer = {key: value for key, value in config.items() if key != "text_config" and value is not None}
    merged = outer | {key: value for key, value in inner.items() if value is not None}
    if "tie_word_embeddings" in outer:
        merged["tie_word_embeddings"] = outer["tie_word_embeddings"]
    return merged


def size(config: Config, name: str) -> int:
    """A size that has no default."""
    value = config.get(name)
    if value is None:
        raise ConfigError(f"config.json: {name} is missing, and has no default")
    return int(value)


def layer_count(config: Config) -> int:
    return size(config, "num_hidden_layers")


def activation(name: Any) -> str:
    if name not in ACTIVATIONS:
        raise Unsupported(f"config.json: activation {name!r} is not supported: known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def dtype(config: Config) -> str | None:
    """The checkpoint's own dtype, under transformers' new or old key."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return name if name in DTYPES else None


def tokens(config: Config) -> dict[str, Any]:
    """Ids of the special tokens; the end of text may be several."""
    eos = config.get("eos_token_id")
    return {
        "pad_id": config.get("pad_token_id"),
        "bos_id": config.get("bos_token_id"),
        "eos_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    }


def layer_windows(kinds: list[str], window: int | None, config: Config) -> tuple[int | None, ...]:
    """The window of each layer; () when no layer has one."""
    known = ("full_attention", "sliding_attention")
    if len(kinds) != layer_count(config) or any(kind not in known for kind in kinds):
        raise ConfigError(
            f"config.json: layer_types must be one of {', '.join(known)} for each of {layer_count(config)} layers"
        )
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()
