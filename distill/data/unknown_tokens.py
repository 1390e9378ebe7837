"""How much of a text a vocabulary covers: logged before training, and refused where too little could be learned."""

import logging
from typing import TYPE_CHECKING

import numpy as np

from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def check_unknown(
    counts: np.ndarray, num_tokens: int, tokenizer: "PreTrainedTokenizerBase", largest: float, setting: str
) -> None:
    """Logs the fraction of a text's tokens that are the unknown one.

    They cannot be predicted, nor can special tokens, so a model learns from the other positions of the sequences alone.

    Args:
        counts: [V] how often each token occurs.
        num_tokens: how many of all positions are no padding.
        largest: fraction of unknown tokens, from 0 to 1, above which the text is refused.
        setting: what names the text, such as `corpus.path=FOLDER`.

    Raises:
        SettingError: there are more, or no token at all can be predicted.
    """
    special = {int(number) for number in tokenizer.all_special_ids if number < len(counts)}
    predictable = int(counts.sum()) - sum(int(counts[number]) for number in special)
    # Some vocabularies give the name of the unknown token to the end of a text.
    is_own = tokenizer.unk_token_id not in (
        None,
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
    )
    unknown = int(counts[tokenizer.unk_token_id]) if is_own else 0
    fraction = unknown / max(predictable + unknown, 1)
    if fraction > largest or not predictable:
        raise SettingError(
            f"{setting}: {fraction:.1%} of its tokens are not in the vocabulary, and "
            f"{predictable / max(num_tokens, 1):.1%} of the positions can be predicted: take a model with a vocabulary "
            f"of this language, student.tokenizer=corpus, or the right encoding (corpus.max_unknown={largest:g})"
        )
    if unknown:
        logger.info(f"{setting}: {fraction:.2%} of its tokens are unknown")
