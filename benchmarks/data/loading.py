"""Tokens per second that data preparation gives: masked batches by number of threads, and text turned into token ids.

Batches come from a memory-mapped file, are masked and, with a GPU, pinned, as in training, while nothing else runs; the
peer is a torch DataLoader whose worker processes run the same masking. The last column sets the rate against a step
that takes 500,000 tokens a second, an assumption for a fast GPU. Efficiency is rate(N) / (N rate(1)).
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import save, table, title
from distill.config.settings import CorpusConfig, DataConfig, MaskingConfig, TeacherConfig
from distill.data.batch import Batch
from distill.data.batches import Batches, StepShape
from distill.data.collate.mlm import MaskedLM
from distill.data.order import FullShuffle
from distill.data.tokens import corpus_text, prepare
from distill.models.teacher import load_teacher

SHAPES = [(128, 6144), (128, 30522), (512, 6144), (512, 30522)]  # positions of a row, vocabulary
STEP_TOKENS = 1 << 16  # of a window: 4 micro-batches
ACCUMULATE = 4
NEED = 500_000  # tokens per second of a fast GPU's steps: assumed, not measured
SPECIAL = 5  # ids that are never masked


def batches(folder: Path, length: int, vocab: int, tokens: int, workers: int) -> Batches:
    """Rows of random ids in a memory-mapped file, masked as the default objective masks."""
    path = folder / f"{length}-{vocab}"
    shape = (tokens // length, length)
    if not path.exists():
        np.random.default_rng(0).integers(SPECIAL, vocab, shape, dtype=np.uint16).tofile(path)
    maskable = np.arange(vocab) >= SPECIAL
    weights = np.arange(1, vocab + 1) ** 0.7  # of counts that fall as 1 / rank
    masks = MaskedLM(MaskingConfig(), SPECIAL - 1, 0, maskable, weights, np.zeros(vocab, bool))
    rows = np.memmap(path, np.uint16, "r", shape=shape)
    step_shape = StepShape(STEP_TOKENS // length // ACCUMULATE, STEP_TOKENS // length)
    return Batches(rows, masks, FullShuffle(len(rows), 0), step_shape, seed=0, threads=workers)


class Windows(Dataset[list[Batch]]):
    """One window of micro-batches by its step, for a DataLoader."""

    def __init__(self, source: Batches, steps: int) -> None:
        self.source, self.steps = source, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> list[Batch]:
        return self.source.window(step)


def peer(source: Batches, steps: int, workers: int, device: torch.device) -> Iterable[list[Batch]]:
    """The same windows through torch's own loader, as far ahead."""
    loader = DataLoader(
        Windows(source, steps),
        batch_size=None,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        prefetch_factor=4 if workers else None,
    )
    for window in loader:
        yield [batch.to(device) for batch in window]


def rate(windows: Iterable[list[Batch]], seconds: float) -> float:
    """Tokens per second once the first windows are there: what starting costs is not of interest over a run."""
    ends, tokens = [], []
    for window in windows:
        ends.append(time.perf_counter())
        tokens.append(sum(batch.ids.numel() for batch in window))
        if len(ends) > 8 and ends[-1] - ends[4] > seconds:
            break
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return sum(tokens[5:]) / (time.perf_counter() - ends[4])


def masked(folder: Path, counts: list[int], seconds: float, tokens: int) -> list[dict[str, Any]]:
    """Distill and the peer for every shape and number of workers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = []
    for length, vocab in SHAPES:
        for workers in counts:
            source = batches(folder, length, vocab, tokens, workers)
            results.append(
                {
                    "positions": length,
                    "vocabulary": vocab,
                    "workers": workers,
                    "distill": rate(source.stream(0, 1 << 30, device), seconds),
                    "dataloader": rate(peer(source, 1 << 20, workers, device), seconds),
                }
            )
    return results


def show_masked(results: list[dict[str, Any]]) -> str:
    firsts = {(r["positions"], r["vocabulary"]): r["distill"] for r in results if r["workers"] == 1}
    rows = []
    for r in results:
        first = firsts.get((r["positions"], r["vocabulary"]))
        efficiency = f"{r['distill'] / r['workers'] / first:.0%}" if first and r["workers"] else ""
        rows.append(
            [
                f"{r['positions']} x {r['vocabulary']:,}",
                str(r["workers"]),
                f"{r['distill']:,.0f}",
                efficiency,
                f"{r['dataloader']:,.0f}",
                f"{r['distill'] / NEED:.1f}x",
            ]
        )
    return table(["positions x vocabulary", "workers", "tokens/s", "efficiency", "DataLoader", "of a fast step"], rows)


def write_text(folder: Path, megabytes: float) -> Path:
    """Files of made-up sentences: as many different words as a book has, and as long."""
    draw = random.Random(0)
    syllables = [a + b for a in "bcdfghlmnprstvw" for b in ("a", "e", "in", "or", "ul", "ey")]
    words = ["".join(draw.choices(syllables, k=draw.choice((1, 1, 2, 2, 3)))) for _ in range(8000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    text = folder / "text"
    text.mkdir()
    for number in range(max(1, round(megabytes * 4))):
        lines = []
        while sum(map(len, lines)) < 1 << 18:
            lines.append(" ".join(draw.choices(words, weights, k=2000)) + ".\n\n")
        (text / f"{number}.txt").write_text("".join(lines), encoding="utf-8")
    return text


def text_rates(folder: Path, counts: list[int], given: Path | None, megabytes: float) -> list[dict[str, Any]]:
    """Text to rows of ids with the bundled teacher's tokenizer, once for every number of processes."""
    path = given or write_text(folder, megabytes)
    kind = "text" if given is None else "gutenberg"
    _, tokenizer, _ = load_teacher(TeacherConfig(path="bundled_small"))
    assert tokenizer is not None
    results = []
    for workers in counts:
        corpus = CorpusConfig(kind=kind, path=str(path), sequence_length=128)
        data = DataConfig(cache=str(folder / f"cache-{workers}"), workers=workers)
        tokens = prepare(corpus_text(corpus, data), tokenizer, corpus, data, "train")
        results.append({"workers": workers, "tokens_per_second": tokens.tokens_per_second, "tokens": tokens.tokens})
    return results


def show_text(results: list[dict[str, Any]]) -> str:
    first = results[0]["tokens_per_second"]
    rows = [
        [
            str(r["workers"]),
            f"{r['tokens']:,}",
            f"{r['tokens_per_second']:,.0f}",
            f"{r['tokens_per_second'] / r['workers'] / first:.0%}",
        ]
        for r in results
    ]
    return table(["processes", "tokens", "tokens/s", "efficiency"], rows)


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    counts = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return counts if counts[-1] == most else [*counts, most]


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", help="threads, and processes of the DataLoader")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--tokens", type=int, default=1 << 23, help="in the memory-mapped file")
    parser.add_argument("--books", type=Path, help="Gutenberg files to prepare; default: made-up text")
    parser.add_argument("--megabytes", type=float, default=8.0, help="of made-up text")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    print(title(), "\n")
    with tempfile.TemporaryDirectory() as name:
        counts = options.workers or [0, *doubling(min(max(cores, 2), 16))]
        batched = masked(Path(name), counts, options.seconds, options.tokens)
        print(show_masked(batched), "\n", flush=True)
        prepared = text_rates(Path(name), doubling(cores), options.books, options.megabytes)
        print(show_text(prepared))
    save(options.json, {"masked": batched, "text": prepared})


if __name__ == "__main__":
    main()
