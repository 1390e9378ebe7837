"""A corpus turned once into rows of token ids, kept on disk under a fingerprint and memory-mapped."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distill.config import Corpus, Kind, Missing, Source
from distill.data import wordpiece
from distill.data.corpus import HeldOut, Shard, describe, documents, fingerprint, held_out, locate, shards
from distill.data.disk_cache import folder_of, num_workers, once, workers
from distill.data.local_copy import local_copy
from distill.data.packing import PARTS, SHORTEST, Packing, pack
from distill.data.sources import prose
from distill.errors import SettingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

FORMAT = 1  # raise it when the same inputs and settings would give other rows
FEW_BYTES = 4 << 20  # stored bytes up to which starting other processes costs more than it gains
SECONDS = 5.0  # between two lines of progress
CHUNK = 8 << 20  # bytes

Log = Callable[[str], None]
Progress = Callable[[int, int, int], None]  # (bytes done, bytes in all, tokens done)


@dataclass(frozen=True)
class Tokens:
    """The rows of one part of a corpus. N rows, L = sequence_length, V = length of the tokenizer."""

    rows: np.ndarray  # [N, L] uint16 or uint32, memory-mapped: [CLS] ids [SEP], then padding
    counts: np.ndarray  # [V] int64: how often each id stands in `rows`, special tokens and padding included
    digest: str  # sha256 of the rows: the same for the same content, wherever the files lie
    name: str  # what `corpus.describe` says
    documents: int
    tokens: int  # ids in `rows` that are not padding
    seconds: float  # it took to prepare the whole corpus, when that was done
    tokens_per_second: float  # of that preparation
    skipped: tuple[str, ...]  # `name: reason` of every file that could not be read


class Work(NamedTuple):
    """A shard, the source it belongs to, and what error lines call that source."""

    shard: Shard
    source: Source
    setting: str


def prepare(
    corpus: Corpus,
    tokenizer: "PreTrainedTokenizerBase",
    part: str = "train",
    source: Source | None = None,
    log: Log = print,
    progress: Progress | None = None,
    setting: str = "corpus",
) -> Tokens:
    """Rows of `corpus` (`part` "train" or "heldout"), or of an evaluation `source` (`part` "all"), from the cache.

    What is not in the cache is built, both parts in one pass, and read from `corpus.local` where that is given.
    `sequence_length`, `cross_documents`, `unreadable`, `cache`, `local` and `workers` are those of `corpus` in either
    case. `setting` is what error lines call the source, such as `evaluate.sources.imdb`.

    Raises:
        SettingError: the source is not to be had, a file cannot be read and `corpus.unreadable=stop`, the tokenizer
            lacks a special token, there is not one row, or a folder cannot be written.
    """
    assert part in (*PARTS, "all") and (source is None or part == "all")
    if part == "heldout" and not corpus.heldout:
        raise SettingError(f"corpus.heldout={corpus.heldout}: no text is held out to evaluate on; set it to 0.02 or so")
    packing = _packing(tokenizer, corpus, 0.0 if part == "all" else corpus.heldout)
    sources = _sources(corpus, source, setting)
    name = " + ".join(describe(each) for each in sources)
    with workers(corpus) as pool:
        work = _work(sources, corpus, setting, pool, log)
        key = _key(work, asdict(packing))
        folder = folder_of(corpus.cache, "tokens", key)
        with once(folder, log) as missing:
            if missing:
                log(f"preparing tokens of {name}")
                packing = replace(packing, held_out=_held_out(packing.held_out.share, work))
                build = Path(f"{folder}.build")
                seconds = _build(build, work, packing, corpus, pool, log, progress)
                meta = _publish(folder, build, len(work), packing, seconds)
                log(f"prepared {_num_tokens(meta):,} tokens in {seconds:.1f} s: {_rate(meta):,.0f} tokens a second")
    if corpus.local is not None:
        folder = local_copy(folder, corpus.local, log)
    tokens = _load(folder, part, corpus, packing, name, setting, str(sources[0].path or sources[0].hub))
    for line in tokens.skipped[:10]:
        log(f"skipped {line}")
    if tokens.skipped:
        log(f"skipped {len(tokens.skipped):,} of the files: they could not be read")
    return tokens


# --- what is to be read --------------------------------------------------------------------------------------------


def _sources(corpus: Corpus, source: Source | None, setting: str) -> list[Source]:
    """The located source, for a corpus with the prose that joins it or stands in for it."""
    where = source or corpus
    found = locate(where, setting)
    prose_ = Source(kind=Kind.prose)
    if found is None and source is None and corpus.fallback:
        return [prose_]
    if found is None:
        raise SettingError(
            f"{setting}.path=null: no {where.kind.value} text is known; give {setting}.path=FOLDER, or set "
            f"DISTILL_DATA to a folder that holds it, or name a data set as {setting}.hub"
        )
    joins = source is None and corpus.add_prose and found.kind is not Kind.prose
    return [found, prose_] if joins else [found]


def _work(sources: list[Source], corpus: Corpus, setting: str, pool: Executor | None, log: Log) -> list[Work]:
    work = []
    for source in sources:
        if source.kind is Kind.prose:
            path = prose.build(corpus.cache, pool, log)
            source = Source(kind=Kind.jsonl, path=str(path), share=source.share)
        work += [Work(shard, source, setting) for shard in shards(source, setting)]
    return work


def _key(work: list[Work], settings: dict[str, Any]) -> str:
    sources = {id(each.source): each for each in work}.values()
    inputs = [[fingerprint(each.source, each.setting), *_identity(each.source)] for each in sources]
    return hashlib.sha256(repr((FORMAT, inputs, sorted(settings.items()))).encode()).hexdigest()[:32]


def _identity(source: Source) -> list[str | float | None]:
    """What, besides the files, decides which text a source gives."""
    return [source.kind.value, source.field, source.hub, source.subset, source.split, source.share]


def _held_out(share: float, work: list[Work]) -> HeldOut:
    texts = (document.text for each in work for document in documents(*each, unreadable=lambda error: None))
    return held_out(share, texts)


def _packing(tokenizer: "PreTrainedTokenizerBase", corpus: Corpus, share: float) -> Packing:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    ids = {
        "[CLS]": tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id,
        "[SEP]": tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id,
        "[PAD]": tokenizer.pad_token_id,
    }
    lacking = [name for name, id_ in ids.items() if id_ is None]
    if backend is None or lacking:
        what = "is not a `tokenizers` one" if backend is None else f"has no {', '.join(lacking)} token"
        raise SettingError(f"teacher.path={tokenizer.name_or_path}: its tokenizer {what}; choose an encoder")
    if corpus.sequence_length < SHORTEST + 2:
        raise SettingError(f"corpus.sequence_length={corpus.sequence_length}: rows need at least {SHORTEST + 2} ids")
    return Packing(
        tokenizer=_plain(backend.to_str()),
        vocabulary=len(tokenizer),
        cls=ids["[CLS]"],
        sep=ids["[SEP]"],
        pad=ids["[PAD]"],
        sequence_length=corpus.sequence_length,
        cross_documents=corpus.cross_documents,
        held_out=HeldOut(share),
    )


def _plain(tokenizer: str) -> str:
    """tokenizer.json without the padding and truncation that whoever used it last left there."""
    return json.dumps(json.loads(tokenizer) | {"padding": None, "truncation": None}, sort_keys=True)


# --- building ------------------------------------------------------------------------------------------------------


class _Todo(NamedTuple):
    stem: str
    work: Work


def _build(
    folder: Path,
    work: list[Work],
    packing: Packing,
    corpus: Corpus,
    pool: Executor | None,
    log: Log,
    progress: Progress | None,
) -> float:
    """Packs the shards that are not done yet; gives the seconds that all of them took."""
    begun = time.perf_counter()
    folder.mkdir(exist_ok=True)
    todo = [_Todo(str(folder / f"{index:06d}"), each) for index, each in enumerate(work)]
    before = [json.loads(Path(f"{t.stem}.json").read_text()) for t in todo if os.path.exists(f"{t.stem}.json")]
    todo = [t for t in todo if not os.path.exists(f"{t.stem}.json")]
    if before:
        log(f"going on with a preparation that was cut short: {len(before):,} of {len(work):,} parts are there")
    size = sum(t.work.shard.size for t in todo)
    if size <= FEW_BYTES and all(t.work.source.path for t in todo):
        pool = None
    meter = _Meter(size, log, progress)
    for shard, done in _run(todo, packing, pool):
        meter.add(shard.size, sum(done[part]["tokens"] for part in PARTS))
    return time.perf_counter() - begun + sum(done["seconds"] for done in before) / num_workers(corpus)


def _run(todo: list[_Todo], packing: Packing, pool: Executor | None) -> Iterator[tuple[Shard, dict[str, Any]]]:
    """Packs shards, in other processes if there is a pool; gives each when it is done."""
    if pool is None:
        for stem, (shard, source, setting) in todo:
            yield shard, pack(stem, shard, source, packing, setting)
        return
    waiting = {pool.submit(pack, t.stem, t.work.shard, t.work.source, packing, t.work.setting): t for t in todo}
    while waiting:
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            yield waiting.pop(future).work.shard, future.result()


class _Meter:
    """Says how far a preparation is: to `progress` each time, else as a line every few seconds."""

    def __init__(self, size: int, log: Log, progress: Progress | None) -> None:
        self.size, self.log, self.progress = size, log, progress
        self.begun = self.said = time.perf_counter()
        self.done = self.tokens = 0

    def add(self, size: int, tokens: int) -> None:
        self.done += size
        self.tokens += tokens
        now = time.perf_counter()
        if self.progress:
            self.progress(self.done, self.size, self.tokens)
        elif now - self.said >= SECONDS and self.done < self.size:
            self.said = now
            left = (now - self.begun) * (self.size - self.done) / max(self.done, 1)
            rate = self.tokens / (now - self.begun)
            self.log(f"{self.done / self.size:.0%}: {self.tokens:,} tokens, {rate:,.0f} a second, {left:.0f} s left")


def _publish(folder: Path, build: Path, num_parts: int, packing: Packing, seconds: float) -> dict[str, Any]:
    """Puts the part files together in order and gives the result its name in one step."""
    final = build / "final"
    shutil.rmtree(final, ignore_errors=True)
    final.mkdir()
    stems = [build / f"{index:06d}" for index in range(num_parts)]
    done = [json.loads(stem.with_suffix(".json").read_text()) for stem in stems]
    meta: dict[str, Any] = {"skipped": [line for each in done for line in each["skipped"]], "seconds": seconds}
    for part in PARTS:
        files = [stem.with_suffix(f".{part}") for stem in stems]
        counts, digest = _join(files, final / part, packing)
        np.save(final / f"{part}.counts.npy", counts)
        meta[part] = {key: sum(each[part][key] for each in done) for key in ("rows", "tokens", "documents")}
        meta[part]["digest"] = digest
    (final / "meta.json").write_text(json.dumps(meta))
    os.rename(final, folder)
    shutil.rmtree(build)
    return meta


def _join(files: list[Path], out: Path, packing: Packing) -> tuple[np.ndarray, str]:
    """Writes files one after the other to `out`; gives the count of each id and the sha256, in bounded memory."""
    counts = np.zeros(packing.vocabulary, np.int64)
    digest = hashlib.sha256(f"{packing.dtype} {packing.sequence_length}\n".encode())
    with out.open("wb") as joined:
        for file in files:
            with file.open("rb") as rows:
                while chunk := rows.read(CHUNK):
                    joined.write(chunk)
                    digest.update(chunk)
                    counts += np.bincount(np.frombuffer(chunk, packing.dtype), minlength=len(counts))
    return counts, digest.hexdigest()


# --- what comes out ------------------------------------------------------------------------------------------------


def _load(folder: Path, part: str, corpus: Corpus, packing: Packing, name: str, setting: str, path: str) -> Tokens:
    meta = json.loads((folder / "meta.json").read_text())
    kept = PARTS[part == "heldout"]
    skipped = tuple(meta["skipped"])
    if skipped and corpus.unreadable is Missing.stop:
        raise SettingError(f"{setting}.path={path}: {skipped[0]}; mend or remove it, or set corpus.unreadable=skip")
    if not meta[kept]["rows"]:
        raise _no_rows(meta, part, corpus, setting, path)
    shape = (meta[kept]["rows"], packing.sequence_length)
    return Tokens(
        rows=np.memmap(folder / kept, packing.dtype, "r", shape=shape),
        counts=np.load(folder / f"{kept}.counts.npy"),
        digest=meta[kept]["digest"],
        name=name,
        documents=meta[kept]["documents"],
        tokens=meta[kept]["tokens"],
        seconds=meta["seconds"],
        tokens_per_second=_rate(meta),
        skipped=skipped,
    )


def _num_tokens(meta: dict[str, Any]) -> int:
    return sum(meta[part]["tokens"] for part in PARTS)


def _rate(meta: dict[str, Any]) -> float:
    """Tokens a second of the preparation, both parts together."""
    return _num_tokens(meta) / max(meta["seconds"], 1e-9)


def _no_rows(meta: dict[str, Any], part: str, corpus: Corpus, setting: str, path: str) -> SettingError:
    if part == "heldout" and meta["train"]["rows"]:
        return SettingError(
            f"corpus.heldout={corpus.heldout}: the corpus is too small to hold a part of it out; give more text, or "
            "leave `heldout` out of evaluate.sets"
        )
    count = sum(meta[each]["documents"] for each in PARTS)
    unread = f"; {len(meta['skipped'])} files could not be read, first {meta['skipped'][0]}" if meta["skipped"] else ""
    return SettingError(
        f"{setting}.path={path}: not one row: {count} document{'s' * (count != 1)}, none with {SHORTEST} tokens or more"
        f"{unread}; check {setting}.kind and {setting}.share"
    )


# --- a tokenizer of one's own --------------------------------------------------------------------------------------


def train_wordpiece(corpus: Corpus, vocab_size: int, cache: str, log: Log = print) -> "PreTrainedTokenizerFast":
    """An uncased WordPiece tokenizer in the manner of BERT, trained on what `corpus` does not hold out.

    The same text gives the same ids every time. `model_max_length` is left to the caller.

    Raises:
        SettingError: as `prepare`, or `vocab_size` is too small.
    """
    from transformers import PreTrainedTokenizerFast

    corpus = replace(corpus, cache=cache)
    sources = _sources(corpus, None, "corpus")
    with workers(corpus) as pool:
        work = _work(sources, corpus, "corpus", pool, log)
    key = _key(work, {"vocab_size": vocab_size, "heldout": corpus.heldout})
    path = folder_of(corpus.cache, "wordpiece", f"{key}.json")
    with once(path, log) as missing:
        if missing:
            begun = time.perf_counter()
            log(f"training a tokenizer of {vocab_size:,} pieces on {' + '.join(map(describe, sources))}")
            wordpiece.train(_training_texts(work, corpus.heldout), vocab_size, path)
            log(f"trained the tokenizer in {time.perf_counter() - begun:.0f} s")
    return PreTrainedTokenizerFast(tokenizer_file=str(path), **wordpiece.SPECIAL)


def _training_texts(work: list[Work], share: float) -> Iterator[str]:
    rule = _held_out(share, work)
    for each in work:
        for document in documents(*each, unreadable=lambda error: None):
            yield from (text for held, text in rule.parts(document.text) if not held)
