"""What the program can say when it refuses, fails or warns, read from its source: every message with its place.

A message is a template: constant words, and `<name>` for what is filled in. Read are

- calls of the classes of `anycore.errors` and of what is derived from them anywhere, and of functions that return one;
- what other exceptions are raised with: most are told to the operator inside a message of the first kind;
- probes and plugins that failed, reasons of the capability table, settings that were decided for a reason;
- warnings and errors in the log, and lines on standard error.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from docs.texts import ROOT, Module, Texts, assignments, name_of

SOURCES = (ROOT / "framework", ROOT / "backends")

PLACES = {"Failed": 0, "Refusal": 1, "PluginFailure": 2, "Probe": 1, "Decision": 3}
"""Calls that are no errors and tell one: which argument holds the text, where it is not named."""
NAMES = ("reason", "why", "message")
"""How it is named."""
LOGGED = ("warning", "error", "critical", "exception")
TROUBLE = ("anycore: ", "error: ")
"""How lines on standard error begin that are about trouble."""
REASONS = {"mismatches": "contract/declare.py"}
"""Functions whose lists of texts are told, and their files."""
UNTOLD = ("NotImplementedError", "AttributeError", "AssertionError", "error", "DeviceLost")
"""Exceptions that nobody is told of: an operator cannot cause them, or they are caught and put in other words."""
OURS_ALONE = (
    "contract/ops.py",
    "contract/reference.py",
    "contract/endtoend_faults.py",
    "server/scopes.py",
    "kernels/attention.py",
    "kernels/edits.py",
    "kernels/ends.py",
    "kernels/quantised.py",
    "kernels/gated.py",
    "kernels/library.py",
    "anycore/__init__.py",
)
"""Files whose ValueErrors and TypeErrors tell one part of the program of a fault of another: no operator's."""


@dataclass(frozen=True)
class Message:
    """One template, and where it stands. Status and code are those of the error envelope; None where it has none."""

    text: str
    place: str  # path:line
    status: int | None = None
    code: str | None = None

    @property
    def key(self) -> str:
        return key_of(self.text)


@dataclass
class Telling:
    """A call that tells something: which of its arguments do, and as which error."""

    told: list[ast.expr]
    error: str | None = None
    fillers: list[ast.expr] = field(default_factory=list)  # of the gaps that a log leaves in its text


def key_of(text: str) -> str:
    """A template without the names of its placeholders, quotes around them and line breaks: two that differ in no more
    are the same message."""
    return re.sub(r"\s+", " ", re.sub(r"(['\"]?)<[^<>]*>\1", "<>", text)).strip()


def messages(modules: Iterable[Module] | None = None) -> list[Message]:
    """Every message of the program, in the order of files and lines."""
    if modules is None:
        modules = [Module(path) for source in SOURCES for path in sorted(source.rglob("*.py"))]
    return Program(list(modules)).messages()


class Program:
    """All files: which classes are errors, which functions make some."""

    def __init__(self, modules: list[Module]) -> None:
        self.modules = modules
        self._texts = Texts(modules)
        self._errors: dict[str, tuple[int, str]] = {"AnycoreError": (500, "internal_error")}  # status and code
        classes = [node for module in modules for node in module.nodes if isinstance(node, ast.ClassDef)]
        while fresh := [c for c in classes if base_of(c) in self._errors and c.name not in self._errors]:
            self._errors |= {kind.name: self._envelope(kind) for kind in fresh}
        returns = ((n, f.returns) for module in modules for n, f in module.functions.items())
        self._makers = {n: r.id for n, r in returns if isinstance(r, ast.Name) and r.id in self._errors}
        self._makers.pop("error_of", None)  # it passes on what others have said

    def messages(self) -> list[Message]:
        return [message for module in self.modules for message in self._of(module)]

    def _envelope(self, kind: ast.ClassDef) -> tuple[int, str]:
        status, code = self._errors[base_of(kind)]
        for name, value in assignments(kind):
            if isinstance(value, ast.Constant):
                status = value.value if name == "status" and isinstance(value.value, int) else status
                code = value.value if name == "code" and isinstance(value.value, str) else code
        return status, code

    def _of(self, module: Module) -> Iterator[Message]:
        for node in module.nodes:
            place = f"{module.place}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and (telling := self._telling(module, node)) is not None:
                status, codes = self._status(module, node, telling.error)
                for text in self._said(module, telling):
                    yield from (Message(text, place, status, code) for code in codes)

    def _telling(self, module: Module, call: ast.Call) -> Telling | None:
        """What a call tells; None where it tells nothing."""
        name, given = name_of(call.func), 0
        if name in module.partials:
            bound = module.partials[name]
            name, given = name_of(bound[0]), len(bound) - 1
        if name in self._errors:
            return Telling(call.args[:1], name)
        if name in self._makers:  # what it is handed from further up is seen there
            return Telling(
                [a for a in call.args if not isinstance(a, ast.Name) or module.assigned(a.id, a)], self._makers[name]
            )
        if name in PLACES:
            named = [word.value for word in call.keywords if word.arg in NAMES]
            return Telling(named or call.args[PLACES[name] - given :][:1])
        if is_log(call.func):
            return Telling(call.args[:1], fillers=call.args[1:])
        if name == "log_crash":
            return Telling(call.args[1:2])
        for function, words in zip(call.args, call.args[1:], strict=False):  # a log line for later, as of a timer
            if is_log(function) and isinstance(words, ast.Tuple):
                return Telling(words.elts[:1], fillers=words.elts[1:])
        if name == "print" and any("stderr" in ast.unparse(word.value) for word in call.keywords if word.arg == "file"):
            told = any(text.startswith(TROUBLE) for a in call.args[:1] for text in self._texts.of(module, a))
            return Telling(call.args[:1]) if told else None
        if name == "error" and module.place.endswith("cli/flags.py"):  # of the parser
            return Telling(call.args[:1])
        home = module.scope(call)
        if name == "append" and isinstance(home, ast.FunctionDef) and home.name in REASONS:
            return Telling(call.args[:1]) if module.place.endswith(REASONS[home.name]) else None
        raised = isinstance(module.parents[call], ast.Raise)
        if raised and name not in UNTOLD and not (hasattr(builtins, name) and module.place.endswith(OURS_ALONE)):
            return Telling(call.args[:1])
        return None

    def _said(self, module: Module, telling: Telling) -> Iterator[str]:
        fillers = [self._texts.filler(module, node) for node in telling.fillers if not isinstance(node, ast.Starred)]
        for argument in telling.told:
            for text in self._texts.of(module, argument):
                for filler in fillers:
                    text = text.replace("%s", filler, 1)
                if says(text):
                    yield tidy(text.replace("%s", "<value>"))

    def _status(self, module: Module, call: ast.Call, error: str | None) -> tuple[int | None, list[str | None]]:
        """The status of an error, and the codes that it may have."""
        if error is None:
            return None, [None]
        status, usual = self._errors[error]
        given = next((word.value for word in call.keywords if word.arg == "code"), None)
        if given is None:
            return status, [usual]
        falls_back = any(isinstance(node, ast.Constant) and node.value is None for node in ast.walk(given))
        return status, [*self._texts.of(module, given), *([usual] if falls_back else [])]


def tidy(text: str) -> str:
    """A template on one line, without what may be put right before it or behind it, such as a hint."""
    joined = re.sub(r"(<[^<>]*>)(?:<[^<>]*>)+", r"\1", re.sub(r"\s+", " ", text.strip()))
    return re.sub(r"^<[^<>]*>(?=[A-Za-z])|(?<=[A-Za-z'])<[^<>]*>$", "", joined)


def says(text: str) -> bool:
    """Whether a template has a word of its own that could be searched."""
    return bool(re.search(r"[A-Za-z]{4,}", re.sub(r"<[^<>]*>", "", text)))


def is_log(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr in LOGGED and name_of(function.value) == "log"


def base_of(kind: ast.ClassDef) -> str:
    return name_of(kind.bases[0]) if kind.bases else ""
