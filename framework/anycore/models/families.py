"""From `config.json` to a ModelSpec: one small function a family, and a table from architecture names to them.

Defaults are those of the Hugging Face config classes, because checkpoints leave out what equals them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from anycore.contract.declare import Task
from anycore.errors import AnycoreError, ConfigError, PluginError, Unsupported
from anycore.models.fields import (
    Config,
    activation,
    check,
    dtype,
    flatten,
    given,
    layer_count,
    layer_windows,
    size,
    tokens,
)
from anycore.models.rope import local_rope, read_rope
from anycore.models.spec import Architecture, ModelSpec, PoolingSpec, ScoreSpec

GEMMA3_DEFAULTS: Config = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "tie_word_embeddings": True, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
"""Gemma 3 checkpoints with images say little more of their text model than how it differs from these."""


def read(config: Config, architectures: Iterable[Architecture] = ()) -> ModelSpec:
    """Return the spec of the architecture that `config` names; plugins' architectures win."""
    check(config, ("architectures", "auto_map"))
    names = config.get("architectures") or []
    if not names:
        raise ConfigError('config.json names no architecture: add, for example, "architectures": ["LlamaForCausalLM"]')
    name = str(names[0])
    for architecture in architectures:
        if architecture.name == name:
            return brought(architecture, config)
    refuse_code(name, config)
    if name not in ARCHITECTURES:
        near = get_close_matches(name, ARCHITECTURES, n=1)
        hint = f" Did the config mean {near[0]}?" if near else ""
        raise Unsupported(
            f"architecture {name} is not known.{hint} Known: {', '.join(ARCHITECTURES)}; "
            "others can come from a plugin (hook register_models)"
        )
    config = flatten(config)
    check(config)
    return ARCHITECTURES[name](config | {"architecture": name})


def brought(architecture: Architecture, config: Config) -> ModelSpec:
    """Ask a plugin's architecture; what goes wrong in there is told as its own fault."""
    try:
        spec = architecture.spec(config)
    except AnycoreError:
        raise
    except Exception as error:
        raise PluginError(f"{architecture.name}, from a plugin, failed on config.json: {error!r}") from error
    if not isinstance(spec, ModelSpec):
        raise PluginError(f"{architecture.name}, from a plugin, made {type(spec).__name__}, not a ModelSpec")
    return spec


def refuse_code(name: str, config: Config) -> None:
    """Refuse a checkpoint that brings its own model code: the built-in class may compute something else."""
    brought = {key: value for key, value in (config.get("auto_map") or {}).items() if key.startswith("AutoModel")}
    if brought:
        raise Unsupported(
            f"config.json asks to run code from the checkpoint (auto_map: {', '.join(map(str, brought.values()))}), "
            f"which anycore never does. If the built-in {name} computes the same, remove auto_map from config.json"
        )


def llama(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    return decoder(config, qkv_bias=bias, output_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))


def mistral(config: Config) -> ModelSpec:
    window = config.get("sliding_window", 4096)
    return decoder(config, windows=(window,) * layer_count(config) if window else ())


def qwen2(config: Config) -> ModelSpec:
    return decoder(config, qkv_bias=True, windows=qwen_windows(config))


def qwen3(config: Config) -> ModelSpec:
    bias = bool(config.get("attention_bias", False))
    config = {"head_dim": 128} | config
    return decoder(config, qkv_bias=bias, output_bias=bias, qk_norm=True, windows=qwen_windows(config))


def gemma3(config: Config) -> ModelSpec:
    config = GEMMA3_DEFAULTS | config
    bias = bool(config.get("attention_bias", False))
    both_ways = bool(config.get("use_bidirectional_attention"))
    window = config["sliding_window"]
    if both_ways:
        window = window // 2 + 1  # the number in the file spans both sides
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    every = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layer_count(config))]
    return decoder(
        config,
        attention="bidirectional" if both_ways else "causal",
        activation=activation(config.get("hidden_activation") or config.get("hidden_act")),
        attention_scale=config["query_pre_attn_scalar"] ** -0.5,
        rope=read_rope(config, config["rope_theta"], "full_attention"),
        rope_local=local_rope(config, config["rope_local_base_freq"]),
        windows=layer_windows(config.get("layer_types") or every, window, config),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        norm_after=True,
        norm_offset=True,
        embedding_scale=config["hidden_size"] ** 0.5,
        logits_softcap=config.get("final_logit_softcapping"),
    )


def decoder(config: Config, **fields: Any) -> ModelSpec:
    """What all decoders share. `fields` are the family's own."""
    name, hidden, heads = config["architecture"], size(config, "hidden_size"), size(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ConfigError(f"config.json: {heads} num_attention_heads are no multiple of {kv_heads} num_key_value_heads")
    head = {"ForCausalLM": "lm", "ForConditionalGeneration": "lm", "ForSequenceClassification": "classifier"}
    common: dict[str, Any] = {
        "architecture": name,
        "family": "decoder",
        "attention": "causal",
        "hidden_size": hidden,
        "intermediate_size": size(config, "intermediate_size"),
        "layers": layer_count(config),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "vocab_size": size(config, "vocab_size"),
        "norm_eps": given(config, "rms_norm_eps", 1e-6),
        "activation": fields.get("activation") or activation(given(config, "hidden_act", "silu")),
        "rope": fields.get("rope") or read_rope(config, 10000.0),
        "dtype": dtype(config),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "head": next((kind for suffix, kind in head.items() if name.endswith(suffix)), None),
        **tokens(config),
    }
    if config.get("is_causal") is False:
        if any(fields.get("windows", ())):
            raise Unsupported("config.json: is_causal false together with sliding windows is not supported")
        common["attention"] = "bidirectional"
    common["max_positions"] = common["rope"].reach(size(config, "max_position_embeddings"))
    spec = common | fields
    if spec["head"] == "classifier":
        return ModelSpec(**spec, tasks=(Task.RERANK,), score=classifier(config))
    if spec["head"] == "lm" and spec["attention"] == "causal":
        return ModelSpec(**spec, tasks=(Task.GENERATE, Task.EMBED), pooling=PoolingSpec("last"))
    spec["head"] = None
    return ModelSpec(
        **spec,
        tasks=(Task.EMBED, Task.RERANK),
        pooling=PoolingSpec("last"),
        score=ScoreSpec("cosine", activation="identity"),
    )


def bert(config: Config) -> ModelSpec:
    return encoder(config)


def roberta(config: Config) -> ModelSpec:
    offset = given(config, "pad_token_id", 1) + 1
    return encoder(config, position_offset=offset)


def encoder(config: Config, position_offset: int = 0) -> ModelSpec:
    """What BERT and RoBERTa share, which is nearly all."""
    name, hidden, heads = config["architecture"], size(config, "hidden_size"), size(config, "num_attention_heads")
    kind = config.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise Unsupported(f"config.json: position_embedding_type {kind!r} is not supported, only 'absolute' is")
    if hidden % heads:
        raise ConfigError(f"config.json: hidden_size {hidden} is no multiple of {heads} num_attention_heads")
    if config.get("is_decoder"):
        raise Unsupported(f"config.json: {name} with is_decoder is not supported: encoders attend both ways")
    scores = name.endswith("ForSequenceClassification")
    return ModelSpec(
        architecture=name,
        family="encoder",
        attention="bidirectional",
        tasks=(Task.RERANK,) if scores else (Task.EMBED, Task.RERANK),
        hidden_size=hidden,
        intermediate_size=size(config, "intermediate_size"),
        layers=layer_count(config),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=size(config, "vocab_size"),
        max_positions=size(config, "max_position_embeddings") - position_offset,
        norm_eps=given(config, "layer_norm_eps", 1e-12),
        activation=activation(given(config, "hidden_act", "gelu")),
        dtype=dtype(config),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        token_type_count=given(config, "type_vocab_size", 2),
        position_offset=position_offset,
        **tokens(config),
        head="classifier" if scores else None,
        pooling=None if scores else PoolingSpec("mean"),
        score=classifier(config) if scores else ScoreSpec("cosine", activation="identity"),
    )


def classifier(config: Config) -> ScoreSpec:
    """A head of labels. One label is a score; of two, the second one's is; more are for classification alone."""
    labels = config.get("num_labels") or len(config.get("id2label") or {}) or 2
    spec = ScoreSpec("classifier", labels, problem=config.get("problem_type"))
    return spec if labels == 1 else replace(spec, activation=spec.of_labels)


def qwen_windows(config: Config) -> tuple[int | None, ...]:
    if not config.get("use_sliding_window"):
        return ()
    first = given(config, "max_window_layers", 28)
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(layer_count(config))]
    return layer_windows(config.get("layer_types") or default, given(config, "sliding_window", 4096), config)


ARCHITECTURES: dict[str, Callable[[Config], ModelSpec]] = {
    "LlamaForCausalLM": llama,
    "LlamaModel": llama,
    "LlamaForSequenceClassification": llama,
    "MistralForCausalLM": mistral,
    "MistralModel": mistral,
    "MistralForSequenceClassification": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen2Model": qwen2,
    "Qwen2ForSequenceClassification": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3Model": qwen3,
    "Qwen3ForSequenceClassification": qwen3,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3,
    "Gemma3TextModel": gemma3,
    "BertModel": bert,
    "BertForMaskedLM": bert,
    "BertForSequenceClassification": bert,
    "RobertaModel": roberta,
    "RobertaForMaskedLM": roberta,
    "RobertaForSequenceClassification": roberta,
    "XLMRobertaModel": roberta,
    "XLMRobertaForMaskedLM": roberta,
    "XLMRobertaForSequenceClassification": roberta,
}
"""Architecture name in config.json to the function that reads it."""
