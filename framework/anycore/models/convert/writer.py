"""Writes a model anew: as safetensors, and quantised if that is asked for, in a form that others read, too.

A folder that is not there yet appears complete, or not at all: everything is written beside it and renamed at the end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from anycore.contract.formats import Format
from anycore.errors import ConfigError
from anycore.models.checkpoint import Checkpoint, Entry, Ordered, open_checkpoint
from anycore.models.convert import form
from anycore.models.convert.calibration import Calibration, calibrate
from anycore.models.convert.legacy import LegacyCheckpoint, open_legacy
from anycore.models.loader import check
from anycore.models.parameters import canonical, parameters
from anycore.models.quantised.methods import OLD_FILES
from anycore.models.quantised.rounding import quantise
from anycore.models.quantization import FINE, FINER, GROUPS, MANY_LAYERS, NARROW, fine, matched, online, spelled_out
from anycore.models.shards import INDEX, SINGLE
from anycore.models.source import Progress, Source, locate
from anycore.models.spec import ModelSpec, read_spec

SHARD = 2 << 30
"""Bytes of a weight file, and of what is held of it before it is written."""

REPLACED = ("quantization_config", "compression_config", "torch_dtype", "dtype")
"""What is said anew in config.json."""

COMPANIONS = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md")
"""Small files beside the weights that are carried over, but for those that describe the old weights."""

CALIBRATED = ("w8a8", "w4a16")
"""Schemes that a text is asked about."""

Words = Callable[[Source, str], Sequence[Sequence[int]]]
Extras = Callable[[Source, Path], None]


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is asked for."""

    quantization: str | None = None  # "w8a8", "w4a16", "fp8"; None: dense
    group: int = 32
    calibration: str | None = None  # text
    keep_dense: tuple[str, ...] = ("auto",)
    tables: bool = False  # quantise the embedding table and the head, too
    dtype: str = "auto"  # of what is dense
    model_type: str | None = None  # for files named as Meta does


def convert(
    model: str, out: Path, asked: Conversion, words: Words, extras: Extras, progress: Progress | None = None
) -> Path:
    """Write `model` to the new folder `out`.

    `words` gives the token ids of a text, in sequences to run; `extras` writes what a GGUF file's header holds beside
    weights.

    Raises:
        ConfigError: `out` is there, or what is asked for cannot be done.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} is there already and is left as it is: choose another folder", param="out")
    if asked.calibration is not None and asked.quantization not in CALIBRATED:
        raise ConfigError(f"--calibration belongs to --quantization {' or '.join(CALIBRATED)}", param="calibration")
    if asked.group not in GROUPS:
        raise ConfigError(f"--group must be 32, 64 or 128, not {asked.group}", param="group")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        write(model, partial, asked, words, extras, progress)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def write(model: str, folder: Path, asked: Conversion, words: Words, extras: Extras, progress: Progress | None) -> None:
    """Fill a folder: companions and config.json, then weights, then what was done to them."""
    source, config, checkpoint = opened(model, asked, progress)
    dtype = dtype_of(config, asked)
    plain = {name: value for name, value in config.items() if name not in REPLACED} | {"dtype": dtype}
    carry(source, folder, extras)
    write_json(folder / "config.json", plain)
    spec = read_spec(Source(model, folder))
    formats = wanted_formats(spec, asked)
    found = None if asked.calibration is None else calibrated(source, checkpoint, formats, asked, words, progress)
    writer = Writer(formats, found, getattr(torch, dtype), asked.dtype != "auto" or source.gguf is not None)
    files = Shards(folder)
    dense = {"lm_head"} if spec.head == "lm" and "lm_head.weight" not in formats else set()
    for done, (name, entry) in enumerate(checkpoint.tensors(), 1):
        for part, tensor in writer.tensors(name, entry):
            files.add(part, tensor)
        if name.endswith(".weight") and len(checkpoint.shapes[name]) == 2 and canonical(name) not in formats:
            dense.add(name.removesuffix(".weight"))
        if progress is not None:
            progress("weights", done / len(checkpoint.shapes))
    files.close()
    if asked.quantization is not None:
        named = [p.name for p in parameters(spec) if (p.table or p.head) and p.name in formats]
        settings = form.settings(asked.quantization, asked.group, grouped(spec, asked, formats), named, dense)
        write_json(folder / "config.json", plain | {"quantization_config": settings})
    result = Source(model, folder)
    check(result, read_spec(result))


def opened(model: str, asked: Conversion, progress: Progress | None) -> tuple[Source, dict[str, Any], Checkpoint]:
    """Find a model's config and weights, whatever its files are."""
    path = Path(model).expanduser()
    if path.exists() and not is_usual(path):
        config, checkpoint = open_legacy(path, asked.model_type)
        return Source(model, path if path.is_dir() else path.parent), config, checkpoint
    source = locate(model, progress=progress)
    return source, source.config(), open_checkpoint(source)


def is_usual(path: Path) -> bool:
    """Whether `serve` reads it as it is: a GGUF file, or a folder with a config.json and safetensors or a GGUF."""
    if path.is_file():
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    named = [file.name for file in path.glob("*.safetensors")]
    shards = (path / "config.json").is_file() and any(not name.startswith("consolidated") for name in named)
    return shards or (not named and any(path.glob("*.gguf")))


def wanted_formats(spec: ModelSpec, asked: Conversion) -> dict[str, Format]:
    """The format of each matrix to round, by its name in the table of parameters."""
    finer = finer_of(spec, asked)
    kept = matched(spec, spelled_out(spec, asked.quantization, asked.keep_dense, groups=asked.tables))
    if asked.quantization is None:
        return {}
    formats: dict[str, Format] = {}
    for parameter in parameters(spec):
        usual = parameter.packed and not parameter.exact
        table = asked.tables and (parameter.table or (parameter.head and not spec.tied))
        if not (usual or table) or parameter.name in kept or online(parameter, asked.quantization, asked.group) is None:
            continue
        for name, _ in parameter.parts:
            formats[name] = form.wanted(asked.quantization, asked.group, parameter.shape[1], finer.get(name))
    if not formats:
        raise ConfigError(f"nothing of {spec.architecture} is left to quantise: all is small or kept dense")
    return formats


def finer_of(spec: ModelSpec, asked: Conversion) -> dict[str, Format]:
    """The matrices that get 8 bits by groups, if those fit: what "auto" says, and with w8a8 tables and heads.

    What other engines read has neither tables nor groups of int8: who quantises tables does without those engines.
    """
    if not asked.tables:
        return {}
    w8a8 = asked.quantization == "w8a8"
    tables = {p.name: FINE for p in parameters(spec) if w8a8 and (p.head or p.table)}
    every = tables | fine(spec, asked.quantization, asked.keep_dense)
    found = {name: every[p.name] for p in parameters(spec) if p.name in every for name, _ in p.parts}
    return found | dict.fromkeys(dearest(spec, asked), FINER)


def dearest(spec: ModelSpec, asked: Conversion) -> list[str]:
    """The matrices of a narrow decoder that 4 bits hurt most for what they weigh: see docs/quantization.md."""
    narrow = spec.family == "decoder" and spec.layers >= MANY_LAYERS and spec.hidden_size < NARROW
    if not narrow or asked.quantization != "w4a16" or asked.group != FINER.group or "auto" not in asked.keep_dense:
        return []
    values = [f"layers.{layer}.self_attn.v_proj.weight" for layer in range(spec.layers)]
    return [*values, f"layers.{spec.layers - 1}.mlp.down_proj.weight"]


def grouped(spec: ModelSpec, asked: Conversion, formats: Mapping[str, Format]) -> dict[str, Format]:
    """Those of `formats` that are by groups so: a scale a row of as many inputs has the same format."""
    finer = finer_of(spec, asked)
    return {name: kind for name, kind in formats.items() if name in finer and kind in (FINE, FINER)}


def calibrated(
    source: Source,
    checkpoint: Checkpoint,
    formats: dict[str, Format],
    asked: Conversion,
    words: Words,
    progress: Progress | None,
) -> Calibration:
    if isinstance(checkpoint, LegacyCheckpoint):
        raise ConfigError("--calibration needs a model that can be served: convert it first", param="calibration")
    assert asked.calibration is not None
    return calibrate(source, read_spec(source), words(source, asked.calibration), formats, progress)


@dataclass(frozen=True, slots=True)
class Writer:
    """What becomes of each tensor of a checkpoint."""

    formats: dict[str, Format]
    found: Calibration | None
    dtype: torch.dtype  # of the model
    cast: bool  # what is dense, to it; else it keeps its own

    def tensors(self, name: str, entry: Entry) -> Iterator[tuple[str, Tensor]]:
        plain = canonical(name)
        scales = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        if self.found is not None and plain in self.found.weights:
            yield from form.encoded(name.removesuffix(".weight"), self.found.weights[plain], scales).items()
            return
        tensor = self.dense(entry)
        if self.found is not None:
            tensor = self.found.scaled(plain, tensor)
        if plain in self.formats:
            weight = quantise(tensor, self.formats[plain])
            yield from form.encoded(name.removesuffix(".weight"), weight, scales).items()
            return
        changed = self.found is not None and plain in self.found.rows
        # A norm that was divided stays in float32: rounded, it would not undo what its matrix was multiplied by.
        if tensor.is_floating_point() and (self.cast or not isinstance(entry, Tensor)) and not changed:
            tensor = tensor.to(self.dtype)
        yield name, tensor

    def dense(self, entry: Entry) -> Tensor:
        if isinstance(entry, Tensor):
            return entry
        if isinstance(entry, Ordered):
            return entry.weight.dense()[:, entry.order.argsort()]
        return entry.dense()


class Shards:
    """Weight files of a bounded size, and the index of them where there are several."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.waiting: dict[str, Tensor] = {}
        self.bytes = 0
        self.written: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if self.waiting and self.bytes + tensor.nbytes > SHARD:
            self.flush()
        self.waiting[name] = tensor.contiguous()
        self.bytes += tensor.nbytes

    def flush(self) -> None:
        path = self.folder / f"part-{len(self.written)}.safetensors"
        try:
            save_file(self.waiting, path, metadata={"format": "pt"})
        except SafetensorError as error:
            number = re.search(r"\(os error (\d+)\)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error  # such as a full disk
        self.written.append(list(self.waiting))
        self.waiting, self.bytes = {}, 0

    def close(self) -> None:
        """Write what is left, and name the files."""
        self.flush()
        count = len(self.written)
        names = [SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for number, name in enumerate(names):
            path = (self.folder / f"part-{number}.safetensors").rename(self.folder / name)
            path.chmod(0o644)  # safetensors keeps others from reading
        if count > 1:
            index = {part: name for name, parts in zip(names, self.written, strict=True) for part in parts}
            write_json(self.folder / INDEX, {"metadata": {}, "weight_map": index})


def dtype_of(config: dict[str, Any], asked: Conversion) -> str:
    if asked.dtype != "auto":
        return asked.dtype
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")


def carry(source: Source, folder: Path, extras: Extras) -> None:
    """Copy the small files beside the weights, and the modules of sentence-transformers."""
    if source.gguf is not None:
        extras(source, folder)
        return
    for path in sorted(source.folder.iterdir()):
        stale = path.name in (*OLD_FILES, "config.json", "params.json") or path.name.endswith(".index.json")
        if path.is_file() and not stale and (path.suffix in COMPANIONS or path.name.startswith("LICENSE")):
            shutil.copyfile(path, folder / path.name)
    for module in source.read_json("modules.json") or ():
        name = str(module.get("path", ""))
        if name and source.path(f"{name}/config.json") is not None:
            shutil.copytree(source.folder / name, folder / name)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
