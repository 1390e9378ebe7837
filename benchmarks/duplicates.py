"""What duplicates cost: counting them while text becomes tokens, and the pass before that which leaves them out.

Text is the prose of the installed packages with a share of its documents once more. It is prepared in one process with
the tokenizer of the bundled teacher, in turns, each time into an empty cache, with each value of `corpus.duplicates`.
Seconds are those of the processor, in which other processes of the machine do not count. The search for equal digests
and its memory are measured by themselves, on made-up digests.
"""

import argparse
import json
import tempfile
import time
import tracemalloc
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from machine import save, table, title

from distill.config.compose import corpus_config
from distill.config.settings import BundledTeacherConfig, DataConfig
from distill.data.duplicates import AT_ONCE, RECORD, digest_of, document_ids_of, find_repeated, write_digests
from distill.data.duplicates import save as save_array
from distill.data.sources.prose import build
from distill.data.tokens import Tokens, corpus_text, prepare
from distill.models.teacher import load_teacher

WAYS = ("keep", "count", "drop", "near")


def write_texts(folder: Path, again: float, most: int | None) -> Path:
    """A JSONL file of the prose, and at its end so large a share of its documents once more."""
    lines = build(DataConfig(workers=1)).read_text(encoding="utf-8").splitlines()[:most]
    copies = lines[:: round(1 / again)]
    path = folder / "texts.jsonl"
    path.write_text("\n".join([*lines, *(json.dumps({"text": json.loads(line)["text"]}) for line in copies)]))
    return path


def prepared(tokenizer: Any, path: Path, way: str) -> tuple[float, Tokens]:
    """Seconds of the processor for a preparation into an empty cache, and what it gave."""
    with tempfile.TemporaryDirectory() as cache:
        corpus = corpus_config({"kind": "jsonl", "path": str(path), "duplicates": way})
        data = DataConfig(cache=cache, workers=1)
        began = time.process_time()
        tokens = prepare(corpus_text(corpus, data), tokenizer, corpus, data, "train")
        return time.process_time() - began, tokens


def in_turns(path: Path, rounds: int) -> dict[str, Any]:
    """The seconds of every way in every round, and the counts of duplicates by way."""
    _, tokenizer, _ = load_teacher(BundledTeacherConfig(kind="bundled_small"))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    counts: dict[str, Any] = {}
    prepared(tokenizer, path, "keep")  # reads the file and loads what is loaded once
    for number in range(rounds):
        for way in WAYS if number % 2 else WAYS[::-1]:
            taken, tokens = prepared(tokenizer, path, way)
            seconds[way].append(taken)
            counts[way] = tokens.duplicates
    return {"bytes": path.stat().st_size, "seconds": seconds, "duplicates": counts}


def digested(path: Path, rounds: int = 9) -> float:
    """Seconds for the digests of all documents alone: what counting adds, without the noise of all the rest."""
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        write_digests(path.with_suffix(""), [digest_of(text) for text in texts])
        seconds.append(time.process_time() - began)
    return median(seconds)


def searched(folder: Path, documents: int, groups: int) -> dict[str, float]:
    """Seconds to find the duplicates among made-up digests of so many groups, and the memory that took."""
    draw, files = np.random.default_rng(0), [folder / f"group-{number}" for number in range(groups)]
    for number, file in enumerate(files):
        records = np.empty(documents // groups, RECORD)
        drawn = draw.integers(0, documents, len(records), np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        records["digest"] = np.sort(drawn.byteswap().view("S8"))
        records["document"] = document_ids_of([len(records)], number)
        save_array(file, records)
    tracemalloc.start()
    began = time.process_time()
    found = sum(map(len, find_repeated(files)))
    seconds, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"documents": documents, "groups": groups, "found": found, "seconds": seconds, "peak_bytes": peak}


def show(found: dict[str, Any]) -> str:
    """Each way beside `keep`, by the ratios within each round."""
    plain = found["seconds"]["keep"]
    rows = []
    for way in WAYS:
        ratios = [own / other - 1 for own, other in zip(found["seconds"][way], plain, strict=True)]
        rate = found["bytes"] / 1e6 / median(found["seconds"][way])
        span = f"{min(ratios):+.1%} to {max(ratios):+.1%}" if way != "keep" else ""
        more = f"{median(ratios):+.1%}" if way != "keep" else ""
        rows.append([f"`{way}`", f"{median(found['seconds'][way]):.2f}", f"{rate:.2f}", more, span])
    return table(["corpus.duplicates", "seconds", "MB/s", "more than keep", "rounds"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, help="documents of the prose; all where it is not given")
    parser.add_argument("--again", type=float, default=0.1, help="share of the documents that stands there twice")
    parser.add_argument("--documents", type=int, default=20_000_000, help="of the search among made-up digests")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    print(title())
    with tempfile.TemporaryDirectory() as folder:
        path = write_texts(Path(folder), options.again, options.most)
        found = in_turns(path, options.rounds)
        found["digests"] = digested(path)
        print(f"{found['bytes'] / 1e6:.1f} MB of text\n\n{show(found)}\n\n{found['duplicates']}")
        share = found["digests"] / median(found["seconds"]["keep"])
        print(f"\ndigests alone: {1000 * found['digests']:.1f} ms, {share:.2%} of a preparation")
        search = searched(Path(folder), options.documents, 200)
    print(
        f"\n{search['found']:,} duplicates among {search['documents']:,} digests of {search['groups']} groups in "
        f"{search['seconds']:.1f} s, {search['peak_bytes'] / 2**20:.0f} MiB ({AT_ONCE >> 20} MiB of records at a time)"
    )
    save(options.out, {"preparation": found, "search": search})


if __name__ == "__main__":
    main()
