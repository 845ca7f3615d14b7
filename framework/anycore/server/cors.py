"""Which web pages of other origins may call the server from a browser: none, unless --allowed-origins names them."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from anycore.config import ServerConfig

EXPOSED = ("retry-after", "x-request-id")  # what scripts may read beside the body


def add(app: FastAPI, config: ServerConfig) -> None:
    """Answer what browsers ask first, around the gate: they ask without a key."""
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=EXPOSED,
        )
