"""What pages are made of, and how jinja2 writes them: one self-contained HTML page, or the same as Markdown."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from distill.report.words import NONE, is_number, listed, number, percent, ratio, short, time_of
from distill.runtime.progress import counted

MARKS = re.compile(r"([\\|<>*`\[\]])")  # characters that mean something in Markdown
GENERATOR = '<meta name="generator" content="distill"/>'  # is at the beginning of every page


@dataclass
class Table:
    """Rows of cells under `head`; a row of one cell is a heading inside the table.

    `groups` are headings above those of `head`, each with the number of columns it spans; with `text` all columns are
    text, otherwise all but the first are numbers.
    """

    kind: ClassVar = "table"
    head: list[str]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""
    title: str = ""
    groups: list[tuple[str, int]] = field(default_factory=list)
    text: bool = False

    def __bool__(self) -> bool:
        return bool(self.rows)

    def full_head(self) -> list[str]:
        """The headings, each behind that of its group."""
        over = [group for group, span in self.groups for _ in range(span)] or [""] * len(self.head)
        return [": ".join(filter(None, pair)) for pair in zip(over, self.head, strict=True)]


@dataclass
class Tiles:
    """The few numbers to see first, each with its meaning."""

    kind: ClassVar = "tiles"
    tiles: list[tuple[str, str]]

    def __bool__(self) -> bool:
        return bool(self.tiles)

    def as_table(self) -> Table:
        return Table([value for value, _ in self.tiles], [[text for _, text in self.tiles]], text=True)


@dataclass
class Code:
    """Preformatted text; folded away under `title` where there is one."""

    kind: ClassVar = "code"
    text: str
    title: str = ""
    language: str = ""
    wrap: bool = False  # long lines wrap instead of running beyond the edge

    def __bool__(self) -> bool:
        return bool(self.text.strip())

    @property
    def fence(self) -> str:
        """One for Markdown, longer than any in the text, which therefore cannot close it."""
        return "`" * max(3, 1 + max(map(len, re.findall("`+", self.text)), default=0))


@dataclass
class Picture:
    """One figure: its file relative to the run folder, the same as SVG elements, and what it shows."""

    kind: ClassVar = "picture"
    file: str
    svg: str
    caption: str


Block = str | list[str] | Table | Tiles | Code | Picture  # a string is a paragraph, a list of strings a list


class Section:
    """A heading and what is below it; blocks without content are left out, and so is a section without blocks."""

    def __init__(self, title: str, blocks: Sequence[Block | None]) -> None:
        self.title, self.blocks = title, [block for block in blocks if block]


def facts_table(title: str, facts: Sequence[tuple[str, Any]]) -> Table:
    """A table of labels and values, without the missing ones."""
    rows = [[label, str(value)] for label, value in facts if value not in (None, "", NONE)]
    return Table(["", ""], rows, title=title, text=True)


def html(title: str, sections: list[Section], renew: float | None = None, watched: bool = True) -> str:
    """One well-formed page that loads nothing: styles and figures are inside.

    Args:
        renew: seconds after which the page loads itself again, also from a file. It stays where the reader has
            scrolled, keeps open what was opened, and waits while text is selected or the page is not to be seen.
        watched: whether it shows a notice after three times as long and half a minute without news.
    """
    shown = [section for section in sections if section.blocks]
    renewal = renew and {"seconds": renew, "written": round(1000 * time.time()), "watched": watched}
    return render("page.html", title=title, sections=shown, renewal=renewal, generator=GENERATOR)


def is_written_here(path: Path) -> bool:
    """Whether a file is a page that this package wrote."""
    try:
        with path.open("rb") as file:
            return GENERATOR.encode() in file.read(1000)
    except OSError:
        return False


def markdown(title: str, sections: list[Section]) -> str:
    """A page as GitHub-flavoured Markdown; figures are linked by their file."""
    return render("page.md", title=title, sections=[section for section in sections if section.blocks])


def table_text(table: Table) -> str:
    """A table in columns of spaces, for a terminal: the first one on the left, the others on the right."""
    rows = [table.head, *table.rows]
    widths = [
        max(map(len, column)) for column in zip(*(row for row in rows if len(row) == len(table.head)), strict=True)
    ]
    widths[0] = max(widths[0], *(len(row[0]) for row in rows))
    over, at = "", 0
    for group, span in table.groups:  # a heading has the width of all its columns
        widths[at] += max(0, len(group) - sum(widths[at : at + span]) - 2 * (span - 1))
        over += group.rjust(sum(widths[at : at + span]) + 2 * (span - 1)) + "  "
        at += span
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return "\n".join(([over.rstrip()] if over else []) + lines)


def render(template: str, **values: Any) -> str:
    """A file of templates/ with these values, which are escaped in HTML whatever they hold."""
    return str(_environment().get_template(template).render(values))


def prose(macro: str, *values: Any) -> str:
    """A paragraph of templates/prose.txt."""
    return " ".join(_rendered("prose.txt", macro, values).split())


def prose_lines(macro: str, *values: Any) -> list[str]:
    """The lines of one of its macros, each an item of a list."""
    return [line.strip() for line in _rendered("prose.txt", macro, values).splitlines() if line.strip()]


def facts(macro: str, *values: Any) -> list[tuple[str, str]]:
    """Labels and values of templates/facts.txt."""
    lines = (line.partition(":") for line in _rendered("facts.txt", macro, values).splitlines())
    return [(label, value.strip()) for label, _, value in lines]


def _rendered(template: str, macro: str, values: tuple[Any, ...]) -> str:
    return str(getattr(_environment().get_template(template).module, macro)(*values))


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    made = Environment(
        loader=PackageLoader("distill.report"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {each.__name__: each for each in (number, percent, short, ratio, listed, time_of, counted)}
    made.filters |= {"md": escaped, "ms": lambda seconds: f"{1000 * (seconds or 0):,.1f} ms"}
    made.tests["finite"] = is_number
    return made


def escaped(text: str) -> str:
    """A text in one line of Markdown, in which it means nothing but itself."""
    return MARKS.sub(r"\\\1", " ".join(text.split()))
