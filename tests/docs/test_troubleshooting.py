"""docs/troubleshooting.md has an entry for every message that the program can print, and none for one that is gone.

How to add a message, or change one: run `python ci/troubleshooting.py`. It takes out lines that nothing says any more,
and puts new ones into the entry that has most others of the same source file, in docs/troubleshooting.md and in
docs/troubleshooting.zh-CN.md alike. Look at where they went. For what it finds no entry, write one in both pages: a
heading, a line `HTTP STATUS `code`` where its messages are errors of the API, a `text` block with the messages, and
what they mean and what to do. The names in `<...>` are not compared: change them where others say more.

`docs/messages.py` says what counts as a message. A ValueError that no operator can cause goes into its OURS_ALONE.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from docs.messages import Message, key_of, messages
from docs.pages import ROOT
from docs.texts import Module

from anycore.cli.main import main, parser_of
from anycore.config import ModelConfig, ServerConfig
from anycore.engine.request import SamplingParams
from anycore.errors import AnycoreError
from anycore.models.source import locate
from anycore.plugins import load as load_plugins
from anycore.server.gate import check_headers
from anycore.server.keys import read_entries
from anycore.server.port import listen

PAGE = ROOT / "docs" / "troubleshooting.md"
ANSWERED = ("Requests", "Streams and requests that end early")
"""Sections whose every entry says with which status and code it is answered."""


@dataclass(frozen=True)
class Entry:
    """One entry of the page."""

    section: str
    heading: str
    lines: tuple[str, ...]  # its messages
    answers: frozenset[tuple[int, str]]  # status and code of those that are errors of the API
    prose: str

    def __str__(self) -> str:
        return self.heading


def entries(text: str) -> list[Entry]:
    """Take a page apart."""
    found = []
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        section, *bodies = re.split(r"^### ", part, flags=re.MULTILINE)
        for body in bodies:
            heading, _, rest = body.partition("\n")
            blocks = re.findall(r"^```text\n(.*?)^```$", rest, re.DOTALL | re.MULTILINE)
            lines = tuple(line for block in blocks for line in block.splitlines() if line)
            http = re.search(r"^HTTP .+$", rest, re.MULTILINE)
            answers = re.findall(r"(\d{3}) `(\w+)`", http[0]) if http else []
            prose = re.sub(r"^```.*?^```$|^HTTP [^\n]+$", "", rest, flags=re.DOTALL | re.MULTILINE).strip()
            known = frozenset((int(status), code) for status, code in answers)
            found.append(Entry(section.partition("\n")[0], heading, lines, known, prose))
    return found


@cache
def said() -> dict[str, list[Message]]:
    """The messages of the program by what tells them apart: one may be said at several places."""
    found: dict[str, list[Message]] = {}
    for message in messages():
        found.setdefault(message.key, []).append(message)
    return found


ENTRIES = entries(PAGE.read_text(encoding="utf-8"))


def difference(entered: list[Entry], told: dict[str, list[Message]]) -> str:
    """What a page lacks and what it has too much, ready to paste; "" where nothing is the matter."""
    lines = [line for entry in entered for line in entry.lines]
    keys = {key_of(line) for line in lines}
    missing = [hint(group[0], entered, told) for key, group in told.items() if key not in keys]
    gone = [line for line in lines if key_of(line) not in told]
    parts = {"missing": missing, "gone": gone}
    return "\n".join(f"{name}:\n" + "\n".join(found) for name, found in parts.items() if found)


def hint(message: Message, entered: list[Entry], told: dict[str, list[Message]]) -> str:
    """A message to paste, where it stands in the source, and the entries that have others of its file."""
    file = message.place.partition(":")[0]
    beside = {key for key, group in told.items() if any(m.place.startswith(file) for m in group)}
    fitting = [str(entry) for entry in entered if beside & {key_of(line) for line in entry.lines}]
    kind = "" if message.code is None else f", {message.status} {message.code}"
    return f"{message.text}\n    ({message.place}{kind}{', beside: ' if fitting else ''}{'; '.join(fitting)})"


def test_every_message_has_an_entry_and_every_entry_its_messages() -> None:
    assert len(said()) > 500
    found = difference(ENTRIES, said())
    assert not found, f"docs/troubleshooting.md, and docs/troubleshooting.zh-CN.md alike:\n{found}"


def test_no_message_has_two_entries() -> None:
    counts = Counter(key_of(line) for entry in ENTRIES for line in entry.lines)
    assert not [key for key, count in counts.items() if count > 1]


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_an_entry_says_what_to_do(entry: Entry) -> None:
    assert entry.lines
    assert len(entry.prose) > 30


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.answers or e.section in ANSWERED], ids=str)
def test_status_and_code_are_those_of_the_messages(entry: Entry) -> None:
    """Codes that are made while the program runs are taken as the page has them."""
    told = [message for line in entry.lines for message in said().get(key_of(line), [])]
    fixed = {(m.status, m.code) for m in told if m.code is not None and "<" not in m.code}
    assert fixed <= entry.answers, f"its messages have {sorted(fixed)}"
    if all("<" not in (message.code or "") for message in told):
        assert entry.answers == fixed
    assert entry.answers


@pytest.mark.parametrize(
    "refused",
    [
        lambda: ServerConfig(port=70000),
        lambda: ModelConfig(model="m", device=1, devices=(0, 1)),
        lambda: locate("./no/such/model"),
        lambda: locate("no//such"),
        lambda: read_entries("{}"),
        lambda: listen("", 0),
        lambda: SamplingParams(min_tokens=2, max_tokens=1),
        lambda: check_headers([(b"x", b"")] * 101),
        lambda: load_plugins([], {}).backend("cud"),
        lambda: parser_of("serve").read(["demo", "--no-such-flag"]),
        lambda: main(["sreve"]),
    ],
)
def test_what_is_printed_is_found_on_the_page(refused: Callable[[], object], capfd: pytest.CaptureFixture[str]) -> None:
    """The words of a real refusal, but for what is filled in, are those of one line of the page."""
    printed = ""
    with suppress(SystemExit):
        try:
            refused()
        except (AnycoreError, ValueError) as error:
            printed = str(error)
    words = re.sub(r"\s+", " ", printed or capfd.readouterr().err)
    lines = [line for entry in ENTRIES for line in entry.lines]
    patterns = {line: ".*".join(map(re.escape, re.split(r"'?<[^<>]*>'?", line))) for line in lines}
    assert [line for line, pattern in patterns.items() if len(line) > 20 and re.search(pattern, words)], words


def test_what_is_read_from_the_source() -> None:
    source = """
class Odd(Conflict):
    code = "odd"

LIMIT = 7

def _refused(why: str) -> Odd:
    return Odd(f"refused, because {why}")

def work(names, place, error):
    if names:
        raise Odd("one word too many", code="odder" if place else None)
    text = "either of them" if place else "or the other"
    log.warning("%s: slow by %d ms", place, error.delay)
    print("anycore: told at once", file=sys.stderr)
    raise _refused(f"of {', '.join(names)} at most {LIMIT} are taken, not {error!r}")
    raise ValueError(text)
    raise NotImplementedError("never told")
    return Odd(str(error))
"""
    errors = """
class AnycoreError(Exception): ...
class Conflict(AnycoreError):
    status = 409
    code = "conflict"
"""
    found = messages([Module(Path("errors.py"), errors), Module(Path("work.py"), source)])
    assert [(m.text, m.status, m.code) for m in sorted(found, key=lambda m: (m.text, m.code or ""))] == [
        ("<place>: slow by <delay> ms", None, None),
        ("anycore: told at once", None, None),
        ("either of them", None, None),
        ("of <names> at most 7 are taken, not '<error>'", 409, "odd"),
        ("one word too many", 409, "odd"),
        ("one word too many", 409, "odder"),
        ("or the other", None, None),
        ("refused, because <why>", 409, "odd"),
    ]
    assert {m.place for m in found if m.text.startswith("refused")} == {"work.py:8"}


def test_what_is_missing_and_what_is_gone_is_named() -> None:
    page = (
        "## Requests\n\n### Busy\n\nHTTP 409 `conflict`\n\n```text\nmodel '<x>' is busy\nno longer said\n```\n\nWait.\n"
    )
    told = [Message("model <name> is busy", "a.py:1", 409, "conflict"), Message("new", "a.py:2", 409, "conflict")]
    found = difference(entries(page), {message.key: [message] for message in told})
    assert found.splitlines() == [
        "missing:",
        "new",
        "    (a.py:2, 409 conflict, beside: Busy)",
        "gone:",
        "no longer said",
    ]
