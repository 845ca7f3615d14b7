"""What every backend found can do, as plain data: the one source of `anycore matrix`, `doctor` and /v1/capabilities."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from anycore import __version__
from anycore.contract.declare import CONTRACT_VERSION, BackendSpec, Support

if TYPE_CHECKING:
    from anycore.plugins import Plugins


def capabilities(plugins: Plugins) -> dict[str, Any]:
    """Return backends (with devices, or the reason why there is none) and plugin failures, ready for JSON."""
    return {
        "anycore": __version__,
        "contract": ".".join(map(str, CONTRACT_VERSION)),
        "backends": [_backend(spec) for spec in plugins.backends],
        "failures": [asdict(failure) for failure in plugins.failures],
    }


def _backend(spec: BackendSpec) -> dict[str, Any]:
    probe = spec.probe()
    return {
        "name": spec.name,
        "distribution": spec.distribution,
        "contract": ".".join(map(str, spec.api)),
        "priority": spec.priority,
        "available": probe.available,
        "devices": [asdict(device) for device in probe.devices],
        "reason": probe.reason,
        "advice": probe.advice,
        "versions": probe.versions,
        "support": [_support(row) for row in spec.support],
    }


def _support(row: Support) -> dict[str, Any]:
    """One row of the matrix; an empty list means "any"."""
    return {
        "level": row.level.value,
        "tasks": [task.value for task in row.tasks],
        "attention": row.attention,
        "weights": list(row.weights),
        "architectures": list(row.architectures),
        "head_dims": list(row.head_dims),
        "block_sizes": list(row.block_sizes),
        "features": list(row.features),
        "chips": list(row.chips),
        "note": row.note,
    }
