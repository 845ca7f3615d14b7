"""Brings the lists of messages in docs/troubleshooting.md, and in its translation, to what the program says now.

A message that is gone is taken out; a new one goes into the entry that has most others of its source file and code.
What has no such entry is told: writing one is for people, as is the `HTTP` line of an entry that gets a new code.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from docs.messages import Message, key_of, messages  # noqa: E402 (as the test reads them)

PAGES = (ROOT / "docs" / "troubleshooting.md", ROOT / "docs" / "troubleshooting.zh-CN.md")
BLOCK = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    said: dict[str, Message] = {}
    for message in messages():
        said.setdefault(message.key, message)
    english = PAGES[0].read_text(encoding="utf-8")
    missing, gone = difference(english, said)
    homes = {message: home_of(message, english, said) for message in missing}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(renewed(text, homes, gone), encoding="utf-8")
    for message, home in homes.items():
        where = "no entry fits" if home is None else f"into {heading(english, home)!r}"
        print(f"{where}: {message.text}\n    ({message.place}, {message.status or '-'} {message.code or '-'})")
    print(*(f"taken out: {key}" for key in sorted(gone)), sep="\n")
    return int(None in homes.values())


def difference(text: str, said: Mapping[str, Message]) -> tuple[list[Message], set[str]]:
    """Messages that a page lacks, and the keys of lines that nothing says any more."""
    listed = {key_of(line) for block in BLOCK.findall(text) for line in block.splitlines()}
    return [message for key, message in said.items() if key not in listed], listed - set(said)


def home_of(message: Message, text: str, said: Mapping[str, Message]) -> int | None:
    """The number of the block with most messages of the same file and code, else of the same file."""
    file = message.place.partition(":")[0]
    counts: Counter[int] = Counter()
    for number, block in enumerate(BLOCK.findall(text)):
        others = filter(None, (said.get(key_of(line)) for line in block.splitlines()))
        for other in others:
            if other.place.startswith(f"{file}:"):
                counts[number] += 1000 if (other.status, other.code) == (message.status, message.code) else 1
    return max(counts, key=lambda number: counts[number]) if counts else None


def heading(text: str, number: int) -> str:
    """The heading of the entry with a block of this number."""
    before = text[: list(BLOCK.finditer(text))[number].start()]
    return before.rpartition("\n### ")[2].partition("\n")[0]


def renewed(text: str, homes: Mapping[Message, int | None], gone: set[str]) -> str:
    """A page with its lists brought up to date."""
    numbers = iter(range(len(BLOCK.findall(text))))

    def anew(found: re.Match[str]) -> str:
        number = next(numbers)
        kept = [line for line in found[1].splitlines() if key_of(line) not in gone]
        added = [message.text for message, home in homes.items() if home == number]
        return "\n".join(["```text", *kept, *added, "```"])

    return BLOCK.sub(anew, text)


if __name__ == "__main__":
    sys.exit(main())
