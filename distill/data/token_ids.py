"""Documents that are token ids already: as text they are numbers, which a tokenizer of numbers turns back."""

from typing import TYPE_CHECKING

from distill.data.sources import Source
from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSIDE = "x"  # before the number of a token of `ids_around` that stands inside a document, and stays there


def ids_around(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """The ids that the format of sequences puts around documents itself."""
    numbers = (getattr(tokenizer, f"{name}_token_id") for name in ("pad", "cls", "sep", "bos", "eos"))
    return frozenset(number for number in numbers if number is not None)


def tokenizer_of_numbers(sources: tuple[Source, ...], tokenizer: "PreTrainedTokenizerBase") -> str:
    """tokenizer.json that turns "12 873" into the ids 12 and 873, without those of `ids_around` that lack `INSIDE`.

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
    if around := ids_around(tokenizer):
        pattern = "|".join(str(number) for number in sorted(around))
        without = normalizers.Replace(Regex(rf"\b({pattern})\b"), " ")
        numbers.normalizer = normalizers.Sequence([without, normalizers.Replace(INSIDE, "")])
    numbers.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return str(numbers.to_str())
