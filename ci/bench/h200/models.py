"""Writes model folders with random weights and a made-up tokenizer, which every engine loads as it loads real ones.

models.py DIR qwen2.5-0.5b qwen2.5-7b bge-base-like qwen3-embedding-0.6b-like bge-reranker-base-like

NAME-w8a8 and NAME-w4a16 (symmetric, groups of 128) hold the layers' matrices as compressed-tensors checkpoints do.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import FOLDERS, tell
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

SHARD_BYTES = 4 * 2**30
RERANKER = {
    "architectures": ["XLMRobertaForSequenceClassification"], "model_type": "xlm-roberta", "hidden_size": 768,
    "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 250002,
    "max_position_embeddings": 514, "type_vocab_size": 1, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
    "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "torch_dtype": "float16", "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {**FOLDERS, "bge-reranker-base-like": RERANKER}
SCHEMES: dict[str, dict[str, Any]] = {
    "w8a8": {
        "format": "int-quantized",
        "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
    },
    "w4a16": {
        "format": "pack-quantized",
        "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False,
        },
    },
}  # fmt: skip
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
END = "<|endoftext|>"


def main() -> None:
    root, *names = sys.argv[1:]
    for name in names:
        start = time.perf_counter()
        folder = Path(root) / name
        folder.mkdir(parents=True, exist_ok=True)
        base, _, last = name.rpartition("-")
        scheme = last if last in SCHEMES else None
        config = MODELS[base if scheme else name]
        (folder / "config.json").write_text(json.dumps(config | (about(scheme) if scheme else {})))
        write_tokenizer(folder, config)
        write_weights(folder, config, scheme)
        tell(folder=name, seconds=round(time.perf_counter() - start, 1))


def about(scheme: str) -> dict[str, Any]:
    """What config.json says of a scheme."""
    group = {"targets": ["Linear"]} | {key: value for key, value in SCHEMES[scheme].items() if key != "format"}
    method = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
    return {
        "quantization_config": method
        | {"format": SCHEMES[scheme]["format"], "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    }


def write_weights(folder: Path, config: dict[str, Any], scheme: str | None = None) -> None:
    """Small numbers in matrices, ones in norms, zeros in biases, under the names that transformers gives them."""
    kind = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = kind(transformers.AutoConfig.for_model(**config))
    tied = set(getattr(model, "all_tied_weights_keys", {})) if config.get("tie_word_embeddings") else set()
    saved = {name for name, _ in model.named_parameters(remove_duplicate=False)} - tied
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name in saved}
    dtype = getattr(torch, config["torch_dtype"])
    numbers = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    shards = list(shards_of(shapes, dtype.itemsize))
    index = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            if scheme and "_proj." in name and len(shapes[name]) == 2:
                tensors |= quantised(name, shapes[name], scheme, numbers)
            else:
                tensors[name] = filled(name, shapes[name], numbers)
        index |= dict.fromkeys(tensors, file)
        save_file(tensors, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def shards_of(shapes: dict[str, tuple[int, ...]], element: int) -> Iterator[list[str]]:
    """Names of tensors, so many that a file holds about SHARD_BYTES."""
    names, held = list[str](), 0
    for name, shape in shapes.items():
        if names and held + prod(shape) * element > SHARD_BYTES:
            yield names
            names, held = [], 0
        names.append(name)
        held += prod(shape) * element
    yield names


def filled(name: str, shape: tuple[int, ...], numbers: torch.Tensor) -> torch.Tensor:
    if len(shape) == 1:
        return torch.full(shape, float(name.endswith("weight")), dtype=numbers.dtype)
    size = prod(shape)
    return numbers.repeat(-(-size // len(numbers)))[:size].view(shape).clone()


def quantised(name: str, shape: tuple[int, ...], scheme: str, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    """Random whole numbers, and scales that make them as large as `filled` ones."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(1)
    if scheme == "w8a8":
        few = torch.randint(-127, 128, (1 << 24,), dtype=torch.int8, generator=generator)
        data = few.repeat(-(-rows * columns // len(few)))[: rows * columns].view(shape).clone()
        return {name: data, f"{name}_scale": torch.full((rows, 1), 0.02 / 73, dtype=numbers.dtype)}
    few = torch.randint(-(1 << 31), 1 << 31, (1 << 22,), generator=generator).int()
    words = rows * columns // 8
    return {
        f"{name}_packed": few.repeat(-(-words // len(few)))[:words].view(rows, columns // 8).clone(),
        f"{name}_scale": torch.full((rows, columns // 128), 0.02 / 4.6, dtype=numbers.dtype),
        f"{name}_shape": torch.tensor(shape),
    }


def write_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    """One token a word. Every id of the model decodes to a few letters, as those of real vocabularies do.

    A decoder's tokens are bytes, so that streams are cut into characters as with real byte-level tokenizers.
    """
    size, generates = config["vocab_size"], "CausalLM" in config["architectures"][0]
    if generates:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = [*letters, *(f"Ġw{i}" for i in range(len(letters), size - 1))]
        tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([END])
        about = {"eos_token": END, "pad_token": END, "model_max_length": 4096}
    else:
        words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), size))]
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
        tokenizer.add_special_tokens(SPECIAL)
        about = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
        about |= {"model_input_names": ["input_ids", "attention_mask"], "model_max_length": 512}
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | about))


if __name__ == "__main__":
    main()
