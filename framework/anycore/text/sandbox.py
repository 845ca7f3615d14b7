"""The process in which chat templates run. A template is a program that came with a checkpoint or a request: it gets
jinja2's sandbox, a limit on CPU time and memory that the kernel enforces, and no more output than a prompt may have.

One JSON object a line comes in on stdin, one goes out on stdout. Running out of CPU time kills the process (SIGPROF),
even within a single long operation; the parent, `template.py`, sees the pipe close and starts another.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 2.0
MEMORY_BYTES = 512 << 20
OUTPUT_CHARACTERS = 32 << 20
CONTINUE_TAG = "<<continue-final-message>> "
"""Put behind the message to continue, to find where it ends. Templates that strip content strip the last space."""


class Generation(Extension):
    """`{% generation %} … {% endgeneration %}`, which marks the assistant's text for training, is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Environment(ImmutableSandboxedEnvironment):
    """The sandbox, except that an unsafe attribute is an error at once; by itself it is printed as nothing."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise SecurityError(f"{attribute!r} of {type(obj).__name__} is not for templates")


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def compiled(text: str) -> jinja2.Template:
    """Compile a template with the settings and helpers that transformers gives to chat templates."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment.from_string(text)


def render(text: str, variables: dict[str, Any], continue_final: bool) -> str:
    """Render a chat; with `continue_final`, cut off what the template puts behind the last message's content."""
    if continue_final:
        last = variables["messages"][-1]
        content = last["content"]
        last["content"] += CONTINUE_TAG
    pieces, size = [], 0
    for piece in compiled(text).generate(**variables):
        size += len(piece)
        if size > OUTPUT_CHARACTERS:
            raise MemoryError(f"more than {OUTPUT_CHARACTERS} characters")
        pieces.append(piece)
    rendered = "".join(pieces)
    if not continue_final:
        return rendered
    end = rendered.rfind(CONTINUE_TAG.strip())
    if end < 0 or content.strip() not in rendered:
        raise jinja2.TemplateError("the template leaves out the last message's content, so it cannot be continued")
    kept = rendered.startswith(CONTINUE_TAG, end)
    return rendered[:end] if kept else rendered[:end].rstrip()


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job: {"template": …} checks it, with "variables" it is rendered. Failures are answers too."""
    try:
        if "variables" not in job:
            compiled(job["template"])
            return {"text": ""}
        return {"text": render(job["template"], job["variables"], job["continue_final"])}
    except MemoryError as error:
        return {"error": f"its output or memory exceeds the limit ({error or f'{MEMORY_BYTES >> 20} MiB'})"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"}
    except Exception as error:  # whatever the template's expressions raise
        return {"error": f"{error}" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end: it closes the pipe
    with suppress(ValueError, OSError):  # macOS refuses some limits
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    read: Callable[[], bytes] = sys.stdin.buffer.readline
    while line := read():
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        reply = json.dumps(answer(json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(reply.encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
