"""The hooks a plugin may implement. They return data; none is called on the per-step path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from anycore.contract.declare import BackendSpec
    from anycore.engine.request import RequestRecord
    from anycore.models.spec import Architecture
    from anycore.text.replies.parts import Format
    from anycore.toolbox import FunctionTool

PROJECT = "anycore"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_backends() -> list[BackendSpec]:
    """Return the backends this plugin brings. Must not import vendor packages: `BackendSpec.open` does."""
    raise NotImplementedError


@hookspec
def register_models() -> list[Architecture]:
    """Return architectures beside the built-in ones: a Hugging Face name and how its config becomes a ModelSpec."""
    raise NotImplementedError


@hookspec
def register_reply_formats() -> list[Format]:
    """Return formats of tool calls and of reasoning. Those of anycore itself are tried last."""
    raise NotImplementedError


@hookspec
def register_tools() -> list[FunctionTool]:
    """Return functions that the server may run for a model, if it was started with --run-tools NAME."""
    raise NotImplementedError


@hookspec
def request_finished(record: RequestRecord) -> None:
    """Look at a finished request: its counts, times and outcome, never its text. Called in the server process."""
