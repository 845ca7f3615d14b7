"""The command `anycore`: imports the sub-command that is asked for, and turns errors into a line and an exit code."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from anycore import __version__
from anycore.cli.flags import Parser, nearest
from anycore.errors import AnycoreError, ConfigError
from anycore.server import logs

COMMANDS = {
    "serve": "serve one or several models over HTTP",
    "chat": "talk to a model in the terminal",
    "generate": "continue prompts, once, from the shell",
    "embed": "turn texts into vectors, once, from the shell",
    "rerank": "order documents by relevance to a query, once, from the shell",
    "run-batch": "answer a file of requests, and go on where a run was stopped",
    "matrix": "show what every backend supports, and why others are absent",
    "check": "say whether a model can be served here, and if not, what is the least to change",
    "plan": "say what memory a model takes on a device, here or not, and what to change if it does not fit",
    "simulate": "predict throughput and latencies under a load, on devices that need not be here",
    "convert": "write a model anew: quantised, or from files that serve does not read",
    "key new": "make an API key, and the line that lets a server know it",
    "doctor": "show versions, devices, failed plugins and the environment; check a device",
    "conformance": "prove what a backend declares, on this machine's device",
    "plugin new": "write the project of a new backend, which works and is tested as it stands",
    "bench offline": "measure a model in this process, without HTTP",
    "bench startup": "time a server's start until its first answer",
    "bench kernels": "time a backend's operations at a model's shapes",
    "bench serve": "put a running server under load",
    "version": "print the version",
}
"""Sub-commands and what they do. Each lives in a module of its name with `add_arguments(parser)` and `run(options)`;
words of a name are joined with an underscore."""


OF_THE_MACHINE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
)
"""Errors of the operating system that no program can do anything about: a full disk, rights, limits."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = os.environ.get("ANYCORE_LOG", "").lower() == "debug"
    fill_streams()
    try:
        return dispatch(words)
    except AnycoreError as error:
        if debug:
            logging.getLogger(__name__).exception("failed")
        print(f"anycore: {error.message}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away (`anycore matrix | head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if debug or error.errno not in OF_THE_MACHINE:
            return fault(error, debug)
        print(f"anycore: {why(error)}: that is for whoever keeps this machine to change", file=sys.stderr)
        return 1
    except Exception as error:
        return fault(error, debug)


def fault(error: Exception, debug: bool) -> int:
    """Tell of an error that nobody foresaw, and return its exit code."""
    if debug:
        raise error
    print(
        f"anycore: internal error: {type(error).__name__}: {error}\n"
        "(this is a fault of anycore or of a plugin; ANYCORE_LOG=debug shows where)",
        file=sys.stderr,
    )
    return 70


def why(error: OSError) -> str:
    """What the operating system refused, and where."""
    places = [os.fsdecode(place) for place in (error.filename, error.filename2) if isinstance(place, str | bytes)]
    return ": ".join([error.strerror or str(error), *places[-1:]])


def fill_streams() -> None:
    """Give the null device to standard streams that were closed, as some supervisors start their services.

    Else the next file or socket would get their numbers, which children take for their own streams, and Python has
    None where output goes.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


def dispatch(words: list[str]) -> int:
    """Run the sub-command that `words` begin with."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else 2
    length = 2 if " ".join(words[:2]) in COMMANDS else 1
    name, rest = " ".join(words[:length]), words[length:]
    if name in ("-V", "--version", "version"):
        print(f"anycore {__version__}")
        return 0
    if name not in COMMANDS and any(other.startswith(f"{name} ") for other in COMMANDS):
        asked = rest in (["-h"], ["--help"])
        if asked or not rest:
            print(overview(name))
            return 0 if asked else 2
        name = " ".join([name, rest[0]])
    if name not in COMMANDS:
        print(
            f"anycore: there is no command {name}{nearest(name, COMMANDS)}\n(anycore --help lists them)",
            file=sys.stderr,
        )
        return 2
    module = module_of(name)
    options = parser_of(name).read(rest)
    start_log(options)
    code: int = module.run(options)
    return code


def module_of(name: str) -> ModuleType:
    return import_module(f"anycore.cli.{name.replace(' ', '_').replace('-', '_')}")


def parser_of(name: str) -> Parser:
    """Build the parser of one sub-command."""
    module = module_of(name)
    parser = Parser(prog=f"anycore {name}", description=module.__doc__)
    module.add_arguments(parser)
    parser.shorten_usage()
    return parser


def overview(group: str = "") -> str:
    """Return the text of `anycore --help`, or of `anycore GROUP --help` for the commands that begin with a word."""
    if group:
        lines = [f"usage: anycore {group} COMMAND ...", ""]
        end = f"anycore {group} COMMAND --help tells more."
    else:
        lines = [
            "One inference core on any hardware: generate, embed and rerank.",
            "",
            "usage: anycore COMMAND ...",
            "",
        ]
        end = "anycore COMMAND --help tells more. Start with: anycore serve demo"
    names = [name for name in COMMANDS if not group or name.startswith(f"{group} ")]
    return "\n".join([*lines, *(f"  {name:15}{COMMANDS[name]}" for name in names), "", end])


def start_log(options: argparse.Namespace) -> None:
    """Log to stderr at the level of --log-level, else of ANYCORE_LOG, with API keys masked."""
    levels = ("debug", "info", "warning", "error")
    level = getattr(options, "log_level", None) or (os.environ.get("ANYCORE_LOG") or "info").lower()
    if level not in levels:
        raise ConfigError(f"ANYCORE_LOG must be one of {', '.join(levels)}, not {level!r}", param="log_level")
    keys = getattr(options, "api_key", None) or ()
    logs.configure(level, [keys] if isinstance(keys, str) else keys)


if __name__ == "__main__":
    sys.exit(main())
