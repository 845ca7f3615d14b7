"""A cheap look at the NVIDIA driver through NVML: no torch, no CUDA context, no memory taken."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from anycore.contract.declare import Device, Probe

INSTALL = "pip install 'anycore[cuda]'"
DRIVER = "Install the NVIDIA driver, or start the container with the GPU passed in (docker run --gpus all)."
VISIBLE = "CUDA_VISIBLE_DEVICES"


def probe() -> Probe:
    """Return the GPUs this process may use, in CUDA's order, or why there are none."""
    versions = {name: version for name in ("torch", "triton") if (version := installed(name))}
    if "torch" not in versions:
        return Probe(reason="torch is not installed", advice=INSTALL)
    if "+cpu" in versions["torch"]:
        advice = "Install torch from PyPI's default wheels, or from PyTorch's index for your CUDA version."
        return Probe(reason=f"torch {versions['torch']} is built for processors only", advice=advice, versions=versions)
    for package, module in (("triton", "triton"), ("nvidia-ml-py", "pynvml")):
        if find_spec(module) is None:
            return Probe(reason=f"{package} is not installed", advice=INSTALL, versions=versions)
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Probe(reason=f"NVML: {error}", advice=DRIVER, versions=versions)
    try:
        versions["driver"] = text(pynvml.nvmlSystemGetDriverVersion())
        count = pynvml.nvmlDeviceGetCount()
        boards = list(all_boards(pynvml, count))
        chosen = visible(boards, os.environ)
        devices = tuple(Device(index, *board[1:], uid=board[0]) for index, board in enumerate(chosen))
    except Exception as error:
        return Probe(reason=f"NVML: {error}", advice="See what nvidia-smi says.", versions=versions)
    finally:
        pynvml.nvmlShutdown()
    if devices:
        return Probe(devices=devices, versions=versions)
    if boards:
        reason = f"{VISIBLE}={os.environ[VISIBLE]!r} leaves none of {len(boards)} GPUs visible"
        return Probe(reason=reason, advice=f"Unset {VISIBLE} or name a GPU in it.", versions=versions)
    return Probe(reason="the driver knows no GPU", advice=DRIVER, versions=versions)


Board = tuple[str, str, str, int]
"""UUID, name, chip and bytes of memory of a GPU or of a slice of one."""


def all_boards(nvml: Any, count: int) -> Iterator[Board]:
    """Every GPU in bus order; of a GPU that is cut into MIG slices, the first slice, as CUDA does."""
    for index in range(count):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        part = first_slice(nvml, handle) or handle
        name, uuid = text(nvml.nvmlDeviceGetName(part)), text(nvml.nvmlDeviceGetUUID(part))
        yield uuid, name, f"sm{major}{minor}", int(nvml.nvmlDeviceGetMemoryInfo(part).total)


def first_slice(nvml: Any, handle: Any) -> Any | None:
    """The first MIG slice of a GPU; None when it is whole."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
        if current != nvml.NVML_DEVICE_MIG_ENABLE:
            return None
        return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)
    except nvml.NVMLError:  # a GPU that knows no MIG
        return None


def visible(boards: list[Board], environ: Mapping[str, str]) -> list[Board]:
    """Boards that CUDA_VISIBLE_DEVICES names, in its order; as CUDA does, it ends at the first unknown entry."""
    if VISIBLE not in environ:
        return boards
    found: list[Board] = []
    for word in environ[VISIBLE].split(","):
        name = word.strip()
        if name.isdigit():
            matching = boards[int(name) : int(name) + 1]
        else:
            matching = [board for board in boards if name and board[0].startswith(name)]
        if len(matching) != 1 or matching[0] in found:
            break
        found += matching
    return found


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def text(value: str | bytes) -> str:
    """NVML's strings, which older bindings hand over as bytes."""
    return value.decode() if isinstance(value, bytes) else value
