"""What every backend found can do, as plain data: the one source of `anycore matrix`, `doctor` and /v1/capabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from anycore import __version__, evidence
from anycore.contract.declare import CONTRACT_VERSION, BackendSpec

if TYPE_CHECKING:
    from anycore.plugins import Plugins


def capabilities(plugins: Plugins) -> dict[str, Any]:
    """Return backends (with devices, or the reason why there is none) and plugin failures, ready for JSON."""
    return {
        "anycore": __version__,
        "contract": list(CONTRACT_VERSION),
        "backends": [backend(spec) for spec in plugins.backends],
        "failures": [msgspec.to_builtins(failure) for failure in plugins.failures],
    }


def backend(spec: BackendSpec) -> dict[str, Any]:
    """Probe one backend and return all it declares. In a row of `support`, an empty list means "any".

    A row's `evidence` says whether it is declared, proven on a device, or proven once and stale.
    """
    probe = spec.probe()
    rows, troubles = evidence.as_rows(spec)
    return {
        "name": spec.name,
        "distribution": spec.distribution,
        "contract": list(spec.api),
        "priority": spec.priority,
        "available": probe.available,
        "probe": msgspec.to_builtins(probe),
        "support": rows,
        "evidence_troubles": troubles,
    }
