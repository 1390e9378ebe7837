"""An uncased WordPiece tokenizer trained on the corpus, the same from the same text every time."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from distill.config.settings import CorpusConfig, DataConfig
from distill.data.new_tokenizer import NO_TEXT, train_tokenizer
from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.normalizers import Normalizer
    from transformers import PreTrainedTokenizerFast

SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}  # their ids are 0 to 4


def corpus_tokenizer(corpus: CorpusConfig, data: DataConfig) -> "PreTrainedTokenizerFast":
    """A tokenizer of `corpus.vocab_size` pieces in the manner of BERT, trained on what the corpus does not hold out.

    `model_max_length` is left to the caller.

    Raises:
        SettingError: the corpus is not available.
    """
    return train_tokenizer(corpus, data, "wordpiece", train, SPECIAL)


def train(plain: Path, counts: Counter[str], vocab_size: int) -> "Tokenizer":
    """A tokenizer of `vocab_size` pieces (fewer where the text has fewer) from a file of text.

    Args:
        counts: of each character of the file.

    Raises:
        SettingError: the text is blank.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    characters = _alphabet(counts, tokenizer.normalizer, vocab_size)
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
    trained = Tokenizer(models.WordPiece(tokenizer.get_vocab(), unk_token=SPECIAL["unk_token"]))
    trained.add_special_tokens(list(SPECIAL.values()))
    trained.normalizer, trained.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    trained.decoder = decoders.WordPiece()
    trained.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return trained


def _alphabet(counts: Counter[str], normalizer: "Normalizer", vocab_size: int) -> list[str]:
    """The commonest characters after normalisation, sorted; each costs two pieces, so they take half at most."""
    letters: Counter[str] = Counter()
    for character, count in counts.items():
        for letter in normalizer.normalize_str(character):
            if not letter.isspace():
                letters[letter] += count
    if not letters:
        raise SettingError(NO_TEXT)
    common = sorted(letters, key=lambda character: (-letters[character], character))
    return sorted(common[: min(1000, vocab_size // 4)])
