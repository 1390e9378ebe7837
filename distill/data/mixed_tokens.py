"""The sequences of the sources of a mixture, each prepared by itself, put together as one corpus with its order."""

from collections import Counter
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from distill.config.settings import CorpusConfig, DataConfig
from distill.data.mixture import Mixture, StackedSequences
from distill.data.order import order_of
from distill.data.sample import subsample
from distill.data.sequence_format import SequenceFormatOf
from distill.data.sequence_store import SequenceStore
from distill.data.tokens import Tokens, corpus_texts, prepare
from distill.runtime.seed import key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Mixed(NamedTuple):
    """The sequences that a run trains on, and their order."""

    tokens: Tokens  # with the counts of an epoch as it is fed
    sequences: SequenceStore
    order: Mixture


def prepare_mixture(
    corpus: CorpusConfig,
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    sequence_format: SequenceFormatOf,
    seed: int,
    recheck: bool = False,
) -> Mixed:
    """The training sequences of a mixture.

    With `corpus.max_sequences` an epoch has at most so many sequences, and each source gives at most its fraction, a
    seeded choice of its sequences. `recheck` is that of `prepare`.

    Raises:
        SettingError: as `prepare`, or a weight is too small for a single sequence of an epoch.
    """
    texts = corpus_texts(corpus, data)
    # Each source has a window of its own, so that all of them together take no more memory than that of one corpus.
    data = data.changed(shuffle_bytes=max(1, data.shuffle_bytes // len(texts)))
    sources = {
        name: prepare(text, tokenizer, corpus, data, "train", sequence_format, recheck) for name, text in texts.items()
    }
    stores = [
        subsample(tokens.sequences, texts[name].max_sequences, f"training rows of {name}", data.shuffle_bytes)
        for name, tokens in sources.items()
    ]
    # No two sources have the same seed.
    seeds = [int(key(seed, f"order of {name}") >> np.uint64(1)) for name in sources]
    order = Mixture(
        names=tuple(sources),
        weights=tuple(corpus.weights[name] for name in sources),
        orders=tuple(order_of(store, data.shuffle_bytes, own) for store, own in zip(stores, seeds, strict=True)),
        tokens_per_sequence=tuple(tokens.tokens / len(tokens.sequences) for tokens in sources.values()),
        seed=seed,
    )
    return Mixed(_together(sources, order), StackedSequences(stores), order)


def _together(sources: dict[str, Tokens], order: Mixture) -> Tokens:
    """All sources as one corpus. Tokens and their counts are those of an epoch, a fraction from each source."""
    parts = list(sources.values())
    factors = order.quotas / [len(part.sequences) for part in parts]
    fractions, seconds = order.quotas / len(order), sum(part.seconds for part in parts)
    identity = [(name, part.digest, int(size)) for (name, part), size in zip(sources.items(), order.sizes, strict=True)]
    named = zip(fractions, sources.items(), strict=True)
    return replace(
        parts[0],
        sequences=StackedSequences([part.sequences for part in parts]),
        counts=np.rint(factors @ np.stack([part.counts for part in parts])).astype(np.int64),
        digest=sha256(repr(identity).encode()).hexdigest(),
        name=" + ".join(f"{fraction:.1%} {name} ({part.name})" for fraction, (name, part) in named),
        documents=sum(part.documents for part in parts),
        tokens=round(float(factors @ [part.tokens for part in parts])),
        seconds=seconds,
        tokens_per_second=sum(part.tokens for part in parts) / max(seconds, 1e-9),
        left_out=sum((Counter(part.left_out) for part in parts), Counter()),
        prompts=any(part.prompts for part in parts),
        duplicates=_sum([part.duplicates for part in parts]),
        sources=sources,
        stored=None,  # each has its own
        held_out=sum(part.held_out for part in parts),
        used=float(fractions @ [part.used for part in parts]),
    )


def _sum(counts: list[dict[str, int] | None]) -> dict[str, int] | None:
    """The counts of duplicates of all sources, each of which was searched by itself; None where one was not."""
    present = [of_source for of_source in counts if of_source is not None]
    if len(present) < len(counts):
        return None
    return {name: sum(of_source.get(name, 0) for of_source in present) for of_source in present for name in of_source}
