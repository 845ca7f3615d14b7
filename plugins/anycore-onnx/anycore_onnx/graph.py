"""A model as one ONNX graph: packed batches become padded [B, S] inputs, and its padded rows packed ones again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from anycore.contract.backend import ModelFiles
from anycore.contract.batch import Batch
from anycore.errors import PluginError, Unsupported
from anycore_onnx import SCORES

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
HIDDEN = ("last_hidden_state", "token_embeddings")
"""What optimum and sentence-transformers call the hidden rows."""

LOGITS = ("logits",)
INTEGERS = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}

Array = np.ndarray[Any, Any]


class Graph:
    """Runs the graph for a batch, in groups of requests of similar length."""

    def __init__(self, path: Path, providers: Sequence[str], files: ModelFiles) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(str(path), options, providers=list(providers))
        used = self.session.get_providers()
        if used[0] != providers[0]:  # ONNX Runtime only warns, and computes elsewhere
            raise PluginError(
                f"ONNX Runtime cannot use {providers[0]} on this machine and took {used[0]} instead: check the driver "
                "and libraries its build needs, or name another with ANYCORE_ONNX_PROVIDERS",
                param="backend",
            )
        self.labels = files.labels
        self.pad_id = files.pad_id
        self.inputs = {item.name: INTEGERS.get(item.type) for item in self.session.get_inputs()}
        self.output = self._output(path)
        self._check_inputs(path, files)

    def __call__(self, batch: Batch) -> Tensor:
        """[T, H] rows, or logits [B, labels]."""
        ids, lens = batch.input_ids.numpy(), np.array(batch.query_lens)
        starts = np.array(batch.query_starts[:-1])
        types = None if batch.token_types is None else batch.token_types.numpy()
        out: Array | None = None
        for group in groups(batch.query_lens):
            columns = np.arange(int(lens[group].max()))
            mask = columns < lens[group, None]
            rows = (starts[group, None] + columns)[mask]
            batch.padding += mask.size - len(rows)
            fed = {IDS: padded(ids[rows], mask, self.pad_id), MASK: mask}
            if TYPES in self.inputs:
                fed[TYPES] = padded(np.zeros_like(rows) if types is None else types[rows], mask, 0)
            (found,) = self.session.run([self.output], {name: x.astype(self.inputs[name]) for name, x in fed.items()})
            found, places = (found, group) if self.labels else (found[mask], rows)
            if out is None:
                out = np.empty((len(lens) if self.labels else len(ids), found.shape[-1]), dtype=np.float32)
            out[places] = found
        assert out is not None
        return torch.from_numpy(out)

    def _output(self, path: Path) -> str:
        """The output to ask for."""
        wanted = LOGITS if self.labels else HIDDEN
        names = [item.name for item in self.session.get_outputs()]
        for name in wanted:
            if name in names:
                return name
        raise Unsupported(
            f"{path} gives {', '.join(names)}, and {' or '.join(wanted)} is needed for this task: name another file "
            "with ANYCORE_ONNX_FILE, or set it to export to have one made from the weights"
        )

    def _check_inputs(self, path: Path, files: ModelFiles) -> None:
        known = {IDS, MASK, TYPES}
        needed = {IDS, MASK} | ({TYPES} if files.token_types and self.labels else set())
        strange, missing = sorted(self.inputs.keys() - known), sorted(needed - self.inputs.keys())
        strange += [name for name, kind in self.inputs.items() if kind is None and name in known]
        if strange or missing:
            what = f"has an input {strange[0]} of a kind that is not known" if strange else f"takes no {missing[0]}"
            raise Unsupported(f"{path} {what}: set ANYCORE_ONNX_FILE to export to have a graph made from the weights")


def groups(lens: Sequence[int]) -> Iterator[list[int]]:
    """Put requests of similar length together.

    The padded places of a group are never more than the rows of the batch, nor its attention scores more than SCORES
    unless it is one request alone.
    """
    order = sorted(range(len(lens)), key=lambda i: -lens[i])
    total = sum(lens)
    at = 0
    while at < len(order):
        longest = lens[order[at]]
        count = max(1, min(total // longest, SCORES // longest**2))
        yield order[at : at + count]
        at += count


def padded(values: Array, mask: Array, fill: int) -> Array:
    """[rows] → [B, S]: each request's values from the left, `fill` behind them."""
    out = np.full(mask.shape, fill, dtype=np.int64)
    out[mask] = values
    return out
