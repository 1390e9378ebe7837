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
    weights = [corpus.weights[name] for name in sources]
    stores = [
        subsample(tokens.sequences, texts[name].max_sequences, f"training rows of {name}", data.shuffle_bytes)
        for name, tokens in sources.items()
    ]
    orders = [
        order_of(store, data.shuffle_bytes, source_seed(seed, name))
        for name, store in zip(sources, stores, strict=True)
    ]
    means = [tokens.tokens / len(tokens.sequences) for tokens in sources.values()]
    order = Mixture(tuple(sources), tuple(weights), tuple(orders), tuple(means), seed)
    return Mixed(mix_sources(sources, order), StackedSequences(stores), order)


def source_seed(seed: int, name: str) -> int:
    """What the order of a source's own sequences is drawn from, so that no two sources have the same."""
    return int(key(seed, f"order of {name}") >> np.uint64(1))


def mix_sources(sources: dict[str, Tokens], order: Mixture) -> Tokens:
    """All sources as one corpus. Tokens and their counts are those of an epoch, a fraction from each source."""
    factors = order.quotas / np.array([len(tokens.sequences) for tokens in sources.values()])
    all_tokens = list(sources.values())
    seconds = sum(tokens.seconds for tokens in all_tokens)
    fractions = order.quotas / len(order)
    digest = sha256(
        repr(
            [(name, source.digest, int(n)) for (name, source), n in zip(sources.items(), order.sizes, strict=True)]
        ).encode()
    )
    return replace(
        all_tokens[0],
        sequences=StackedSequences([tokens.sequences for tokens in all_tokens]),
        counts=np.rint(sum(tokens.counts * factor for tokens, factor in zip(all_tokens, factors, strict=True))).astype(
            np.int64
        ),
        digest=digest.hexdigest(),
        name=" + ".join(
            f"{fraction:.1%} {name} ({source.name})"
            for fraction, (name, source) in zip(fractions, sources.items(), strict=True)
        ),
        documents=sum(tokens.documents for tokens in all_tokens),
        tokens=round(sum(tokens.tokens * factor for tokens, factor in zip(all_tokens, factors, strict=True))),
        seconds=seconds,
        tokens_per_second=sum(tokens.tokens for tokens in all_tokens) / max(seconds, 1e-9),
        left_out=sum((Counter(tokens.left_out) for tokens in all_tokens), Counter()),
        prompts=any(tokens.prompts for tokens in all_tokens),
        duplicates=_sum([tokens.duplicates for tokens in all_tokens]),
        sources=sources,
        stored=None,  # each has its own
        held_out=sum(tokens.held_out for tokens in all_tokens),
        used=float(np.average([tokens.used for tokens in all_tokens], weights=fractions)),
    )


def _sum(counts: list[dict[str, int] | None]) -> dict[str, int] | None:
    """The counts of duplicates of all sources, each of which was searched by itself; None where one was not."""
    present = [of_source for of_source in counts if of_source is not None]
    if len(present) < len(counts):
        return None
    return {name: sum(of_source.get(name, 0) for of_source in present) for of_source in present for name in of_source}
