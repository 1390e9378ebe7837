"""Plain sentences of the code, such as docstrings and comments of YAML files, as Markdown."""

import inspect
import re
from itertools import takewhile
from pathlib import Path

SIGNS = {"<": "&lt;", "{": "&#123;", "*": "\\*", "_": "\\_", "[": "\\["}
SECTIONS = (
    "backend|chain|corpus|data|evaluate|hydra|objective|optimizer|precision|profile|report|schedule|student|teacher|"
    "tracker|train"
)
# What is code although no backticks say so: settings with or without a value, names with an underscore, variables.
CODE = re.compile(
    r"(?<![\w`./$])(?:\$\{[^}]*\}|"
    rf"\+?(?:{SECTIONS})\.[\w.]*\w(?:=(?:'[^']*'|[^\s,;)]*[^\s,;.):]))?|'(?:{SECTIONS})\.[^']*'"
    r"|[a-z][\w.]*=(?:\[[^\]]*\]|[\w.{]*[\w}])"
    r"|\$DISTILL_DATA(?:[\w/.]*\w)?|\w+(?:/(?:\w|\{[\w,]+\})+)+(?:\.\w+)?/?"
    r"|[a-z]{2,}(?:_[a-z]+)+|_target_)"
)


def escaped(text: str) -> str:
    """The text with settings and names as code, and other signs that Markdown reads escaped."""
    parts = re.split(r"(`[^`]*`)", text)
    coded = "".join(part if part.startswith("`") else CODE.sub(r"`\g<0>`", part) for part in parts)
    parts = re.split(r"(`[^`]*`)", coded)
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
