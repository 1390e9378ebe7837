"""Text turned into shards of token rows: rate by processes and hosts, what publishing costs, and zstd's ratio and rate.

Hosts are commands of this machine, each with a folder of its own, that fill one folder at the same time; all ways to
prepare take turns. Publishing is compared with what it took the place of: one process that put all rows together. The
tokenizer is the bundled teacher's. `--data` is a folder of Gutenberg books, by default $DISTILL_DATA/gutenberg/train.
"""

import argparse
import hashlib
import json
import os
import pickle
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from benchmarks.common import save, table, title
from distill.config.settings import CorpusConfig, DataConfig, SourceConfig
from distill.data.build_tokens import held_out_rule
from distill.data.packing import Packing, pack
from distill.data.sequence_format import masked_format
from distill.data.shards import publish as publishing
from distill.data.shards.destination import LocalFolder
from distill.data.shards.groups import divide, work_of
from distill.data.shards.publish import Publication, publish
from distill.data.shards.records import PARTS
from distill.data.sources import Source, find_source
from distill.models.teacher import bundled_folder

HOST = Path(__file__).with_name("prepare_host.py")
PACKING = "packing.pickle"  # for the hosts
CHUNK = 8 << 20  # bytes that the serial join reads at once
# (hosts, processes of each)
WAYS = {"1 process": (1, 1), "2 processes": (1, 2), "2 hosts": (2, 1)}
LEVELS = (1, 3, 9)


def packing_of(source: Source) -> Packing:
    from distill.data.tokens import Text, _packing
    from distill.models.load import load_tokenizer

    tokenizer = load_tokenizer("teacher.path", bundled_folder("bundled_small"))
    return _packing(Text((source,), "corpus"), tokenizer, CorpusConfig(), masked_format)


def source_of(data: Path) -> Source:
    source = find_source(SourceConfig(kind="gutenberg", path=str(data)), "corpus", DataConfig())
    assert source is not None
    return source


def prepare(folder: Path, hosts: int, workers: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a preparation from the beginning of the first host's work to the end of all."""
    command = [sys.executable, str(HOST), str(arguments.data), str(folder.parent / PACKING), str(folder / "rows")]
    own = [str(workers), str(shard_bytes(arguments))]
    before = computing()
    processes = [
        subprocess.Popen(
            [*command, str(folder / f"scratch-{number}"), *own],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for number in range(hosts)
    ]
    began = [float(process.communicate()[0]) for process in processes]
    assert all(process.returncode == 0 for process in processes)
    ended = (folder / "rows" / "meta.json").stat().st_mtime
    meta = json.loads((folder / "rows" / "meta.json").read_text())
    tokens = sum(meta[part]["tokens"] for part in PARTS)
    shutil.rmtree(folder)
    seconds = ended - min(began)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "rate": tokens / seconds,
        "computing": computing() - before,
        "shards": meta["train"]["shards"],
        "digests": [meta[part]["digest"] for part in PARTS],
    }


def computing() -> float:
    """Processor seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rates(folder: Path, arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for _ in range(arguments.turns):
        for name, (hosts, workers) in WAYS.items():
            (folder / name).mkdir()
            found[name].append(prepare(folder / name, hosts, workers, arguments))
    assert len({str(each["digests"]) for all_ in found.values() for each in all_}) == 1
    return found


def shard_bytes(arguments: argparse.Namespace) -> int:
    return int(arguments.shard_mb * 1e6)


def pack_all(packing: Packing, source: Source, folder: Path, size: int) -> tuple[list[list[str]], float]:
    """The packed files of all units, by group of this size, and the seconds that packing them took one process."""
    work = work_of([source])
    packing = replace(packing, held_out=held_out_rule(0.02, work))
    begun = time.perf_counter()
    groups = []
    for group in divide(work, packing.dtype, size):
        stems = [str(folder / f"{group.first + number:06d}") for number in range(len(group.work))]
        for stem, each in zip(stems, group.work, strict=True):
            pack(stem, each.shard, each.source, packing)
        groups.append(stems)
    return groups, time.perf_counter() - begun


def serial_join(packing: Packing, stems: list[str], out: Path) -> None:
    """How rows were put together before: by one process, for all units of a text."""
    out.mkdir()
    for part in PARTS:
        counts = np.zeros(packing.vocabulary, np.int64)
        digest = hashlib.sha256(f"{packing.dtype} {packing.sequence_length}\n".encode())
        with (out / part).open("wb") as joined:
            for stem in stems:
                with Path(f"{stem}.{part}").open("rb") as rows:
                    while chunk := rows.read(CHUNK):
                        joined.write(chunk)
                        digest.update(chunk)
                        counts += np.bincount(np.frombuffer(chunk, packing.dtype), minlength=len(counts))
        np.save(out / f"{part}.counts.npy", counts)


def publish_all(
    packing: Packing, groups: list[list[str]], out: Path, compression: str | None, pool: ProcessPoolExecutor | None
) -> None:
    jobs = [
        Publication(number, tuple(stems), (0,) * len(stems), 0.0, LocalFolder(str(out)), out, compression)
        for number, stems in enumerate(groups)
    ]
    waiting = [pool.submit(publish, job, packing) for job in jobs] if pool else [publish(job, packing) for job in jobs]
    for each in waiting:
        if pool:
            each.result()  # type: ignore[attr-defined]


def joins(
    folder: Path, packing: Packing, groups: list[list[str]], turns: int, pool: ProcessPoolExecutor
) -> dict[str, float]:
    """Medians of the seconds to publish what is packed, by the way; all take turns."""
    ways: dict[str, Callable[[Path], None]] = {
        "one process joins all": lambda out: serial_join(packing, [stem for stems in groups for stem in stems], out),
        "shards, 1 process": lambda out: publish_all(packing, groups, out, None, None),
        "shards, 2 processes": lambda out: publish_all(packing, groups, out, None, pool),
        "shards with zstd, 1 process": lambda out: publish_all(packing, groups, out, "zstd", None),
        "shards with zstd, 2 processes": lambda out: publish_all(packing, groups, out, "zstd", pool),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            begun = time.perf_counter()
            way(folder / "out")
            taken[name].append(time.perf_counter() - begun)
            shutil.rmtree(folder / "out")
    return {name: statistics.median(each) for name, each in taken.items()}


def zstd(groups: list[list[str]], turns: int) -> list[dict[str, Any]]:
    """Ratio and rates of each level, in one thread, on blocks of 16 MiB of training rows."""
    content = b"".join(Path(f"{stem}.train").read_bytes() for stems in groups for stem in stems)
    size = publishing.BLOCK_BYTES
    blocks = [content[begin : begin + size] for begin in range(0, len(content), size)]
    found = []
    for level in LEVELS:
        codec = pyarrow.Codec("zstd", level)
        forth, back, stored = [], [], []
        for _ in range(turns):
            begun = time.perf_counter()
            stored = [codec.compress(block, asbytes=True) for block in blocks]
            middle = time.perf_counter()
            for block, packed in zip(blocks, stored, strict=True):
                codec.decompress(packed, len(block))
            forth.append(middle - begun)
            back.append(time.perf_counter() - middle)
        seconds = {"compress": statistics.median(forth), "decompress": statistics.median(back)}
        found.append(
            {"level": level, "ratio": len(content) / sum(map(len, stored))}
            | {f"{name}_mb": len(content) / each / 1e6 for name, each in seconds.items()}
        )
    return found


def show(found: dict[str, Any]) -> str:
    first = statistics.median(each["rate"] for each in found["rates"]["1 process"])
    rows = []
    for name, runs in found["rates"].items():
        rate = statistics.median(each["rate"] for each in runs)
        seconds = statistics.median(each["computing"] for each in runs)
        rows.append([name, f"{rate:,.0f}", f"{rate / first:.2f}", f"{seconds:.1f}", str(runs[0]["shards"])])
    one = found["joins"]["one process joins all"]
    joined = [
        [name, f"{seconds:.3f}", f"{found['bytes'] / seconds / 1e6:,.0f}", f"{seconds / one:.2f}"]
        for name, seconds in found["joins"].items()
    ]
    levels = [
        [str(z["level"]), f"{z['ratio']:.2f}", f"{z['compress_mb']:,.0f}", f"{z['decompress_mb']:,.0f}"]
        for z in found["zstd"]
    ]
    packed = f"Packing these {found['bytes'] / 1e6:,.0f} MB of rows took one process {found['pack_seconds']:.1f} s."
    return "\n\n".join(
        [
            table(["", "tokens/s", "of one", "processor seconds", "shards"], rows),
            table(["publishing", "seconds", "MB/s", "of the serial join"], joined) + f"\n\n{packed}",
            table(["zstd level", "times smaller", "MB/s", "MB/s back"], levels),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    data = os.environ.get("DISTILL_DATA")
    parser.add_argument("--data", type=Path, default=Path(data) / "gutenberg" / "train" if data else None)
    parser.add_argument("--shard-mb", type=float, default=4.0, help="megabytes of rows in a shard")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.data is None:
        parser.error("give --data FOLDER, or set DISTILL_DATA")
    source = source_of(arguments.data)
    packing = packing_of(source)
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(2) as pool:
        folder = Path(name)
        (folder / PACKING).write_bytes(pickle.dumps(packing))
        found: dict[str, Any] = {"rates": rates(folder, arguments)}
        (folder / "units").mkdir()
        groups, seconds = pack_all(packing, source, folder / "units", shard_bytes(arguments))
        found["pack_seconds"] = seconds
        found["bytes"] = sum(path.stat().st_size for part in PARTS for path in (folder / "units").glob(f"*.{part}"))
        found["joins"] = joins(folder, packing, groups, arguments.turns, pool)
        found["zstd"] = zstd(groups, arguments.turns)
    print(f"{title()}\n\n{show(found)}")
    save(arguments.json, found)


if __name__ == "__main__":
    main()
