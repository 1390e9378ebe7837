"""What mkdocs calls while it builds the manual: puts in what is made from the code, and checks the docstrings."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands_page
import record_page
from docstring_check import missing_docstrings
from mkdocs.structure.files import File, Files, InclusionLevel
from settings_page import SettingsPage

DOCS = Path(__file__).resolve().parent.parent
# What stands in a page in place of the line `<!-- made by docs/hooks: NAME -->`, by that name.
MADE: dict[str, Callable[[], str]] = {
    "commands": commands_page.text,
    "record": record_page.text,
    "settings": lambda: SettingsPage().text(),
}
MARK = re.compile(r"^<!-- made by docs/hooks: (\w+) -->$", re.M)

MANY = 80  # entries below the sections of a page

log = logging.getLogger("mkdocs.hooks.site")  # a warning there ends a strict build


def on_config(config: Any) -> Any:
    """Leave pages whose file is not there yet out of the navigation."""
    config.nav = _existing(config.nav)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Check the docstrings; and add a page in place of each that is not there yet, so that links to it hold."""
    for name in missing_docstrings():
        log.warning(f"{name} has no docstring")
    for address in re.findall(r"^ *- ([\w/-]+\.md)$", (DOCS.parent / "mkdocs.yml").read_text("utf-8"), re.M):
        if files.get_file_from_path(address) is None:
            text = "# To come\n\nThis page is not written yet.\n"
            files.append(File.generated(config, address, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put in what is made from the code."""
    return MARK.sub(lambda mark: MADE[mark[1]](), markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Show sections alone beside a page of more entries than anybody would look through there."""
    if sum(len(section.children) for item in page.toc for section in item.children) > MANY:
        for item in page.toc:
            for section in item.children:
                section.children.clear()
    return html


def _existing(nav: list[Any]) -> list[Any]:
    """The entries of a navigation whose pages are there, and the sections that have any."""
    kept: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and (DOCS / entry).is_file():
            kept.append(entry)
        elif isinstance(entry, dict):
            ((title, content),) = entry.items()
            remaining = _existing(content if isinstance(content, list) else [content])
            if remaining:
                kept.append({title: remaining if isinstance(content, list) else content})
    return kept
