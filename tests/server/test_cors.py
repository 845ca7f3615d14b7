"""Which web pages may call the server from a browser: none, but for those that are named."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from anycore.config import ServerConfig
from anycore.errors import ConfigError
from anycore.server.app import create_app
from anycore.server.auth import Guard
from anycore.server.keys import plain

PAGE, OTHER = "https://chat.example", "https://evil.example"
KEY = {"authorization": "Bearer secret"}
ASKING = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def ask(method: str, path: str, headers: dict[str, str], **settings: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        app = create_app(ServerConfig(**settings), [], guard=Guard([plain("key", "secret")]))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(send())


def allowed(answer: httpx.Response) -> dict[str, str]:
    """What the answer tells browsers."""
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}


def test_no_page_may_by_default() -> None:
    assert allowed(ask("GET", "/v1/models", {"origin": PAGE, **KEY})) == {}
    preflight = ask("OPTIONS", "/v1/completions", {"origin": PAGE, **ASKING})
    assert (preflight.status_code, allowed(preflight)) == (401, {})


def test_a_page_that_is_named_may_and_asks_without_a_key() -> None:
    settings = {"allowed_origins": (PAGE, "http://localhost:3000")}
    preflight = ask("OPTIONS", "/v1/completions", {"origin": PAGE, **ASKING}, **settings)
    assert preflight.status_code == 200
    told = allowed(preflight)
    assert told["access-control-allow-origin"] == PAGE
    assert set(told["access-control-allow-methods"].split(", ")) == {"GET", "POST"}
    assert {"authorization", "content-type", "x-request-timeout"} <= set(
        told["access-control-allow-headers"].lower().split(", ")
    )
    assert "access-control-allow-credentials" not in told
    answer = ask("GET", "/v1/models", {"origin": PAGE, **KEY}, **settings)
    assert answer.status_code == 200
    assert allowed(answer)["access-control-allow-origin"] == PAGE
    assert set(allowed(answer)["access-control-expose-headers"].split(", ")) == {"retry-after", "x-request-id"}
    assert "origin" in answer.headers["vary"].lower()


@pytest.mark.parametrize(("headers", "status"), [({}, 401), ({**KEY, "content-type": "text/plain"}, 400)])
def test_a_page_can_read_errors_too(headers: dict[str, str], status: int) -> None:
    answer = ask("POST", "/v1/completions", {"origin": PAGE, **headers}, allowed_origins=(PAGE,))
    assert answer.status_code == status
    assert allowed(answer)["access-control-allow-origin"] == PAGE


def test_other_pages_and_methods_may_not() -> None:
    settings = {"allowed_origins": (PAGE,)}
    assert "access-control-allow-origin" not in allowed(ask("GET", "/v1/models", {"origin": OTHER, **KEY}, **settings))
    for headers in ({"origin": OTHER, **ASKING}, {"origin": PAGE, "access-control-request-method": "DELETE"}):
        assert ask("OPTIONS", "/v1/completions", headers, **settings).status_code == 400


def test_settings_that_would_open_to_all_are_refused() -> None:
    with pytest.raises(ConfigError, match="name the origins"):
        ServerConfig(allowed_origins=("*",), allow_credentials=True)
    for settings in ({"allowed_origins": (f"{PAGE},{OTHER}",)}, {"allowed_headers": ('["x"]',)}):
        with pytest.raises(ConfigError, match="blanks between them"):
            ServerConfig(**settings)  # type: ignore[arg-type]
