"""What mkdocs calls while it builds the manual: puts in what is made from the code, and checks the docstrings."""

import inspect
import logging
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import record_page
import yaml
from markdown_text import comment_of
from mkdocs.structure.files import Files
from settings_page import SettingsPage

import distill
from distill.commands.cli import COMMANDS, HELP, OPTIONS, command
from distill.config.settings import RECIPES

MARK = re.compile(r"^<!-- made by docs/hooks: (\w+) -->$", re.M)
MODELS = yaml.safe_load(Path("docs/reference/models.yaml").read_text("utf-8"))
MANY = 80  # entries below the sections of a page

log = logging.getLogger("mkdocs.hooks.site")  # a warning there ends a strict build


def commands() -> str:
    """What `--help` prints of every command."""
    helps = {"distill": f"{HELP.strip()}\n\n{OPTIONS.strip()}"} | {f"distill {n}": command(n).HELP for n in COMMANDS}
    return "\n\n".join(f"## {name}\n\n```text\n{text.strip()}\n```" for name, text in helps.items())


def models() -> str:
    """The supported pairs, each with the settings behind the command of its task."""
    blocks = []
    for task, found in MODELS.items():
        blocks.append(f"## {task.capitalize()} models\n\n`python -m distill {found['command']}` and:")
        rows = ["| family | covered | layers | settings |", "| --- | --- | ---: | --- |"]
        rows += [f"| {family} | `{kind}` | {layers} | `{words}` |" for family, kind, layers, words in found["pairs"]]
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks)


def recipes() -> str:
    """Every recipe, with the comment and the commands at its head."""
    blocks = []
    for file in sorted(RECIPES.glob("*.yaml")):
        lines = [line[1:] for line in file.read_text("utf-8").splitlines() if line.startswith("#   ")]
        shell = "\n".join(line.removeprefix("   ") for line in lines)
        blocks.append(f"### {file.stem}\n\n{comment_of(file)}\n\n```sh\n{shell}\n```")
    return "\n\n".join(blocks)


MADE: dict[str, Callable[[], str]] = {
    "commands": commands,
    "models": models,
    "recipes": recipes,
    "record": record_page.text,
    "settings": lambda: SettingsPage().text(),
}


def undescribed() -> Iterator[str]:
    """What of the public interface has no docstring: names, and the methods and properties that this package gives."""
    for name in distill.__all__:
        value = getattr(distill, name)
        described = {f"distill.{name}": value} if name != "__version__" else {}
        for owner in inspect.getmro(value) if inspect.isclass(value) else ():
            for member, of in vars(owner).items() if owner.__module__.startswith("distill.") else ():
                known = inspect.isroutine(of) or isinstance(of, property | cached_property | classmethod | staticmethod)
                if known and not member.startswith("_"):
                    described[f"distill.{name}.{member}"] = inspect.getattr_static(value, member)
        yield from (each for each, of in described.items() if len((inspect.getdoc(of) or "").strip()) <= 10)


def on_files(files: Files, **_: Any) -> Files:
    """Check the docstrings."""
    for name in undescribed():
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
