"""Rotary embeddings as `config.json` spells them: `rope_scaling` and `rope_theta` (transformers 4), or
`rope_parameters` (transformers 5), which may hold one dict for each kind of layer."""

from __future__ import annotations

from typing import Any

from anycore.errors import ConfigError, Unsupported
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
    base = float(written.get("rope_theta") or config.get("rope_theta") or theta)
    return spec(written, base, config)


def local_rope(config: dict[str, Any], theta: float) -> RopeSpec:
    """The rotary embedding of Gemma 3's windowed layers: never scaled unless it has a dict of its own."""
    nested = config.get("rope_parameters") or {}
    written = nested.get("sliding_attention") or {}
    return spec(written, float(written.get("rope_theta") or theta), config)


def spec(written: dict[str, Any], theta: float, config: dict[str, Any]) -> RopeSpec:
    kind = written.get("rope_type") or written.get("type") or "default"
    if kind not in KINDS:
        raise Unsupported(f"config.json: rope type {kind!r} is not supported: known are {', '.join(KINDS)}")
    partial = written.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise Unsupported(f"config.json: partial_rotary_factor {partial} is not supported, only 1 is")
    required, optional = KINDS[kind]
    missing = [name for name in required if written.get(name) is None]
    if missing:
        raise ConfigError(f"config.json: rope type {kind!r} lacks {', '.join(missing)}")
    numbers = {name: float(written[name]) for name in required + optional if written.get(name) is not None}
    if kind != "default" and numbers.get("factor", 1.0) <= 0:
        raise ConfigError(f"config.json: the factor of rope type {kind!r} must be above 0, not {numbers['factor']}")
    longest = config.get("max_position_embeddings") or 0
    trained = written.get("original_max_position_embeddings")
    if kind in ("yarn", "llama3"):
        numbers["original_max_position_embeddings"] = float(
            config.get("original_max_position_embeddings") or trained or longest
        )
    if kind == "dynamic":
        numbers["original_max_position_embeddings"] = float(longest)
    if kind == "yarn":
        numbers.setdefault("factor", longest / numbers["original_max_position_embeddings"])
    return RopeSpec(theta, kind, tuple(sorted(numbers.items())))
