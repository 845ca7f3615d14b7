"""Rotary embeddings as `config.json` spells them: `rope_scaling` and `rope_theta` (transformers 4), or
`rope_parameters` (transformers 5), which may hold one dict for each kind of layer."""

from __future__ import annotations

from math import inf
from typing import Any

from anycore.errors import ConfigError, Unsupported
from anycore.models.fields import size
from anycore.models.spec import RopeSpec

KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": ((), ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
}
"""Kind to the numbers it must have and those it may have."""

GROUPS = ("full_attention", "sliding_attention")


def read_rope(config: dict[str, Any], theta: float, group: str = "full_attention") -> RopeSpec:
    """Read the rotary embedding of the layers of one group; `theta` is the base when the file has none."""
    written = config.get("rope_parameters") or {}
    if any(name in written for name in GROUPS):
        written = written.get(group) or {}
    if config.get("rope_scaling"):  # it wins where a newer config was given one by hand, which then has no base
        written = {"rope_theta": written.get("rope_theta")} | config["rope_scaling"]
    return spec(written, config.get("rope_theta") or theta, config)


def local_rope(config: dict[str, Any], theta: float) -> RopeSpec:
    """The rotary embedding of Gemma 3's windowed layers: never scaled unless it has a dict of its own."""
    nested = config.get("rope_parameters") or {}
    written = nested.get("sliding_attention") or {}
    return spec(written, theta, config)


def spec(written: dict[str, Any], theta: float, config: dict[str, Any]) -> RopeSpec:
    """`theta` is the base where `written` has none."""
    if not isinstance(written, dict):
        raise ConfigError(f"config.json: rope_parameters of a kind of layer must be a JSON object, not {written!r}")
    if written.get("rope_theta") is not None:
        theta = number(written, "rope_theta")
    kind = written.get("rope_type") or written.get("type")
    if kind is None and written.get("factor") is not None:
        raise ConfigError("config.json: the rotary embedding has a factor but no rope_type that says what it means")
    kind = kind or "default"
    if str(kind) not in KINDS:
        raise Unsupported(f"config.json: rope type {kind!r} is not supported: known are {', '.join(KINDS)}")
    partial = written.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise Unsupported(f"config.json: partial_rotary_factor {partial} is not supported, only 1 is")
    required, optional = KINDS[kind]
    missing = [name for name in required if written.get(name) is None]
    if missing:
        raise ConfigError(f"config.json: rope type {kind!r} lacks {', '.join(missing)}")
    numbers = {name: number(written, name) for name in required + optional if written.get(name) is not None}
    if kind != "default" and numbers.get("factor", 1.0) <= 0:
        raise ConfigError(f"config.json: the factor of rope type {kind!r} must be above 0, not {numbers['factor']}")
    longest = size(config, "max_position_embeddings")
    length = "original_max_position_embeddings"
    trained = number(written, length) if written.get(length) is not None else None
    if trained == 0:
        raise ConfigError(f"config.json: {length} must be above 0")
    if kind in ("yarn", "llama3"):
        numbers[length] = float(config.get(length) or trained or longest)
    if kind == "dynamic":
        numbers[length] = float(longest)
    if kind == "yarn":
        numbers.setdefault("factor", longest / numbers[length])
    return RopeSpec(float(theta), kind, tuple(sorted(numbers.items())))


def number(written: dict[str, Any], name: str) -> float:
    value = written[name]
    truth = name == "truncate"
    if isinstance(value, bool) is not truth or not isinstance(value, (int, float)) or not 0 <= value < inf:
        wanted = "true or false" if truth else "a number that is not negative"
        raise ConfigError(f"config.json: {name} of the rotary embedding must be {wanted}, not {value!r}")
    return float(value)
