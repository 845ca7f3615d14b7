"""Writes a tiny model folder as a GGUF file, the way llama.cpp's converter does, with the gguf package's own names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Quantization
from safetensors.numpy import load_file

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "bert": "bert",
}
Edit = Callable[[gguf.GGUFWriter], None]


def write_gguf(
    folder: Path, path: Path, kind: Quantization = Quantization.F32, *, pre: str = "gpt-2", edit: Edit | None = None
) -> Path:
    """Convert `folder`; matrices are stored as `kind`, vectors as float32. `edit` may add to the header last."""
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(f"Tiny {arch}")
    describe(writer, config, arch)
    if arch == "bert":
        add_wordpiece(writer, folder)
    else:
        add_bpe(writer, folder, config, pre)
    names = gguf.get_tensor_name_map(ARCH[arch], config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith("pooler"):
            continue
        data = stored(name, tensor, config, arch)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        wanted = kind if data.ndim == 2 else Quantization.F32
        writer.add_tensor(target, gguf.quants.quantize(data, wanted), raw_dtype=wanted)
    if edit:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ARCH = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def describe(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str) -> None:
    """Write the header's numbers."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if arch == "bert":
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        writer.add_causal_attention(False)
        return
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, config["head_dim"]))
    if arch == "llama":
        writer.add_rope_dimension_count(config["head_dim"])
    if config["model_type"] in ("mistral", "gemma3_text") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """What each frequency is divided by under Llama 3's scaling."""
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * i / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def stored(name: str, tensor: np.ndarray[Any, Any], config: dict[str, Any], arch: str) -> np.ndarray[Any, Any]:
    """A weight as llama.cpp keeps it: Llama's queries and keys in rotated pairs, Gemma's norms plus one."""
    if arch == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if arch == "gemma3" and name.endswith("norm.weight"):
        return tensor + np.float32(1)
    return tensor


def add_bpe(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any], pre: str) -> None:
    saved = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"] for token in saved["added_tokens"]}
    words = sorted(saved["model"]["vocab"], key=saved["model"]["vocab"].__getitem__)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.CONTROL if w in special else gguf.TokenType.NORMAL for w in words])
    writer.add_token_merges([" ".join(merge) for merge in saved["model"]["merges"]])
    for role, write in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
        if config.get(f"{role}_token_id") is not None:
            write(config[f"{role}_token_id"])
    writer.add_pad_token_id(words.index(settings["pad_token"]))
    writer.add_add_bos_token(config.get("bos_token_id") is not None)
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())


def add_wordpiece(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Mark the pieces that begin a word, which is how llama.cpp keeps BERT's vocabulary."""
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(vocab, key=vocab.__getitem__)
    special = {"[PAD]": "pad", "[UNK]": "unk", "[CLS]": "bos", "[SEP]": "sep", "[MASK]": "mask"}
    pieces = [w if w in special else w[2:] if w.startswith("##") else f"▁{w}" for w in words]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(pieces)
    writer.add_token_types([gguf.TokenType.CONTROL if w in special else gguf.TokenType.NORMAL for w in words])
    for token, role in special.items():
        getattr(writer, f"add_{role}_token_id")(vocab[token])
