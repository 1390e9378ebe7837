"""What `--help` prints of every command, as lists and blocks of Markdown, for reference/commands.md."""

import re
import textwrap
from collections.abc import Iterator

from markdown_text import escaped

from distill.commands.cli import COMMANDS, HELP, OPTIONS, command


def text() -> str:
    """All commands, as Markdown."""
    parts = ["## distill\n", *_formatted(HELP), *_formatted(OPTIONS)]
    for name in COMMANDS:
        parts += [f"\n## distill {name}\n", *_formatted(command(name).HELP)]
    return "\n".join(parts)


def _formatted(help_text: str) -> Iterator[str]:
    """The blocks of a help text: the usage and examples as code, arguments as lists, the rest as paragraphs."""
    for block in help_text.strip().split("\n\n"):
        lines = block.splitlines()
        if block.startswith("usage: "):
            usage = textwrap.dedent(block.replace("usage: ", "       ", 1)).splitlines()
            yield "``` { .text .usage }\n" + "\n".join(map(_example, usage)) + "\n```\n"
            continue
        prose = [line for line in lines if not line.startswith("  ")]
        indented = [line for line in lines if line.startswith("  ")]
        if prose:
            sentence = escaped(" ".join(prose))
            yield f"{sentence[0].upper()}{sentence[1:]}\n"
        if indented and indented[0].startswith("  distill "):
            yield "```sh\n" + "\n".join(_example(line.strip()) for line in indented) + "\n```\n"
        elif indented:
            yield from _definitions(indented)


def _example(line: str) -> str:
    """`distill X     what it does` with that as a comment."""
    return re.sub(r"\s{3,}(\S.*)$", r"  # \1", line)


def _definitions(lines: list[str]) -> Iterator[str]:
    """A list of arguments: one begins two characters into a line, and what it means may go on in lines below."""
    entries: list[list[str]] = []
    for line in lines:
        match = re.match(r"  (\S.*?)(?:\s{2,}(\S.*))?$", line)
        if match is not None and not line.startswith("    "):
            entries.append([match[1], match[2] or ""])
        else:
            entries[-1].append(line.strip())
    for term, *meaning in entries:
        yield f"`{term}`\n:   {escaped(' '.join(filter(None, meaning))) or '&nbsp;'}\n"
