"""The fields of `config.json` that families share, checked as they are read."""

from __future__ import annotations

from typing import Any

from anycore.contract.declare import DTYPES
from anycore.errors import ConfigError, Unsupported

Config = dict[str, Any]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


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
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {name} must be a positive number, not {value!r}")
    return value


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
