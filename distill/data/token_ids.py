"""Documents that are token ids already: as text they are numbers, which a tokenizer of numbers turns back."""

from typing import TYPE_CHECKING

from distill.data.sources import Source
from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AROUND = ("pad", "cls", "sep", "bos", "eos")  # tokens that the format of sequences sets itself


def tokenizer_of_numbers(sources: tuple[Source, ...], tokenizer: "PreTrainedTokenizerBase") -> str:
    """tokenizer.json that turns "12 873" into the ids 12 and 873, without those that stand around a document.

    Raises:
        SettingError: a source has other ids than the tokenizer, or some have texts.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    for source in sources:
        if not source.token_ids:
            raise SettingError(
                f"{source.describe()} is text, and another source of the corpus has token ids: give all as texts"
            )
        source.check_ids(len(tokenizer))
    numbers = Tokenizer(models.WordLevel({str(number): number for number in range(len(tokenizer))}, unk_token="0"))
    around = {getattr(tokenizer, f"{name}_token_id") for name in AROUND} - {None}
    if around:
        pattern = "|".join(str(number) for number in sorted(around))
        numbers.normalizer = normalizers.Replace(Regex(rf"\b({pattern})\b"), " ")
    numbers.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return str(numbers.to_str())
