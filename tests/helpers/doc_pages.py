"""Extract what README.md and docs/ quote: YAML blocks, commands, tables, links."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README, CONFIGURATION = ROOT / "README.md", ROOT / "docs" / "configuration.md"
SITE = tuple(sorted((ROOT / "docs").rglob("*.md")))  # mkdocs.yml lists them
PAGES = (README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *SITE)
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`(surefoot [^`\n]*)`")
_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
_ENDS = {"|", ">", "<", "&&", ";"}  # where a shell command ends


@dataclass(frozen=True)
class Quote:
    """A quoted text on a page.

    text: a YAML block, a command, or the target of a link.
    """

    page: Path
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}: {' '.join(self.text.split())[:60]}"

    @property
    def words(self) -> list[str]:
        """Split a command into arguments, without comment, pipe or redirection."""
        words = shlex.split(self.text, comments=True)
        return words[: next((place for place, word in enumerate(words) if word in _ENDS), len(words))]


def blocks(language: str) -> list[Quote]:
    """Return the fenced blocks of a language."""
    return [Quote(page, text) for page in PAGES for found, text in _BLOCK.findall(_text(page)) if found == language]


def commands() -> list[Quote]:
    """Return every `surefoot` command in bash blocks, without duplicates."""
    first: dict[tuple[str, ...], Quote] = {}
    for line in (Quote(block.page, line) for block in blocks("bash") for line in block.text.splitlines()):
        if line.text.startswith("surefoot "):
            first.setdefault(tuple(line.words), line)
    return list(first.values())


def mentions() -> list[Quote]:
    """Return every `surefoot` command named in running text, complete or not."""
    return [Quote(page, span) for page in PAGES for span in _SPAN.findall(_BLOCK.sub("", _text(page)))]


def links() -> list[Quote]:
    """Return every link to a file or a heading; none to the web."""
    return [Quote(page, target) for page in PAGES for target in _LINK.findall(_BLOCK.sub("", _text(page)))]


def anchors(page: Path) -> set[str]:
    """Return the headings of a page in the form that links use."""
    headings = re.findall(r"^#+ (.*)$", _BLOCK.sub("", _text(page)), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table(page: Path, *columns: str) -> list[tuple[str, ...]]:
    """Return the rows of the only table with these column heads."""
    head = f"| {' | '.join(columns)} |\n"
    assert _text(page).count(head) == 1, f"{page.name} has {_text(page).count(head)} tables with the head {columns}"
    lines = _text(page).partition(head)[2].split("\n\n")[0].splitlines()[1:]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]


def names(cell: str) -> list[str]:
    """Return the words in backquotes."""
    return re.findall(r"`([^`]+)`", cell)


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")
