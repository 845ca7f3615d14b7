"""The pages of the documentation, read: their text, their code blocks, their links."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}: {self.code[:40]}"


def blocks(page: Path, *languages: str) -> list[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [Block(page, language, code) for language, code in found if not languages or language in languages]


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def everything() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def shell_lines() -> list[tuple[Path, str]]:
    """Every command of the shell blocks, continued lines joined, remarks cut off."""
    lines = []
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in re.sub(r"\\\n", " ", block.code).splitlines():
                lines.append((page, re.sub(r"\s+# .*", "", line)))
    return lines


def generator() -> ModuleType:
    """ci/generate_docs.py as a module."""
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "ci" / "generate_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
