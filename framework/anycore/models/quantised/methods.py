"""How a checkpoint says that its weights are quantised. Read before any weight, so that plans are exact. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anycore.contract.formats import Format
from anycore.errors import Unsupported
from anycore.models.parameters import canonical, parameters
from anycore.models.quantised.announced import METHODS, Announced
from anycore.models.quantization import GROUPS, Stored

if TYPE_CHECKING:
    from anycore.models.source import Source
    from anycore.models.spec import ModelSpec

OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Where older tools write what is in config.json now, and which method that is."""


def stored(source: Source, config: dict[str, Any], spec: ModelSpec) -> Stored | None:
    """Return the formats that a checkpoint's weights have; None where they are dense, or are made so.

    Raises:
        Unsupported: they are quantised by a method that nothing here reads.
    """
    if source.gguf is not None:
        from anycore.models.gguf.names import formats

        found = {canonical(name): format for name, format in formats(source.gguf).items()}
        return Stored("gguf", "gguf", tuple(found.items())) if found else None
    settings = settings_of(source)
    if settings is None:
        return None
    announced = announced_by(settings, source)
    found = dict(announced_formats(announced, spec))
    method = str(settings["quant_method"])
    return Stored(method, scheme(found, source), tuple(found.items())) if found else None


def announced_formats(announced: Announced, spec: ModelSpec) -> list[tuple[str, Format]]:
    """Every matrix of the model that config.json says is quantised."""
    prefix = "model." if spec.family == "decoder" else ""
    formats = []
    for parameter in parameters(spec):
        if not (parameter.packed or parameter.table or (parameter.head and not spec.tied)):
            continue
        for name, _ in parameter.parts:
            layer = name.removesuffix(".weight")
            full = layer if parameter.head else prefix + layer
            format = announced.format(full, parameter.shape[1], parameter.table)
            if format is not None:
                formats.append((name, format))
    return formats


def scheme(formats: dict[str, Format], source: Source) -> str:
    """What a backend must have to keep weights of these formats.

    Raises:
        Unsupported: no scheme has all of them.
    """
    kinds = {format.kind for format in formats.values()}
    if kinds == {"fp8"}:
        return "fp8"
    if "fp8" in kinds:
        raise Unsupported(f"{source.folder}: config.json mixes 8-bit floats with whole numbers", param="model")
    if all(format == Format("int8") for format in formats.values()):
        return "w8a8"
    return "w4a16" if kinds == {"int4"} and all(format.group in GROUPS for format in formats.values()) else "gguf"


def settings_of(source: Source) -> dict[str, Any] | None:
    """The quantisation settings: of config.json, or of the file beside it that older tools write."""
    config = source.config()
    found: Any = config.get("quantization_config") or config.get("compression_config")
    for name, method in OLD_FILES.items():
        if not found and isinstance(old := source.read_json(name), dict):
            found = {"quant_method": method, **old.get("quantization", old)}
    if found and not isinstance(found, dict):
        raise Unsupported(f"{source.folder}: quantization_config is no JSON object: {found!r}", param="model")
    return found or None


def announced_by(settings: dict[str, Any], source: Source) -> Announced:
    """Read the settings of whichever method they are of.

    Raises:
        Unsupported: of none that is known, or in a way that is not read.
    """
    where = f"{source.folder / 'config.json'}: quantization_config"
    method = settings.get("quant_method")
    if method not in METHODS:
        raise Unsupported(
            f"{where} says quant_method {method!r}, which is not read; known are {', '.join(METHODS)}, and GGUF files. "
            "The unquantised model can be made small while it loads: --quantization w8a8 or w4a16",
            param="model",
        )
    try:
        return METHODS[str(method)](settings)
    except (ValueError, TypeError, AttributeError) as error:
        raise Unsupported(f"{where} {error}", param="model") from error
