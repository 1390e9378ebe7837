"""A small text, its preparation in shards, and a plain reader of them, for tests of what writes and reads shards."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from distill.config.settings import DataConfig, SourceConfig
from distill.data.build_tokens import Host, build
from distill.data.heldout import HeldOut
from distill.data.packing import Packing
from distill.data.sequence_format import SequenceFormat
from distill.data.shards import PARTS, Index, PartName, read_index
from distill.data.sources import Source, find_source
from distill.data.storage import Folder

ROOT = Path(__file__).resolve().parent.parent
WORDS = [first + second for first in "bdfgkmnprt" for second in "aeiou"]
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
VOCABULARY = len(SPECIAL) + len(WORDS)
MASKED = SequenceFormat(1, 2, None, None, 2, 0, 8)
CAUSAL = SequenceFormat(None, None, None, 2, None, 0, 1)


def packing(heldout: float = 0.2, format: SequenceFormat = MASKED, **changes: Any) -> Packing:
    """Rows of 16 ids of a tokenizer that knows all words of the small text."""
    words = Tokenizer(models.WordLevel({word: id for id, word in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return replace(Packing(words.to_str(), VOCABULARY, format, 16, False, HeldOut(heldout)), **changes)


def some_words(draw: random.Random, count: int) -> str:
    return ". ".join(" ".join(draw.choices(WORDS, k=6)).capitalize() for _ in range(count // 6)) + "."


def write_text(folder: Path, files: int = 6) -> Path:
    """JSONL files of 40 documents each, with a prompt before each text."""
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        texts = [some_words(draw, draw.randint(12, 120)) for _ in range(40)]
        lines = [json.dumps({"text": text, "prompt": some_words(draw, 12)}) for text in texts]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return folder


def source_of(path: Path | str, kind: str = "jsonl", **settings: Any) -> Source:
    source = find_source(SourceConfig(kind=kind, path=str(path), **settings), "corpus", DataConfig())
    assert source is not None
    return source


def prepare(
    text: Path | str | Source,
    place: Path | str,
    scratch: Path,
    rows: Packing | None = None,
    host: Host = Host(),  # noqa: B008
    **cache: Any,
) -> Index:
    """Fills `place` with the rows of the text."""
    source = text if isinstance(text, Source) else source_of(text)
    settings = DataConfig(**{"workers": 1, **cache})
    return build(
        Folder(str(place), "data.tokens"), "a small text", [source], rows or packing(), settings, scratch, host
    )


def read_rows(place: Path | str, part: PartName) -> np.ndarray:
    """All rows [N, S] of a part."""
    folder = Folder(str(place), "data.tokens")
    index = read_index(folder)
    content = b"".join(folder.read(file.name) for file in index.part(part).files)
    return np.frombuffer(content, index.token_dtype).reshape(-1, index.sequence_length)


def assert_same_rows(place: Path | str, other: Path | str) -> None:
    for part in PARTS:
        np.testing.assert_array_equal(read_rows(place, part), read_rows(other, part))


CHILD = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from shards import prepare
from distill.data import build_tokens
from distill.data.sources import _files

if __name__ == "__main__":
    _files.SHARD_BYTES = 1
    build_tokens.POLL = 0.1
    make, workers = build_tokens.make_shard, int(sys.argv[5])
    if workers > 1:
        build_tokens.FEW_BYTES = 0
    else:

        def slow(task):
            time.sleep(0.2)
            while "WAITS" in os.environ and len(list(Path(sys.argv[2]).glob("parts/*.json"))) >= 2:
                time.sleep(0.01)  # until it is killed
            print(task.number, flush=True)
            return make(task)

        build_tokens.make_shard = slow
    host = build_tokens.this_host()
    prepare(sys.argv[1], sys.argv[2], Path(sys.argv[3]), host=host, shard_bytes=4000, workers=workers)
"""


def start(
    text: Path, place: str, scratch: Path, workers: int = 1, host: int = 0, hosts: int = 1, waits: bool = False
) -> subprocess.Popen[str]:
    """Another host: a process with a folder of its own, which prints the numbers of the shards that it makes.

    `waits`: once two are made it waits until it is killed, where it is one process.
    """
    script = scratch.with_suffix(".py")
    script.write_text(CHILD)
    command = [sys.executable, str(script), str(text), place, str(scratch), str(ROOT / "tests"), str(workers)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"SLURM_NODEID": str(host), "SLURM_STEP_NUM_NODES": str(hosts)}
    environment |= {"WAITS": "1"} if waits else {}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
