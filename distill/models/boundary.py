"""The boundary around the reading of a folder with a model or tokenizer: whatever is raised in it becomes one line."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from distill.runtime.errors import SettingError
from distill.runtime.host import is_out_of_memory
from distill.runtime.hub import how_to_do_without, is_unreachable

# Errors whose text is a sentence; the text of any other, such as a KeyError, needs its class in front of it.
SENTENCES = (OSError, ValueError, ImportError, SafetensorError, StrictDataclassError)
CODE = "trust_remote_code"  # in what transformers raises for a model with code of its own
LONGEST_REASON = 240  # characters
JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


@contextmanager
def loading(setting: str, path: str, folder: str, failure: str, cure: str) -> Iterator[None]:
    """The boundary around the reading of a folder that somebody gave: whatever is raised in it becomes one line.

    A folder can hold anything, and what transformers, tokenizers, safetensors and the packages that these import raise
    for it has no class in common.

    Args:
        path: as it was given: a folder, or a name on the Hub.
        folder: what is read, such as the student of a run.
        failure: what the line states of the folder, before the reason.
        cure: what helps where the folder is there.

    Raises:
        SettingError: also one that was raised in it, unchanged.
    """
    try:
        with quietly():  # what transformers warns of is in that line
            yield
    except SettingError:
        raise
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # of Rust, in tokenizers; it is no Exception
        if not (isinstance(error, Exception) or is_panic) or is_out_of_memory(error):
            raise
        if is_unreachable(error) and not Path(path).expanduser().exists():
            absolute = Path(path).expanduser().absolute()
            looked_up = f"no folder {absolute} exists, so {path} was looked up on the Hugging Face Hub"
            raise SettingError(f"{setting}={path}: {looked_up}; {how_to_do_without(path)}") from error
        end = _no_folder(path) or f"; {_of_code(setting, error) or cure}"
        reason = _damaged_json(Path(folder)) or _reason(error)
        raise SettingError(f"{setting}={path} {failure}: {reason}{end}") from error


def _damaged_json(folder: Path) -> str:
    """What is wrong with the first file of JSON in a folder that holds no object; empty where all of them do."""
    for file in filter(Path.is_file, (folder / name for name in JSON_FILES)):
        try:
            content = json.loads(file.read_text("utf-8"))
        except Exception as error:  # of the file system, of JSON, of UTF-8, or of nesting too deep for Python
            return f"{file.name} is damaged ({_reason(error)})"
        if not isinstance(content, dict):
            return f"{file.name} is damaged (it holds no object)"
    return ""


@contextmanager
def quietly() -> Iterator[None]:
    """Without transformers' table of the weights that a model lacks, has besides, or has in another shape."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)  # it logs an error before it raises it
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _of_code(setting: str, error: BaseException) -> str:
    """The cure where a model comes with code of its own, which only a teacher or a student may run; else empty."""
    if CODE not in str(error):
        return ""
    group, _, name = setting.rpartition(".")
    allowed = group.startswith("teacher") or (group == "student" and name == "path")
    return f"set {group}.trust_remote_code=true if you trust it" if allowed else "this command runs no such code"


def _reason(error: BaseException) -> str:
    """Why something does not load; of weights of other shapes transformers names a table that it has logged."""
    if CODE in str(error):
        return "it comes with code of its own"
    if "ignore_mismatched_sizes" in str(error):
        return "its weights have other shapes than its config.json names"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    end = next((number for number, line in enumerate(lines) if not line.endswith(":")), len(lines))
    text = " ".join(lines[: end + 1])  # a line that ends in a colon has its reason in the next one
    text = text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."
    return text if text and isinstance(error, SENTENCES) else f"{type(error).__name__}: {text}".removesuffix(": ")


def _no_folder(path: str) -> str:
    """The end of a message about a value that is no folder and so was looked up as a name on the Hub; else empty."""
    if Path(path).expanduser().exists():
        return ""
    folder = Path(path).expanduser().absolute()
    return f"; {path} was looked up on the Hugging Face Hub, since no folder {folder} exists: correct the name"
