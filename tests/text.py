"""Made-up text for the tests of what becomes of text."""

import random

from tiny import parts
from transformers import PreTrainedTokenizerFast

from distill.config.settings import Config
from distill.data.tokens import Tokens, corpus_text, prepare

WORDS = [f"{a}{b}{c}" for a in "bdfgklmn" for b in "aeiou" for c in ("", "n", "rt", "st")]


def some_text(seed: int, num_words: int) -> str:
    draw = random.Random(seed)
    sentences = []
    while num_words > 0:
        length = min(num_words, draw.randint(5, 15))
        sentences.append(" ".join(draw.choices(WORDS, k=length)).capitalize() + ".")
        num_words -= length
    return "\n\n".join(" ".join(sentences[i : i + 5]) for i in range(0, len(sentences), 5))


def tokens_of(config: Config, tokenizer: PreTrainedTokenizerFast, part: str = "train") -> Tokens:
    return prepare(corpus_text(*parts(config)), tokenizer, *parts(config), part)
