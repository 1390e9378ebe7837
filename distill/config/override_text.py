"""The text of an override, NAME=VALUE: as Hydra reads it, and as a shell does."""

import json
import re
import shlex
from functools import cache, lru_cache
from types import NoneType
from typing import Any

from distill.config.base import Settings, kinds_of
from distill.runtime.files import expanded

# Where a run folder begins; of nothing it would be the folder that the user is in.
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
SIMPLE = re.compile(r"[A-Za-z0-9_./-]+")  # a value that Hydra reads as it stands
NAME = re.compile(r"[+~]*[\w./@-]+")
# An entry of a list or a dict without quotation marks, behind the sign that begins it.
ENTRY = re.compile(r"""((?:[\[{,]|:\s)\s*)([^\[\]{},:'"\s][^\[\]{},:'"]*)(?=[\]},])""")
UNQUOTED = re.compile(r"[A-Za-z0-9_./\\+*%@?|$ -]+")  # what Hydra takes without quotation marks


def as_value(value: Any) -> str:
    """A plain value as it stands on a command line, a text in quotation marks where its signs need them."""
    if value is None or isinstance(value, bool | int | float | list | dict):  # JSON, but for the names in a dict
        return re.sub(r'"(\w+)": ', r"\1: ", json.dumps(value, ensure_ascii=False))
    text = str(value)
    return text if SIMPLE.fullmatch(text) else quoted(text.replace("${", r"\${"))


def quoted(text: str) -> str:
    """A text as a value of a command line, whatever signs are in it."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return str(QuotedString(text, Quote.single).with_quotes())


def understood(override: str, multirun: bool) -> str:
    """An override as Hydra reads it: with quotation marks where it would not understand a value, or change it.

    It takes no `=`, brackets, quotation marks or letters beyond ASCII in texts, and reads the path 1e5 as a number.

    Args:
        multirun: commas are between the values of several runs.
    """
    name, is_set, value = override.partition("=")
    if not is_set or not NAME.fullmatch(name):
        return override
    if name == "+recipe":  # a recipe stands in the defaults list already
        name = "recipe"
    if name in FOLDERS and value.startswith("~"):
        value = expanded(value)
    if name == "hydra.searchpath":
        value = re.sub(r"(?<=[\[,'\"/ ])~[^/,'\"\]]*", lambda match: expanded(match[0]), value)
    parsed = parse_override(f"{name}={value}")
    if parsed is not None:
        number = None if parsed.is_sweep_override() else parsed.value()
        changes = is_text(name) and isinstance(number, int | float) and str(number) != value
        return f"{name}={quoted(value)}" if changes else f"{name}={value}"
    values = value.split(",") if multirun else [value]
    as_texts = ",".join(text if parse_override(f"{name}={text}") else quoted(text) for text in values)
    as_entries = ENTRY.sub(lambda match: match[1] + _entry(match[2]), value)
    is_nested = value.startswith(("[", "{", "'", '"', "${")) and not is_text(name)
    candidate = as_entries if is_nested else as_texts
    return f"{name}={value}" if parse_override(f"{name}={candidate}") is None else f"{name}={candidate}"


def _entry(text: str) -> str:
    return text if UNQUOTED.fullmatch(text) else quoted(text.rstrip())


@lru_cache(4096)  # it takes a tenth of a second for a long list, and is asked for again and again
def parse_override(override: str) -> Any:
    """An override as Hydra reads it; None where it does not understand it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(override)
    except (HydraException, RecursionError, ValueError):  # lists in lists too deep, numbers of too many digits
        return None


def is_text(name: str) -> bool:
    """Whether a setting is a text whatever its value looks like."""
    return name in (*FOLDERS, "data.cache") or name.rpartition(".")[2] in _texts()


@cache
def _texts() -> set[str]:
    """The last parts of the names of settings that are texts; without `cache`, which of a teacher is a group."""
    sections, texts, others = [Settings], set[str](), set[str]()
    for section in sections:
        sections += section.__subclasses__()
        for name, field in section.model_fields.items():
            (texts if kinds_of(field.annotation) <= {str, NoneType} else others).add(name)
    return texts - others


def in_shell(name: str, value: str) -> str:
    """An override with this text as its value, as it is typed in a shell."""
    override = f"{name}={quoted(value)}"
    return shlex.quote(override) if re.search(r'["$`\\!]', override) else f'"{override}"'
