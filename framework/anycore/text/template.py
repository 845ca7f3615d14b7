"""Chat templates, rendered as transformers renders them, in a process of their own (`sandbox.py`).

Rendering blocks for a fraction of a millisecond, and for up to the sandbox's limit if the template is hostile: a
server calls it off its event loop.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from anycore.errors import BadRequest, ConfigError
from anycore.text import sandbox

OWN_ARGUMENTS = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"),
    *("conversation", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    *("return_assistant_tokens_mask", "raise_exception", "strftime_now", "bos_token", "eos_token", "unk_token"),
    *("sep_token", "pad_token", "cls_token", "mask_token"),
}
"""What chat_template_kwargs may not set: the request has a field of its own for it, or it is not the client's."""

START = "import sys; sys.path[:] = sys.argv[1:]; from anycore.text.sandbox import main; main()"


class Sandbox:
    """The process that renders, started with the first use and again whenever it died. One job at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: weakref.finalize[Any, Any] | None = None

    def run(self, job: dict[str, Any]) -> str:
        """Have a job of `sandbox.answer` done.

        Raises:
            TemplateFailed: it failed or went over a limit.
        """
        try:
            line = json.dumps(job, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise TemplateFailed(f"what a chat template is given must be JSON: {error}") from None
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                reply = process.stdout.readline()
            except BrokenPipeError:
                reply = b""
            except BaseException:  # such as Ctrl-C: the next job must not be told what this one asked for
                stop(process)
                raise
            if not reply.endswith(b"\n"):
                stop(process)
                raise TemplateFailed(
                    f"the chat template was ended: it may take {sandbox.CPU_SECONDS:g} seconds of CPU time and "
                    f"{sandbox.MEMORY_BYTES >> 20} MiB of memory"
                )
        answer: dict[str, str] = json.loads(reply)
        if "error" in answer:
            raise TemplateFailed(f"the chat template cannot be rendered: {answer['error']}")
        return answer["text"]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, *sys.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            if self._ending is not None:
                self._ending.detach()  # of a process that has ended
            self._ending = weakref.finalize(self, stop, self._process)
        return self._process


class TemplateFailed(BadRequest):
    """A chat template refused its messages, failed, or went over a limit."""

    code = "chat_template"


class ChatTemplate:
    """One template.

    Args:
        text: Jinja.
        special_tokens: "bos_token", … as the template may name them.
        box: where it is rendered.
    """

    def __init__(self, text: str, special_tokens: dict[str, str], box: Sandbox) -> None:
        self.text = text
        self._special_tokens = special_tokens
        self._box = box

    def check(self) -> None:
        """Raise TemplateFailed unless the template is Jinja."""
        self._box.run({"template": self.text})

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: dict[str, Any] | None = None,
    ) -> str:
        """Return the prompt. Messages are as `messages.normalise` leaves them, `arguments` are chat_template_kwargs.

        Raises:
            BadRequest: an argument is not the client's to set, or the template failed.
        """
        variables = {
            **self._special_tokens,
            **check_arguments(arguments or {}),
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._box.run({"template": self.text, "variables": variables, "continue_final": continue_final_message})


class ChatTemplates:
    """The templates of one model, and the choice among them.

    Args:
        own: name → text, from the model's files.
        file: a template to use instead.
        allow_guests: whether a request may bring one.

    Raises:
        ConfigError: the file cannot be read, or is not Jinja.
    """

    def __init__(
        self, own: dict[str, str], special_tokens: dict[str, str], file: str | None = None, allow_guests: bool = False
    ) -> None:
        self._special_tokens = special_tokens
        self._allow_guests = allow_guests
        self._guests = Sandbox()  # templates from requests hold up each other only
        box = Sandbox()
        texts = own if file is None else {"default": read_template(file)}
        self._templates = {name: ChatTemplate(text, special_tokens, box) for name, text in texts.items()}
        if file is not None:
            try:
                self._templates["default"].check()
            except TemplateFailed as error:
                raise ConfigError(f"--chat-template {file}: {error.message}", param="chat_template") from None

    @property
    def usual(self) -> str | None:
        """The text of the template that is used where nothing asks for another."""
        found = self._templates.get("default")
        return None if found is None else found.text

    @property
    def texts(self) -> list[str]:
        return [template.text for template in self._templates.values()]

    def choose(self, guest: str | None, tools: bool) -> ChatTemplate:
        """Return the request's template, or the model's: the one for tools, if there are tools and it has one.

        Raises:
            BadRequest: requests may bring none, or there is none.
        """
        if guest is not None:
            if not self._allow_guests:
                raise BadRequest(
                    "this server takes no chat_template from requests: templates are programs "
                    "(--allow-request-template changes it)",
                    param="chat_template",
                )
            return ChatTemplate(guest, self._special_tokens, self._guests)
        found = (self._templates.get("tool_use") if tools else None) or self._templates.get("default")
        if found is None:
            raise BadRequest(
                "the model has no chat template: send text instead of messages, or start the server with "
                "--chat-template FILE",
                param="messages",
            )
        return found


def read_template(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8-sig")  # such as Windows writes
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--chat-template must name a file with a Jinja template; {file[:200]!r} cannot be read: {error}",
            param="chat_template",
        ) from None


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a sandbox process and wait for it."""
    process.kill()
    with process:  # closes the pipes and waits
        pass


def check_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return chat_template_kwargs if none of them is the request's or the server's own.

    Raises:
        BadRequest: naming the key.
    """
    if not isinstance(arguments, dict):
        raise BadRequest("chat_template_kwargs must be an object", param="chat_template_kwargs")
    for name in arguments:
        if name in OWN_ARGUMENTS or name.startswith("_"):
            param = f"chat_template_kwargs.{name}"
            raise BadRequest(
                f"{param} must not be set: chat_template_kwargs only adds to what a template sees", param=param
            )
    return arguments
