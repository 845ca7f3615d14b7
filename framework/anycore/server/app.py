"""Builds the FastAPI application: state, gate, error handlers, and one router for each family of routes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.routing import APIRoute

from anycore import __version__
from anycore.config import ServerConfig
from anycore.server import (
    access,
    admin,
    chat,
    classify,
    completions,
    console,
    cors,
    embed,
    embeddings,
    failures,
    gate,
    messages,
    models_routes,
    operations,
    rerank,
    responses,
    scopes,
    score,
    tokenize,
)
from anycore.server.auth import Guard
from anycore.server.metrics import Metrics
from anycore.server.state import ServedModel, ServerState

if TYPE_CHECKING:
    from anycore.plugins import Plugins
    from anycore.server.tracing import Tracer

ROUTERS = (
    operations.router,
    admin.router,
    models_routes.router,
    chat.router,
    completions.router,
    responses.router,
    messages.router,
    embeddings.router,
    embed.router,
    rerank.router,
    score.router,
    classify.router,
    tokenize.router,
)
"""Every family of routes. Each module makes its own `router`."""


def create_app(
    config: ServerConfig,
    models: list[ServedModel],
    *,
    guard: Guard | None = None,
    metrics: Metrics | None = None,
    plugins: Plugins | None = None,
) -> FastAPI:
    """Make the application. Models may still be loading; the routes say so until they are ready."""
    app = FastAPI(
        title="anycore",
        version=__version__,
        description="OpenAI-compatible inference: generate, embed and rerank on any hardware.",
        redirect_slashes=False,
    )
    state = ServerState(config, models, guard or Guard([]), metrics or Metrics(config.metrics_names), plugins)
    app.state.anycore = state
    failures.add_handlers(app)
    app.add_middleware(gate.Gate, guard=state.guard, max_body=config.max_body_size, read_timeout=config.read_timeout)
    cors.add(app, config)
    app.add_middleware(access.Access, metrics=state.metrics, tracer=tracer(config))
    app.state.paths = [route.path for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    for router in (*ROUTERS, *([console.routes()] if config.console else [])):
        scopes.check_routes(router.routes)  # here: an app may keep what it includes as one opaque route
        app.include_router(router)
    return app


def tracer(config: ServerConfig) -> Tracer | None:
    """Return what traces requests; without an endpoint nothing of it is imported."""
    if config.otlp_traces_endpoint is None:
        return None
    from anycore.server.tracing import tracer_of

    return tracer_of(config.otlp_traces_endpoint)
