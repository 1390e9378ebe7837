"""What pages are made of, and how jinja2 writes them: one self-contained HTML page, or the same as Markdown."""

import re
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from distill.report.words import NONE

MARKS = re.compile(r"([\\|<>*`\[\]])")  # characters that mean something in Markdown
GENERATOR = '<meta name="generator" content="distill"/>'  # is at the beginning of every page


class Link(str):
    """A cell of a table that leads to another file; in Markdown and everywhere else it is its text."""

    href: str

    def __new__(cls, text: str, href: str) -> "Link":
        made = super().__new__(cls, text)
        made.href = href
        return made


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

    def full_head(self) -> list[str]:
        """The headings, each behind that of its group."""
        over = [group for group, span in self.groups for _ in range(span)] or [""] * len(self.head)
        return [": ".join(filter(None, pair)) for pair in zip(over, self.head, strict=True)]


@dataclass
class Tiles:
    """The few numbers to see first, each with its meaning."""

    kind: ClassVar = "tiles"
    tiles: list[tuple[str, str]]

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

    @property
    def fence(self) -> str:
        """One for Markdown, longer than any in the text, which therefore cannot close it."""
        return "`" * max(3, 1 + max((len(run) for run in re.findall("`+", self.text)), default=0))


@dataclass
class Picture:
    """One figure: its file relative to the run folder, the same as SVG elements, and what it shows."""

    kind: ClassVar = "picture"
    file: str
    svg: str
    caption: str


Block = str | list[str] | Table | Tiles | Code | Picture  # a string is a paragraph, a list of strings a list


@dataclass
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)


class Renewal:
    """A page that a process writes anew every so many seconds, and that loads itself again, also from a file.

    It stays where the reader has scrolled, keeps open what was opened, and waits while text is selected or the page is
    not to be seen. After three times as long and half a minute without news it shows a notice.
    """

    def __init__(self, seconds: float, watched: bool = True) -> None:
        """`watched`: whether the page shows a notice when no news comes."""
        self.seconds = max(1, round(seconds))
        self.every, self.written = round(1000 * seconds), round(1000 * time.time())
        self.limit = round(1000 * (3 * seconds + 30)) if watched else 0


def html(title: str, sections: list[Section], renewal: Renewal | None = None) -> str:
    """One well-formed page that loads nothing: styles and figures are inside."""
    return render("page.html", title=title, sections=sections, renewal=renewal, generator=GENERATOR)


def is_written_here(path: Path) -> bool:
    """Whether a file is a page that this package wrote."""
    try:
        with path.open("rb") as file:
            return GENERATOR.encode() in file.read(1000)
    except OSError:
        return False


def markdown(title: str, sections: list[Section]) -> str:
    """A page as GitHub-flavoured Markdown; figures are linked by their file."""
    return render("page.md", title=title, sections=sections)


def table_text(table: Table) -> str:
    """A table in columns of spaces, for a terminal: the first one on the left, the others on the right."""
    rows = [row for row in (table.head, *table.rows) if len(row) == len(table.head)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    over, at = [], 0
    for group, span in table.groups:  # a heading has the width of all its columns
        widths[at] += max(0, len(group) - sum(widths[at : at + span]) - 2 * (span - 1))
        over.append(group.rjust(sum(widths[at : at + span]) + 2 * (span - 1)))
        at += span
    widths[0] = max(widths[0], *(len(row[0]) for row in table.rows)) if table.rows else widths[0]
    lines = [
        [
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        for row in (table.head, *table.rows)
    ]
    return "\n".join("  ".join(line).rstrip() for line in ([over] if over else []) + lines)


def table_markdown(table: Table) -> str:
    """A table alone."""
    return render("table.md", table=table).rstrip()


def render(template: str, **values: Any) -> str:
    """A file of templates/ with these values, which are escaped in HTML and SVG whatever they hold."""
    return str(_environment().get_template(template).render(values))


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    made = Environment(
        loader=PackageLoader("distill.report"),
        autoescape=select_autoescape(["html", "svg"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["md"] = escaped
    return made


def escaped(text: str) -> str:
    """A text in one line of Markdown, in which it means nothing but itself."""
    return MARKS.sub(r"\\\1", " ".join(text.split()))


def facts_table(title: str, facts: list[tuple[str, Any]]) -> list[Block]:
    """A table of labels and values, without the missing ones; nothing where none is left."""
    rows = [[label, str(value)] for label, value in facts if value not in (None, "", NONE)]
    return [Table(["", ""], rows, title=title, text=True)] if rows else []
