"""The tensors of a GGUF file under their Hugging Face names: a `checkpoint.Checkpoint`.

Matrices stay the whole numbers they are stored as where the contract has a weight for them; others are dequantised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anycore.contract.weights import Int4Weight, Int8Weight, QuantisedWeight
from anycore.errors import Unsupported, WeightsError
from anycore.models.gguf.blocks import repack
from anycore.models.gguf.config import config_of
from anycore.models.gguf.header import GgufFile, TensorInfo
from anycore.models.gguf.names import formats_of, tensors_of, type_of
from anycore.models.parallel import Cut
from anycore.models.parameters import canonical

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
        self._stored = tensors_of(self.file)
        self.shapes = {name: info.shape for name, info in self._stored.items()}
        self._parts: dict[str, tuple[slice, slice]] = {}  # of the rows and bytes of those that are given in part
        self.formats = formats_of(self._stored)
        self._check_types()

    def tensors(self) -> Iterator[tuple[str, Tensor | QuantisedWeight]]:
        """Yield (name, host tensor of the checkpoint's dtype, or quantised matrix), as Hugging Face has them."""
        for name in self._stored:
            yield name, self.weight(name) if name in self.formats else self.tensor(name)

    def narrow(self, cuts: Mapping[str, Cut]) -> dict[str, Cut]:
        """Give a rank's part of matrices from now on, reading nothing else; return the cuts that are left to be made.

        A cut of inputs inside a block is left, for a block is taken apart as a whole, and so are vectors.
        """
        left = dict(cuts)
        for name, info in self._stored.items():
            cut = cuts.get(canonical(name))
            if cut is None or len(info.shape) != 2 or cut.whole != info.shape:  # the loader says what is wrong
                continue
            numbers, stored = block_of(info)
            each = numbers if cut.dim else info.shape[0] // (self._rotated(info) or info.shape[0])
            if cut.start % each or cut.stop % each:
                continue
            if cut.dim:
                self._parts[name] = (slice(None), slice(cut.start // numbers * stored, cut.stop // numbers * stored))
                self.shapes[name] = (info.shape[0], cut.stop - cut.start)
            else:
                self._parts[name] = (slice(cut.start, cut.stop), slice(None))
                self.shapes[name] = (cut.stop - cut.start, info.shape[1])
            del left[canonical(name)]
        return left

    def weight(self, name: str) -> Int4Weight | Int8Weight:
        """Return one matrix as the whole numbers that it is stored as."""
        info = self._stored[name]
        try:
            weight = repack(self._raw(name), type_of(info), self.shapes[name][-1])
        except ValueError as error:
            raise WeightsError(f"{self.file.path}: {info.name} {error}") from error
        heads = self._heads(name)
        if heads is None:
            return weight
        data, scale = unpermute(weight.data, heads), unpermute(weight.scale, heads)
        if isinstance(weight, Int4Weight):
            return replace(weight, data=data, scale=scale, zero=unpermute(weight.zero, heads))
        return replace(weight, data=data, scale=scale)

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, dequantised, with llama.cpp's changes to it undone."""
        from gguf import quants
        from gguf.constants import GGMLQuantizationType

        info = self._stored[name]
        kind = GGMLQuantizationType(info.type)
        raw, shape = self._raw(name), self.shapes[name]
        result = torch.empty((raw.shape[0], shape[-1]), dtype=self.dtype)
        step = max(1, CHUNK // shape[-1])
        for start in range(0, raw.shape[0], step):
            rows = quants.dequantize(raw[start : start + step].reshape(1, -1), kind).reshape(-1, shape[-1])
            if self.file.architecture == "gemma3" and info.name.endswith("norm.weight"):
                rows = rows - np.float32(1)  # the file has 1 + w, as its kernels multiply; transformers has w
            result[start : start + step] = torch.from_numpy(np.require(rows, np.float32, "W"))
        if kind.name not in ("F32", "F16", "BF16") and not bool(torch.isfinite(result).all()):
            raise WeightsError(f"{self.file.path}: {info.name} holds blocks whose scale is NaN or infinite")
        heads = self._heads(name)
        return result.reshape(shape) if heads is None else unpermute(result.reshape(shape), heads)

    def _raw(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """[rows, bytes]: what the file has of a tensor, or of the part of it that is asked for."""
        return self.file.raw(self._stored[name].name)[self._parts.get(name, ...)]

    def _heads(self, name: str) -> int | None:
        """How many heads there are whose rows are in another order, if they are."""
        info = self._stored[name]
        heads = self._rotated(info)
        return None if heads is None else heads * self.shapes[name][0] // info.shape[0]

    def _rotated(self, info: TensorInfo) -> int | None:
        """How many heads a tensor has whose rows llama.cpp put in another order, if it did."""
        match = re.search(r"\.attn_([qk])\.", info.name)
        if self.file.architecture != "llama" or match is None:
            return None
        return int(self.config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"])

    def file_of(self, name: str) -> str:
        return self.file.path.name

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


def block_of(info: TensorInfo) -> tuple[int, int]:
    """Numbers of a block of a tensor's type, and its bytes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGML_QUANT_SIZES[GGMLQuantizationType(info.type)]


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """Put the rows of each head, which llama.cpp keeps as the pairs it rotates, back as two halves."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
