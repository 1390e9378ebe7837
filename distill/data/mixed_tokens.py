"""The rows of the sources of a mixture, each prepared by itself, put together as one corpus with its order."""

from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from distill.config.settings import CorpusConfig, DataConfig
from distill.data.mixture import Mixture, StackedRows
from distill.data.order import order_of
from distill.data.row_format import RowFormatOf
from distill.data.row_store import RowStore
from distill.data.sample import subsample_rows
from distill.data.tokens import Tokens, corpus_texts, prepare
from distill.data.unread import Unread
from distill.runtime.seed import key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Mixed(NamedTuple):
    """The rows that a run trains on, and their order."""

    tokens: Tokens  # with the counts of an epoch as it is fed
    rows: RowStore
    order: Mixture


def prepare_mixture(
    corpus: CorpusConfig,
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    row_format: RowFormatOf,
    seed: int,
) -> Mixed:
    """The training rows of a mixture.

    With `corpus.max_sequences` an epoch has at most so many rows, and each source gives at most its share, a seeded
    choice of its rows.

    Raises:
        SettingError: as `prepare`, or a weight is too small for a single row of an epoch.
    """
    texts = corpus_texts(corpus, data)
    # Each source has a window of its own, so that all of them together take no more memory than that of one corpus.
    data = data.changed(shuffle_bytes=max(1, data.shuffle_bytes // len(texts)))
    sources = {name: prepare(text, tokenizer, corpus, data, "train", row_format) for name, text in texts.items()}
    weights = [corpus.weights[name] for name in sources]
    rows = [
        subsample_rows(tokens.rows, texts[name].rows, f"training rows of {name}", data.shuffle_bytes)
        for name, tokens in sources.items()
    ]
    orders = [
        order_of(each, data.shuffle_bytes, source_seed(seed, name)) for name, each in zip(sources, rows, strict=True)
    ]
    means = [tokens.tokens / len(tokens.rows) for tokens in sources.values()]
    order = Mixture(tuple(sources), tuple(weights), tuple(orders), tuple(means), seed)
    return Mixed(as_fed(sources, order), StackedRows(rows), order)


def source_seed(seed: int, name: str) -> int:
    """What the order of a source's own rows is drawn from, so that no two sources have the same."""
    return int(key(seed, f"order of {name}") >> np.uint64(1))


def as_fed(sources: dict[str, Tokens], order: Mixture) -> Tokens:
    """All sources as one corpus. Tokens and their counts are those of an epoch, to which each adds its share."""
    factors = order.quotas / np.array([len(tokens.rows) for tokens in sources.values()])
    each = list(sources.values())
    shares = order.quotas / len(order)
    digest = sha256(
        repr([(name, of.digest, int(n)) for (name, of), n in zip(sources.items(), order.sizes, strict=True)]).encode()
    )
    return replace(
        each[0],
        rows=StackedRows([tokens.rows for tokens in each]),
        counts=np.rint(sum(tokens.counts * factor for tokens, factor in zip(each, factors, strict=True))).astype(
            np.int64
        ),
        digest=digest.hexdigest(),
        name=" + ".join(
            f"{share:.1%} {name} ({of.name})" for share, (name, of) in zip(shares, sources.items(), strict=True)
        ),
        documents=sum(tokens.documents for tokens in each),
        tokens=round(sum(tokens.tokens * factor for tokens, factor in zip(each, factors, strict=True))),
        seconds=sum(tokens.seconds for tokens in each),
        tokens_per_second=sum(tokens.tokens for tokens in each) / max(sum(tokens.seconds for tokens in each), 1e-9),
        unread=Unread.together(tokens.unread for tokens in each),
        prompts=any(tokens.prompts for tokens in each),
        duplicates=_sum([tokens.duplicates for tokens in each]),
        sources=sources,
        stored=None,  # each has its own
    )


def _sum(counts: list[dict[str, int] | None]) -> dict[str, int] | None:
    """The counts of duplicates of all sources, each of which was searched by itself; None where one was not."""
    known = [each for each in counts if each is not None]
    if len(known) < len(counts):
        return None
    return {name: sum(each.get(name, 0) for each in known) for each in known for name in each}
