"""The documentation's pages as the tests see them: their blocks, commands, links and anchors."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"(?:^<!-- (?P<note>.*) -->\n)?^```(?P<info>.*)\n(?P<text>(?s:.*?))^```$", re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]+))?\)")


@dataclass(frozen=True)
class Block:
    """One fenced block; `note` is the HTML comment right before it."""

    page: str
    line: int
    language: str
    title: str
    note: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read(page: str) -> str:
    return (ROOT / page).read_text()


def all_pages() -> list[str]:
    """Every page of the repository, as a path from its root."""
    paths = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "examples/README.md"]
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def blocks(page: str, language: str | None = None) -> list[Block]:
    """The page's blocks in order, or those of one language."""
    text = read(page)
    found = []
    for match in _BLOCK.finditer(text):
        name, _, options = match["info"].partition(" ")
        titles = re.findall(r'title="([^"]*)"', options)
        line = text.count("\n", 0, match.start("info")) + 2
        found.append(Block(page, line, name, titles[0] if titles else "", match["note"] or "", match["text"]))
    return [block for block in found if language in (None, block.language)]


def section(page: str, heading: str) -> str:
    """What stands under a heading of the second level."""
    return read(page).split(f"## {heading}\n")[1].split("\n## ")[0]


def commands(page: str) -> list[list[str]]:
    """The lines of the page's shell blocks, in words, each with the lines that a backslash joins to it."""
    joined = [block.text.replace("\\\n", " ") for block in blocks(page, "sh")]
    lines = [line for text in joined for line in text.splitlines()]
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def without_assignments(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The variables that stand before a command, and the command."""
    count = next((i for i, word in enumerate(words) if not re.match(r"\w+=", word)), len(words))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def launched(words: list[str]) -> list[str] | None:
    """The launcher's arguments, where the command is one of the launcher."""
    command = without_assignments(words)[1]
    if command[:1] == ["ringrun"]:
        return command[1:]
    return command[2:] if command[:2] == ["python", "launch.py"] else None


def links(page: str) -> list[tuple[str, str]]:
    """The page's links to files and places of this repository: path from the page ('' for itself), and anchor."""
    return _LINK.findall(read(page))


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", it.lower()).replace(" ", "-") for it in headings}
