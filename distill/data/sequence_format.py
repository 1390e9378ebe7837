"""What surrounds text in a sequence of token ids: special tokens, padding, and where documents begin and end."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SequenceFormat:
    """Ids that are put around sequences and documents; None: none is."""

    row_start: int | None
    row_end: int | None
    document_start: int | None
    document_end: int | None
    separator: int | None  # between documents of one sequence, where sequences may run over a document's end
    pad: int  # may lie one beyond the vocabulary, where the tokenizer has no such token
    shortest: int  # ids that the end of a document needs to become a sequence
    pairs: bool = False  # a sequence is two consecutive segments of one document, with `separator` between them

    @property
    def body(self) -> int:
        """How many ids of a sequence are not the text's."""
        return (self.row_start is not None) + (self.row_end is not None) + self.pairs


SequenceFormatOf = Callable[["PreTrainedTokenizerBase"], SequenceFormat]  # the format of the sequences of a tokenizer


def masked_format(tokenizer: "PreTrainedTokenizerBase") -> SequenceFormat:
    """Sequences of masked language models: [CLS] ids [SEP] padding.

    Raises:
        SettingError: the tokenizer lacks one of these.
    """
    ids = {
        "[CLS]": tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id,
        "[SEP]": tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id,
        "[PAD]": tokenizer.pad_token_id,
    }
    if lacking := [name for name, id_ in ids.items() if id_ is None]:
        raise SettingError(
            f"teacher.path={tokenizer.name_or_path}: its tokenizer has no {', '.join(lacking)} token; choose an encoder"
        )
    cls, sep, pad = ids["[CLS]"], ids["[SEP]"], ids["[PAD]"]
    assert sep is not None and pad is not None
    return SequenceFormat(cls, sep, None, None, sep, pad, 8)


def paired_format(tokenizer: "PreTrainedTokenizerBase") -> SequenceFormat:
    """Sequences of models that learn the order of segments: [CLS] ids [SEP] ids [SEP] padding.

    Raises:
        SettingError: the tokenizer lacks one of these.
    """
    return replace(masked_format(tokenizer), pairs=True)


def causal_format(tokenizer: "PreTrainedTokenizerBase") -> SequenceFormat:
    """Sequences of causal language models: each document ends in the end-of-text token; nothing surrounds a sequence.

    A document begins with the beginning-of-text token where that is another one, as in Llama; in GPT-2 it is the same,
    and stands once between two documents.

    Raises:
        SettingError: the tokenizer has no end-of-text token.
    """
    end, start, pad = tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id
    if end is None:
        raise SettingError(
            f"teacher.path={tokenizer.name_or_path}: its tokenizer has no end-of-text token (eos_token); choose a "
            "causal language model"
        )
    filler = len(tokenizer) if pad in (None, start, end, tokenizer.unk_token_id) else pad
    # The beginning of the next document is found behind the end of the last, so no end of a document may be dropped.
    return SequenceFormat(None, None, start if start != end else None, end, None, filler, 1)


def padding_of(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """What fills up sequences that a decoder classifies: its padding token, else its end-of-text token."""
    pad: int | None = tokenizer.pad_token_id
    return tokenizer.eos_token_id if pad is None else pad


def first_token(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The beginning-of-text token of a tokenizer that puts it before every text; None where it puts nothing there."""
    bos = tokenizer.bos_token_id
    return bos if bos not in (None, tokenizer.eos_token_id) and tokenizer.encode("a")[:1] == [bos] else None
