"""Talks to a model in the terminal: in this process, or on a running server with --url.

/clear forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from anycore.cli.flags import Parser
from anycore.cli.local import SAMPLING, add_model_flags, add_sampling_flags, open_model
from anycore.errors import AnycoreError, ConfigError

Message = dict[str, Any]
Reply = Callable[[list[Message]], Iterator[str]]


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="model to load (demo, folder, id), or with --url a name it serves"
    )
    parser.add_argument("--url", metavar="URL", help="talk to this server, such as http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="key for --url (better: ANYCORE_API_KEY, not shown in ps)")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_flags(parser, max_tokens=None)
    add_model_flags(parser)


def run(options: argparse.Namespace) -> int:
    start = [{"role": "system", "content": options.system}] if options.system else []
    if options.url:
        from anycore.cli.remote import remote_reply

        sampling = {name: getattr(options, name) for name in (*SAMPLING, "max_tokens")}
        given = {name: value for name, value in sampling.items() if value is not None}
        converse(remote_reply(options.url, options.model, options.api_key, given), start)
    elif options.model:
        with open_model(options, options.model, "generate") as llm:
            converse(llm.stream_chat, start)
    else:
        raise ConfigError("name a MODEL, such as demo, or a server with --url", param="model")
    return 0


def converse(reply: Reply, start: list[Message]) -> None:
    """Read lines and print answers until the end of input."""
    messages = list(start)
    if sys.stdin.isatty():
        _line_editing()
        print("/clear forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer.", file=sys.stderr)
    while (line := _read_line()) is not None and line != "/exit":
        if line == "/clear":
            messages = list(start)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": answer(reply, messages)})
            except AnycoreError as error:
                messages.pop()
                print(f"error: {error.message}", file=sys.stderr)


def answer(reply: Reply, messages: list[Message]) -> str:
    """Print an answer as it comes and return what was printed of it."""
    pieces = []
    with stoppable() as stopped, closing(reply(messages)) as stream:  # type: ignore[type-var]  # generators close
        for piece in stream:
            print(piece, end="", flush=True)
            pieces.append(piece)
            if stopped():
                break
    print()
    return "".join(pieces)


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed. Only the second one raises: a step must not be cut."""
    presses = 0

    def note(signum: int, frame: Any) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: presses > 0
    finally:
        signal.signal(signal.SIGINT, previous)


def _read_line() -> str | None:
    """Return the next line without its spaces; None at the end of input or on Ctrl-C."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _line_editing() -> None:
    """Let `input` edit lines and recall earlier ones, where this Python has readline."""
    try:
        importlib.import_module("readline")
    except ImportError:
        return
