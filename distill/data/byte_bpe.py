"""A byte-level BPE tokenizer in the manner of GPT-2, trained on the corpus, the same from the same text every time."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from distill.config.settings import CorpusConfig, DataConfig
from distill.data.new_tokenizer import train_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
SPECIAL = {"bos_token": END, "eos_token": END, "unk_token": END}  # as GPT-2 has them; its id is 0


def corpus_tokenizer(corpus: CorpusConfig, data: DataConfig) -> "PreTrainedTokenizerFast":
    """A tokenizer of `corpus.vocab_size` pieces in the manner of GPT-2, trained on what the corpus does not hold out.

    `model_max_length` is left to the caller.

    Raises:
        SettingError: the corpus is not available.
    """
    return train_tokenizer(corpus, data, "byte_bpe", train, SPECIAL)


def train(plain: Path, counts: Counter[str], vocab_size: int) -> "Tokenizer":
    """A tokenizer of `vocab_size` pieces (fewer where the text has fewer) from a file of text.

    Any text comes back from its ids as it was (Sennrich, Haddow and Birch 2016; bytes as in Radford et al. 2019).

    Args:
        counts: of each character of the file, which bytes do without.
    """
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
    tokenizer.train([str(plain)], trainer)
    return tokenizer
