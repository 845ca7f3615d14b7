"""Tensor parallelism: what one of several ranks holds of a model. No torch.

Matrices whose results are heads or parts of the MLP are cut by rows ("column parallel" in the literature, which
writes them transposed); those that take these results in are cut by columns, and what they give is summed over ranks
(Shoeybi et al., 2019). Tables by token id are cut by tokens. All else is whole on every rank. A rank's ModelSpec has
the numbers of what the rank holds, so that plans, caches and layers need not know of ranks; `split.split`
lets the finished model exchange.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anycore.errors import ConfigError, Unsupported
from anycore.models.parameters import Parameter, parameters
from anycore.models.spec import ModelSpec, Shard

if TYPE_CHECKING:
    from anycore.models.quantization import Quantization

FLAG = "tensor_parallel_size"


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank holds of one checkpoint tensor: `start` to `stop` of dimension `dim`."""

    whole: tuple[int, ...]  # the tensor's shape
    dim: int
    start: int
    stop: int


def shard(spec: ModelSpec, rank: int, ranks: int) -> ModelSpec:
    """The spec of one rank's part; the same spec where there is one rank.

    KV heads that are fewer than ranks are repeated, so that each rank has the one that its query heads share.

    Raises:
        ConfigError: something cannot be divided; says what, and by how many it could be.
    """
    if ranks == 1:
        return spec
    for name, count in (("attention heads", spec.heads), ("columns of the MLP", spec.intermediate_size)):
        if count % ranks:
            raise indivisible(spec, ranks, f"{count} {name}")
    if spec.kv_heads % ranks and ranks % spec.kv_heads:
        raise indivisible(spec, ranks, f"{spec.kv_heads} KV heads")
    return replace(
        spec,
        heads=spec.heads // ranks,
        kv_heads=max(1, spec.kv_heads // ranks),
        intermediate_size=spec.intermediate_size // ranks,
        shard=Shard(rank, ranks, spec),
    )


def indivisible(spec: ModelSpec, ranks: int, what: str) -> ConfigError:
    fitting = [str(n) for n in range(1, spec.heads + 1) if fits(spec, n)]
    return ConfigError(
        f"--tensor-parallel-size {ranks} does not divide the {what} of {spec.architecture}: "
        f"it can be {', '.join(fitting)}",
        param=FLAG,
    )


def fits(spec: ModelSpec, ranks: int) -> bool:
    kv_heads = spec.kv_heads % ranks == 0 or ranks % spec.kv_heads == 0
    return spec.heads % ranks == 0 and spec.intermediate_size % ranks == 0 and kv_heads


def cuts(spec: ModelSpec) -> dict[str, Cut]:
    """Which part of each checkpoint tensor this rank holds, by its name; those that are not there are held whole."""
    if spec.shard is None:
        return {}
    found = {}
    for whole, mine in zip(parameters(spec.shard.whole), parameters(spec), strict=True):
        for (name, rows), (_, own) in zip(whole.parts, mine.parts, strict=True):
            shape = (rows, *whole.shape[1:])
            if own != rows:
                start = first_token(spec) if is_by_token(whole) else first_of(spec.shard, rows, own)
                found[name] = Cut(shape, 0, start, start + own)
            elif whole.shape[1:] != mine.shape[1:]:
                start = first_of(spec.shard, whole.shape[1], mine.shape[1])
                found[name] = Cut(shape, 1, start, start + mine.shape[1])
    return found


def first_of(shard: Shard, whole: int, mine: int) -> int:
    """Where a rank's part begins; parts are fewer than ranks where KV heads are repeated."""
    return shard.rank * (whole // mine) // shard.ranks * mine


def is_by_token(parameter: Parameter) -> bool:
    return parameter.table or parameter.head


def first_token(spec: ModelSpec) -> int:
    """The first row of a rank's part of a table: the last rank's may be shorter."""
    assert spec.shard is not None
    return spec.shard.rank * -(-spec.vocab_size // spec.shard.ranks)


def check_formats(spec: ModelSpec, quantization: Quantization | None) -> None:
    """Check that quantised matrices can be cut where they have to be.

    Raises:
        Unsupported: inputs that share a scale would come apart.
    """
    if spec.shard is None or quantization is None:
        return
    for name, cut in cuts(spec).items():
        format = quantization.formats.get(name)
        if cut.dim == 0 or format is None or not format.group or (cut.stop - cut.start) % format.group == 0:
            continue
        raise Unsupported(
            f"{quantization.scheme} weights in groups of {format.group} inputs cannot be divided among "
            f"{spec.shard.ranks} ranks: {name} has {cut.whole[1]} inputs, and each rank would have "
            f"{cut.stop - cut.start}. Take fewer ranks, smaller groups, or --quantization none",
            param=FLAG,
        )


def describe(spec: ModelSpec) -> str:
    """What each rank holds, in words."""
    assert spec.shard is not None
    whole = spec.shard.whole
    again = " (repeated)" if whole.kv_heads < spec.shard.ranks else ""
    return f"each rank has {spec.heads} of {whole.heads} heads, {spec.kv_heads} of {whole.kv_heads} KV heads{again}"
