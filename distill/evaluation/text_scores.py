"""How likely texts are to a model: the log-probability of every token, and their sum.

A causal model gives log p(token | the tokens before it). A masked one gives pseudo-log-likelihoods: each token masked
by itself (Salazar et al. 2020, "Masked Language Model Scoring").

Shapes: R texts, S positions, B copies of them with one position scored each.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from distill.data.batch import PADDING
from distill.data.text_pairs import TextEncoder
from distill.evaluation.masked_copies import Copies, head_rows_at_masks
from distill.evaluation.measures import token_losses
from distill.models.blocks import in_evaluation_mode
from distill.models.kind import CAUSAL, MASKED
from distill.models.language_model import LanguageModel, OutputSpec
from distill.models.loaded import Held, LoadedModel, as_loaded
from distill.runtime.errors import SettingError, raising_at_the_call


@dataclass(frozen=True)
class TextScore:
    """The score of one text.

    Attributes:
        text: as it was given.
        tokens: those that were scored, as text.
        log_probs: of each of them, to the base `base`; for masked models pseudo-log-likelihoods.
        base: of the logarithm.
    """

    text: str
    tokens: tuple[str, ...]
    log_probs: tuple[float, ...]
    base: float

    @property
    def total(self) -> float:
        """The (pseudo-)log-likelihood of the text, the sum over its tokens."""
        return math.fsum(self.log_probs)

    @property
    def mean(self) -> float:
        """The mean score of a token; nan for a text without any."""
        return self.total / len(self.log_probs) if self.log_probs else math.nan

    @property
    def perplexity(self) -> float:
        """base^-mean: the (pseudo-)perplexity of the text."""
        return float(self.base**-self.mean)


Model = str | Path | LoadedModel | Held  # as `score` takes it
ScoredTokens = tuple[int, list[str], list[float]]  # number of a text, its tokens, and their log-probabilities in nats


# fmt: off
@overload
def score(
    text: str, model: Model, *, bos: bool = ..., base: float = ..., batch_size: int = ..., device: str = ...
) -> TextScore: ...
@overload
def score(
    text: list[str], model: Model, *, bos: bool = ..., base: float = ..., batch_size: int = ..., device: str = ...
) -> list[TextScore]: ...
# fmt: on
@raising_at_the_call
def score(
    text: str | Sequence[str],
    model: Model,
    *,
    bos: bool = True,
    base: float = math.e,
    batch_size: int = 64,
    device: str = "auto",
) -> TextScore | list[TextScore]:
    """The (pseudo-)log-likelihood of a text, or of each of several, token by token.

    Special tokens around a text are seen and not scored. A model that is loaded here computes in fp32; the softmax is
    taken in float64.

    Args:
        text: one, or several, which are computed together.
        model: a run folder, a model folder, a name on the Hub, what `distill.load_model` gave, or (model, tokenizer)
            in memory.
        bos: of causal models: whether a text begins behind the beginning-of-text token, or the end-of-text token of a
            model without one; else its first token, which then follows nothing, is not scored.
        base: of the logarithm: e for nats, 2 for bits, 10.
        batch_size: sequences, or masked copies of sequences, that are computed at once.
        device: as `distill.load_model` takes it, where `model` is not loaded yet.

    Returns:
        A `TextScore` for one text; a list of them, in the order of the texts, for several.

    Raises:
        SettingError: the model is neither causal nor masked, a text is longer than its sequences, or an option does not
            fit.
    """
    lm = as_loaded(model, device)
    texts = [text] if isinstance(text, str) else list(text)
    _check(lm, bos, base, batch_size)
    scores = [TextScore(one, (), (), base) for one in texts]
    with in_evaluation_mode(lm.model), torch.inference_mode():
        parts = _causal(lm, texts, bos, batch_size) if lm.kind.causal else _masked(lm, texts, batch_size)
        for number, tokens, log_probs in parts:
            in_base = tuple(value / math.log(base) for value in log_probs)
            scores[number] = TextScore(texts[number], tuple(tokens), in_base, base)
    return scores[0] if isinstance(text, str) else scores


def _check(lm: LoadedModel, bos: bool, base: float, batch_size: int) -> None:
    if lm.kind not in (MASKED, CAUSAL):
        raise SettingError(
            f"model={lm.path} is a {lm.kind.noun}, which gives texts no probability: choose a masked or a causal "
            "language model"
        )
    if not lm.kind.causal and not bos:
        raise SettingError(f"bos=False is for causal models, and model={lm.path} is masked: leave it out")
    if not (base > 0 and math.isfinite(base)) or base == 1:
        raise SettingError(f"base={base} is no base of a logarithm: give math.e, 2 or 10")
    if batch_size < 1:
        raise SettingError(f"batch_size={batch_size}: give 1 or more")


def _causal(lm: LoadedModel, texts: list[str], bos: bool, batch_size: int) -> Iterator[ScoredTokens]:
    model, tokenizer = LanguageModel(lm.model), lm.tokenizer
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if bos and first is None:
        raise SettingError(f"bos=True: the tokenizer of model={lm.path} has no token to begin with; give bos=False")
    # Causal tokenizers may lack the tokens that a `TextEncoder` puts around texts.
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False).encodings or [] if texts else []
    sequences = [[first, *encoding.ids] if bos else list(encoding.ids) for encoding in encoded]
    order = [number for number in _longest_first(lm, sequences) if len(sequences[number]) > 1]
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        ids, valid = _padded([sequences[number] for number in numbers], 0, lm.device)
        documents = None if valid is None else torch.where(valid, 0, PADDING)
        lengths = torch.tensor([len(sequences[number]) for number in numbers])
        # The last token of a text predicts nothing.
        positions = (torch.arange(ids.shape[1]) < lengths[:, None] - 1).flatten().nonzero()[:, 0].to(lm.device)
        rows = model({"input_ids": ids}, documents, OutputSpec(True, positions)).head_rows
        assert rows is not None
        losses = token_losses(model, rows, ids.roll(-1, 1).flatten()[positions], len(tokenizer)).cpu()
        for number, part in zip(numbers, losses.split((lengths - 1).tolist()), strict=True):
            yield number, _names(lm, encoded[number])[0 if bos else 1 :], (-part).tolist()


def _masked(lm: LoadedModel, texts: list[str], batch_size: int) -> Iterator[ScoredTokens]:
    model, encoder = LanguageModel(lm.model), TextEncoder(lm.tokenizer)
    around, encoded = encoder.surroundings(pairs=False), list(encoder.encode(texts))
    sequences = [[*around.before, *encoding.ids, *around.after] for encoding in encoded]
    # Copies of one text stay side by side, and so share what can be computed once for it; the longest come first.
    order = _longest_first(lm, sequences)
    copies = [(number, column) for number in order for column in range(len(encoded[number].ids))]
    losses = [torch.empty(0)]
    for start in range(0, len(copies), batch_size):
        chunk = copies[start : start + batch_size]
        numbers = list(dict.fromkeys(number for number, _ in chunk))
        ids, valid = _padded([sequences[number] for number in numbers], lm.tokenizer.pad_token_id, lm.device)
        of_row = torch.tensor([numbers.index(number) for number, _ in chunk], device=lm.device)
        column = torch.tensor([len(around.before) + column for _, column in chunk], device=lm.device)
        masked = Copies(ids, valid, of_row, column, int(lm.tokenizer.mask_token_id))
        rows = head_rows_at_masks(model, masked)
        losses.append(token_losses(model, rows, ids[of_row, column], len(lm.tokenizer)).cpu())
    counts = [len(encoded[number].ids) for number in order]
    for number, part in zip(order, torch.cat(losses).split(counts), strict=False):
        yield number, _names(lm, encoded[number]), (-part).tolist()


def _longest_first(lm: LoadedModel, sequences: list[list[int]]) -> list[int]:
    """The numbers of the sequences. Raises SettingError for one that the model cannot read."""
    for number, sequence in enumerate(sequences, 1):
        if lm.longest is not None and len(sequence) > lm.longest:
            raise SettingError(
                f"text {number} has {len(sequence):,} tokens, special tokens included, and model={lm.path} reads "
                f"{lm.longest:,}: split it"
            )
    return sorted(range(len(sequences)), key=lambda number: -len(sequences[number]))


def _names(lm: LoadedModel, encoded: Any) -> list[str]:
    """The tokens as text; one that is no text by itself, such as a part of a character, as the vocabulary has it."""
    decoded = [str(lm.tokenizer.decode([number])).strip() for number in encoded.ids]
    return [name or token for name, token in zip(decoded, encoded.tokens, strict=True)]


def _padded(sequences: list[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Sequences as ids [R, S], and which of them are not padding [R, S]; None: all."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    ids = pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True, padding_value=pad)
    valid = torch.arange(ids.shape[1]) < lengths[:, None]
    return ids.to(device), None if valid.all() else valid.to(device)
