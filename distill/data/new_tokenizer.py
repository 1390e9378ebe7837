"""Trains a tokenizer on the documents of a corpus that are not held out, and keeps it in the cache."""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from distill.config.settings import CorpusConfig, DataConfig
from distill.data.build_tokens import held_out_rule
from distill.data.disk_cache import folder_of, once_with_digest
from distill.data.readers import blocks
from distill.data.sources import read
from distill.data.tokens import Text, corpus_texts, key_of
from distill.data.work import work_of
from distill.runtime.errors import SettingError, first_line
from distill.runtime.files import locked

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

NO_TEXT = "corpus.path: it holds no text to train a tokenizer on; check corpus.path and corpus.kind"
BLOCK = 16 << 10  # characters
TRAINING_TEXT = ".training-text"  # ends the name of a copy of the text, which a killed process leaves to the next one
_LONG = re.compile(r"\w{1000,}")

logger = logging.getLogger(__name__)


def train_tokenizer(
    corpus: CorpusConfig,
    data: DataConfig,
    algorithm: str,
    train: Callable[[Path, Counter[str], int], "Tokenizer"],
    special: dict[str, str],
) -> "PreTrainedTokenizerFast":
    """Train a tokenizer of `corpus.vocab_size` pieces, or read it from the cache; the caller sets `model_max_length`.

    It is trained on every document that is not held out: of a mixture on all sources, whatever their weights, and also
    on duplicates.

    Args:
        algorithm: its name in the cache.
        train: makes a tokenizer of so many pieces from a file of text and the count of each of its characters.
        special: the names that transformers gives its special tokens, and these.

    Raises:
        SettingError: the corpus is not available, or holds token ids.
    """
    from transformers import PreTrainedTokenizerFast

    texts = list(corpus_texts(corpus, data).values())
    if ids := next((text for text in texts if any(source.token_ids for source in text.sources)), None):
        raise SettingError(
            f"{ids.setting}: {ids.describe()} holds token ids, which no new tokenizer has: give the tokenizer that "
            "made them, or texts"
        )
    text = Text(tuple(source for text in texts for source in text.sources), texts[0].setting)
    settings = {"vocab_size": corpus.vocab_size, "heldout": corpus.heldout}
    path = folder_of(data.cache, algorithm, f"{key_of(text, settings, data)}.json")
    with once_with_digest(path) as new:
        if new is not None:
            begun = time.perf_counter()
            logger.info(f"training a tokenizer of {corpus.vocab_size:,} pieces on {text.describe()}")
            training = chain.from_iterable(_training_texts(source, corpus) for source in texts)
            write_tokenizer(train, training, corpus.vocab_size, new)
            logger.info(f"trained the tokenizer in {time.perf_counter() - begun:.0f} s")
    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(path), **special)
    except Exception as error:  # of whatever kind the tokenizers library raises
        raise SettingError(
            f"data.cache={data.cache}: {path} is damaged ({first_line(error)}): delete it, and the same command makes "
            "it again"
        ) from error


def _training_texts(text: Text, corpus: CorpusConfig) -> Iterator[str]:
    """The texts that are not held out. Raises SettingError where something cannot be read."""
    for source in text.sources:
        of_source = work_of([source])
        rule = held_out_rule(corpus.heldout, of_source)
        for unit in of_source:
            for document in read(unit.source, unit.shard):
                yield from (stretch.text for is_held_out, stretch in rule.parts(document) if not is_held_out)


def write_tokenizer(
    train: Callable[[Path, Counter[str], int], "Tokenizer"], texts: Iterable[str], vocab_size: int, path: Path
) -> None:
    """Train a tokenizer on texts, and write it as a tokenizer.json to `path`.

    Raises:
        SettingError: there is no text.
    """
    for left in path.parent.glob(f"*{TRAINING_TEXT}"):
        with locked(left, wait=False):  # and so removed, unless another process is at work on it
            pass
    with locked(path.with_suffix(TRAINING_TEXT)):
        counts = write_training_text(texts, path.with_suffix(TRAINING_TEXT))
        if not counts:
            raise SettingError(NO_TEXT)
        tokenizer = train(path.with_suffix(TRAINING_TEXT), counts, vocab_size)
    tokenizer.save(str(path))


def write_training_text(texts: Iterable[str], path: Path) -> Counter[str]:
    """Write the texts to a file, so that they are read and cleaned only once; returns the count of each character.

    Its lines have a bounded length, and words of 1000 characters or more become a blank: trainers hold every line, and
    every word, in memory.
    """
    counts: Counter[str] = Counter()
    with path.open("w", encoding="utf-8", errors="replace") as out:
        for text in texts:
            counts.update(text)
            for block in blocks(text, BLOCK):
                out.write(_LONG.sub(" ", block) + "\n")
    return counts
