"""Text turned into shards of token sequences: tokens a second by processes and hosts.

Hosts are commands of this machine that are numbered as a launcher numbers them, and fill one folder at the same time;
all ways to prepare take turns. The tokenizer is the bundled teacher's. `--data` is a folder of Gutenberg books, by
default $DISTILL_DATA/gutenberg/train.
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
from pathlib import Path
from typing import Any

from benchmarks.common import save, table, title

# (hosts, processes of each)
WAYS = {"1 process": (1, 1), "2 processes": (1, 2), "2 hosts": (2, 1)}
PARTS = ("train", "heldout")


def prepare(folder: Path, hosts: int, workers: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a preparation from the beginning of the first host's command to the end of all."""
    settings = [
        "+recipe=distilbert_gutenberg", f"corpus.path={arguments.data}", "corpus.max_sequences=null",
        "evaluate.sets=[heldout]", f"data.tokens={folder / 'tokens'}", f"data.workers={workers}",
        f"data.shard_bytes={int(arguments.shard_mb * 1e6)}",
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
    assert all(process.wait() == 0 for process in processes)
    seconds = time.perf_counter() - began
    (file,) = (folder / "tokens").glob("*/index.json")
    index = json.loads(file.read_text())
    shutil.rmtree(folder)
    tokens = sum(index[part]["tokens"] for part in PARTS)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "rate": tokens / seconds,
        "computing": computing() - before,
        "shards": len(index["train"]["files"]),
        "files": [index[part]["files"] for part in PARTS],
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
    assert len({str(each["files"]) for runs in found.values() for each in runs}) == 1
    return found


def show(found: dict[str, list[dict[str, Any]]]) -> str:
    medians = {name: statistics.median(each["rate"] for each in runs) for name, runs in found.items()}
    lines = []
    for name, runs in found.items():
        seconds = statistics.median(each["computing"] for each in runs)
        relative = medians[name] / medians["1 process"]
        lines.append([name, f"{medians[name]:,.0f}", f"{relative:.2f}", f"{seconds:.1f}", str(runs[0]["shards"])])
    return table(["", "tokens/s", "of one", "processor seconds", "shards"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    data = os.environ.get("DISTILL_DATA")
    parser.add_argument("--data", type=Path, default=Path(data) / "gutenberg" / "train" if data else None)
    parser.add_argument("--shard-mb", type=float, default=64.0, help="megabytes of sequences in a shard")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.data is None:
        parser.error("give --data FOLDER, or set DISTILL_DATA")
    with tempfile.TemporaryDirectory() as name:
        found = rates(Path(name), arguments)
    print(f"{title()}\n\n{show(found)}")
    save(arguments.json, {"rates": found})


if __name__ == "__main__":
    main()
