"""Cuts a rank's part out of a checkpoint's tensors: before they are unpacked where their layout allows it.

What is cut after that is a view where it is dense, so that files are read no further, and a quantised matrix that was
unpacked whole where it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from anycore.contract.weights import Fp8Weight, Int4Weight, Int8Weight, QuantisedWeight
from anycore.errors import Unsupported
from anycore.models.checkpoint import Checkpoint, Entry, Ordered
from anycore.models.parallel import FLAG, Cut


def narrow(checkpoint: Checkpoint, cuts: Mapping[str, Cut]) -> Mapping[str, Cut]:
    """Let a checkpoint read only a rank's part of its matrices; return the cuts that `cut_out` has to make."""
    from anycore.models.gguf.weights import GgufCheckpoint
    from anycore.models.quantised.folder import QuantisedFolder
    from anycore.models.quantised.slices import narrow as narrow_folder

    if isinstance(checkpoint, GgufCheckpoint):
        return checkpoint.narrow(cuts)
    return narrow_folder(checkpoint, cuts) if isinstance(checkpoint, QuantisedFolder) else cuts


def cut_out(entry: Entry, cut: Cut, kept: bool, name: str) -> Entry:
    """A part of a tensor; `kept`: it stays quantised if it is.

    Raises:
        Unsupported: its columns are in an order that parts of it would not have.
    """
    if isinstance(entry, Tensor):
        return entry.narrow(cut.dim, cut.start, cut.stop - cut.start)
    if not isinstance(entry, Ordered):
        return part_of(entry, cut, name)
    if cut.dim == 0:
        return replace(entry, weight=part_of(entry.weight, cut, name))
    if kept:
        raise Unsupported(
            f"{name} has its columns in the order of activations (g_idx), which cannot be divided among ranks: "
            "take --quantization none, which makes such matrices dense",
            param=FLAG,
        )
    dense = entry.weight.dense()[:, entry.order.argsort()]
    return dense.narrow(1, cut.start, cut.stop - cut.start)


def part_of(weight: QuantisedWeight, cut: Cut, name: str) -> QuantisedWeight:
    """Rows, or columns, of a quantised matrix.

    Raises:
        Unsupported: columns that share a scale would come apart.
    """
    mine = slice(cut.start, cut.stop)
    if cut.dim == 0:
        scales = {"scale": weight.scale[mine]}
        if isinstance(weight, Int4Weight):
            scales["zero"] = weight.zero[mine]
        return replace(weight, data=weight.data[mine], **scales)  # type: ignore[arg-type]
    data = weight.data[:, mine]
    if isinstance(weight, Fp8Weight):
        return replace(weight, data=data)
    if isinstance(weight, Int8Weight) and weight.group >= weight.shape[1]:
        return replace(weight, data=data, group=cut.stop - cut.start)
    if cut.start % weight.group:
        raise Unsupported(
            f"{name} has a scale for each {weight.group} inputs, and a rank's part would begin at {cut.start}",
            param=FLAG,
        )
    groups = slice(cut.start // weight.group, -(-cut.stop // weight.group))
    if isinstance(weight, Int4Weight):
        return replace(weight, data=data, scale=weight.scale[:, groups], zero=weight.zero[:, groups])
    return replace(weight, data=data, scale=weight.scale[:, groups])
