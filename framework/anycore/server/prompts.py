"""Options of `text.render.Renderer` as a generate or tokenize body sets them."""

from __future__ import annotations

from typing import Any

from anycore.server.protocol_generate import ChatBody, GenerateBody
from anycore.server.protocol_pool import TokenizeBody
from anycore.server.sampling import asked_tokens


def chat_options(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """Return what shapes the text of a conversation."""
    options: dict[str, Any] = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "add_special_tokens": bool(body.add_special_tokens),
        "chat_template": body.chat_template,
        "chat_template_kwargs": dict(body.chat_template_kwargs),
        "documents": body.documents,
    }
    if body.reasoning_effort is not None:
        options["chat_template_kwargs"].setdefault("reasoning_effort", body.reasoning_effort)
    if body.reasoning_effort == "none":
        options["chat_template_kwargs"].setdefault("enable_thinking", False)
    return options


def cut_options(body: GenerateBody) -> dict[str, Any]:
    """Return how a prompt is cut; what is cut leaves room for the output asked for, at least one token."""
    if body.truncate_prompt_tokens is None:
        return {}  # `Generation` checks the length, prompt and output together
    asked = asked_tokens(body)
    room = 1 if asked is None else asked
    return {"truncate": body.truncate_prompt_tokens, "side": body.truncation_side, "room": room}
