"""Chinese pages say what the English ones do: the same commands, headings, tables and links, so that neither drifts.

How to keep up: change the English page, run this file, and bring the Chinese one to what it says. Code blocks and names
in backticks that are flags, variables or codes stand as they are; a generated part may be left to the English page.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs.pages import ROOT, blocks, prose
from docs.test_pages import anchors

PAGES = [ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*.zh-CN.md"))]
GENERATED = re.compile(r"<!-- begin ([\w-]+) -->.*?<!-- end \1 -->\n?", re.DOTALL)
CHINESE = re.compile(r"[\u4e00-\u9fff]")

pytestmark = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def english(page: Path) -> Path:
    return page.with_name(page.name.replace(".zh-CN", ""))


def written(page: Path) -> str:
    """A page without code and generated parts."""
    return GENERATED.sub("", prose(page))


def names(page: Path) -> set[str]:
    """What stands in backticks and is the same in every language: flags, variables, codes of errors, paths."""
    spans = re.findall(r"`([^`\n]+)`", written(page))
    return {span for span in spans if re.fullmatch(r"--[a-z-]+|[A-Z]+_[A-Z_]+|[a-z]+_[a-z_]+|/[a-z/]+", span)}


def links(page: Path) -> set[str]:
    """Where a page's links lead, whatever the language of the page there; links between the two languages left out."""
    targets = re.findall(r"\]\(([^)\s]+)\)", written(page))
    return {target.replace(".zh-CN", "").partition("#")[0] for target in targets} - {"", english(page).name}


def test_code_is_the_same(page: Path) -> None:
    ours = [(block.language, block.code) for block in blocks(page)]
    theirs = [(block.language, block.code) for block in blocks(english(page))]
    for mine, wanted in zip(ours, theirs, strict=False):
        assert mine == wanted
    assert len(ours) == len(theirs)


def test_headings_tables_and_lists_have_the_same_shape(page: Path) -> None:
    for kind in (r"^(#+) ", r"^(\|)", r"^(- )", r"^(HTTP [^\n]+)"):
        ours, theirs = (re.findall(kind, written(p), re.MULTILINE) for p in (page, english(page)))
        assert ours == theirs


def test_generated_parts_are_the_same_where_there_are_any(page: Path) -> None:
    ours, theirs = (
        {m[1]: m[0] for m in GENERATED.finditer(p.read_text(encoding="utf-8"))} for p in (page, english(page))
    )
    assert ours.items() <= theirs.items()


def test_names_are_the_same_and_no_link_is_missing(page: Path) -> None:
    assert names(page) == names(english(page))
    assert links(english(page)) <= links(page)


def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", written(page)):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_every_paragraph_is_chinese_and_names_the_english_page(page: Path) -> None:
    text = written(page)
    assert f"[English]({english(page).name})" in text
    paragraphs = [
        part for part in re.split(r"\n\s*\n", text) if part and not re.match(r"HTTP \d|# anycore$|\[English", part)
    ]
    assert len(paragraphs) > 10
    assert not [part for part in paragraphs if not CHINESE.search(part) and len(part) > 40]
