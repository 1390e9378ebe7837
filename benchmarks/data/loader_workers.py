"""What threads that prepare batches gain on slow storage: ALBERT's rows, by storage and number of threads.

The project's own loader reads, swaps and masks rows of a memory-mapped token file. Rows that it reads first wait as
long as storage would let them: a thread reads its rows one after the other, as page faults do, and all threads share
one bandwidth, of which a read takes a page. Nothing is found in memory, as in the first epoch over a file that is
larger than it. The waits leave the processor and Python to others, as page faults of a memory map do (there is a test
with real ones). Between two batches the loop sleeps for as long as a GPU would take for a step.

`model` is max(step, (latency x rows + computing) / threads, computing) a batch, and step + latency x rows + computing
without threads. `auto` is train.workers=null, measured once it has found its number; `reads at once` are the most
threads that were seen to wait for storage together.
"""

import argparse
import logging
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import save, table, title
from distill.config.settings import MaskingConfig
from distill.data.batches import Batches, StepShape, Threads, num_threads
from distill.data.collate.mlm import MaskedLM
from distill.data.collate.mlm_sop import MaskedLMAndOrder
from distill.data.order import FullShuffle
from distill.runtime.progress import configure_logging
from distill.runtime.seed import key

STORAGES = {
    "local, 0 ms": 0.0,
    "network file system, 1 ms": 1.0,
    "object storage, 20 ms": 20.0,
}  # milliseconds that a read waits
PAGE = 4096  # bytes of a read: rows lie apart, so that each is in a page of its own
VOCAB = 30_000
SPECIAL = 5  # ids that are never masked; the last are [SEP] and [MASK]
AUTO = "auto"


@dataclass
class SlowRows:
    """Rows [N, S] on slow storage: reading some of them waits for each, one after the other."""

    rows: np.ndarray
    latency: float  # seconds of a read
    bandwidth: float  # bytes a second, of all threads together
    busy_until: float = 0.0  # when the reads begun so far have passed the shared line
    reading: int = 0  # threads that wait for a read
    most_reading: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        if self.latency:
            self.wait(len(numbers))
        return self.rows[numbers]

    def wait(self, reads: int) -> None:
        now = time.perf_counter()
        with self.lock:
            self.busy_until = max(self.busy_until, now) + reads * PAGE / self.bandwidth
            until = max(self.busy_until, now + reads * self.latency)
            self.reading += 1
            self.most_reading = max(self.most_reading, self.reading)
        time.sleep(max(0.0, until - time.perf_counter()))
        with self.lock:
            self.reading -= 1


def write_rows(path: Path, length: int, megabytes: float) -> np.ndarray:
    """A memory-mapped file of rows [CLS] A [SEP] B [SEP] of random ids, [N, length] uint16."""
    shape = (int(megabytes * 2**20) // (2 * length), length)
    draw = np.random.default_rng(0)
    rows = draw.integers(SPECIAL, VOCAB, shape, dtype=np.uint16)
    rows[:, 0], rows[:, -1] = SPECIAL - 3, SPECIAL - 2
    rows[np.arange(len(rows)), draw.integers(length // 4, length // 2, len(rows))] = SPECIAL - 2
    rows.tofile(path)
    return np.memmap(path, np.uint16, "r", shape=shape)


def make_batches(rows: Any, batch_size: int, seed: int, threads: Threads) -> Batches:
    """Shuffled rows in steps of one micro-batch."""
    order = FullShuffle(len(rows), seed)
    return Batches(rows, albert_collator(), order, StepShape(batch_size, batch_size), seed, threads=threads)


def albert_collator() -> MaskedLMAndOrder:
    """Masked n-grams and the order of segments, as `objective=albert` has them; every third id goes on a word."""
    masking = MaskingConfig(smoothing=0.0, whole_words=True, ngrams=3)
    ids = np.arange(VOCAB)
    words = MaskedLM(masking, SPECIAL - 1, 0, ids >= SPECIAL, np.ones(VOCAB), (ids >= SPECIAL) & (ids % 3 == 0))
    return MaskedLMAndOrder(words, SPECIAL - 2, swaps=True)


def computing(batches: Batches, rounds: int = 5) -> float:
    """Seconds of a processor that preparing a batch takes, without any wait: the median."""
    taken = []
    for step in range(rounds):
        began = time.thread_time()
        batches.window(step)
        taken.append(time.thread_time() - began)
    return float(np.median(taken))


def measure(batches: Batches, slow: SlowRows, step: float, warm_up: float, seconds: float) -> dict[str, float]:
    """Batches a second and the share of the time that the loop waits, after a time to get going."""
    stream = batches.stream(0, 1 << 30, torch.device("cpu"))
    began, count, waited = time.perf_counter(), 0, 0.0
    warm = False
    while True:
        waiting = time.perf_counter()
        next(stream)
        now = time.perf_counter()
        if warm:
            count, waited = count + 1, waited + now - waiting
        elif now - began >= warm_up:
            warm, began, slow.most_reading = True, now, 0
        if warm and count >= 2 and now - began >= seconds:
            break
        time.sleep(step)
    stream.close()
    took = now - began
    return {"batches_per_second": count / took, "data_wait": waited / took, "reads_at_once": slow.most_reading}


def model(latency: float, compute: float, step: float, rows: int, threads: int) -> float:
    """Batches a second as the docstring of this file expects them."""
    prepare = latency * rows + compute
    return 1 / (max(step, prepare / threads, compute) if threads else step + prepare)


def measure_storage(rows: np.ndarray, name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One storage with every number of threads."""
    latency, step = options.storages[name] / 1000, options.step / 1000
    results: list[dict[str, Any]] = []
    for workers in [*options.workers, AUTO]:
        slow = SlowRows(rows, latency, options.bandwidth * 1e6)
        threads = num_threads(None if workers == AUTO else workers, 1)
        batches = make_batches(slow, options.rows, int(key(0, name)) >> 1, threads)
        warm_up = options.warm_up * (2 if workers == AUTO else 1)  # it may grow more than once
        measured = measure(batches, slow, step, warm_up, options.seconds)
        expected = None if workers == AUTO else model(latency, options.computing, step, options.rows, threads.start)
        results.append({"storage": name, "latency": latency, "workers": workers, "model": expected, **measured})
    return results


def show(results: list[dict[str, Any]]) -> str:
    """The grid, with each number of threads beside none, and the automatic choice beside the best."""
    lines = []
    for storage in dict.fromkeys(result["storage"] for result in results):
        own = [result for result in results if result["storage"] == storage]
        none = next((r["batches_per_second"] for r in own if r["workers"] == 0), None)
        best = max(r["batches_per_second"] for r in own if r["workers"] != AUTO)
        for r in own:
            rate, expected = r["batches_per_second"], r["model"]
            lines.append(
                [
                    storage,
                    str(r["workers"]),
                    f"{expected:.2f}" if expected else "",
                    f"{rate:.2f}",
                    f"{r['data_wait']:.0%}",
                    f"{rate / none - 1:+.0%}" if none else "",
                    f"{rate / best:.0%}",
                    str(r["reads_at_once"] or ""),
                ]
            )
    head = [
        "storage, a read",
        "workers",
        "model",
        "batches/s",
        "waiting",
        "gain over 0",
        "of the best",
        "reads at once",
    ]
    return table(head, lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 4, 8, 12, 16])
    parser.add_argument(
        "--latency", type=float, nargs="+", help="milliseconds of a read, instead of those of three storages"
    )
    parser.add_argument("--bandwidth", type=float, default=100.0, help="of the storage, MB a second")
    parser.add_argument("--rows", type=int, default=32, help="of a batch")
    parser.add_argument("--length", type=int, default=512, help="positions of a row")
    parser.add_argument("--step", type=float, default=50.0, help="milliseconds that the loop computes on a batch")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--warm-up", type=float, default=6.0, help="seconds before each measurement; of auto, twice")
    parser.add_argument("--megabytes", type=float, default=64.0, help="of the token file")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    options.storages = {f"{each:g} ms": each for each in options.latency} if options.latency else STORAGES
    return options


def main() -> None:
    options = parse()
    configure_logging(0)
    logging.getLogger("distill").setLevel(logging.INFO)
    print(title(), "\n")
    with tempfile.TemporaryDirectory() as folder:
        rows = write_rows(Path(folder) / "tokens", options.length, options.megabytes)
        options.computing = computing(make_batches(rows, options.rows, 0, Threads()))
        print(
            f"{options.rows} rows of {options.length} positions a batch, prepared in {1000 * options.computing:.1f} ms "
            f"of computing; a step of {options.step:g} ms; {options.bandwidth:g} MB/s\n"
        )
        results = [each for name in options.storages for each in measure_storage(rows, name, options)]
    print(show(results))
    save(options.json, results)


if __name__ == "__main__":
    main()
