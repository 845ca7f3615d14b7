"""Weights as older tools leave them: pickles (`.bin`, `.ckpt`), and the consolidated files of Meta and Mistral.

`anycore convert` reads them once. Pickles are read as weights only: whatever else they hold is refused, not run.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from anycore.contract.formats import Format
from anycore.errors import ConfigError, SourceError, WeightsError
from anycore.models.gguf.weights import unpermute
from anycore.models.shards import Shard
from anycore.models.source import check_whole

PICKLES = (".bin", ".ckpt", ".pt", ".pth")
STATE = ("state_dict", "model")
"""Under which of these names training tools put the weights beside the rest of what they save."""

NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "layers.#.attention.wq": "model.layers.#.self_attn.q_proj",
    "layers.#.attention.wk": "model.layers.#.self_attn.k_proj",
    "layers.#.attention.wv": "model.layers.#.self_attn.v_proj",
    "layers.#.attention.wo": "model.layers.#.self_attn.o_proj",
    "layers.#.attention_norm": "model.layers.#.input_layernorm",
    "layers.#.ffn_norm": "model.layers.#.post_attention_layernorm",
    "layers.#.feed_forward.w1": "model.layers.#.mlp.gate_proj",
    "layers.#.feed_forward.w2": "model.layers.#.mlp.down_proj",
    "layers.#.feed_forward.w3": "model.layers.#.mlp.up_proj",
}
"""Meta's names, which Mistral's are, too; # stands for the layer, ".weight" follows."""

BY_COLUMNS = ("attention.wo", "feed_forward.w2")
"""Matrices whose columns are divided among the files of a model for several devices; others' rows are."""

REACH = {10000.0: 2048, 500000.0: 8192, 1000000.0: 32768}
"""What every Llama and Mistral with this rotary base was trained for, at least: their params.json do not say."""


class LegacyCheckpoint:
    """Tensors under Hugging Face's names, from files that are open: a `checkpoint.Checkpoint`."""

    def __init__(self, tensors: Mapping[str, Tensor], files: Mapping[str, Path]) -> None:
        self._tensors = tensors
        self._files = files
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.formats: dict[str, Format] = {}

    def file_of(self, name: str) -> str:
        return str(self._files[name])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._tensors.items()


def open_legacy(path: Path, model_type: str | None) -> tuple[dict[str, Any], LegacyCheckpoint]:
    """Return the config and the weights of a folder, or of one file in it, that `serve` does not read.

    Raises:
        SourceError: it holds no weights, or nothing that says what model they are of.
        WeightsError: they are damaged, or more than weights.
        ConfigError: it takes a `model_type` to read them.
    """
    folder = path if path.is_dir() else path.parent
    files = weight_files(path)
    if not files:
        raise SourceError(f"{path} holds no weights: no safetensors, {', '.join(PICKLES)} or GGUF file", param="model")
    params = folder / "params.json"
    if (folder / "config.json").is_file() and not any(file.name.startswith("consolidated") for file in files):
        return read_object(folder / "config.json"), union([(file, read(file)) for file in files])
    if not params.is_file():
        raise SourceError(f"{folder} holds neither a config.json nor a params.json beside {files[0].name}")
    if model_type is None:
        raise ConfigError(
            f"{folder} names its weights as Meta and Mistral do: say --model-type llama or mistral", param="model_type"
        )
    described = read_object(params)
    checkpoint = consolidated(files, described)
    written = folder / "config.json"
    return read_object(written) if written.is_file() else config_of(described, checkpoint, model_type), checkpoint


def weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    for pattern in ("consolidated*.safetensors", "consolidated*.pth", "pytorch_model*.bin", "*.ckpt", "*.bin", "*.pt*"):
        found = sorted(file for file in path.glob(pattern) if file.name != "training_args.bin")
        if found:
            return found
    return []


def read(path: Path) -> dict[str, Tensor]:
    """The weights of one file, mapped where its format allows.

    Raises:
        WeightsError: it is damaged, or a pickle of more than weights.
    """
    check_whole(path)
    if path.suffix == ".safetensors":
        shard = Shard.open(path)
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in shard.shapes}
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{path} is a pickle of more than weights, which would run code when it is read, or is damaged: "
            f"{str(error).splitlines()[0]}"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise WeightsError(f"{path} is damaged: {str(error).splitlines()[0] if str(error) else 'it is cut'}") from error
    for name in STATE:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    tensors = {str(name): value for name, value in content.items()} if isinstance(content, dict) else {}
    weights = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    if not weights:
        raise WeightsError(f"{path} holds no tensors by name")
    return weights


def union(parts: list[tuple[Path, dict[str, Tensor]]]) -> LegacyCheckpoint:
    """Files that hold different tensors.

    Raises:
        WeightsError: one is in two of them.
    """
    tensors: dict[str, Tensor] = {}
    files: dict[str, Path] = {}
    for path, content in parts:
        for name, tensor in content.items():
            if name in files:
                raise WeightsError(f"{name} is both in {files[name]} and in {path}: remove one")
            tensors[name], files[name] = tensor, path
    return LegacyCheckpoint(tensors, files)


def consolidated(files: list[Path], params: dict[str, Any]) -> LegacyCheckpoint:
    """Meta's and Mistral's files: joined, named as Hugging Face does, heads' rows in its order.

    Raises:
        WeightsError: a tensor has no place in a Llama.
    """
    parts = [(path, read(path)) for path in files]
    divided = len(files) > 1 and files[0].suffix != ".safetensors"
    whole = parts[0][1] if divided else union(parts).shapes
    heads = {"attention.wq": params["n_heads"], "attention.wk": params.get("n_kv_heads") or params["n_heads"]}
    tensors: dict[str, Tensor] = {}
    owners: dict[str, Path] = {}
    for name in whole:
        if name == "rope.freqs":
            continue
        stem = name.removesuffix(".weight")
        layer = re.match(r"layers\.(\d+)\.", stem)
        known = NAMES.get(re.sub(r"^layers\.\d+\.", "layers.#.", stem))
        if known is None or stem == name:
            raise WeightsError(f"{files[0]} holds {name}, which is no part of a Llama or Mistral")
        pieces = [content[name] for _, content in parts if name in content]
        tensor = joined(stem, pieces, int(params["dim"])) if divided else pieces[0]
        kind = stem.split(".", 2)[-1]
        target = (known.replace("#", layer[1]) if layer else known) + ".weight"
        tensors[target] = unpermute(tensor, int(heads[kind])) if kind in heads else tensor
        owners[target] = files[0]
    return LegacyCheckpoint(tensors, owners)


def joined(stem: str, pieces: list[Tensor], width: int) -> Tensor:
    """The parts of a tensor that each device had. Norms are the same in all; so is what only one file holds."""
    if len(pieces) == 1 or pieces[0].dim() == 1:
        return pieces[0]
    columns = stem.endswith(BY_COLUMNS) or (stem == "tok_embeddings" and pieces[0].shape[1] != width)
    return torch.cat(pieces, dim=1 if columns else 0)


def config_of(params: dict[str, Any], checkpoint: LegacyCheckpoint, model_type: str) -> dict[str, Any]:
    """What params.json and the shapes of the weights say, as Hugging Face's config.json.

    Raises:
        SourceError: the rotary embedding is scaled, and nothing says by how much.
    """
    if params.get("use_scaled_rope"):
        raise SourceError(
            "params.json says use_scaled_rope, but not by which factor: put the model's config.json beside it",
            param="model",
        )
    heads, width = int(params["n_heads"]), int(params["dim"])
    theta = float(params.get("rope_theta") or 10000.0)
    config = {
        "architectures": ["MistralForCausalLM" if model_type == "mistral" else "LlamaForCausalLM"],
        "model_type": model_type,
        "hidden_size": width,
        "intermediate_size": checkpoint.shapes["model.layers.0.mlp.gate_proj.weight"][0],
        "num_hidden_layers": int(params["n_layers"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(params.get("n_kv_heads") or heads),
        "head_dim": int(params.get("head_dim") or width // heads),
        "vocab_size": checkpoint.shapes["model.embed_tokens.weight"][0],
        "max_position_embeddings": int(params.get("max_seq_len") or REACH.get(theta, 2048)),
        "rms_norm_eps": float(params["norm_eps"]),
        "rope_theta": theta,
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in checkpoint.shapes,
    }
    if model_type == "mistral":
        config["sliding_window"] = params.get("sliding_window")
    return config


def read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise SourceError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content
