"""Rows from shards against the local memory map: rate, waiting for slow storage, and a corpus of 10 TB.

rate       rows a second of one local file, of many, and of compressed shards through the cache of the node: gathered
           alone, and as masked batches, which is what training takes. All have the same order of the same rows.
waiting    share of the time that a loop waits for its windows, whose storage (a real S3 server behind a slow line)
           gives twice the bytes that the loop needs, its start included.
ten_tb     10,000 shards that are made up when they are asked for: seconds and memory until a new process has its first
           row, and then to read random rows.

Needs the extra `dev`.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import save, table, title
from benchmarks.data.loading import batches as masked_batches

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests"))
from object_store import ACCESS, serving
from stored import Faulty, files_of, forwarded, write_shards

from distill.config.settings import DataConfig
from distill.data.batches import Batches, StepShape, Threads
from distill.data.order import WindowedShuffle, order_of
from distill.data.sequence_store import SequenceStore
from distill.data.shards.index import Layout, ShardIndex
from distill.data.shards.open import open_sequences

ROOT = Path(__file__).resolve().parent.parent.parent
LENGTH, VOCAB = 128, 30522
MIB = 1 << 20


def masker(folder: Path) -> Any:
    """What masks rows, as the default objective does."""
    return masked_batches(folder, LENGTH, VOCAB, 1 << 16, 0).collator


# --- rate ----------------------------------------------------------------------------------------------------------


def rate(folder: Path, count: int, rounds: int) -> dict[str, Any]:
    """Medians of rows a second, and of the ratio to the memory map in the same round."""
    rows = np.random.default_rng(0).integers(5, VOCAB, (count, LENGTH), dtype=np.uint16)
    block, shard = 16 * MIB // (2 * LENGTH), 64 * MIB // (2 * LENGTH)
    write_shards(folder / "one", rows, block, count)
    write_shards(folder / "many", rows, block, shard)
    write_shards(folder / "zstd", rows, block, shard, "zstd")
    window = DataConfig(cache=str(folder / "cache"), shuffle_bytes=rows.nbytes // 4, local_bytes=2 * rows.nbytes)
    whole = DataConfig(cache=str(folder / "cache"), shuffle_bytes=rows.nbytes)
    stores = {
        "memory map": open_sequences(str(folder / "one"), "train", whole),
        "mapped shards": open_sequences(str(folder / "many"), "train", window),
        "cached blocks": open_sequences(str(folder / "zstd"), "train", window),
    }
    order = WindowedShuffle(np.array([*range(0, count, block), count]), 4, 0)
    collator = masker(folder)
    found: dict[str, dict[str, list[float]]] = {name: {"gathered": [], "masked": []} for name in stores}
    for store in stores.values():  # files into memory, blocks into the cache
        gathered(store, order, count // 32)
    for number in range(rounds):
        for name in list(stores)[number % 3 :] + list(stores)[: number % 3]:
            found[name]["gathered"].append(gathered(stores[name], order, 4000))
            found[name]["masked"].append(masked(stores[name], order, collator, 60))
    return {
        name: {kind: {"rows_per_second": float(np.median(values)),
                      "ratio": float(np.median(np.divide(values, found["memory map"][kind])))}
               for kind, values in kinds.items()}
        for name, kinds in found.items()
    }  # fmt: skip


def gathered(store: SequenceStore, order: WindowedShuffle, batches: int) -> float:
    """Rows a second in batches of 32."""
    numbers = order.numbers(1, np.arange(32 * batches) % len(order)).reshape(batches, 32)
    begun = time.perf_counter()
    for batch in numbers:
        store[batch]
    return numbers.size / (time.perf_counter() - begun)


def masked(store: SequenceStore, order: WindowedShuffle, collator: Any, steps: int) -> float:
    """Rows a second of windows of 4 micro-batches of 32 rows, in the thread that asks for them."""
    batches = Batches(store, collator, order, StepShape(32, 128), seed=0)
    begun = time.perf_counter()
    for step in range(steps):
        batches.window(batches.steps_per_epoch + step)
    return steps * batches.sequences_per_step / (time.perf_counter() - begun)


# --- waiting -------------------------------------------------------------------------------------------------------


def waiting(folder: Path, seconds: float, margins: list[float]) -> dict[str, Any]:
    """Shares of the time that a loop waits, whose steps take 50 ms of sleep and use 64 rows each."""
    step, step_rows, block = 0.05, 64, 256
    count = int(seconds / step) * step_rows
    rows = np.random.default_rng(0).integers(5, VOCAB, (count, LENGTH), dtype=np.uint16)
    write_shards(folder / "slow", rows, block, 16 * block)
    need = step_rows * LENGTH * 2 / step
    stores: dict[str, float | None] = {"memory map": None, **{f"{margin:g}": margin * need for margin in margins}}
    found = {}
    for name, rate in stores.items():
        cache = DataConfig(cache=str(folder / f"cache {name}"), shuffle_bytes=rows.nbytes // 8, local_bytes=rows.nbytes)
        with storage(folder / "slow", rate) as place:
            store = open_sequences(place, "train", cache)
            found[name] = one_loop(store, cache, masker(folder), step, step_rows)
            print(name, found[name], flush=True)
    return {"need_bytes_per_second": need, "steps": count // step_rows, "waited": found}


@contextmanager
def storage(folder: Path, rate: float | None) -> Iterator[str]:
    """The folder itself, or a bucket with its files behind a line of so many bytes a second, in another process."""
    if rate is None:
        yield str(folder)
        return
    import s3fs

    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    server = context.Process(target=serve, args=(str(folder), rate, child), daemon=True)
    server.start()
    bucket, environment = parent.recv()
    os.environ.update(environment)
    s3fs.S3FileSystem.clear_instance_cache()  # those know the server before
    yield bucket
    parent.send(None)
    server.join()


def serve(folder: str, rate: float, pipe: Any) -> None:
    """An S3 server behind a slow line, until something comes through the pipe."""
    import s3fs

    with serving() as bucket:
        for file in sorted(Path(folder).iterdir()):
            s3fs.S3FileSystem().put_file(str(file), f"{bucket}/{file.name}")
        host, port = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://").split(":")
        with Faulty(forwarded(host, int(port)), rate=rate).serving() as url:
            pipe.send((bucket, {**ACCESS, "AWS_ENDPOINT_URL": url}))
            pipe.recv()


def one_loop(store: SequenceStore, cache: DataConfig, collator: Any, step: float, step_rows: int) -> dict[str, float]:
    """Of one epoch: share of the time that went by waiting, and seconds until the first window was there."""
    order = order_of(store, cache.shuffle_bytes, 0)
    batches = Batches(store, collator, order, StepShape(32, step_rows), seed=0, threads=Threads(1, 16))
    begun, waits = time.perf_counter(), []
    stream = batches.stream(0, batches.steps_per_epoch, torch.device("cpu"))
    while True:
        asked = time.perf_counter()
        if next(stream, None) is None:
            break
        waits.append(time.perf_counter() - asked)
        time.sleep(step)
    return {
        "share": sum(waits) / (time.perf_counter() - begun),
        "first": waits[0],
        "longest": max(waits[1:]),
        "median": float(np.median(waits)),
    }


# --- 10 TB ---------------------------------------------------------------------------------------------------------

CHILD = """
import json, sys, time
begun = time.perf_counter()
import numpy as np
from distill.config.settings import DataConfig
from distill.data.order import order_of
from distill.data.shards.open import open_sequences
def memory():
    lines = open("/proc/self/status").read().split("\\n")
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
url, cache, block_rows, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
config = DataConfig(cache=cache)
imported, before = time.perf_counter() - begun, memory()
store = open_sequences(url, "train", config)
order = order_of(store, config.shuffle_bytes, 0)
first = order.numbers(0, np.arange(256))
ready = time.perf_counter() - begun
assert store[first[:1]][0, :4].view(np.int64)[0] == first[0]
row, started = time.perf_counter() - begun, memory()
numbers = np.array(json.loads(sys.stdin.read()))
reading = time.perf_counter()
for some in np.array_split(numbers, max(1, count // 8)):
    assert (np.ascontiguousarray(store[some][:, :4]).view(np.int64)[:, 0] == some).all()
print(json.dumps({
    "rows": len(store), "terabytes": len(store) * 256 / 1e12, "imported_s": imported, "import_mb": before,
    "ready_s": ready, "first_row_s": row, "start_mb": started, "random_rows": len(numbers),
    "random_rows_s": time.perf_counter() - reading, "peak_mb": memory(),
}))
store.close()
"""


def ten_tb(folder: Path, shards: int, count: int) -> dict[str, Any]:
    """A process of its own that reads random rows of shards of 1 GiB which nobody has."""
    block_rows, blocks = 16 * MIB // (2 * LENGTH), 64
    index = made_up_index(shards, blocks, block_rows, count)
    content = index.as_bytes()
    numbers = random_numbers(index, count)

    def size(name: str) -> int:
        if name == "train.index":
            return len(content)
        if not name.startswith("train-"):
            raise FileNotFoundError(name)
        return blocks * block_rows * 2 * LENGTH

    def read(name: str, begin: int, end: int | None) -> bytes:
        if name == "train.index":
            return content[begin:end]
        assert end is not None
        first = int(name[6:11]) * blocks * block_rows + begin // (2 * LENGTH)
        return numbered(first, (end - begin) // (2 * LENGTH))

    with Faulty(files_of(read, size)).serving() as url:
        command = [sys.executable, "-c", CHILD, url, str(folder / "ten"), str(block_rows), str(count)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(
            command, input=json.dumps(numbers.tolist()), env=environment, text=True, capture_output=True, check=False
        )
    if done.returncode:
        raise RuntimeError(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    return {"shards": shards, "index_mb": len(content) / 1e6, **result}


def numbered(first: int, count: int) -> bytes:
    """Rows of zeros, but for their numbers."""
    rows = np.zeros((count, LENGTH), np.uint16)
    rows[:, :4] = np.arange(first, first + count).view(np.uint16).reshape(count, 4)
    return rows.tobytes()


def made_up_index(shards: int, blocks: int, block_rows: int, count: int) -> ShardIndex:
    """The digests are right for the blocks that will be read, as making 10 TB to know the others takes hours."""
    size = block_rows * 2 * LENGTH
    total = shards * blocks
    digests = np.frombuffer(np.random.default_rng(1).bytes(32 * total), np.uint8).reshape(total, 32).copy()
    layout = Layout("train", "uint16", LENGTH)
    numbers = np.arange(total)
    index = ShardIndex(
        layout, (numbers // blocks).astype(np.int32), np.full(total, block_rows, np.int32),
        (numbers % blocks * size).astype(np.int64), np.full(total, size, np.int32), digests,
    )  # fmt: skip
    window = DataConfig().shuffle_bytes // size
    first = WindowedShuffle(index.first, window, 0).numbers(0, np.arange(1))
    for block in np.unique(index.block_of(np.concatenate([first, random_numbers(index, count)]))):
        digests[block] = np.frombuffer(sha256(numbered(int(block) * block_rows, block_rows)).digest(), np.uint8)
    return index


def random_numbers(index: ShardIndex, count: int) -> np.ndarray:
    return np.random.default_rng(2).integers(0, index.num_sequences, count)


# --- all -----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["rate", "waiting", "ten_tb"], nargs="+")
    parser.add_argument("--rows", type=int, default=1 << 20, help="of the rates: 256 bytes each")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=45, help="of the loop that may wait, without the waiting")
    parser.add_argument("--margins", type=float, nargs="+", default=[2.0, 1.2], help="bytes of storage to those needed")
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--random-rows", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wanted, results = options.only or ["rate", "waiting", "ten_tb"], {}
    print(title(), "\n")
    with tempfile.TemporaryDirectory() as name:
        if "rate" in wanted:
            results["rate"] = rate(Path(name), options.rows, options.rounds)
            print_rates(results["rate"])
        if "waiting" in wanted:
            results["waiting"] = waiting(Path(name), options.seconds, options.margins)
            print(json.dumps(results["waiting"], indent=1), "\n")
        if "ten_tb" in wanted:
            results["ten_tb"] = ten_tb(Path(name), options.shards, options.random_rows)
            print(json.dumps(results["ten_tb"], indent=1), "\n")
    save(options.json, results)


def print_rates(found: dict[str, Any]) -> None:
    head = ["rows from", "gathered, rows/s", "ratio", "masked batches, rows/s", "ratio"]
    lines = [
        [
            name,
            *(text for kind in kinds.values() for text in (f"{kind['rows_per_second']:,.0f}", f"{kind['ratio']:.3f}")),
        ]
        for name, kinds in found.items()
    ]
    print(table(head, lines), "\n")


if __name__ == "__main__":
    main()
