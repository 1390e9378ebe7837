"""Rows from a real S3 server through a proxy that fails: whether a row is lost or wrong, and what the faults cost.

moto's server speaks S3 over HTTP. The proxy before it (`tests/stored.py`) resets connections before an answer and
within one, answers 503 SlowDown, cuts answers short, changes a byte, and limits the line. Rows are read as training
reads them: in windows, step by step, fetched ahead, through a node's cache that is too small to hold the corpus. Every
row carries its number, so a lost, repeated or wrong one is found.

Needs the extra `dev`.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import save, table, title

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests"))
from object_store import serving
from stored import FAULTS, Faulty, forwarded, write_shards

from distill.config.settings import DataConfig
from distill.data.order import At, order_of
from distill.data.shards.block_store import BlockStore
from distill.data.shards.open import open_sequences

LENGTH = 128  # ids of a row
BLOCK_ROWS = 256  # 64 KiB: small, so that there are many requests
SHARD_ROWS = 64 * BLOCK_ROWS
STEP_ROWS = 512
WINDOW_BLOCKS = 64
WANTED = 1000  # faults


class Result(NamedTuple):
    """Of reading for some epochs."""

    epochs: int
    rows: int
    bad_rows: int  # that are not those of their number
    bad_epochs: int  # in which a row is missing or comes twice
    seconds: float
    requests: int
    faults: dict[str, int]


def numbered_rows(count: int) -> np.ndarray:
    """Random ids, but for the first four of a row, which are its number."""
    rows = np.random.default_rng(0).integers(0, 1 << 16, (count, LENGTH), dtype=np.uint16)
    rows[:, :4] = np.arange(count, dtype=np.int64).view(np.uint16).reshape(count, 4)
    return rows


def read(url: str, rows: np.ndarray, server: Faulty, cache: Path, epochs: int, faults: int) -> Result:
    """Epochs of all rows, so many or until there were so many faults."""
    block_bytes = BLOCK_ROWS * LENGTH * 2
    settings = DataConfig(
        cache=str(cache), shuffle_bytes=WINDOW_BLOCKS * block_bytes, local_bytes=3 * WINDOW_BLOCKS * block_bytes
    )
    store = open_sequences(url, "train", settings)
    assert isinstance(store, BlockStore)
    order = order_of(store, settings.shuffle_bytes, seed=0)
    bad_rows = bad_epochs = epoch = 0
    before, requests, begun = Counter(server.faults), server.requests, time.perf_counter()
    while epoch < epochs or sum(server.faults.values()) - sum(before.values()) < faults:
        seen = np.zeros(len(rows), np.int64)
        for first in range(0, len(rows), STEP_ROWS):
            store.expect(order.upcoming(At(epoch, first, STEP_ROWS, 1 << 40), 0, 1))
            numbers = order.numbers(epoch, np.arange(first, min(first + STEP_ROWS, len(rows))))
            found = store[numbers]
            bad_rows += int((found != rows[numbers]).any(1).sum())
            np.add.at(seen, np.ascontiguousarray(found[:, :4]).view(np.int64).reshape(-1) % len(rows), 1)
        bad_epochs += not (seen == 1).all()
        epoch += 1
    seconds = time.perf_counter() - begun
    store.close()
    new = {kind: server.faults[kind] - before[kind] for kind in FAULTS}
    return Result(epoch, epoch * len(rows), bad_rows, bad_epochs, seconds, server.requests - requests, new)


def through_proxy(count: int, folder: Path) -> "AbstractContextManager[tuple[str, Faulty]]":
    """A bucket with the rows behind a proxy."""
    from contextlib import contextmanager

    @contextmanager
    def opened() -> Any:
        import s3fs

        write_shards(folder / "shards", numbered_rows(count), BLOCK_ROWS, SHARD_ROWS, "zstd")
        with serving("faults") as bucket:
            system = s3fs.S3FileSystem()
            for file in sorted((folder / "shards").iterdir()):
                system.put_file(str(file), f"{bucket}/tokens/{file.name}")
            host, port = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://").split(":")
            server = Faulty(forwarded(host, int(port)))
            with server.serving() as url:
                os.environ["AWS_ENDPOINT_URL"] = url
                s3fs.S3FileSystem.clear_instance_cache()
                yield f"{bucket}/tokens", server

    return opened()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=131_072, help="of the corpus, 256 bytes each")
    parser.add_argument("--share", type=float, default=0.25, help="of the answers that are spoilt")
    parser.add_argument("--rate", type=float, default=20.0, help="MB a second of the slow line")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, results = numbered_rows(options.rows), {}
    with tempfile.TemporaryDirectory() as name, through_proxy(options.rows, Path(name)) as (url, server):
        for case, share, rate, epochs, faults in (
            ("as it is", 0.0, None, 2, 0),
            ("faults", options.share, None, 2, WANTED),
            (f"faults, {options.rate:g} MB/s", options.share, options.rate * 1e6, 2, 0),
        ):
            server.share, server.rate = share, rate
            results[case] = read(url, rows, server, Path(name) / case.replace("/", " "), epochs, faults)
    plain = results["as it is"]
    print(title(), "\n")
    head = ["storage", "epochs", "requests", "faults", "seconds an epoch", "ms a fault", "wrong rows", "wrong epochs"]
    print(table(head, [line(case, result, plain) for case, result in results.items()]))
    print("\nfaults:", results["faults"].faults)
    save(options.json, {case: result._asdict() for case, result in results.items()})


def line(case: str, result: Result, plain: Result) -> list[str]:
    """Of the table: a fault costs what an epoch takes longer than without any."""
    faults, epoch = sum(result.faults.values()), result.seconds / result.epochs
    cost = (epoch - plain.seconds / plain.epochs) * result.epochs / faults if faults else None
    return [
        case, str(result.epochs), f"{result.requests:,}", f"{faults:,}", f"{epoch:.1f}",
        "" if cost is None else f"{1000 * cost:.0f}", str(result.bad_rows), str(result.bad_epochs),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
