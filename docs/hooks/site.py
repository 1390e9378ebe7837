"""What mkdocs calls while it builds the manual: puts in what is made from the code, and checks the docstrings."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands_page
import record_page
from docstring_check import missing_docstrings
from mkdocs.structure.files import Files
from settings_page import SettingsPage

# What stands in a page in place of the line `<!-- made by docs/hooks: NAME -->`, by that name.
MADE: dict[str, Callable[[], str]] = {
    "commands": commands_page.text,
    "record": record_page.text,
    "settings": lambda: SettingsPage().text(),
}
MARK = re.compile(r"^<!-- made by docs/hooks: (\w+) -->$", re.M)

MANY = 80  # entries below the sections of a page

log = logging.getLogger("mkdocs.hooks.site")  # a warning there ends a strict build


def on_files(files: Files, **_: Any) -> Files:
    """Check the docstrings."""
    for name in missing_docstrings():
        log.warning(f"{name} has no docstring")
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Put in what is made from the code; a page with such a part is written as Markdown too, beside its HTML."""
    whole = MARK.sub(lambda mark: MADE[mark[1]](), markdown)
    if whole == markdown:
        return markdown
    path = Path(config.site_dir) / page.file.src_uri
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(whole, encoding="utf-8")
    return f'{whole}\n\n<a href="{path.name}" download>This page as Markdown</a>\n'


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Show sections alone beside a page of more entries than anybody would look through there."""
    if sum(len(section.children) for item in page.toc for section in item.children) > MANY:
        for item in page.toc:
            for section in item.children:
                section.children.clear()
    return html
