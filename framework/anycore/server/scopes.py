"""What a key must be allowed to do for a route: each route names one of these among its dependencies.

A route that names none does not start: `create_app` refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from anycore.errors import Forbidden
from anycore.server.auth import OPEN_ROUTES
from anycore.server.keys import Scope


class Needs:
    """Lets a request pass whose key has one of the scopes.

    Without keys everybody may do everything, but what an admin does, which only clients on this machine may.
    """

    def __init__(self, *scopes: Scope) -> None:
        self.scopes = frozenset(scopes)

    async def __call__(self, request: Request) -> None:
        key = request.state.account.key
        named = " or ".join(sorted(self.scopes))
        if key is None:
            if self.scopes == {"admin"} and request.client and not ip_address(request.client.host).is_loopback:
                raise Forbidden(
                    "without keys this route is for clients on the server's own machine: set --api-key-file",
                    code="needs_key",
                )
        elif not key.scopes & self.scopes:
            raise Forbidden(f"this route needs a key with scope {named}; key {key.name} has {', '.join(key.scopes)}")


INFER = Depends(Needs("infer"))
METRICS = Depends(Needs("metrics"))
ADMIN = Depends(Needs("admin"))
ANY = Depends(Needs("infer", "metrics", "admin"))


def scopes_of(route: APIRoute) -> frozenset[Scope]:
    """Return what a route asks for; nothing for an open one."""
    asked = [d.dependency.scopes for d in route.dependencies if isinstance(d.dependency, Needs)]
    return frozenset().union(*asked)


def check_routes(routes: Iterable[BaseRoute]) -> None:
    """Refuse routes of the API that say nothing about scopes and are not open. Of pages, /docs takes any key."""
    for route in routes:
        if isinstance(route, APIRoute) and not scopes_of(route) and route.path not in OPEN_ROUTES:
            raise TypeError(f"{route.path} names no scope among its dependencies (server/scopes.py)")
