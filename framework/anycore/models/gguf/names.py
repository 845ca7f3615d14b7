"""What the tensors of a GGUF file are called elsewhere, and which formats they keep. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from anycore.contract.formats import Format
from anycore.errors import WeightsError
from anycore.models.gguf.header import GgufFile, TensorInfo

DECODER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.#.attn_norm": "model.layers.#.input_layernorm",
    "blk.#.attn_q": "model.layers.#.self_attn.q_proj",
    "blk.#.attn_k": "model.layers.#.self_attn.k_proj",
    "blk.#.attn_v": "model.layers.#.self_attn.v_proj",
    "blk.#.attn_output": "model.layers.#.self_attn.o_proj",
    "blk.#.attn_q_norm": "model.layers.#.self_attn.q_norm",
    "blk.#.attn_k_norm": "model.layers.#.self_attn.k_norm",
    "blk.#.ffn_norm": "model.layers.#.post_attention_layernorm",
    "blk.#.ffn_gate": "model.layers.#.mlp.gate_proj",
    "blk.#.ffn_up": "model.layers.#.mlp.up_proj",
    "blk.#.ffn_down": "model.layers.#.mlp.down_proj",
}
GEMMA3 = DECODER | {
    "blk.#.post_attention_norm": "model.layers.#.post_attention_layernorm",
    "blk.#.ffn_norm": "model.layers.#.pre_feedforward_layernorm",
    "blk.#.post_ffw_norm": "model.layers.#.post_feedforward_layernorm",
}
BERT = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "blk.#.attn_q": "encoder.layer.#.attention.self.query",
    "blk.#.attn_k": "encoder.layer.#.attention.self.key",
    "blk.#.attn_v": "encoder.layer.#.attention.self.value",
    "blk.#.attn_output": "encoder.layer.#.attention.output.dense",
    "blk.#.attn_output_norm": "encoder.layer.#.attention.output.LayerNorm",
    "blk.#.ffn_up": "encoder.layer.#.intermediate.dense",
    "blk.#.ffn_down": "encoder.layer.#.output.dense",
    "blk.#.layer_output_norm": "encoder.layer.#.output.LayerNorm",
}
NAMES = {"llama": DECODER, "qwen2": DECODER, "qwen3": DECODER, "gemma3": GEMMA3, "bert": BERT}
"""Architecture -> name in the file -> Hugging Face name; # stands for the layer, ".weight" or ".bias" follows."""

IN_CONFIG = {"rope_freqs.weight", "cls.output.weight"}
"""Not weights: read into the configuration, or a copy of two rows of the head (Qwen3-Reranker)."""

FORMATS = {
    "Q4_0": Format("int4", 32),
    "Q4_1": Format("int4", 32),
    "Q5_0": Format("int8", 32),
    "Q8_0": Format("int8", 32),
    "Q2_K": Format("int4", 16),
    "Q3_K": Format("int4", 16),
    "Q4_K": Format("int4", 32),
    "Q6_K": Format("int8", 16),
}
"""What matrices of ggml's types become, without rounding. Those of other types are made dense: see `blocks`."""


def tensors_of(file: GgufFile) -> dict[str, TensorInfo]:
    """Every weight of a file by its Hugging Face name, in the order of the file.

    Raises:
        WeightsError: it holds a tensor that its architecture does not have.
    """
    names = NAMES[file.architecture]
    stored = sorted(file.tensors.values(), key=lambda info: info.offset)
    return {name_of(file, info.name, names): info for info in stored if info.name not in IN_CONFIG}


def name_of(file: GgufFile, name: str, names: dict[str, str]) -> str:
    stem, _, ending = name.rpartition(".")
    layer = re.match(r"blk\.(\d+)\.", stem)
    known = names.get(re.sub(r"^blk\.\d+\.", "blk.#.", stem))
    if known is None or ending not in ("weight", "bias"):
        raise WeightsError(f"{file.path} holds {name}, which is no part of a {file.architecture} model")
    return f"{known.replace('#', layer[1]) if layer else known}.{ending}"


def type_of(info: TensorInfo) -> str:
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType(info.type).name


def formats_of(tensors: dict[str, TensorInfo]) -> dict[str, Format]:
    """The matrices that stay small, by Hugging Face name."""
    kinds = {name: type_of(info) for name, info in tensors.items() if len(info.shape) == 2}
    return {name: FORMATS[kind] for name, kind in kinds.items() if kind in FORMATS}


def formats(path: Path) -> dict[str, Format]:
    """The same of a file that is not open yet."""
    file = GgufFile(path)
    return formats_of(tensors_of(file)) if file.architecture in NAMES else {}
