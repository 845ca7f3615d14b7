"""What rounding costs: perplexity on a fixed text, and the direction of sentence vectors, for every scheme of weights;
perplexity for every KV cache.

    python ci/accuracy.py FOLDER_OF_A_DECODER ... [--embedder FOLDER] [--schemes dense,w8a8,w4a16,w4a16-calibrated]
                          [--caches bfloat16,int8,fp8] [--tokens 4096]

Computed in float32 with the contract's plain operations, and the rounding of activations that w8a8 means added to them:
it is the schemes that are measured here. That a backend's kernels compute them right is the conformance kit's matter.
Prints a line for each scheme as a Markdown table.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
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
from anycore.contract.weights import Int8Weight, Weight
from anycore.models.convert.calibration import HostMemory
from anycore.models.convert.writer import Conversion, convert
from anycore.models.loader import Model, load
from anycore.models.quantization import quantization
from anycore.models.source import Source, locate
from anycore.models.spec import ModelSpec, read_spec
from anycore.text.tokenizer import Tokenizer

TEXTS = Path(__file__).parents[1] / "tests" / "data" / "texts"
WINDOW = 1024
"""Tokens that are predicted from one another."""
ROWS = 128
"""Rows of logits at a time."""
CALIBRATED = "-calibrated"
SCHEMES = ("dense", "w8a8", "w8a8" + CALIBRATED, "fp8", "w4a16", "w4a16" + CALIBRATED)
CACHES = ("bfloat16", *KV_CACHES)
BLOCK = 16


class Rounded:
    """A matrix of int8 with a scale a row, made dense: what is multiplied by it is rounded, too."""

    def __init__(self, weight: Int8Weight) -> None:
        self.dense = weight.dense()


class SchemeOps(Ops):
    """The plain operations, with each token's inputs rounded to int8 where the scheme says so."""

    def pack(self, weight: Weight) -> Any:
        if isinstance(weight, Int8Weight) and weight.group >= weight.shape[1]:
            return Rounded(weight)
        return weight.dense()

    def linear(self, x: Tensor, handle: Any, bias: Tensor | None = None) -> Tensor:
        if not isinstance(handle, Rounded):
            return super().linear(x, handle, bias)
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return super().linear((x / scale).round() * scale, handle.dense, bias)

    def embedding(self, ids: Tensor, table: Any) -> Tensor:
        return F.embedding(ids, table.dense if isinstance(table, Rounded) else table)

    def embedding_sum(self, terms: Any, scale: float = 1.0) -> Tensor:
        return super().embedding_sum([(ids, getattr(table, "dense", table)) for ids, table in terms], scale)


def tokens(source: Source, text: str) -> tuple[list[int], list[int]]:
    """The ids of a text, and those that a prompt begins with."""
    tokenizer = Tokenizer.from_source(source)
    return tokenizer.encode(text, add_special_tokens=False), tokenizer.encode("")


def opened(source: Source, spec: ModelSpec, scheme: str, tables: bool = True) -> Model:
    """A model whose matrices and tables are held in a scheme, or as its files have them."""
    online = None if scheme == "dense" else scheme
    asked = "auto" if spec.stored is not None else online or "none"
    held = spec.stored.scheme if spec.stored is not None else online
    cpu = torch.device("cpu")
    chosen = quantization(spec, asked, held, 32, tables, keep_dense=("auto",))
    return load(source, spec, Backend(cpu, HostMemory(cpu), SchemeOps()), "float32", quantization=chosen)


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
def perplexity(model: Model, ids: list[int], cache: str | None = None, begin: Sequence[int] = ()) -> float:
    """The exponential of the mean loss of every token but the first of each window, which `begin` stands before."""
    total, count = 0.0, 0
    for start in range(0, len(ids), WINDOW):
        window = [*begin, *ids[start : start + WINDOW]]
        rows, targets = hidden(model, window, cache)[:-1], torch.tensor(window[1:])
        for first in range(0, len(targets), ROWS):
            logits = model.logits(rows[first : first + ROWS])
            total += float(F.cross_entropy(logits, targets[first : first + ROWS], reduction="sum"))
        count += len(targets)
    return math.exp(total / count)


def vectors(model: Model, tokenizer: Tokenizer, sentences: list[str]) -> Tensor:
    """Mean-pooled, of length 1."""
    pooled = [hidden(model, tokenizer.encode(sentence)[:256]).mean(0) for sentence in sentences]
    return F.normalize(torch.stack(pooled), dim=-1)


def variants(folder: str, schemes: list[str], group: int, tables: bool) -> Iterator[tuple[str, Source, ModelSpec]]:
    """Each scheme's name, and the files that it is loaded from; `tables`: those are quantised, too."""
    source = locate(folder)
    for scheme in schemes:
        if not scheme.endswith(CALIBRATED):
            yield scheme, source, read_spec(source)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            text = (TEXTS / "calibration.txt").read_text(encoding="utf-8")
            plain = scheme.removesuffix(CALIBRATED)
            asked = Conversion(quantization=plain, group=group, calibration=text, tables=tables)
            written = locate(str(convert(folder, Path(scratch) / "model", asked, words, write_extras)))
            yield scheme, written, read_spec(written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("decoders", nargs="*", metavar="FOLDER")
    parser.add_argument("--embedder", metavar="FOLDER")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--caches", default=",".join(CACHES))
    parser.add_argument("--tokens", type=int, help="of the text, from its start (default: all)")
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--dense-tables", action="store_true", help="leave embedding tables and tied heads as they are")
    options = parser.parse_args()
    schemes, caches = ([name for name in given.split(",") if name] for given in (options.schemes, options.caches))
    text = (TEXTS / "opticks.txt").read_text(encoding="utf-8")
    print("| model | weights | perplexity | against dense |\n|---|---|---|---|", flush=True)
    for folder in options.decoders:
        (ids, begin), dense = tokens(locate(folder), text), 0.0
        for name, source, spec in variants(folder, schemes, options.group, not options.dense_tables):
            found = perplexity(opened(source, spec, name, not options.dense_tables), ids[: options.tokens], None, begin)
            dense = dense or found
            print(f"| {Path(folder).name} | {name} | {found:.3f} | {found / dense - 1:+.2%} |", flush=True)
    print("\n| model | KV cache | perplexity | against float32 |\n|---|---|---|---|", flush=True)
    for folder in options.decoders if caches else ():
        source = locate(folder)
        ids, begin = tokens(source, text)
        model = opened(source, read_spec(source), "dense")
        exact = perplexity(model, ids[: options.tokens], None, begin)
        for name in caches:
            found = perplexity(model, ids[: options.tokens], name, begin)
            print(f"| {Path(folder).name} | {name} | {found:.3f} | {found / exact - 1:+.2%} |", flush=True)
    if options.embedder:
        print("\n| model | weights | cosine, mean | cosine, least |\n|---|---|---|---|", flush=True)
        source = locate(options.embedder)
        tokenizer, spec = Tokenizer.from_source(source), read_spec(source)
        sentences = [sentence.replace("\n", " ") for sentence in text.split(". ")][:48]
        straight = vectors(opened(source, spec, "dense"), tokenizer, sentences)
        named = [scheme for scheme in schemes if scheme != "dense"]
        for name, files, held in variants(options.embedder, named, options.group, not options.dense_tables):
            near = (vectors(opened(files, held, name, not options.dense_tables), tokenizer, sentences) * straight).sum(
                -1
            )
            print(f"| {Path(options.embedder).name} | {name} | {near.mean():.5f} | {near.min():.5f} |", flush=True)


if __name__ == "__main__":
    main()
