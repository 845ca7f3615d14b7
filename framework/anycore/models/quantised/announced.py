"""What a quantised checkpoint's config.json announces: how layers are stored, and so the format each will have.

No torch: plans are made of it before any weight is fetched. awq, gptq, compressed and fp8 read the weights by it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

from anycore.contract.formats import Format

GROUPS = {"int4": (128, 64, 32, 16), "int8": (32, 16)}
"""Groups that weights are held in. A larger one is divided into several with the same scale."""


def divided(kind: str, group: int) -> int | None:
    """The largest group that divides a checkpoint's; None if there is none, so that its matrices are made dense."""
    return next((size for size in GROUPS[kind] if group > 0 and group % size == 0), None)


def grouped(kind: str, group: int) -> Format | None:
    size = divided(kind, group)
    return None if size is None else Format(kind, size)


class Announced(Protocol):
    """The settings of one method."""

    def format(self, layer: str, columns: int, table: bool = False) -> Format | None:
        """The format of a layer's matrix, by the layer's name as the checkpoint has it; None: dense.

        `table`: what is looked up in by token id, which one method only quantises.
        """
        ...


def skipped(layer: str, names: Iterable[str]) -> bool:
    """Whether a list names a layer, or what it is in: by name, by "re:" and a pattern, or by one with asterisks."""
    return any(
        bool(re.match(name[3:], layer))
        if name.startswith("re:")
        else f".{name}." in f".{layer}." or ("*" in name and fnmatchcase(layer, name))
        for name in names
    )


@dataclass(frozen=True, slots=True)
class AwqSettings:
    group: int  # -1: all inputs
    dense: tuple[str, ...]  # layers left as they were

    @staticmethod
    def of(settings: dict[str, Any]) -> AwqSettings:
        """Read config.json's quantization_config, or AutoAWQ's own quant_config.json.

        Raises:
            ValueError: it asks for what is not read.
        """
        bits = settings.get("bits", settings.get("w_bit", 4))
        version = str(settings.get("version", "gemm")).lower()
        if bits != 4:
            raise ValueError(f"says AWQ of {bits} bits: 4 are read")
        if version != "gemm":
            raise ValueError(f"says version {version!r}, a layout for one kernel: 'gemm' is read")
        group = int(settings.get("group_size", settings.get("q_group_size", 128)))
        return AwqSettings(group, ("lm_head", *(settings.get("modules_to_not_convert") or ())))

    def format(self, layer: str, columns: int, table: bool = False) -> Format | None:
        if table or skipped(layer, self.dense):
            return None
        return grouped("int4", columns if self.group == -1 else self.group)


@dataclass(frozen=True, slots=True)
class GptqSettings:
    bits: int
    group: int  # -1: all inputs
    symmetric: bool
    shift: int  # what version 1 subtracts from a zero point before it is stored
    head: bool  # whether lm_head is quantised, too

    @staticmethod
    def of(settings: dict[str, Any]) -> GptqSettings:
        """Read config.json's quantization_config, or AutoGPTQ's own quantize_config.json.

        Raises:
            ValueError: it asks for what is not read.
        """
        bits: Any = settings.get("bits")
        if bits not in (2, 3, 4, 8):
            raise ValueError(f"says GPTQ of {bits!r} bits: 2, 3, 4 and 8 are read")
        layout = settings.get("checkpoint_format") or "gptq"
        if layout not in ("gptq", "gptq_v2"):
            raise ValueError(f"says checkpoint_format {layout!r}: 'gptq' and 'gptq_v2' are read")
        if settings.get("dynamic"):
            raise ValueError("gives some layers settings of their own (dynamic), which is not read")
        symmetric, shift = bool(settings.get("sym", True)), int(layout == "gptq")
        return GptqSettings(bits, int(settings.get("group_size", -1)), symmetric, shift, bool(settings.get("lm_head")))

    def format(self, layer: str, columns: int, table: bool = False) -> Format | None:
        if table or (layer == "lm_head" and not self.head) or (self.bits == 8 and not self.symmetric):
            return None
        return grouped("int8" if self.bits == 8 else "int4", columns if self.group == -1 else self.group)


@dataclass(frozen=True, slots=True)
class Fp8Settings:
    block: tuple[int, int] | None  # rows and inputs that share a scale; None: rows do, or the whole matrix
    dense: tuple[str, ...]

    @staticmethod
    def of(settings: dict[str, Any]) -> Fp8Settings:
        """Read what transformers, FBGEMM or ModelOpt wrote.

        Raises:
            ValueError: it asks for what is not read.
        """
        if settings.get("quant_algo", "FP8") != "FP8":
            raise ValueError(f"says quant_algo {settings['quant_algo']!r}: of ModelOpt's, 'FP8' is read")
        lists = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore")
        dense = tuple(str(name) for key in lists for name in settings.get(key) or ())
        block = settings.get("weight_block_size")
        if block is None:
            return Fp8Settings(None, ("lm_head", *dense))
        if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
            raise ValueError(f"says weight_block_size {block!r}, not two sizes such as [128, 128]")
        return Fp8Settings((block[0], block[1]), ("lm_head", *dense))

    def format(self, layer: str, columns: int, table: bool = False) -> Format | None:
        return None if table or self.block is not None or skipped(layer, self.dense) else Format("fp8")


LAYOUTS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
"""Formats of compressed-tensors that are read."""


@dataclass(frozen=True, slots=True)
class Group:
    """How the layers are stored that some targets name: "Linear", a layer's name, or "re:" and a pattern."""

    targets: tuple[str, ...]
    bits: int
    floats: bool  # e4m3; else whole numbers
    symmetric: bool
    size: int  # of a group of inputs; 0: a scale a row, or one for all
    block: tuple[int, int] | None

    @staticmethod
    def of(name: str, group: dict[str, Any]) -> Group:
        """Read one of config_groups.

        Raises:
            ValueError: it is quantised in a way that is not read.
        """
        weights = group.get("weights") or {}
        bits: Any = weights.get("num_bits")
        kind, strategy = weights.get("type", "int"), weights.get("strategy") or "tensor"
        if group.get("format") not in (None, *LAYOUTS):
            raise ValueError(f"says format {group['format']!r} in {name}; known are {', '.join(LAYOUTS)}")
        known = (kind == "int" and bits in range(2, 9)) or (kind == "float" and bits == 8)
        if not known or strategy not in ("tensor", "channel", "group" if kind == "int" else "block"):
            raise ValueError(
                f"says weights of {bits!r} bits, type {kind!r}, strategy {strategy!r} in {name}: read are whole "
                "numbers of 2 to 8 bits a tensor, channel or group, and 8-bit floats a tensor, channel or block"
            )
        activations = group.get("input_activations") or {}
        if activations and (activations.get("num_bits") != 8 or activations.get("type", "int") != kind or bits != 8):
            raise ValueError(
                f"says activations of {activations.get('num_bits')!r} bits, type {activations.get('type')!r}, beside "
                f"weights of {bits} bits, type {kind!r}, in {name}: 8 bits of the same type beside 8 bits are computed"
            )
        block: Any = weights.get("block_structure")
        if strategy == "block" and not (isinstance(block, list) and len(block) == 2):
            raise ValueError(f"says block_structure {block!r} in {name}, not two sizes such as [128, 128]")
        return Group(
            targets=tuple(str(target) for target in group.get("targets", ())),
            bits=bits,
            floats=kind == "float",
            symmetric=bool(weights.get("symmetric", True)),
            size=int(weights.get("group_size") or 0) if strategy == "group" else 0,
            block=(int(block[0]), int(block[1])) if strategy == "block" else None,
        )

    def format(self, columns: int) -> Format | None:
        """Up to 4 bits are held as 4, more as 8; with zero points beside 8, or scales of blocks, as dense weights."""
        if self.floats:
            return Format("fp8") if self.block is None else None
        if self.bits <= 4:
            return grouped("int4", self.size or columns)
        if not self.symmetric:
            return None
        return grouped("int8", self.size) if self.size else Format("int8")

    def names(self, layer: str) -> bool:
        """Whether a target means this very layer, and not only its class."""
        return any(
            bool(re.match(target[3:], layer)) if target.startswith("re:") else f".{layer}".endswith(f".{target}")
            for target in self.targets
        )


@dataclass(frozen=True, slots=True)
class CompressedSettings:
    groups: tuple[Group, ...]
    dense: tuple[str, ...]

    @staticmethod
    def of(settings: dict[str, Any]) -> CompressedSettings:
        """Read config.json's quantization_config.

        Raises:
            ValueError: it asks for what is not read.
        """
        if settings.get("format", "dense") not in LAYOUTS:
            raise ValueError(f"says format {settings['format']!r}; known are {', '.join(LAYOUTS)}")
        if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise ValueError("says that weights are sparse (sparsity_config), which is not read")
        if settings.get("transform_config"):
            raise ValueError("says that activations are transformed (transform_config), which is not computed")
        groups = settings.get("config_groups") or {}
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise ValueError(f"has config_groups that are no groups: {groups!r}")
        read = tuple(Group.of(name, group) for name, group in groups.items())
        return CompressedSettings(read, tuple(str(name) for name in settings.get("ignore") or ()))

    def group(self, layer: str, table: bool = False) -> Group | None:
        """The group that names a layer itself, else the one that names its class."""
        named = next((group for group in self.groups if group.names(layer)), None)
        classes = (group for group in self.groups if ("Embedding" if table else "Linear") in group.targets)
        return named or next(classes, None)

    def format(self, layer: str, columns: int, table: bool = False) -> Format | None:
        group = None if skipped(layer, self.dense) else self.group(layer, table)
        return None if group is None else group.format(columns)


METHODS: dict[str, Callable[[dict[str, Any]], Announced]] = {
    "awq": AwqSettings.of,
    "gptq": GptqSettings.of,
    "compressed-tensors": CompressedSettings.of,
    "fp8": Fp8Settings.of,
    "fbgemm_fp8": Fp8Settings.of,
    "modelopt": Fp8Settings.of,
}
"""By the quant_method of config.json."""
