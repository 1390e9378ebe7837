"""Tokenizers trained on the documents of a corpus that are not held out, the same from the same text every time."""

import logging
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING

from distill.config.settings import CorpusConfig, DataConfig
from distill.data.disk_cache import folder_of, once_with_digest
from distill.data.readers import blocks
from distill.data.sources import read
from distill.data.tokens import Text, corpus_texts, key_of
from distill.data.work import held_out_rule, work_of
from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    # Makes a tokenizer of so many pieces (fewer where the text has fewer) from lines of text and the count of each of
    # their characters.
    Train = Callable[[Iterable[str], Counter[str], int], Tokenizer]

END = "<|endoftext|>"
BPE_SPECIAL = {"bos_token": END, "eos_token": END, "unk_token": END}  # as GPT-2 has them; its id is 0
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}  # their ids are 0 to 4
NO_TEXT = "corpus.path: it holds no text to train a tokenizer on; check corpus.path and corpus.kind"
BLOCK = 16 << 10  # characters
_LONG = re.compile(r"\w{1000,}")

logger = logging.getLogger(__name__)


def wordpiece(corpus: CorpusConfig, data: DataConfig) -> "PreTrainedTokenizerFast":
    """An uncased tokenizer in the manner of BERT, of `corpus.vocab_size` pieces. Raises SettingError as `_trained`."""
    return _trained(corpus, data, "wordpiece", train_wordpiece, SPECIAL)


def byte_bpe(corpus: CorpusConfig, data: DataConfig) -> "PreTrainedTokenizerFast":
    """A tokenizer in the manner of GPT-2, of `corpus.vocab_size` pieces. Raises SettingError as `_trained`."""
    return _trained(corpus, data, "byte_bpe", train_byte_bpe, BPE_SPECIAL)


def _trained(
    corpus: CorpusConfig, data: DataConfig, algorithm: str, train: "Train", special: dict[str, str]
) -> "PreTrainedTokenizerFast":
    """A new tokenizer, or the same from the cache; the caller sets `model_max_length`.

    It is trained on every document that is not held out: of a mixture on all sources, whatever their weights, and also
    on duplicates.

    Args:
        algorithm: its name in the cache.
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
    return PreTrainedTokenizerFast(tokenizer_file=str(path), **special)


def _training_texts(text: Text, corpus: CorpusConfig) -> Iterator[str]:
    """The texts that are not held out. Raises SettingError where something cannot be read."""
    for source in text.sources:
        of_source = work_of([source])
        rule = held_out_rule(corpus.heldout, of_source)
        for unit in of_source:
            for document in read(unit.source, unit.shard):
                yield from (stretch.text for is_held_out, stretch in rule.parts(document) if not is_held_out)


def write_tokenizer(train: "Train", texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a tokenizer on texts, and write it as a tokenizer.json to `path`.

    Raises:
        SettingError: there is no text.
    """
    # A file without a name, of which a killed process leaves nothing.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace", newline="\n", dir=path.parent) as plain:
        counts = _write_plain(texts, plain)
        if not counts:
            raise SettingError(NO_TEXT)
        plain.seek(0)
        train(plain, counts, vocab_size).save(str(path))


def _write_plain(texts: Iterable[str], plain: IO[str]) -> Counter[str]:
    """Write the texts to a file, so that they are read and cleaned only once; returns the count of each character.

    Its lines have a bounded length, and words of 1000 characters or more become a blank: trainers hold every line, and
    every word, in memory.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
        for block in blocks(text, BLOCK):
            plain.write(_LONG.sub(" ", block) + "\n")
    return counts


def train_byte_bpe(plain: Iterable[str], counts: Counter[str], vocab_size: int) -> "Tokenizer":
    """Byte-level BPE: any text comes back from its ids as it was (Sennrich et al. 2016; Radford et al. 2019)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(plain, trainer)
    return tokenizer


def train_wordpiece(plain: Iterable[str], counts: Counter[str], vocab_size: int) -> "Tokenizer":
    """WordPiece as BERT's. Raises SettingError where the text is blank."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    letters: Counter[str] = Counter()
    for character, count in counts.items():
        for letter in "".join(tokenizer.normalizer.normalize_str(character).split()):
            letters[letter] += count
    if not letters:
        raise SettingError(NO_TEXT)
    # The commonest: each costs two pieces, so they take half at most.
    common = sorted(letters, key=lambda letter: (-letters[letter], letter))[: min(1000, vocab_size // 4)]
    characters = sorted(common)
    # The trainer numbers `##x` pieces in the random order of a hash map, and breaks ties by number. Numbering them
    # beforehand, as if they were special, makes the outcome the same every time.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL.values(), *characters, *(f"##{character}" for character in characters)],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=False,
    )
    tokenizer.train_from_iterator(plain, trainer)
    trained = Tokenizer(models.WordPiece(tokenizer.get_vocab(), unk_token=SPECIAL["unk_token"]))
    trained.add_special_tokens(list(SPECIAL.values()))
    trained.normalizer, trained.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    trained.decoder = decoders.WordPiece()
    trained.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return trained
