"""What `--ray` is told, checked before a cluster is asked: resources, autoscaling, and what cannot be had there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from anycore.config import ModelConfig, ServerConfig, flag
from anycore.errors import ConfigError

MISSING = "--ray needs a package that is missing: pip install 'anycore[ray]'"
SEATS = 256  # requests that an engine gets at a time where --max-num-seqs does not say so
ELSEWHERE_MODEL = {
    "url": "a model of another server needs no engines",
    "keep_alive": "engines are ended and started by Ray: use ray_autoscaling",
    "device": "Ray chooses the devices: reserve them with --ray-resources",
    "devices": "Ray chooses the devices: reserve them with --ray-resources",
}
ELSEWHERE_SERVER = {
    "reuse_port": "Ray Serve listens",
    "write_timeout": "Ray Serve writes the answers",
    "ssl_ca_certs": "clients' certificates are not handed on by Ray Serve: let what stands before it check them",
}
"""Settings that mean nothing on a cluster, and why."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How many engines of a model there are, and what each takes of the cluster.

    Args:
        resources: that each rank of an engine reserves, by Ray's names.
        autoscaling: fields of Ray Serve's AutoscalingConfig; None: the number stays.
        seats: requests that an engine has at a time; more wait in front.
    """

    replicas: int
    ranks: int
    resources: dict[str, float]
    autoscaling: dict[str, Any] | None
    seats: int

    @property
    def most(self) -> int:
        """Engines that there may be."""
        return self.replicas if self.autoscaling is None else int(self.autoscaling["max_replicas"])

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray is to hold for one rank."""
        return {name: number for name, number in self.resources.items() if number}


def need_ray() -> Any:
    """Import Ray and Ray Serve.

    Raises:
        ConfigError: they are not installed.
    """
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise ConfigError(f"{MISSING} ({error})", param="ray") from error
    return ray


def check(config: ServerConfig, models: Sequence[ModelConfig]) -> None:
    """Refuse what cannot be had on a cluster, and what is for a cluster where there is none.

    Raises:
        ConfigError: naming the setting and what to use instead.
    """
    if config.ray is None:
        for model in models:
            for name in ("ray_resources", "ray_autoscaling"):
                if getattr(model, name) is not None:
                    raise ConfigError(f"{model.names[0]}: {flag(name)} needs --ray", param=name)
        return
    default = ServerConfig()
    for name, why in ELSEWHERE_SERVER.items():
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(f"{flag(name)} means nothing with --ray: {why}", param=name)
    plain = ModelConfig()
    for model in models:
        for name, why in ELSEWHERE_MODEL.items():
            if getattr(model, name) != getattr(plain, name):
                raise ConfigError(f"{model.names[0]}: {flag(name)} does not go with --ray: {why}", param=name)
        placement_of(model)


def placement_of(model: ModelConfig) -> Placement:
    """Read a model's placement.

    Raises:
        ConfigError: a number or a name is wrong.
    """
    resources: dict[str, Any] = _object(model, "ray_resources") if model.ray_resources is not None else {"CPU": 1}
    for name, number in resources.items():
        if isinstance(number, bool) or not isinstance(number, (int, float)) or number < 0:
            raise ConfigError(
                f"--ray-resources: {name} must be a number, 0 or more, not {number!r}", param="ray_resources"
            )
    replicas = model.replicas or 1
    seats = model.max_num_seqs or SEATS
    scaling = None
    if model.ray_autoscaling is not None:
        scaling = {"min_replicas": replicas, "target_ongoing_requests": seats, **_object(model, "ray_autoscaling")}
        most = scaling.get("max_replicas")
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ConfigError(
                f"--ray-autoscaling needs max_replicas, a whole number from 1 on, not {most!r}", param="ray_autoscaling"
            )
    return Placement(replicas, model.tensor_parallel_size, resources, scaling, seats)


def _object(model: ModelConfig, name: str) -> dict[str, Any]:
    try:
        found = json.loads(getattr(model, name))
    except ValueError as error:
        raise ConfigError(f"{model.names[0]}: {flag(name)} is not JSON: {error}", param=name) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{model.names[0]}: {flag(name)} must be a JSON object, not {found!r}", param=name)
    return found


def alone(model: ModelConfig) -> ModelConfig:
    """The settings of one engine, which knows nothing of the cluster."""
    return replace(model, replicas=None, ray_resources=None, ray_autoscaling=None)
