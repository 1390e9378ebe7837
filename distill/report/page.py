"""Turns sections of text, tables and figures into one self-contained HTML page and into its Markdown twin."""

import math
import re
from dataclasses import dataclass, field
from html import escape
from typing import Any
from urllib.parse import quote

from distill.report.plots import Picture
from distill.runtime.progress import duration

NONE = "\u2013"  # en dash: stands where there is no number
TIMES, MINUS = "\u00d7", "\u2212"


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
    words, otherwise all but the first are numbers.
    """

    head: list[str]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""
    title: str = ""
    groups: list[tuple[str, int]] = field(default_factory=list)
    text: bool = False


@dataclass
class Tiles:
    """The few numbers to see first, each with its meaning."""

    tiles: list[tuple[str, str]]


@dataclass
class Code:
    """Preformatted text; folded away under `title` where there is one."""

    text: str
    title: str = ""
    language: str = ""
    wrap: bool = False  # long lines go on in the next one, instead of beyond the edge


Block = str | list[str] | Table | Tiles | Code | Picture  # a string is a paragraph, a list of strings a list


@dataclass
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)


def number(value: Any) -> str:
    """A number with about four digits that mean something, thousands set apart; a dash for no number."""
    if value is None or isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{value:.3g}"
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3
    return f"{value:,.{digits}f}"


def percent(share: Any, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}%" if isinstance(share, int | float) and math.isfinite(share) else NONE


def short(value: Any, unit: str = "") -> str:
    """A large count with three digits: `66.4 M`, or `265 MB` with the unit `B`."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return NONE
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            scaled = value / size
            return f"{scaled:.{0 if scaled >= 100 else 1 if scaled >= 10 else 2}f} {letter}{unit}"
    return f"{value:,.0f} {unit}".strip()


def time_of(seconds: Any) -> str | None:
    """A span of time in words; None where it is not known."""
    return duration(seconds) if isinstance(seconds, int | float) and math.isfinite(seconds) else None


def markdown(title: str, sections: list[Section]) -> str:
    """The report as GitHub-flavoured Markdown; figures are linked by their file."""
    parts = [f"# {_md(title)}"]
    for section in sections:
        parts += [f"## {_md(section.title)}"] if section.title else []
        parts += [_md_block(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def _md(text: str) -> str:
    return re.sub(r"([\\|<>*`\[\]])", r"\\\1", " ".join(text.split()))


def _md_block(block: Block) -> str:
    match block:
        case str():
            return _md(block)
        case list():
            return "\n".join(f"- {_md(item)}" for item in block)
        case Table():
            return _md_table(block)
        case Tiles():
            return _md_table(Table([value for value, _ in block.tiles], [[text for _, text in block.tiles]], text=True))
        case Code():
            return _md_code(block)
        case Picture():
            return f"![{_md(block.caption)}]({block.file})"


def _md_code(code: Code) -> str:
    # A fence longer than any in the text cannot be closed by it.
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", code.text)), default=0))
    text = f"{fence}{code.language}\n{code.text.rstrip()}\n{fence}"
    return f"<details><summary>{escape(code.title)}</summary>\n\n{text}\n\n</details>" if code.title else text


def _md_table(table: Table) -> str:
    over = [group for group, span in table.groups for _ in range(span)] or [""] * len(table.head)
    head = [": ".join(filter(None, pair)) for pair in zip(over, table.head, strict=True)]
    lines = [f"**{_md(table.title)}**\n"] if table.title else []
    lines += ["| " + " | ".join(_md(cell) for cell in head) + " |"]
    lines += ["|" + "|".join([" --- "] + [" --- " if table.text else " ---: "] * (len(table.head) - 1)) + "|"]
    for row in table.rows:
        cells = [_md(cell) for cell in row]
        cells = [f"**{cells[0]}**"] + [""] * (len(table.head) - 1) if len(row) == 1 < len(table.head) else cells
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + (f"\n\n{_md(table.note)}" if table.note else "")


def html(title: str, sections: list[Section], head: str = "", first: str = "") -> str:
    """The report as one well-formed page that loads nothing: styles and figures are inside.

    Args:
        head, first: further elements of the page's head, and in front of its heading, such as those of a page that
            renews itself (`distill.report.live`).
    """
    body = "\n".join(
        "<section>"
        + (f"<h2>{escape(section.title)}</h2>" if section.title else "")
        + "\n".join(_html_block(block) for block in section.blocks)
        + "</section>"
        for section in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        '<meta name="color-scheme" content="light dark"/>\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n{head}</head>\n"
        f"<body>\n<main>\n{first}<h1>{escape(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _html_block(block: Block) -> str:
    match block:
        case str():
            return f"<p>{escape(block)}</p>"
        case list():
            return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in block) + "</ul>"
        case Table():
            return _html_table(block)
        case Tiles():
            tiles = (f"<div><b>{escape(value)}</b><span>{escape(text)}</span></div>" for value, text in block.tiles)
            return f'<div class="tiles">{"".join(tiles)}</div>'
        case Code():
            kind = ' class="wrap"' if block.wrap else ""
            text = f"<pre{kind}>{escape(block.text.rstrip())}</pre>"
            return f"<details><summary>{escape(block.title)}</summary>{text}</details>" if block.title else text
        case Picture():
            caption = escape(block.caption)
            return f'<figure role="img" aria-label="{caption}">{block.svg}<figcaption>{caption}</figcaption></figure>'


def _html_cell(cell: str) -> str:
    text = escape(cell)
    return f'<a href="{escape(quote(cell.href))}">{text}</a>' if isinstance(cell, Link) else text


def _html_table(table: Table) -> str:
    over = "".join(
        f'<th colspan="{span}">{f"<span>{escape(group)}</span>" if group else ""}</th>' for group, span in table.groups
    )
    head = f'<tr class="over">{over}</tr>' if over else ""
    if any(table.head):
        head += "<tr>" + "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.head) + "</tr>"
    rows = []
    for row in table.rows:
        if len(row) == 1 < len(table.head):
            rows.append(f'<tr class="group"><th colspan="{len(table.head)}">{escape(row[0])}</th></tr>')
            continue
        cells = "".join(f"<td>{_html_cell(cell)}</td>" for cell in row[1:])
        rows.append(f'<tr><th scope="row">{_html_cell(row[0])}</th>{cells}</tr>')
    # On a narrow screen the rows of such a table stand in two lines, the name above its numbers.
    many = len(table.head) in (5, 6) and not table.groups
    kind = ' class="text"' if table.text else f' class="many" style="--columns:{len(table.head) - 1}"' if many else ""
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    head = f"<thead>{head}</thead>" if head else ""
    return f'<div class="wide"><table{kind}>{caption}{head}<tbody>{"".join(rows)}</tbody></table></div>{note}'


CSS = """
:root{--paper:#fff;--ink:#22303c;--soft-ink:#5a6672;--rule:#d5dbe1;--hair:#e6eaee;--wash:#f4f6f8;--alarm:#fdecdc;--shade:#0003;
--teacher:#66717d;--student:#0072b2;--twin:#d55e00;--series-1:#0072b2;--series-2:#009e73;--series-3:#b0588c;
--series-4:#e69f00;--series-5:#56b4e9;--series-6:#8c6d31}
@media (prefers-color-scheme:dark){:root{--paper:#14191f;--ink:#e3e8ed;--soft-ink:#9aa7b4;--rule:#333d47;
--hair:#262f38;--wash:#1c232b;--alarm:#4a2c14;--shade:#fff4;
--teacher:#a3aeba;--student:#56b4e9;--twin:#f0884a;--series-1:#56b4e9;--series-2:#35c79c;--series-3:#dd90bd;
--series-4:#f2bd4b;--series-5:#a6d8f5;--series-6:#cbb07a}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.6 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:56rem;margin:0 auto;padding:3rem 1.5rem 4rem;overflow-wrap:break-word}
h1{font-size:1.9rem;line-height:1.2;letter-spacing:-.015em;margin:0 0 1rem;text-wrap:balance}
h2{font-size:1.2rem;line-height:1.3;margin:3rem 0 .75rem;padding-top:1.1rem;border-top:1px solid var(--rule)}
p,ul{margin:.75rem 0;max-width:44rem}
section:first-of-type>p:first-child{font-size:1.13rem;line-height:1.6}
ul{padding-left:1.2rem}li{margin:.3rem 0;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.1rem,1fr));gap:.75rem;margin:1.5rem 0}
.tiles div{background:var(--wash);border-radius:.5rem;padding:.8rem .9rem}
.tiles b{display:block;font-size:1.5rem;line-height:1.25;letter-spacing:-.02em;font-variant-numeric:tabular-nums}
.tiles span{display:block;font-size:.84rem;line-height:1.4;color:var(--soft-ink)}
.wide{overflow-x:auto;margin:1rem 0 .5rem;background:linear-gradient(90deg,var(--paper) 40%,transparent),
linear-gradient(270deg,var(--paper) 40%,transparent) 100% 0,linear-gradient(90deg,var(--shade),transparent),
linear-gradient(270deg,var(--shade),transparent) 100% 0;background-size:2.5rem 100%,2.5rem 100%,.9rem 100%,.9rem 100%;
background-repeat:no-repeat;background-attachment:local,local,scroll,scroll}
caption{text-align:left;font-weight:600;padding:.9rem 0 .35rem}
thead tr.over th{text-align:center;padding-bottom:0}
tr.over span{display:block;border-bottom:1px solid var(--rule);padding-bottom:.25rem}
table{border-collapse:collapse;width:100%;font-size:.92rem;line-height:1.4;
font-variant-numeric:tabular-nums lining-nums}
th,td{padding:.42rem .75rem;text-align:right;vertical-align:top}
td{white-space:nowrap}
th:first-child{text-align:left;font-weight:400;padding-left:0}
th:last-child,td:last-child{padding-right:.25rem}
thead th,thead th:first-child{font-weight:600;vertical-align:bottom}
thead tr:last-child th{border-bottom:2px solid var(--rule)}
tbody tr{border-bottom:1px solid var(--hair)}
tr.group th{font-weight:600;padding-top:1.1rem}
table.text th,table.text td{text-align:left;white-space:normal;overflow-wrap:anywhere}
table.text th:first-child{color:var(--soft-ink);min-width:10rem;width:13rem}
.note,figcaption{font-size:.86rem;line-height:1.5;color:var(--soft-ink);margin:.4rem 0 1.2rem}
figure{margin:1.5rem 0;overflow-x:auto}
figure svg{display:block;width:100%;min-width:30rem;height:auto}
svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
pre{background:var(--wash);border-radius:.5rem;padding:.9rem 1rem;overflow-x:auto;margin:.75rem 0;
font:.84rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
pre.wrap{white-space:pre-wrap;overflow-wrap:anywhere}
.notice{background:var(--alarm);color:var(--ink);border-radius:.5rem;padding:.8rem .9rem;max-width:none}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(17rem,100%),1fr));gap:.5rem 1rem}
figure .panels svg{min-width:0}
.panels text{font-size:11px;fill:var(--soft-ink)}.panels .title{font-size:12px;fill:var(--ink)}
.panels polyline{fill:none;stroke-linejoin:round}.curve{stroke-width:1.8}.faint{stroke-width:.9;opacity:.3}
.level{stroke:var(--hair);fill:none}.mark{stroke:var(--twin);stroke-dasharray:1 3;fill:none}
a{color:var(--student)}
details{margin:1rem 0}summary{cursor:pointer;font-weight:600}
@media (max-width:40rem){main{padding:1.5rem 1rem 3rem}h1{font-size:1.5rem;overflow-wrap:anywhere}
table{font-size:.82rem}th,td{padding:.38rem .45rem}td{white-space:normal}
table.text th:first-child{min-width:6rem;width:7.5rem}
table.many,.many thead,.many tbody{display:block}.many tr{display:grid;grid-template-columns:repeat(var(--columns),1fr)}
.many th,.many td{padding-inline:.15rem}.many th:first-child{grid-column:1/-1;padding-bottom:0}
.many thead th:first-child:empty{display:none}}
@media print{:root{--paper:#fff;--ink:#000;--soft-ink:#444;--rule:#ccc;--hair:#ddd;--wash:#f2f2f2;
--alarm:#eee;--shade:transparent;
--teacher:#66717d;--student:#0072b2;--twin:#d55e00;--series-1:#0072b2;--series-2:#009e73;--series-3:#b0588c;
--series-4:#e69f00;--series-5:#56b4e9;--series-6:#8c6d31}
@page{margin:16mm 14mm}html{font-size:11.5px}body{font-size:1rem}main{max-width:none;padding:0}
h2{margin-top:1.6rem;break-after:avoid}
figure,.wide,.tiles{break-inside:avoid}figcaption,.note{break-before:avoid}pre{white-space:pre-wrap;overflow-wrap:anywhere}.wide,figure{overflow:visible}}
"""
