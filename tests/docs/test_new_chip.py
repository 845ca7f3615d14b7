"""docs/new-chip.md as it stands: every command is run in its order, and what the page shows is what comes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs.pages import ROOT, blocks
from installed import KIT, install, own_cache

PAGE = ROOT / "docs" / "new-chip.md"


class Reader:
    """Somebody who does what the page says, in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder / "anycore-acme" / "anycore_acme"
        self.cache = own_cache(folder / "cache")
        self.said = ""

    def type(self, command: str) -> None:
        """Run a command; installing is done by putting the project on the path (test_plugin_new.py runs pip)."""
        if command.startswith("pip install"):
            install(self.folder / "site", "anycore-acme", "0.1.0", "acme", "anycore_acme")
            return
        paths = [str(self.folder / "site"), str(self.package.parent)]
        variables = {
            **{name: text for name, text in os.environ.items() if not name.startswith(("ANYCORE_", "PYTEST_"))},
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",  # a file is changed within a second
            "ANYCORE_CACHE": str(self.cache),
            "OMP_NUM_THREADS": "1",
            **KIT,
        }
        done = subprocess.run(
            command,
            shell=True,
            cwd=self.folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        self.said = done.stdout + done.stderr

    def write(self, code: str) -> None:
        """Put a block of Python where the page says it goes."""
        attention, device = self.package / "attention.py", self.package / "device.py"
        if code.startswith('"""'):
            attention.write_text(code)
        elif code.startswith("def attend"):
            text = attention.read_text()
            attention.write_text(text[: text.index("def attend")] + code)
            declared = self.package / "__init__.py"
            declared.write_text(declared.read_text().replace("level=Level.REFERENCE", "level=Level.NATIVE"))
        else:
            text = re.sub(r"class AcmeOps\(Ops\):.*?\n\n\n(?=class)", "", device.read_text(), flags=re.DOTALL)
            device.write_text(text.replace("from anycore.contract.ops import Ops\n", code))

    def sees(self, shown: str) -> None:
        """Each line of the page is in what was said, in this order."""
        said = plain(self.said)
        at = 0
        for line in plain(shown).splitlines():
            found = said.find(line, at)
            assert found >= 0, f"the page shows\n  {line}\nbut what came is\n{self.said}"
            at = found + len(line)


def plain(text: str) -> str:
    """Without what differs from run to run: spacing, dates, sizes of memory, and how many tests there are."""
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r"\d{4}-\d\d-\d\d", "DATE", text)
    text = re.sub(r"[\d.]+ GiB", "N GiB", text)
    text = re.sub(r"\d+ (passed|deselected)", r"N \1", text)
    return re.sub(r"(?m)^ +", "", text)


@pytest.mark.slow
def test_the_page_is_true(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for block in blocks(PAGE):
        if block.language == "sh":
            reader.type(block.code.strip())
        elif block.language == "python":
            reader.write(block.code)
        else:
            reader.sees(block.code)
    assert len(blocks(PAGE, "text")) == 7
