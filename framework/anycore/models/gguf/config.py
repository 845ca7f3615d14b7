"""The header of a GGUF file as a Hugging Face `config.json`, and the few companion files that it can stand for."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from anycore.errors import Unsupported, WeightsError
from anycore.models.gguf.header import GgufFile

Config = dict[str, Any]
COMPANIONS = ("config.json", "generation_config.json", "modules.json", "1_Pooling/config.json")
POOLING = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}
"""llama.cpp's pooling types, as sentence-transformers names them; 0 is none."""
SCORE = 4
"""The pooling type of rerankers."""
END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""Words that end an answer although the header names only the end of the text (instruction-tuned models)."""
DENSE = {0: "float32", 1: "float16", 30: "bfloat16"}
CONTROL = 3


def companion(path: Path, name: str) -> Any | None:
    """Return what a model folder would hold under this name; None if the header says nothing of the kind."""
    if name not in COMPANIONS:
        return None
    file = header(path, path.stat().st_mtime_ns)
    if name == "config.json":
        return config_of(file)
    if name == "generation_config.json":
        return {key: value for key, value in special_ids(file).items() if value is not None}
    kind = POOLING.get(file.get(f"{file.architecture}.pooling_type", 0))
    if kind is None:
        return None
    if name == "modules.json":
        kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        return [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    size = file.need(f"{file.architecture}.embedding_length")
    return {"word_embedding_dimension": size, f"pooling_mode_{kind}": True}


@lru_cache(maxsize=1)
def header(path: Path, changed: int) -> GgufFile:
    """The file as it was at its last change: a model is asked for several companions in a row."""
    return GgufFile(path)


def config_of(file: GgufFile) -> Config:
    """Return the configuration that transformers would use for the model in a GGUF file.

    Raises:
        Unsupported: the architecture, or something the header says about it, is not known here.
    """
    make = ARCHITECTURES.get(file.architecture)
    if make is None:
        raise _unsupported(file, f"has the architecture {file.architecture!r}; known are {', '.join(ARCHITECTURES)}")
    config = make(file) | {"_name_or_path": file.get("general.name", file.path.stem)}
    matrices = {t.type for t in file.tensors.values() if len(t.shape) > 1}
    if len(matrices) == 1 and (dtype := DENSE.get(matrices.pop())):
        config["dtype"] = dtype
    return config


def special_ids(file: GgufFile) -> Config:
    """Return the ids of the special tokens; several that end a text become a list."""
    ends = [file.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    controls = [i for i, kind in enumerate(file.listed("tokenizer.ggml.token_type")) if kind == CONTROL]
    words = file.words("tokenizer.ggml.tokens", controls) if controls else []
    ends += [i for i, word in zip(controls, words, strict=True) if word in END_OF_TURN]
    for name, i in zip(("eos", "eot", "eom"), ends, strict=False):
        if not isinstance(i, int | None):
            file.refuse(f"tokenizer.ggml.{name}_token_id", i, "a token id")
    unique = list(dict.fromkeys(i for i in ends if i is not None))
    return {
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": unique[0] if len(unique) == 1 else unique or None,
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }


def _llama(file: GgufFile) -> Config:
    """Llama and Mistral, which llama.cpp files under one name; a window marks the latter."""
    config = _decoder(file, "LlamaForCausalLM", "llama")
    if rotated := file.get("llama.rope.dimension_count"):
        _expect(file, "llama.rope.dimension_count", rotated, config["head_dim"])
    window = file.get("llama.attention.sliding_window")
    if window:
        return config | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    bias = "blk.0.attn_q.bias" in file.tensors
    return config | {"attention_bias": bias, "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}


def _qwen2(file: GgufFile) -> Config:
    return _decoder(file, "Qwen2ForCausalLM", "qwen2") | {"use_sliding_window": False}


def _qwen3(file: GgufFile) -> Config:
    config = _decoder(file, "Qwen3ForCausalLM", "qwen3")
    config |= {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "use_sliding_window": False}
    if file.get("qwen3.pooling_type") == SCORE:
        config["classifier_from_token"] = ["no", "yes"]
    return config


def _gemma3(file: GgufFile) -> Config:
    """Gemma 3 text. What the header leaves out is the same in every Gemma 3: pattern, local base, scale."""
    config = _decoder(file, "Gemma3ForCausalLM", "gemma3_text")
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    key = "gemma3.attention.sliding_window_pattern"  # how often a layer sees all, or whether each is windowed
    windowed = file.get(key)
    if not isinstance(windowed, list):
        windowed = [bool((i + 1) % file.whole(key, 6)) for i in range(layers)]
    kinds = ["sliding_attention" if each else "full_attention" for each in windowed]
    largest = layers == 62  # the 27B model scales by the width per head, the others by the head size
    local = {"rope_type": "default", "rope_theta": file.get("gemma3.rope.freq_base_swa", 10000.0)}
    return config | {
        "hidden_activation": config.pop("hidden_act") and "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // heads if largest else config["head_dim"],
        "sliding_window": file.need("gemma3.attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "attn_logit_softcapping": file.get("gemma3.attn_logit_softcapping"),
        "final_logit_softcapping": file.get("gemma3.final_logit_softcapping"),
        "attention_bias": False,
    }


def _bert(file: GgufFile) -> Config:
    """BERT with its own tokenizer; RoBERTa's kin share the name but keep their positions in another way."""
    _expect(file, "tokenizer.ggml.model", file.need("tokenizer.ggml.model"), "bert")
    _expect(file, "bert.attention.causal", bool(file.get("bert.attention.causal", False)), False)
    if file.get("bert.pooling_type") == SCORE:
        raise _unsupported(
            file, "is a BERT reranker, and GGUF leaves out a layer of its head; use its safetensors folder"
        )
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": file.need("bert.embedding_length"),
        "intermediate_size": file.need("bert.feed_forward_length"),
        "num_hidden_layers": file.need("bert.block_count"),
        "num_attention_heads": file.need("bert.attention.head_count"),
        "max_position_embeddings": _tensor(file, "position_embd.weight")[0],
        "type_vocab_size": _tensor(file, "token_types.weight")[0],
        "vocab_size": _tensor(file, "token_embd.weight")[0],
        "layer_norm_eps": file.need("bert.attention.layer_norm_epsilon"),
        "hidden_act": "gelu",
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id", 0),
    }


ARCHITECTURES: dict[str, Callable[[GgufFile], Config]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "bert": _bert,
}


def _decoder(file: GgufFile, name: str, model_type: str) -> Config:
    """What all decoders share."""
    kind = file.architecture
    heads = _same(file, f"{kind}.attention.head_count")
    hidden = file.whole(f"{kind}.embedding_length")
    head_dim = file.whole(f"{kind}.attention.key_length", hidden // heads)
    _expect(file, f"{kind}.attention.value_length", file.get(f"{kind}.attention.value_length", head_dim), head_dim)
    _expect(file, f"{kind}.expert_count", file.get(f"{kind}.expert_count", 0), 0)
    _expect(file, f"{kind}.attention.causal", file.get(f"{kind}.attention.causal", True), True)
    return {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": _same(file, f"{kind}.feed_forward_length"),
        "num_hidden_layers": file.whole(f"{kind}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _same(file, f"{kind}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": _tensor(file, "token_embd.weight")[0],
        "max_position_embeddings": file.need(f"{kind}.context_length"),
        "rms_norm_eps": file.need(f"{kind}.attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file, kind, head_dim),
        **special_ids(file),
    }


def _rope(file: GgufFile, kind: str, head_dim: int) -> Config:
    """Return the rotary embedding's parameters as transformers spells them."""
    theta = file.get(f"{kind}.rope.freq_base", 10000.0)
    if "rope_freqs.weight" in file.tensors:
        factors = file.raw("rope_freqs.weight").view(np.float32)[0].astype(np.float64)
        return {"rope_theta": theta} | _llama3_scaling(file, factors, theta, head_dim)
    scaling = f"{kind}.rope.scaling."
    form, factor = file.get(f"{scaling}type", "none"), file.get(f"{scaling}factor", 1.0)
    if form == "none" or (form == "linear" and factor == 1.0):
        return {"rope_theta": theta, "rope_type": "default"}
    if form == "linear":
        return {"rope_theta": theta, "rope_type": "linear", "factor": factor}
    if form == "yarn":
        optional = {
            "original_max_position_embeddings": file.get(f"{scaling}original_context_length"),
            "attention_factor": file.get(f"{scaling}attn_factor"),
            "beta_fast": file.get(f"{scaling}yarn_beta_fast"),
            "beta_slow": file.get(f"{scaling}yarn_beta_slow"),
        }
        given = {key: value for key, value in optional.items() if value is not None}
        return {"rope_theta": theta, "rope_type": "yarn", "factor": factor} | given
    raise _unsupported(file, f"scales its rotary embedding by {form!r}; known are linear, yarn and Llama 3's factors")


def _llama3_scaling(file: GgufFile, factors: np.ndarray[Any, Any], theta: float, head_dim: int) -> Config:
    """Find the numbers of Llama 3's rope scaling from the factors that llama.cpp made of them.

    Where 1/factor lies between its extremes it is a straight line over the frequency, whose slope and intercept fix
    the original length and the ratio of the two frequency bounds. Only that ratio counts, so the low one is called 1.
    """
    turns = theta ** (-2.0 * np.arange(head_dim // 2) / head_dim) / (2 * np.pi)  # rotations per token
    largest = float(np.round(factors.max(), 4))
    if factors.shape == turns.shape and largest > 1:
        blend = (1 / factors - 1 / largest) / (1 - 1 / largest)
        middle = (blend > 1e-4) & (blend < 1 - 1e-4)
        candidates = [(8192.0, 4.0)]
        if middle.sum() > 1:
            slope, intercept = np.polyfit(turns[middle], blend[middle], 1)
            candidates.append((float(np.round(-slope / intercept, 1)), float(np.round(1 - 1 / intercept, 4))))
        for original, high in candidates:
            line = np.clip((original * turns - 1) / (high - 1), 0, 1)
            if np.allclose(1 / (line + (1 - line) / largest), factors, rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": largest,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": int(original),
                }
    raise _unsupported(file, "holds rotary factors (rope_freqs.weight) that are not Llama 3's scaling")


def _same(file: GgufFile, key: str, default: int | None = None) -> int:
    """Return a number that may be written per layer, which must then be the same for all."""
    value = file.need(key) if default is None else file.get(key, default)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise _unsupported(file, f"varies {key} from layer to layer: {value}")
        value = value[0]
    if not isinstance(value, int) or value < 1:
        file.refuse(key, value, "a whole number above 0")
    return value


def _expect(file: GgufFile, key: str, value: Any, wanted: Any) -> None:
    if value != wanted:
        raise _unsupported(file, f"says {key} = {value!r}; only {wanted!r} is known here")


def _tensor(file: GgufFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise WeightsError(f"{file.path} holds no tensor {name}")
    return file.tensors[name].shape


def _unsupported(file: GgufFile, reason: str) -> Unsupported:
    return Unsupported(f"{file.path.name} {reason}", param="model")
