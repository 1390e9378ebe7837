"""Tokens a second that data preparation gives, in two modes.

    python -m benchmarks.data load            # masked batches, by number of threads
    python -m benchmarks.data prepare         # text to shards of sequences, by processes and hosts

`load`: batches come from a memory-mapped file, are masked and, with a GPU, pinned, as in training, while nothing else
runs. `of_a_fast_step` sets the rate against a step that takes 500,000 tokens a second, an assumption for a fast GPU.
Efficiency is rate(N) / (N rate(1)).

`prepare`: hosts are commands of this machine that are numbered as a launcher numbers them, and fill one folder at the
same time; all ways to prepare take turns. The tokenizer is the bundled teacher's.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import Results, add_out
from distill.config.settings import MaskingConfig
from distill.data.batch import Batch
from distill.data.batches import Batches, StepShape
from distill.data.collate.mlm import MaskedLM
from distill.data.order import FullShuffle

SHAPES = [(128, 6144), (128, 30522), (512, 6144), (512, 30522)]  # positions of a row, vocabulary
STEP_TOKENS = 1 << 16  # of a window: 4 micro-batches
ACCUMULATE = 4
NEED = 500_000  # tokens per second of a fast GPU's steps: assumed, not measured
SPECIAL = 5  # ids that are never masked
WAYS = {"1 process": (1, 1), "2 processes": (1, 2), "2 hosts": (2, 1)}  # hosts, processes of each


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


def load(options: argparse.Namespace, results: Results) -> None:
    """Every shape and number of threads."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    counts = options.workers or [0, *doubling(min(max(len(os.sched_getaffinity(0)), 2), 16))]
    with tempfile.TemporaryDirectory() as name:
        for length, vocab in SHAPES:
            alone = None
            for workers in counts:
                source = batches(Path(name), length, vocab, options.tokens, workers)
                own = rate(source.stream(0, 1 << 30, device), options.seconds)
                alone = own if workers == 1 else alone
                efficiency = {"efficiency": own / workers / alone} if workers and alone else {}
                results.row(
                    positions=length,
                    vocabulary=vocab,
                    workers=workers,
                    tokens_per_second=own,
                    **efficiency,
                    of_a_fast_step=own / NEED,
                )


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    counts = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return counts if counts[-1] == most else [*counts, most]


def prepare_once(folder: Path, hosts: int, workers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a preparation from the beginning of the first host's command to the end of all."""
    settings = [
        "+recipe=distilbert_gutenberg", f"corpus.path={options.data}", "corpus.max_sequences=null",
        "evaluate.sets=[heldout]", f"data.tokens={folder / 'tokens'}", f"data.workers={workers}",
        f"data.shard_bytes={int(options.shard_mb * 1e6)}",
    ]  # fmt: skip
    before, began = computing(), time.perf_counter()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "distill", "prepare", *settings, f"data.cache={folder / f'cache{host}'}"],
            env={**os.environ, "SLURM_NODEID": str(host), "SLURM_STEP_NUM_NODES": str(hosts)},
            stderr=subprocess.DEVNULL,
        )
        for host in range(hosts)
    ]
    statuses = [process.wait() for process in processes]
    assert not any(statuses), f"preparations ended with {statuses}"
    seconds = time.perf_counter() - began
    (file,) = (folder / "tokens").glob("*/index.json")
    index = json.loads(file.read_text())
    shutil.rmtree(folder)
    return {
        "tokens": sum(index[part]["tokens"] for part in ("train", "heldout")),
        "seconds": seconds,
        "computing": computing() - before,
        "shards": len(index["train"]["files"]),
        "files": [index[part]["files"] for part in ("train", "heldout")],
    }


def computing() -> float:
    """Processor seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def prepare(options: argparse.Namespace, results: Results) -> None:
    """All ways in turns; each has to write the same files."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.turns):
            for name, (hosts, workers) in WAYS.items():
                found[name].append(prepare_once(Path(folder) / name, hosts, workers, options))
    assert len({str(each["files"]) for runs in found.values() for each in runs}) == 1
    one = 0.0
    for name, runs in found.items():
        own = statistics.median(each["tokens"] / each["seconds"] for each in runs)
        one = one or own
        results.row(
            way=name,
            tokens=runs[0]["tokens"],
            tokens_per_second=own,
            of_one_process=own / one,
            processor_seconds=statistics.median(each["computing"] for each in runs),
            shards=runs[0]["shards"],
            seconds=[each["seconds"] for each in runs],
        )


def main() -> None:
    raw, data = argparse.RawDescriptionHelpFormatter, os.environ.get("DISTILL_DATA")
    parser = argparse.ArgumentParser("python -m benchmarks.data", description=__doc__, formatter_class=raw)
    modes = parser.add_subparsers(dest="mode", required=True)
    own = modes.add_parser("load")
    own.add_argument("--workers", type=int, nargs="+", help="threads")
    own.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    own.add_argument("--tokens", type=int, default=1 << 23, help="in the memory-mapped file")
    add_out(own, "data-load")
    own = modes.add_parser("prepare")
    books = Path(data) / "gutenberg" / "train" if data else None
    own.add_argument("--data", type=Path, default=books, required=books is None, help="a folder of Gutenberg books")
    own.add_argument("--shard-mb", type=float, default=64.0, help="megabytes of sequences in a shard")
    own.add_argument("--turns", type=int, default=5)
    add_out(own, "data-prepare")
    options = parser.parse_args()
    results = Results(options.out)
    (load if options.mode == "load" else prepare)(options, results)
    results.where()


if __name__ == "__main__":
    main()
