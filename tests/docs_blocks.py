"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: where it is, its language, and its text without common indentation."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return the blocks of all pages in given languages; all of them where none is given."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text[: match.start()].count("\n") + 1
            found.append(Block(str(page.relative_to(ROOT)), line, match[1], textwrap.dedent(match[2])))
    return [block for block in found if not languages or block.language in languages]
