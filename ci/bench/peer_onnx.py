"""ONNX Runtime as a peer: an encoder exported once, in float32 or with int8 weights, batches of 32 padded together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 32
LONGEST = 512


def encoder(model: str, kind: str, labels: bool, threads: int) -> tuple[Any, Callable[[list[Any]], Any]]:
    """Tokenizer and what embeds or scores a pile of texts or pairs with it; `kind` is "float32" or "int8"."""
    import onnxruntime
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(model)
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    tokenizer.enable_truncation(LONGEST)
    tokenizer.enable_padding(pad_id=loaded.pad_token_id or 0)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    file = exported(Path(model), kind, labels)
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def run(items: list[Any]) -> Any:
        parts = []
        for start in range(0, len(items), BATCH):
            encoded = tokenizer.encode_batch(items[start : start + BATCH])
            mask = np.array([one.attention_mask for one in encoded])
            given = {"input_ids": np.array([one.ids for one in encoded]), "attention_mask": mask}
            given["token_type_ids"] = np.array([one.type_ids for one in encoded])
            out = session.run(None, given)[0]
            if not labels:
                weights = mask[..., None].astype(out.dtype)
                out = (out * weights).sum(1) / weights.sum(1)
                out = out / np.linalg.norm(out, axis=1, keepdims=True)
            parts.append(out)
        return np.concatenate(parts)

    return loaded, run


def exported(folder: Path, kind: str, labels: bool) -> Path:
    """The model as an ONNX file beside its own, made when it is not there."""
    plain, small = folder / "bench-float32.onnx", folder / "bench-int8.onnx"
    if not plain.is_file():
        export(folder, plain, labels)
    if kind == "int8" and not small.is_file():
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(plain, small, weight_type=QuantType.QInt8)
    return small if kind == "int8" else plain


def export(folder: Path, file: Path, labels: bool) -> None:
    import torch
    from transformers import AutoModel, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if labels else AutoModel
    model = kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    names = ["input_ids", "attention_mask", "token_type_ids"]

    class Positional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.model(**dict(zip(names, given, strict=True)))[0]
            return out

    example = tuple(torch.ones(2, 9, dtype=torch.int64) for _ in names)
    axes = {name: {0: "batch", 1: "tokens"} for name in names}
    torch.onnx.export(
        Positional(), example, str(file), input_names=names, output_names=["out"], dynamic_axes=axes, dynamo=False
    )
