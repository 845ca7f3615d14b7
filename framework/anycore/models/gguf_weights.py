"""The tensors of a GGUF file under their Hugging Face names, dequantised one at a time: a `checkpoint.Checkpoint`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from anycore.contract.formats import Format
from anycore.errors import Unsupported, WeightsError
from anycore.models.gguf import GgufFile
from anycore.models.gguf_config import config_of

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

CHUNK = 1 << 20  # numbers dequantised at a time: 4 MiB of float32


class GgufCheckpoint:
    """The weights of one GGUF file, in the order of the file.

    Raises:
        WeightsError: the file is damaged, or holds a tensor that its architecture does not have.
        Unsupported: its architecture, or a way its tensors are stored, is not known.
    """

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.file = GgufFile(path)
        self.dtype = dtype
        self.config = config_of(self.file)
        names = NAMES[self.file.architecture]
        stored = sorted(self.file.tensors.values(), key=lambda t: t.offset)
        self._stored = {self._name(t.name, names): t for t in stored if t.name not in IN_CONFIG}
        self.shapes = {name: info.shape for name, info in self._stored.items()}
        self.formats: dict[str, Format] = {}
        self._check_types()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, host tensor of the checkpoint's dtype), as Hugging Face has them."""
        for name in self._stored:
            yield name, self.tensor(name)

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, dequantised, with llama.cpp's changes to it undone."""
        from gguf import quants
        from gguf.constants import GGMLQuantizationType

        info = self._stored[name]
        kind = GGMLQuantizationType(info.type)
        raw = self.file.raw(info.name)
        result = torch.empty((raw.shape[0], info.shape[-1]), dtype=self.dtype)
        step = max(1, CHUNK // info.shape[-1])
        for start in range(0, raw.shape[0], step):
            rows = quants.dequantize(raw[start : start + step].reshape(1, -1), kind).reshape(-1, info.shape[-1])
            if self.file.architecture == "gemma3" and info.name.endswith("norm.weight"):
                rows = rows - np.float32(1)  # the file has 1 + w, as its kernels multiply; transformers has w
            result[start : start + step] = torch.from_numpy(np.require(rows, np.float32, "W"))
        if self.file.architecture == "llama" and (match := re.search(r"\.attn_([qk])\.", info.name)):
            heads = self.config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
            return unpermute(result.reshape(info.shape), heads)
        return result.reshape(info.shape)

    def file_of(self, name: str) -> str:
        return self.file.path.name

    def _name(self, name: str, names: dict[str, str]) -> str:
        stem, _, ending = name.rpartition(".")
        layer = re.match(r"blk\.(\d+)\.", stem)
        known = names.get(re.sub(r"^blk\.\d+\.", "blk.#.", stem))
        if known is None or ending not in ("weight", "bias"):
            raise WeightsError(f"{self.file.path} holds {name}, which is no part of a {self.file.architecture} model")
        return f"{known.replace('#', layer[1]) if layer else known}.{ending}"

    def _check_types(self) -> None:
        """Refuse before loading what the gguf package cannot dequantise, by trying one block of each type."""
        from gguf import quants
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        for kind in {t.type for t in self._stored.values()}:
            ggml = GGMLQuantizationType(kind)
            try:
                quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[ggml][1]), np.uint8), ggml)
            except NotImplementedError as error:
                raise Unsupported(
                    f"{self.file.path.name} stores weights as {ggml.name}, which the gguf package cannot dequantise; "
                    "take a file of another quantisation (Q4_K_M, Q8_0, BF16, …)",
                    param="model",
                ) from error


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """Put the rows of each head, which llama.cpp keeps as the pairs it rotates, back as two halves."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
