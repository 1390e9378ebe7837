"""Plain sentences of the code, such as docstrings and comments of YAML files, as Markdown."""

import inspect
import re
from itertools import takewhile
from pathlib import Path

SIGNS = {"<": "&lt;", "{": "&#123;", "*": "\\*", "_": "\\_", "[": "\\["}


def escaped(text: str) -> str:
    """The text with the signs that Markdown reads escaped, but for those in backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"[<{*_\[]", lambda m: SIGNS[m[0]], part) for part in parts)


def paragraphs(docstring: str | None) -> list[str]:
    """The paragraphs of a docstring before its lists of arguments, attributes and errors, each as one line."""
    blocks = inspect.cleandoc(docstring or "").split("\n\n")
    prose = takewhile(lambda block: not re.match(r"(Args|Attributes|Returns|Raises|Shapes):?\s", block), blocks)
    return [escaped(" ".join(block.split())) for block in prose if block and not block.startswith("    ")]


def comment_of(file: Path) -> str:
    """The comment that a YAML file begins with, as one line."""
    lines = [line for line in file.read_text("utf-8").splitlines() if not line.startswith("# @")]
    comment = takewhile(lambda line: line.startswith("# "), lines)
    return escaped(" ".join(line[2:].strip() for line in comment))
