"""English prose that every installation has: the docstrings of installed packages, parsed and never imported."""

import ast
import hashlib
import importlib.machinery
import importlib.metadata
import json
import logging
import os
import platform
import re
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from distill.config.settings import DataConfig, SourceConfig
from distill.data.disk_cache import folder_of, once_with_digest, workers
from distill.data.readers import blocks
from distill.data.sources import Document, InvalidRecord, Shard, Source
from distill.data.sources.jsonl import Jsonl

logger = logging.getLogger(__name__)

FORMAT = 2  # raise it when the same packages would give another text

_NAMES = """
accelerate aiohttp click datasets filelock fsspec huggingface_hub hydra jinja2 joblib matplotlib mpmath networkx nltk
numpy omegaconf packaging pandas pip PIL psutil pyarrow pydantic requests rich scipy setuptools sklearn sympy tokenizers
torch torchmetrics torchvision tqdm transformers urllib3 wandb yaml
"""
PACKAGES = tuple(_NAMES.split())
DOCUMENT = 16 << 10  # characters
_DISTRIBUTION = {"hydra": "hydra-core", "PIL": "pillow", "sklearn": "scikit-learn", "yaml": "PyYAML"}
_SKIPPED_FOLDERS = {"test", "tests", "testing", "_vendor", "__pycache__", "site-packages", "dist-packages", "idlelib"}
_SKIPPED_PATHS = {("transformers", "models")}  # a quarter of all the code to parse, for a tenth of the prose
_MAX_BYTES = 2_000_000  # larger modules are generated tables
_MIN_SHARE = 0.1  # of a module within triple quotes; below it, parsing costs more than the prose is worth
_QUOTED = re.compile(rb'"""(.*?)"""', re.S)

_ROLE = re.compile(r":[\w:.+-]+:`~?([^`<]*?)(?:\s*<[^`>]*>)?`")  # :func:`name`, :ref:`text <target>`
_LINK = re.compile(r"`+([^`<]+?)\s*<[^`>]+>`_*|\[([^\]]+)\]\([^)]+\)")  # `text <url>`_, [text](url)
_MARKS = re.compile(r"``|`_?|\*\*|(?<!\w)\*(?=\w)|(?<=\w)\*(?!\w)")
_HEADING = re.compile(r"^.*\n\s*([-=~^\"'*#+])\1{2,}\s*$", re.M)  # a line and the rule below it
_NO_PROSE = re.compile(r">>>|\.\. [a-z]|::|[={}|\\]|https?:|^\d+[.)]|^[\w.]+ ?\([^)]*\) ?:|^Returns?:|__|\bTODO\b|--\w")
_WORDS = re.compile(r"[A-Za-z][a-z']*")


def installed() -> dict[str, tuple[Path, str]]:
    """Folder and version of every package of the fixed list that is installed, the standard library first."""
    packages = {"python": (Path(sysconfig.get_paths()["stdlib"]), platform.python_version())}
    for name in sorted(PACKAGES):
        spec = importlib.machinery.PathFinder.find_spec(name)  # finds a top-level package without running it
        if spec and spec.submodule_search_locations:
            try:
                version = importlib.metadata.version(_DISTRIBUTION.get(name, name))
            except importlib.metadata.PackageNotFoundError:
                version = ""
            packages[name] = (Path(next(iter(spec.submodule_search_locations))), version)
    return packages


@dataclass(frozen=True)
class Prose(Source):
    """A document is up to 16 KiB or so of the prose of one folder of modules, so that few sequences end early."""

    data: DataConfig
    fraction: float = 1.0

    @classmethod
    def find(cls, settings: SourceConfig, setting: str, data: DataConfig) -> Self:
        return cls(data, settings.fraction)

    def describe(self) -> str:
        count = len(installed()) - 1
        return f"bundled prose (docstrings of Python {platform.python_version()} and {count} installed packages)"

    @property
    def identity(self) -> Any:
        return FORMAT, [(name, version) for name, (_, version) in installed().items()], self.fraction

    def shards(self) -> list[Shard]:
        """Those of a JSONL file in the cache, which is made first where there is none for these packages."""
        return _lines_of(build(self.data)).shards()

    def documents(self, shard: Shard) -> Iterator[Document | InvalidRecord]:
        return _lines_of(Path(shard.paths[0])).documents(shard)


def _lines_of(path: Path) -> Jsonl:
    return Jsonl(SourceConfig(kind="jsonl", path=str(path)), "corpus")


def build(data: DataConfig) -> Path:
    """A JSONL file of documents, one of `{"name", "text"}` a line, made once per set of package versions.

    A paragraph that came before, in any package, is left out.
    """
    packages = installed()
    key = hashlib.sha256(repr((FORMAT, [(name, version) for name, (_, version) in packages.items()])).encode())
    path = folder_of(data.cache, "prose", f"{key.hexdigest()[:32]}.jsonl")
    with once_with_digest(path) as new, workers(data) as pool:
        if new is not None:
            begun = time.perf_counter()
            versions = ", ".join(f"{name} {version}".strip() for name, (_, version) in packages.items())
            logger.info(f"reading the prose of {versions}")
            count = _write(packages, new, pool)
            logger.info(f"read {count:,} paragraphs of prose in {time.perf_counter() - begun:.0f} s")
    return path


def _write(packages: dict[str, tuple[Path, str]], path: Path, pool: Executor | None) -> int:
    """Writes the file; gives the number of paragraphs."""
    modules = [(name, root, file) for name, (root, _) in packages.items() for file in _modules(root)]
    files = [str(file) for *_, file in modules]
    texts = pool.map(_read, files, chunksize=64) if pool else map(_read, files)
    seen: set[int] = set()
    folders: dict[str, list[str]] = {}
    for (name, root, file), texts_of_module in zip(modules, texts, strict=True):
        folder = ".".join((name, *file.parent.relative_to(root).parts))
        folders.setdefault(folder, []).extend(_unseen(texts_of_module, seen))
    with path.open("w", encoding="utf-8") as out:
        for folder, documents in folders.items():
            for number, text in enumerate(blocks("\n\n".join(documents), DOCUMENT)):
                record = {"name": f"{folder}#{number}", "text": text.strip()}
                out.write(json.dumps(record, ensure_ascii=False) + "\n")
    return len(seen)


def _modules(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        here = Path(folder).name
        folders[:] = sorted(name for name in set(folders) - _SKIPPED_FOLDERS if (here, name) not in _SKIPPED_PATHS)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _unseen(paragraphs: list[str], seen: set[int]) -> list[str]:
    """The paragraphs whose words (without case and signs) were not met before."""
    new = []
    for paragraph in paragraphs:
        words = " ".join(_WORDS.findall(paragraph)).lower()
        mark = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "big")
        if mark not in seen:
            seen.add(mark)
            new.append(paragraph)
    return new


def _read(path: str) -> list[str]:
    """The prose paragraphs of a module's docstrings; none where it cannot be parsed."""
    try:
        data = Path(path).read_bytes()
        if len(data) > _MAX_BYTES or sum(map(len, _QUOTED.findall(data))) < _MIN_SHARE * len(data):
            return []
        tree = ast.parse(data)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    docstrings = [ast.get_docstring(node) for node in _definitions(tree)]
    return [paragraph for text in docstrings if text for paragraph in paragraphs(text)]


def _definitions(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Everything that can have a docstring; expressions, most of a tree, are not entered."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _definitions(child)


def paragraphs(docstring: str) -> Iterator[str]:
    """The paragraphs of prose in a docstring, each on one line and without markup; lines of one depth make one.

    Doctests, code, tables, lists, headings, directives and the names and types of parameters do not pass; full
    sentences about a parameter do.
    """
    for block in re.split(r"\n\s*\n", _HEADING.sub("\n\n", docstring)):
        for _, lines in groupby(block.splitlines(), key=lambda line: len(line) - len(line.lstrip())):
            text = " ".join(line.strip() for line in lines)
            text = _LINK.sub(lambda m: m[1] or m[2], _ROLE.sub(r"\1", text))
            text = " ".join(_MARKS.sub("", text).split()).removesuffix(":")
            if is_prose(text):
                yield text


def is_prose(text: str) -> bool:
    """Whether `text` reads like sentences: capital first, full stop last, at least eight words, few other signs."""
    if len(text) < 40 or not text[0].isupper() or text[-1] not in ".!?:" or _NO_PROSE.search(text):
        return False
    words = _WORDS.findall(text)
    letters = sum(map(len, words)) + text.count(" ")
    return len(words) >= 8 and letters >= 0.88 * len(text)
