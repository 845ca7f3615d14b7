"""Which matrices of a model are held in which format: as the checkpoint brings them, or as the user asks. No torch.

A format belongs to a checkpoint's tensor, by its name without prefixes ("layers.0.self_attn.q_proj.weight"), because
that is what files and users name. A parameter that is made of several is cut where their formats differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING

from anycore.contract.declare import DTYPES
from anycore.contract.formats import Format
from anycore.errors import ConfigError
from anycore.models.parameters import Parameter, parameters

if TYPE_CHECKING:
    from anycore.models.spec import ModelSpec

SPELLINGS = {"bits=8": "w8a8", "bits=4": "w4a16"}
ONLINE = ("w8a8", "w4a16", "fp8")
"""Schemes that dense weights can be turned into while they are loaded."""

GROUPS = (32, 64, 128)
SMALLEST = 64
"""Matrices with fewer rows or columns stay dense: they cost little and carry much."""
ALIGNED = 16
"""So do those whose columns are no multiple of it: the products of devices take whole runs."""

SENSITIVE_FIRST, SENSITIVE_LAST, MANY_LAYERS = 3, 1, 16
"""What "auto" keeps dense under w8a8: in decoders of so many layers and more, the down projections of so many at either
end. What they multiply holds a few numbers hundreds of times larger than the rest (Sun et al., 2024), beside which a
scale a token leaves the others nothing: see docs/quantization.md for what that costs.
"""
ENCODER_LAYERS = 6
"""In encoders of so many and more, the projections to queries, keys and values of all but the first third: what they
multiply, a norm's result, has a few columns many times larger than the rest, which no scale can be folded out of.
"""
NARROW = 1024
"""Models of so many layers whose hidden rows are narrower lose more than 1 % by a scale a row and token, whichever
matrices stay dense. Where the backend multiplies by groups, "auto" gives all of theirs scales by groups instead; and
in encoders, eight bits by groups to those that w4a16 hurts most: their vectors lose more by it than a decoder's logits.
"""
FINE, FINER = Format("int8", 64), Format("int8", 32)
"""Wider groups are faster; an encoder's queries, keys and values need the narrower ones."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint's small files, or the header of its one file, say of its quantised weights."""

    method: str  # what wrote it, for messages: "awq", "gptq", "compressed-tensors", "fp8", "gguf"
    scheme: str  # a name from SCHEMES: what a backend must have to keep the weights as they are
    formats: tuple[tuple[str, Format], ...]  # every quantised matrix by its name in the table of parameters


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a parameter that have one format: all of them, but where its parts came in several."""

    parameter: Parameter
    first: int
    rows: int
    parts: tuple[tuple[str, int], ...]  # (name, rows) of the checkpoint tensors it is made of
    format: Format | None  # None: dense

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.parameter.shape[1:])

    def bytes(self, dtype: str) -> int:
        if self.format is not None:
            return self.format.bytes(*self.shape)
        return prod(self.shape) * DTYPES["float32" if self.parameter.exact else dtype]


@dataclass(frozen=True, slots=True)
class Quantization:
    """What is done about a model's weights: the scheme that the backend has to have, and every matrix's format."""

    scheme: str
    formats: Mapping[str, Format]  # by the names of checkpoint tensors; those that are not there are dense


def pieces(parameter: Parameter, quantization: Quantization | None) -> Iterator[Piece]:
    """Cut a parameter where the formats of its parts change."""
    first = 0
    formats = quantization.formats if quantization is not None else {}
    for kind, run in groupby(parameter.parts, lambda part: formats.get(part[0])):
        parts = tuple(run)
        rows = sum(count for _, count in parts)
        yield Piece(parameter, first, rows, parts, kind)
        first += rows


def scheme_of(asked: str) -> str:
    """`--quantization` with its other spellings undone."""
    return SPELLINGS.get(asked, asked)


def schemes(asked: str, stored: Stored | None) -> list[str | None]:
    """The schemes to ask a backend for, best first; None: dense weights.

    A GGUF file is made dense where a backend cannot keep its blocks, as it always was; others are not unasked.
    """
    asked = scheme_of(asked)
    if asked == "none" or (asked == "auto" and stored is None):
        return [None]
    if asked != "auto":
        return [asked]
    assert stored is not None
    return [stored.scheme, None] if stored.method == "gguf" else [stored.scheme]


def quantization(
    spec: ModelSpec,
    asked: str,
    scheme: str | None,
    group: int,
    tables: bool,
    keep_dense: Iterable[str] = (),
    groups: bool = False,
) -> Quantization | None:
    """What is done about the weights of `spec`, if a backend was found that has `scheme`.

    `tables`: it looks up quantised rows; `groups`: it multiplies by int8 in groups, too.

    Raises:
        ConfigError: a pattern of `keep_dense` names no matrix, or there are no such groups.
    """
    made = scheme if scheme_of(asked) != "auto" else None
    kept = matched(spec, spelled_out(spec, made, keep_dense, groups))
    if group not in GROUPS:
        raise ConfigError(
            f"--quantization-group must be one of {', '.join(map(str, GROUPS))}, not {group}",
            param="quantization_group",
        )
    if scheme is None:
        return None
    if scheme_of(asked) == "auto":
        assert spec.stored is not None
        every = dict(spec.stored.formats)
    else:
        finer = fine(spec, scheme, keep_dense) if groups else {}
        every = {
            name: wanted
            for p in parameters(spec)
            if (wanted := online(p, scheme, group, finer.get(p.name)))
            for name, _ in p.parts
        }
    formats = {
        name: every[name]
        for parameter in parameters(spec)
        if parameter.name not in kept and quantisable(parameter, spec, tables)
        for name, _ in parameter.parts
        if name in every
    }
    return Quantization(scheme, formats)


def quantisable(parameter: Parameter, spec: ModelSpec, tables: bool) -> bool:
    """Whether it is a matrix that is multiplied by, or a table that the backend looks up quantised rows in.

    So is a head that is tied to such a table; and a reranker that answers yes or no looks two rows of its head up.
    """
    if parameter.packed:
        return not parameter.exact
    yes_no = spec.score is not None and spec.score.yes_no_ids is not None
    return tables if parameter.table or spec.tied or yes_no else parameter.head


def words(kind: Format | None) -> str:
    """A format in a message."""
    if kind is None:
        return "dense"
    return f"{kind.kind} in groups of {kind.group}" if kind.group else f"{kind.kind} with a scale a row"


def online(parameter: Parameter, scheme: str, group: int, finer: Format | None = None) -> Format | None:
    """The format that a dense matrix is turned into, `finer` if that fits; None where it stays as it is."""
    if len(parameter.shape) != 2:
        return None
    wanted = {"w8a8": Format("int8"), "w4a16": Format("int4", group), "fp8": Format("fp8")}[scheme]
    rows, columns = parameter.shape
    if finer is not None and columns % finer.group == 0:
        wanted = finer
    small = min(rows, columns) < SMALLEST
    return None if small or columns % (wanted.group or ALIGNED) else wanted


def fine(spec: ModelSpec, scheme: str | None, patterns: Iterable[str]) -> dict[str, Format]:
    """The parameters of a narrow model that "auto" gives 8 bits by groups, where that can be multiplied by."""
    encoder = spec.family == "encoder"
    deep = spec.layers >= (ENCODER_LAYERS if encoder else MANY_LAYERS)
    if "auto" not in patterns or not deep or spec.hidden_size >= NARROW:
        return {}
    attention, mlp = "encoder.layer.*.attention.self.qkv", "encoder.layer.*.intermediate.dense"
    if scheme == "w4a16" and encoder:
        return dict.fromkeys(matched(spec, (attention, mlp)), FINER)
    if scheme != "w8a8":
        return {}
    found = {parameter.name: FINE for parameter in parameters(spec)}
    return found | dict.fromkeys(matched(spec, (attention,)), FINER) if encoder else found


def spelled_out(spec: ModelSpec, scheme: str | None, patterns: Iterable[str], groups: bool = False) -> list[str]:
    """`--keep-dense` with its words undone: "auto" is what rounding to a scheme hurts most, "none" nothing.

    `groups`: what "auto" names may have scales by groups; then none of a narrow model's need stay dense.

    Raises:
        ConfigError: "none" stands beside others.
    """
    given = list(patterns)
    if "none" in given and len(given) > 1:
        raise ConfigError("--keep-dense none stands alone", param="keep_dense")
    found = [pattern for pattern in given if pattern not in ("auto", "none")]
    if "auto" in given and scheme == "w8a8" and not (groups and fine(spec, scheme, given)):
        found += sensitive(spec)
    return found


def sensitive(spec: ModelSpec) -> list[str]:
    """The matrices that w8a8 hurts most."""
    if spec.family == "encoder":
        later = range(spec.layers // 3, spec.layers) if spec.layers >= ENCODER_LAYERS else ()
        return [f"encoder.layer.{layer}.attention.self.qkv" for layer in later]
    if spec.attention != "causal" or spec.layers < MANY_LAYERS:
        return []
    ends = (*range(SENSITIVE_FIRST), *range(spec.layers - SENSITIVE_LAST, spec.layers))
    return [f"layers.{layer}.mlp.down_proj" for layer in ends]


def matched(spec: ModelSpec, patterns: Iterable[str]) -> set[str]:
    """The parameters that patterns such as "lm_head" or "layers.0.*" name, by their own name or that of a part.

    Raises:
        ConfigError: one names nothing.
    """
    found: set[str] = set()
    every = [p for p in parameters(spec) if p.name.endswith(".weight") and len(p.shape) == 2]
    names = {p.name: {name.removesuffix(".weight") for name in (p.name, *(part for part, _ in p.parts))} for p in every}
    for pattern in patterns:
        hits = {name for name, own in names.items() if any(fnmatchcase(one, pattern) for one in own)}
        if not hits:
            some = ", ".join(sorted(one for own in list(names.values())[:3] for one in own))
            raise ConfigError(
                f"--keep-dense {pattern} matches no matrix of {spec.architecture}; there are {some}, …",
                param="keep_dense",
            )
        found |= hits
    if spec.tied and "lm_head.weight" in found:
        found.add("embed_tokens.weight")  # they are one matrix
    return found
