"""What a model is, as plain numbers and flags: made from `config.json` alone, before any weight is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anycore.contract.declare import Task


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base, kind ("default", "linear", "dynamic", "yarn", "llama3") and the kind's own numbers."""

    theta: float
    kind: str = "default"
    parameters: tuple[tuple[str, float], ...] = ()  # factor, low_freq_factor, …, as in Hugging Face


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """How a vector is taken from the hidden states, from sentence-transformers files where there are any."""

    kind: str  # "cls", "mean", "max", "last"
    normalize: bool = True
    source: str = "default"  # "files", "flag", or "default": nobody said so
    matryoshka: tuple[int, ...] = ()  # dimensions the model was trained for; empty: not declared
    prompts: tuple[tuple[str, str], ...] = ()  # name -> text put before the input
    default_prompt: str | None = None
    max_length: int | None = None  # sentence_bert_config.json's max_seq_length
    dense: tuple[str, ...] = ()  # folders of sentence-transformers Dense modules, applied in order


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """How a relevance score is taken: "classifier" (cross-encoder), "yes_no" (causal LM) or "cosine" (bi-encoder)."""

    kind: str
    labels: int = 1
    activation: str = "sigmoid"  # "sigmoid", "softmax", "identity"
    yes_no_ids: tuple[int, int] | None = None  # "yes_no": rows of the head


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model. Sizes are counts of elements; None where a model has no such thing."""

    architecture: str  # Hugging Face name, such as "LlamaForCausalLM"
    family: str  # "decoder" or "encoder": which class builds it
    attention: str  # "causal" or "bidirectional"
    tasks: tuple[Task, ...]  # what it can be served for, the natural one first
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int  # longest sequence in tokens
    norm_eps: float
    activation: str  # "silu", "gelu", "gelu_tanh", "relu"
    dtype: str | None = None  # the checkpoint's own; None when it does not say
    tied: bool = False  # the head is the embedding table
    attention_scale: float | None = None  # None: head_dim ** -0.5
    rope: RopeSpec | None = None
    rope_local: RopeSpec | None = None  # for windowed layers that rotate by another base (Gemma 3)
    windows: tuple[int | None, ...] = ()  # sliding window of each layer; () = none
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head
    norm_after: bool = False  # extra norms after attention and MLP (Gemma 3)
    norm_offset: bool = False  # RMS weights are stored as w - 1 (Gemma)
    embedding_scale: float = 1.0
    softcap: float | None = None  # of attention scores
    logits_softcap: float | None = None
    token_type_count: int = 0  # segment embeddings
    position_offset: int = 0  # RoBERTa: positions start at padding_idx + 1
    pad_id: int | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pooling: PoolingSpec | None = None
    score: ScoreSpec | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture name and how its `config.json` (a dict) becomes a ModelSpec. What `register_models` returns."""

    name: str
    spec: Callable[[dict[str, Any]], ModelSpec]
