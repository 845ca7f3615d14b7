"""Writes a Llama of 1.5b size with random weights, and with the tokenizer of a model that is there: for speed alone.

    python ci/bench/random_llama.py FROM TO
    python convert_hf_to_gguf.py TO --outtype q8_0 --outfile q8.gguf        # llama.cpp's, for the peer
    llama-quantize --allow-requantize q8.gguf q41.gguf Q4_1

Shapes are those of Qwen2.5-1.5B but for the vocabulary, which is the tokenizer's. 2.8 GB in bfloat16.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, DIM = 1536, 8960, 28, 12, 2, 128
MATRICES = {
    "self_attn.q_proj": (HEADS * DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * DIM),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
DRAWN = 1 << 22


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    assert config["model_type"] == "llama", f"{source} is a {config['model_type']}, not a llama"
    config |= {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "head_dim": DIM}
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        if (source / file).is_file():
            shutil.copy(source / file, folder)
    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], HIDDEN), "model.norm.weight": ones()}
    for layer in range(LAYERS):
        for name, shape in MATRICES.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = ones()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def matrix(outputs: int, inputs: int) -> Tensor:
    """Small numbers, some of them drawn and the rest their repetition: drawing all takes minutes."""
    drawn = (torch.randn(DRAWN) * 0.02).bfloat16()
    return drawn.repeat(-(-outputs * inputs // DRAWN))[: outputs * inputs].view(outputs, inputs).clone()


def ones() -> Tensor:
    return torch.ones(HIDDEN, dtype=torch.bfloat16)


if __name__ == "__main__":
    main()
