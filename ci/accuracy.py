"""What rounding costs: perplexity on a fixed text, and the direction of sentence vectors, for every scheme of weights;
perplexity for every KV cache.

    python ci/accuracy.py FOLDER_OF_A_DECODER ... [--embedder FOLDER] [--schemes dense,w8a8,w4a16,w4a16-calibrated]
                          [--caches bfloat16,int8,fp8] [--tokens 4096] [--rows] [--round-groups]

Computed in float32 with the contract's plain operations, and the rounding of activations that w8a8 means added to them:
it is the schemes that are measured here. That a backend's kernels compute them right is the conformance kit's matter.
Prints each row of a Markdown table as soon as it is measured. In brackets is the standard error of a difference: that
of the differences token by token, in runs of 64 tokens, since neighbours fare alike.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anycore.cli.convert import words, write_extras
from anycore.contract.backend import Backend
from anycore.contract.batch import Batch
from anycore.contract.formats import KV_CACHES
from anycore.contract.ops import Ops
from anycore.contract.weights import Int4Weight, Int8Weight, Weight
from anycore.models.convert.calibration import HostMemory
from anycore.models.convert.writer import Conversion, convert
from anycore.models.loader import Model, load
from anycore.models.quantization import Quantization, quantization
from anycore.models.source import Source, locate
from anycore.models.spec import ModelSpec, read_spec
from anycore.text.tokenizer import Tokenizer

TEXTS = Path(__file__).parents[1] / "tests" / "data" / "texts"
WINDOW = 1024
"""Tokens that are predicted from one another."""
ROWS = 128
"""Rows of logits at a time."""
RUN = 64
"""Tokens whose mean is one observation of a difference."""
CALIBRATED = "-calibrated"
SCHEMES = ("dense", "w8a8", "w8a8" + CALIBRATED, "fp8", "w4a16", "w4a16" + CALIBRATED)
CACHES = ("bfloat16", *KV_CACHES)
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Rounded:
    """A matrix made dense: what is multiplied by it is rounded to int8, a scale for each `group` of a row."""

    dense: Tensor
    group: int


class SchemeOps(Ops):
    """The plain operations, with inputs rounded to int8 where the scheme says so; `groups`: by groups, too."""

    def __init__(self, groups: bool = False) -> None:
        self.groups = groups

    def pack(self, weight: Weight) -> Any:
        whole = isinstance(weight, Int8Weight) and weight.group >= weight.shape[1]
        if isinstance(weight, (Int8Weight, Int4Weight)) and (whole or self.groups):
            return Rounded(weight.dense(), weight.group)
        return weight.dense()

    def linear(self, x: Tensor, handle: Any, bias: Tensor | None = None) -> Tensor:
        if not isinstance(handle, Rounded):
            return super().linear(x, handle, bias)
        grouped = x.reshape(*x.shape[:-1], -1, min(handle.group, x.shape[-1]))
        scale = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return super().linear(((grouped / scale).round() * scale).view(x.shape), handle.dense, bias)

    def embedding(self, ids: Tensor, table: Any) -> Tensor:
        return F.embedding(ids, table.dense if isinstance(table, Rounded) else table)

    def embedding_sum(self, terms: Any, scale: float = 1.0) -> Tensor:
        return super().embedding_sum([(ids, getattr(table, "dense", table)) for ids, table in terms], scale)


@dataclass(frozen=True, slots=True)
class Held:
    """A model's files, and how its weights are held."""

    name: str  # of the scheme
    source: Source
    spec: ModelSpec
    quantization: Quantization | None

    def bytes(self) -> int:
        return self.spec.weight_bytes("bfloat16", self.quantization)

    def load(self, round_groups: bool = False) -> Model:
        cpu = torch.device("cpu")
        backend = Backend(cpu, HostMemory(cpu), SchemeOps(round_groups))
        return load(self.source, self.spec, backend, "float32", quantization=self.quantization)


def held(folder: str, scheme: str, options: argparse.Namespace) -> Held:
    """A model's weights in a scheme that they are rounded to while they are loaded, or as its files have them."""
    source = locate(folder)
    spec = read_spec(source)
    online = None if scheme.removesuffix(CALIBRATED) != scheme or scheme == "dense" else scheme
    asked = "auto" if spec.stored is not None else online or "none"
    kept = spec.stored.scheme if spec.stored is not None else online
    keep_dense = tuple(options.keep_dense.split(","))
    chosen = quantization(
        spec, asked, kept, options.group, not options.dense_tables, keep_dense=keep_dense, groups=not options.rows
    )
    return Held(scheme, source, spec, chosen)


def variants(folder: str, schemes: Sequence[str], options: argparse.Namespace) -> Iterator[Held]:
    """Each scheme of a model; those that are calibrated are converted first."""
    for scheme in schemes:
        if not scheme.endswith(CALIBRATED):
            yield held(folder, scheme, options)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            asked = Conversion(
                quantization=scheme.removesuffix(CALIBRATED),
                group=options.group,
                calibration=(TEXTS / "calibration.txt").read_text(encoding="utf-8"),
                keep_dense=tuple(options.keep_dense.split(",")),
                tables=not options.dense_tables,
            )
            written = convert(folder, Path(scratch) / "model", asked, words, write_extras)
            yield held(str(written), scheme, argparse.Namespace(**vars(options) | {"keep_dense": "none"}))


def tokens(source: Source, text: str) -> tuple[list[int], list[int]]:
    """The ids of a text, and those that a prompt begins with."""
    tokenizer = Tokenizer.from_source(source)
    return tokenizer.encode(text, add_special_tokens=False), tokenizer.encode("")


@torch.inference_mode()
def hidden(model: Model, ids: list[int], cache: str | None = None) -> Tensor:
    """The last hidden rows; with `cache`, keys and values are read as they were stored there."""
    paged: dict[str, Any] = {}
    if cache is not None:
        blocks = -(-len(ids) // BLOCK)
        wide, rounded = ("float32", cache) if cache in KV_CACHES else (cache, None)
        paged = {
            "kv": HostMemory(torch.device("cpu")).allocate_kv(model.spec.kv(BLOCK, wide, rounded), blocks),
            "slots": torch.arange(len(ids)),
            "block_tables": torch.arange(blocks, dtype=torch.int32)[None],
            "block_size": BLOCK,
        }
    batch = Batch(
        input_ids=torch.tensor(ids),
        positions=torch.arange(len(ids)),
        query_lens=[len(ids)],
        context_lens=[0],
        output_rows=None,
        causal=model.spec.attention == "causal",
        token_types=torch.zeros(len(ids), dtype=torch.int64) if model.spec.token_type_count else None,
        **paged,
    )
    return model.forward(batch)


@torch.inference_mode()
def losses(model: Model, ids: list[int], cache: str | None = None, begin: Sequence[int] = ()) -> Tensor:
    """The loss of every token but the first of each window, which `begin` stands before."""
    found: list[Tensor] = []
    for start in range(0, len(ids), WINDOW):
        window = [*begin, *ids[start : start + WINDOW]]
        rows, targets = hidden(model, window, cache)[:-1], torch.tensor(window[1:])
        for first in range(0, len(targets), ROWS):
            logits = model.logits(rows[first : first + ROWS])
            found.append(F.cross_entropy(logits, targets[first : first + ROWS], reduction="none"))
    return torch.cat(found).double()


def compared(found: Tensor, exact: Tensor) -> str:
    """Perplexity, and how much more it is than the other, with the standard error of that."""
    more = found - exact
    means = more[: len(more) // RUN * RUN].view(-1, RUN).mean(1)
    error = float(means.std() / len(means) ** 0.5) if len(means) > 1 else float("nan")
    ratio = float(more.mean().exp())
    return f"{float(found.mean().exp()):.3f} | {ratio - 1:+.2%} ({100 * ratio * error:.2f})"


def vectors(model: Model, tokenizer: Tokenizer, sentences: list[str]) -> Tensor:
    """Mean-pooled, of length 1."""
    pooled = [hidden(model, tokenizer.encode(sentence)[:256]).mean(0) for sentence in sentences]
    return F.normalize(torch.stack(pooled), dim=-1)


def weights_of_decoder(folder: str, schemes: Sequence[str], text: str, options: argparse.Namespace) -> None:
    ids, begin = tokens(locate(folder), text)
    ids = ids[: options.tokens]
    plain = held(folder, "dense", options)
    exact = losses(plain.load(), ids, None, begin)
    for one in variants(folder, schemes, options):
        found = exact if one.name == "dense" else losses(one.load(options.round_groups), ids, None, begin)
        share = f"{one.bytes() / 2**20:.1f} MiB ({one.bytes() / plain.bytes():.1%})"
        print(f"| {Path(folder).name} | {one.name} | {compared(found, exact)} | {share} |", flush=True)


def caches_of_decoder(folder: str, caches: Sequence[str], text: str, options: argparse.Namespace) -> None:
    ids, begin = tokens(locate(folder), text)
    model = held(folder, "dense", options).load()
    exact = losses(model, ids[: options.tokens], None, begin)
    for name in caches:
        found = losses(model, ids[: options.tokens], name, begin)
        print(f"| {Path(folder).name} | {name} | {compared(found, exact)} |", flush=True)


def weights_of_embedder(folder: str, schemes: Sequence[str], text: str, options: argparse.Namespace) -> None:
    tokenizer = Tokenizer.from_source(locate(folder))
    sentences = [sentence.replace("\n", " ") for sentence in text.split(". ")]
    plain = held(folder, "dense", options)
    straight = vectors(plain.load(), tokenizer, sentences)
    for one in variants(folder, [scheme for scheme in schemes if scheme != "dense"], options):
        near = (vectors(one.load(options.round_groups), tokenizer, sentences) * straight).sum(-1)
        share = f"{one.bytes() / 2**20:.1f} MiB ({one.bytes() / plain.bytes():.1%})"
        print(f"| {Path(folder).name} | {one.name} | {near.mean():.5f} | {near.min():.5f} | {share} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("decoders", nargs="*", metavar="FOLDER")
    parser.add_argument("--embedder", metavar="FOLDER")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--caches", default=",".join(CACHES))
    parser.add_argument("--tokens", type=int, help="of the text, from its start (default: all)")
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--keep-dense", default="auto", help="as for anycore convert")
    parser.add_argument("--dense-tables", action="store_true", help="leave embedding tables and tied heads as they are")
    parser.add_argument("--rows", action="store_true", help="w8a8 as a backend has it that knows no groups of int8")
    parser.add_argument(
        "--round-groups", action="store_true", help="round what groups multiply to int8, too, as the CPU backend does"
    )
    options = parser.parse_args()
    schemes, caches = ([name for name in given.split(",") if name] for given in (options.schemes, options.caches))
    text = (TEXTS / "opticks.txt").read_text(encoding="utf-8")
    if options.decoders and schemes:
        print("| model | weights | perplexity | against dense | bytes |\n|---|---|---|---|---|", flush=True)
        for folder in options.decoders:
            weights_of_decoder(folder, schemes, text, options)
    if options.decoders and caches:
        print("\n| model | KV cache | perplexity | against float32 |\n|---|---|---|---|", flush=True)
        for folder in options.decoders:
            caches_of_decoder(folder, caches, text, options)
    if options.embedder:
        print("\n| model | weights | cosine, mean | cosine, least | bytes |\n|---|---|---|---|---|", flush=True)
        weights_of_embedder(options.embedder, schemes, text, options)


if __name__ == "__main__":
    main()
