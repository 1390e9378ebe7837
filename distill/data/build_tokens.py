"""Builds the token rows of a text: shards packed by several processes, put together in order, published at once."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, wait
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from distill.config import CacheConfig
from distill.data.disk_cache import num_processes, workers
from distill.data.heldout import HeldOut, held_out
from distill.data.packing import COUNTS, PARTS, Packing, pack
from distill.data.row_format import IDS
from distill.data.sources import Shard, Source, read
from distill.data.unread import Unread
from distill.files import atomic, remove
from distill.progress import Progress

FEW_BYTES = 4 << 20  # stored bytes up to which starting other processes costs more than it gains
CHUNK = 8 << 20  # bytes

logger = logging.getLogger(__name__)


class Work(NamedTuple):
    """A shard, the source it belongs to, and where its rows go."""

    shard: Shard
    source: Source
    stem: str = ""


def build(folder: Path, name: str, sources: Sequence[Source], packing: Packing, cache: CacheConfig) -> None:
    """Make `folder` with the rows of these sources; a build that was cut short goes on with the shards not done yet."""
    work = work_of(sources)  # prose is collected here, and says so
    logger.info(f"preparing tokens of {name}")
    packing = replace(packing, held_out=held_out_rule(packing.held_out.share, work))
    unfinished = Path(f"{folder}.build")
    unfinished.mkdir(exist_ok=True)
    work = [each._replace(stem=str(unfinished / f"{index:06d}")) for index, each in enumerate(work)]
    seconds = _pack_all(work, packing, cache)
    meta = _publish(folder, work, packing, seconds)
    remove(unfinished)
    logger.info(f"prepared {num_tokens(meta):,} tokens in {seconds:.1f} s: {rate(meta):,.0f} tokens a second")
    if dropped := sum(meta[part]["dropped"] for part in PARTS):
        share = dropped / (num_tokens(meta) + dropped)
        logger.info(f"left out {dropped:,} tokens ({share:.1%}): {_left_out(packing)}")


def _left_out(packing: Packing) -> str:
    """Which tokens of a text stand in no row."""
    shortest = f"ends of documents of fewer than {packing.format.shortest} tokens"
    return f"{shortest}, and what is over of pairs of segments" if packing.format.pairs else shortest


def work_of(sources: Sequence[Source]) -> list[Work]:
    return [Work(shard, source) for source in sources for shard in source.shards()]


def held_out_rule(share: float, work: list[Work]) -> HeldOut:
    return held_out(share, (document for each in work for document in read(each.source, each.shard)))


def num_tokens(meta: dict[str, Any]) -> int:
    """Of both parts."""
    return sum(meta[part]["tokens"] for part in PARTS)


def rate(meta: dict[str, Any]) -> float:
    """Tokens a second of the preparation, both parts together."""
    return num_tokens(meta) / max(meta["seconds"], 1e-9)


def _pack_all(work: list[Work], packing: Packing, cache: CacheConfig) -> float:
    """Packs the shards that are not done yet; gives the seconds that all of them took."""
    begun = time.perf_counter()
    before = [json.loads(Path(f"{each.stem}.json").read_text()) for each in work if os.path.exists(f"{each.stem}.json")]
    todo = [each for each in work if not os.path.exists(f"{each.stem}.json")]
    if before:
        logger.info(f"going on with a preparation that was cut short: {len(before):,} of {len(work):,} parts are there")
    size = sum(each.shard.size for each in todo)
    of_files = all(each.shard.paths for each in todo)
    done = tokens = 0
    total, unit = (size / 1e6, "MB") if of_files else (size, "rows")
    parallel = workers(cache, only_if=size > FEW_BYTES or not of_files)
    with parallel as pool, Progress("tokens", total, unit) as progress:
        for shard, packed in _run(todo, packing, pool):
            done += shard.size
            tokens += num_tokens(packed)
            progress.update(done / 1e6 if of_files else done, f"{tokens:,} tokens")
    return time.perf_counter() - begun + sum(each["seconds"] for each in before) / num_processes(cache)


def _run(todo: list[Work], packing: Packing, pool: Executor | None) -> Iterator[tuple[Shard, dict[str, Any]]]:
    """Packs shards, in other processes if there is a pool; gives each when it is done."""
    if pool is None:
        for each in todo:
            yield each.shard, pack(each.stem, each.shard, each.source, packing)
        return
    waiting = {pool.submit(pack, each.stem, each.shard, each.source, packing): each for each in todo}
    while waiting:
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            yield waiting.pop(future).shard, future.result()


def _publish(folder: Path, work: list[Work], packing: Packing, seconds: float) -> dict[str, Any]:
    """Puts the part files together in order and gives the result its name in one step.

    Raises:
        SettingError: a setting names a field that no record of a source has.
    """
    stems = [Path(each.stem) for each in work]
    done = [json.loads(stem.with_suffix(".json").read_text()) for stem in stems]
    unread = [Unread.of(each) for each in done]
    for _, parts in groupby(zip(work, unread, strict=True), lambda pair: id(pair[0].source)):
        Unread.together(part for _, part in parts).require_fields()
    meta: dict[str, Any] = {**Unread.together(unread).as_dict(), "seconds": seconds}
    with atomic(folder) as new:
        new.mkdir()
        for part in PARTS:
            counts, digest = _join([stem.with_suffix(f".{part}") for stem in stems], new / part, packing)
            np.save(new / f"{part}.counts.npy", counts)
            meta[part] = {key: sum(each[part][key] for each in done) for key in COUNTS}
            meta[part]["digest"] = digest
        (new / "meta.json").write_text(json.dumps(meta))
    return meta


def _join(files: list[Path], out: Path, packing: Packing) -> tuple[np.ndarray, str]:
    """Writes files one after the other to `out`; gives the count of each id and the sha256, in bounded memory."""
    counts = np.zeros(max(packing.vocabulary, packing.format.pad + 1), np.int64)
    digest = hashlib.sha256(f"{packing.dtype} {packing.sequence_length}\n".encode())
    with out.open("wb") as joined:
        for file in files:
            with file.open("rb") as rows:
                while chunk := rows.read(CHUNK):
                    joined.write(chunk)
                    digest.update(chunk)
                    ids = np.frombuffer(chunk, packing.dtype)
                    counts += np.bincount(ids & IDS if packing.prompts else ids, minlength=len(counts))
    return counts[: packing.vocabulary], digest.hexdigest()
