"""An uncased WordPiece tokenizer trained on the corpus, the same from the same text every time."""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from distill.config import CorpusConfig
from distill.data.build_tokens import Work, held_out_rule, work_of
from distill.data.disk_cache import folder_of, once
from distill.data.sources import read
from distill.data.tokens import corpus_text, key_of
from distill.errors import SettingError
from distill.files import atomic

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}  # their ids are 0 to 4
SMALLEST = 100


def corpus_tokenizer(corpus: CorpusConfig) -> "PreTrainedTokenizerFast":
    """A tokenizer of `corpus.vocab_size` pieces in the manner of BERT, trained on what the corpus does not hold out.

    It is kept in the cache. `model_max_length` is left to the caller.

    Raises:
        SettingError: the corpus is not available, or `corpus.vocab_size` is too small.
    """
    from transformers import PreTrainedTokenizerFast

    text = corpus_text(corpus)
    settings = {"vocab_size": corpus.tokens.vocab_size, "heldout": corpus.tokens.heldout}
    path = folder_of(corpus.cache.cache, "wordpiece", f"{key_of(text, settings)}.json")
    with once(path) as missing:
        if missing:
            begun = time.perf_counter()
            logger.info(f"training a tokenizer of {corpus.tokens.vocab_size:,} pieces on {text.describe()}")
            train(_training_texts(work_of(text.sources), corpus.tokens.heldout), corpus.tokens.vocab_size, path)
            logger.info(f"trained the tokenizer in {time.perf_counter() - begun:.0f} s")
    return PreTrainedTokenizerFast(tokenizer_file=str(path), **SPECIAL)


def _training_texts(work: list[Work], share: float) -> Iterator[str]:
    rule = held_out_rule(share, work)
    for each in work:
        for document in read(each.source, each.shard):
            yield from (text for held, text in rule.parts(document.text) if not held)


def train(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Writes a tokenizer.json of `vocab_size` pieces (fewer where the texts have fewer) to `path`, in one step.

    Raises:
        SettingError: `vocab_size` is too small, or there is no text.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    if vocab_size < SMALLEST:
        raise SettingError(f"corpus.vocab_size={vocab_size}: too few pieces for a tokenizer; at least {SMALLEST}")
    tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    plain = path.with_suffix(f".{os.getpid()}.txt")
    try:
        characters = _alphabet(_spool(texts, plain), tokenizer.normalizer, vocab_size)
        # The trainer numbers `##x` pieces in the random order of a hash map, and breaks ties by number. Numbering them
        # beforehand, as if they were special, makes the outcome the same every time.
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            special_tokens=[*SPECIAL.values(), *characters, *(f"##{character}" for character in characters)],
            initial_alphabet=characters,
            limit_alphabet=len(characters),
            show_progress=False,
        )
        tokenizer.train([str(plain)], trainer)
    finally:
        plain.unlink(missing_ok=True)
    trained = Tokenizer(models.WordPiece(tokenizer.get_vocab(), unk_token=SPECIAL["unk_token"]))
    trained.add_special_tokens(list(SPECIAL.values()))
    trained.normalizer, trained.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    trained.decoder = decoders.WordPiece()
    trained.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    with atomic(path) as new:
        trained.save(str(new))


def _spool(texts: Iterable[str], path: Path) -> Counter[str]:
    """Writes the texts to a file, so that they are read and cleaned once only; gives the count of each character."""
    counts: Counter[str] = Counter()
    with path.open("w", encoding="utf-8", errors="replace") as out:
        for text in texts:
            counts.update(text)
            out.write(text + "\n")
    return counts


def _alphabet(counts: Counter[str], normalizer: "Normalizer", vocab_size: int) -> list[str]:
    """The commonest characters after normalisation, sorted; each costs two pieces, so they take half at most."""
    kept: Counter[str] = Counter()
    for character, count in counts.items():
        for each in normalizer.normalize_str(character):
            if not each.isspace():
                kept[each] += count
    if not kept:
        raise SettingError("corpus.path: it holds no text to train a tokenizer on; check corpus.path and corpus.kind")
    common = sorted(kept, key=lambda character: (-kept[character], character))
    return sorted(common[: min(1000, vocab_size // 4)])
