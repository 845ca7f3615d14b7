"""`anycore serve --ray`: joins the cluster, deploys the application, waits to be stopped, and takes it away again."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

from anycore.config import ModelConfig, ServerConfig
from anycore.distributed.app import application
from anycore.distributed.settings import need_ray
from anycore.errors import ConfigError, Unavailable
from anycore.server.auth import read_keys

APP = "anycore"
LOCAL = "local"

log = logging.getLogger(__name__)


def serve(config: ServerConfig, models: Sequence[ModelConfig]) -> int:
    """Serve on a cluster until stopped; return the exit code.

    Raises:
        ConfigError: Ray is missing, no cluster is there, or a setting does not go with it.
        Unavailable: the cluster could not start the application; the sentences are Ray's.
    """
    need_ray()
    from ray import serve as ray_serve

    keys, _ = read_keys(config)
    target = application(config, models, keys)
    ray = join(config)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # joining has set its own
        signal.signal(number, lambda *_: stop.set())
    try:
        ray_serve.start(proxy_location="EveryNode", http_options=http_options(config))
        failed: list[Exception] = []
        starting = threading.Thread(target=deploy, args=(target, failed), daemon=True)
        starting.start()
        while starting.is_alive() and not stop.is_set():
            starting.join(0.2)
        if failed:
            raise failed[0]
        if not stop.is_set():
            scheme = "http" if config.ssl_certfile is None else "https"
            names = ", ".join(model.names[0] for model in models)
            print(f"anycore: {scheme}://{config.host}:{config.port} serves {names} on Ray", flush=True)
        stop.wait()
        log.info("stopping: requests that run have %g s to finish", config.shutdown_timeout)
        ray_serve.delete(APP)
    finally:
        if config.ray == LOCAL:
            ray_serve.shutdown()
        ray.shutdown()
    return 0


def join(config: ServerConfig) -> Any:
    """Connect to the cluster, or start one of this machine alone.

    Raises:
        ConfigError: there is none at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody unless the user says so
    import ray

    try:
        if config.ray == LOCAL:
            return ray.init(include_dashboard=False, log_to_driver=True) and ray
        ray.init(address=config.ray, log_to_driver=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--ray {config.ray}: no cluster is there ({error}); `ray start --head` begins one, --ray {LOCAL} one of "
            "this machine alone",
            param="ray",
        ) from error
    return ray


def http_options(config: ServerConfig) -> dict[str, Any]:
    """Where Ray Serve's proxies listen."""
    options: dict[str, Any] = {"host": config.host, "port": config.port}
    if config.ssl_certfile is not None:
        options |= {"ssl_certfile": config.ssl_certfile, "ssl_keyfile": config.ssl_keyfile or config.ssl_certfile}
    return options


def deploy(target: Any, failed: list[Exception]) -> None:
    """Start the application and wait until it runs; say why if it does not."""
    from ray import serve as ray_serve

    try:
        ray_serve.run(target, name=APP, route_prefix="/")
    except Exception as error:
        found = ray_serve.status().applications.get(APP)
        said = [] if found is None else [each.message for each in found.deployments.values() if each.message]
        failed.append(Unavailable("\n".join([f"the application could not be started: {error}", *said])))
