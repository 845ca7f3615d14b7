"""The Ray Serve application: fronts, and behind them a deployment of engines for each model.

`anycore serve --ray` runs it, and so do Ray's own tools, which have it made from a settings file by `cli.ray_app`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anycore.config import ModelConfig, ServerConfig
from anycore.distributed.settings import Placement, alone, check, need_ray, placement_of
from anycore.server.keys import Key

ROUTER = "anycore.distributed.router:PrefixRouter"
FRONT_REQUESTS = 100_000  # at a time: what is too much is refused by the application, in its own words
HEAD = "node:__internal_head__"


def application(config: ServerConfig, models: Sequence[ModelConfig], keys: list[Key]) -> Any:
    """Make the application.

    Raises:
        ConfigError: Ray is missing, or a setting does not go with it.
    """
    check(config, models)
    need_ray()
    names = [f"engine-{number}" for number in range(len(models))]
    engines = [engine(name, config, model) for name, model in zip(names, models, strict=True)]
    return front(config, [alone(model) for model in models], keys, names, engines)


def front(
    config: ServerConfig, models: Sequence[ModelConfig], keys: list[Key], names: Sequence[str], engines: Sequence[Any]
) -> Any:
    """The ingress. One front stands on the head node, beside what Ray cannot lose either; several, anywhere."""
    from ray import serve

    from anycore.distributed.front import Front

    one = config.api_servers == 1
    kind = serve.deployment(
        serve.ingress(None)(Front),
        name="front",
        num_replicas=config.api_servers,
        max_ongoing_requests=FRONT_REQUESTS,
        graceful_shutdown_timeout_s=config.shutdown_timeout + 5,
        ray_actor_options={"num_cpus": 0, "resources": {HEAD: 0.001} if one else {}},
        **({} if one else {"max_replicas_per_node": 1}),
    )
    # What is left out has done its work, or is not for every process of the cluster to read.
    own = replace(config, api_servers=1, api_key=(), api_key_file=None, ssl_certfile=None, ssl_keyfile=None, ray=None)
    return kind.bind(own, list(models), keys, list(names), *engines)


def engine(name: str, config: ServerConfig, model: ModelConfig) -> Any:
    """The deployment of a model's engines."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    from anycore.distributed.replica import EngineReplica

    placement = placement_of(model)
    number: dict[str, Any] = {"num_replicas": placement.replicas}
    if placement.autoscaling is not None:
        number = {"autoscaling_config": AutoscalingConfig(**placement.autoscaling)}
    kind = serve.deployment(
        EngineReplica,
        name=name,
        max_ongoing_requests=placement.seats,
        max_queued_requests=model.max_queued,
        graceful_shutdown_timeout_s=config.shutdown_timeout,
        health_check_period_s=2,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,
            request_router_kwargs={"most": placement.most, "seats": placement.seats},
        ),
        **actor(placement),
        **number,
    )
    own = replace(config, api_key=(), api_key_file=None, ray=None)
    return kind.bind(own, alone(model), placement.resources)


def actor(placement: Placement) -> dict[str, Any]:
    """What the actor of an engine reserves: a bundle for each rank, of which it holds the first."""
    others = {name: number for name, number in placement.bundle.items() if name not in ("CPU", "GPU")}
    options = {
        "num_cpus": placement.resources.get("CPU", 0),
        "num_gpus": placement.resources.get("GPU", 0),
        "resources": others,
    }
    if placement.ranks == 1:
        return {"ray_actor_options": options}
    return {
        "ray_actor_options": options,
        "placement_group_bundles": [placement.bundle or {"CPU": 0.001}] * placement.ranks,
        "placement_group_strategy": "PACK",
    }
