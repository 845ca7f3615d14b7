"""Sampling values that a request leaves out, and who decided them: flag, the model's file, or the OpenAI API."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from anycore.engine.request import SamplingParams
from anycore.errors import BadRequest, ConfigError

NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",  # the name in generation_config.json
}
"""Keys that a model's file or --override-generation-config may set -> the sampling parameter each one sets."""

OTHERS = """
bad_words_ids begin_suppress_tokens bos_token_id cache_implementation constraints decoder_start_token_id
diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id
epsilon_cutoff eta_cutoff exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_eos_token_id
guidance_scale length_penalty max_length max_time min_length min_new_tokens no_repeat_ngram_size num_beam_groups
num_beams num_return_sequences output_attentions output_hidden_states output_logits output_scores pad_token_id
penalty_alpha remove_invalid_values renormalize_logits return_dict_in_generate sequence_bias stop_strings
suppress_tokens token_healing top_h transformers_version typical_p use_cache watermarking_config
"""
UNSUPPORTED = frozenset(OTHERS.split())
"""Further keys of Hugging Face generation files: known, and not sampling values here."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """`values`: SamplingParams fields; `sources`: field -> "flag" or "file"; `notes`: one line per key left aside."""

    values: dict[str, Any]
    sources: dict[str, str]
    notes: tuple[str, ...] = ()


def sampling_defaults(file: Mapping[str, Any] | None, override: str | None, mode: str = "auto") -> SamplingDefaults:
    """Combine a model's generation_config.json with --override-generation-config; `mode` is --generation-config.

    Precedence is request, flag, file, OpenAI: what is in neither of the two stays with SamplingParams.

    Raises:
        ConfigError: the override is no JSON object, or names a key nobody knows; a value is out of range.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    notes: list[str] = []
    if mode == "auto":
        for key, name in NAMES.items():
            if (file or {}).get(key) is not None:
                values[name], sources[name] = _value(key, (file or {})[key], "generation_config.json"), "file"
    for key, value in _parse(override).items():
        if key in NAMES:
            name = NAMES[key]
            values[name], sources[name] = _value(key, value, "--override-generation-config"), "flag"
        elif key in UNSUPPORTED:
            notes.append(f"--override-generation-config: {key} has no effect here")
        else:
            near = difflib.get_close_matches(key, [*NAMES, *UNSUPPORTED], 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(NAMES)}"
            raise ConfigError(
                f"--override-generation-config: unknown key {key!r}{hint}", param="override_generation_config"
            )
    return SamplingDefaults(values, sources, tuple(notes))


def _parse(override: str | None) -> dict[str, Any]:
    if not override:
        return {}
    try:
        parsed = json.loads(override)
    except ValueError as error:
        raise ConfigError(
            f"--override-generation-config is not valid JSON: {error}", param="override_generation_config"
        ) from None
    if not isinstance(parsed, dict):
        raise ConfigError("--override-generation-config must be a JSON object", param="override_generation_config")
    return parsed


def _value(key: str, value: Any, where: str) -> Any:
    """Return the value if a request could send it."""
    whole = NAMES[key] in ("top_k", "max_tokens")
    if whole and isinstance(value, float) and value.is_integer():
        value = int(value)  # as in a request
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise ConfigError(f"{where}: {key} must be {'an integer' if whole else 'a number'}, not {value!r}", param=key)
    try:
        msgspec.structs.replace(SamplingParams(), **{NAMES[key]: value})
    except BadRequest as error:
        raise ConfigError(f"{where}: {error.message}", param=key) from None
    return value if whole else float(value)
