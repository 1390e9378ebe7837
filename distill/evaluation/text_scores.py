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

import numpy as np
import torch
from torch import Tensor

from distill.data.batch import PADDING
from distill.data.text_pairs import TextEncoder
from distill.evaluation.measures import token_losses
from distill.evaluation.measures.masked_copies import Copies, head_rows_at_masks
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
    names: list[list[str]] = [[] for _ in texts]
    values: list[list[float]] = [[] for _ in texts]
    with lm.evaluating():
        causal = lm.kind.causal
        parts = _causal(lm, texts, bos, batch_size) if causal else _masked(lm, texts, batch_size)
        for number, tokens, log_probs in parts:
            names[number], values[number] = tokens, [value / math.log(base) for value in log_probs]
    scores = [
        TextScore(one, tuple(tokens), tuple(log_probs), base)
        for one, tokens, log_probs in zip(texts, names, values, strict=True)
    ]
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


def _check_length(lm: LoadedModel, number: int, length: int) -> None:
    if lm.longest is not None and length > lm.longest:
        raise SettingError(
            f"text {number} has {length:,} tokens, special tokens included, and model={lm.path} reads "
            f"{lm.longest:,}: split it"
        )


def _names(lm: LoadedModel, encoded: Any) -> list[str]:
    """The tokens as text; one that is no text by itself, such as a part of a character, as the vocabulary has it."""
    decoded = [str(lm.tokenizer.decode([number])).strip() for number in encoded.ids]
    return [name or token for name, token in zip(decoded, encoded.tokens, strict=True)]


ScoredTokens = tuple[int, list[str], list[float]]  # number of a text, its tokens, and their log-probabilities in nats


@torch.inference_mode()
def _causal(lm: LoadedModel, texts: list[str], bos: bool, batch_size: int) -> Iterator[ScoredTokens]:
    model, tokenizer = LanguageModel(lm.model), lm.tokenizer
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if bos and first is None:
        raise SettingError(f"bos=True: the tokenizer of model={lm.path} has no token to begin with; give bos=False")
    encoded = list(_encoded(lm, texts))
    sequences = [[first, *encoding.ids] if bos else list(encoding.ids) for encoding in encoded]
    for number, row in enumerate(sequences, 1):
        _check_length(lm, number, len(row))
    order = [
        number
        for number in sorted(range(len(sequences)), key=lambda n: -len(sequences[n]))
        if len(sequences[number]) > 1
    ]
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        lengths = np.array([len(sequences[number]) for number in numbers])
        ids, documents = _padded([sequences[number] for number in numbers], 0, lm.device)
        predicts = np.arange(ids.shape[1])[None] < lengths[:, None] - 1  # the last token of a text predicts nothing
        positions = torch.from_numpy(np.flatnonzero(predicts)).to(lm.device)
        targets = ids.roll(-1, 1).flatten()[positions]
        outputs = model({"input_ids": ids}, documents, OutputSpec(True, positions))
        losses = token_losses(model, outputs.head_rows, targets, len(tokenizer)).cpu()
        for number, part in zip(numbers, losses.split((lengths - 1).tolist()), strict=True):
            yield number, _names(lm, encoded[number])[0 if bos else 1 :], (-part).tolist()


@torch.inference_mode()
def _masked(lm: LoadedModel, texts: list[str], batch_size: int) -> Iterator[ScoredTokens]:
    model, around = LanguageModel(lm.model), TextEncoder(lm.tokenizer).surroundings(pairs=False)
    encoded = list(_encoded(lm, texts))
    sequences = [[*around.before, *encoding.ids, *around.after] for encoding in encoded]
    for number, row in enumerate(sequences, 1):
        _check_length(lm, number, len(row))
    # Copies of one text stay side by side, and so share what can be computed once for it; the longest come first.
    order = sorted(range(len(sequences)), key=lambda n: -len(sequences[n]))
    copies = [(number, column) for number in order for column in range(len(encoded[number].ids))]
    losses: list[Tensor] = []
    for start in range(0, len(copies), batch_size):
        chunk = copies[start : start + batch_size]
        numbers = list(dict.fromkeys(number for number, _ in chunk))
        ids, documents = _padded([sequences[number] for number in numbers], lm.tokenizer.pad_token_id, lm.device)
        of_row = torch.tensor([numbers.index(number) for number, _ in chunk], device=lm.device)
        column = torch.tensor([len(around.before) + column for _, column in chunk], device=lm.device)
        valid = None if documents is None else documents != PADDING
        masked = Copies(ids, valid, of_row, column, int(lm.tokenizer.mask_token_id))
        head_rows = head_rows_at_masks(model, masked)
        losses.append(token_losses(model, head_rows, ids[of_row, column], len(lm.tokenizer)).cpu())
    counts = [len(encoded[number].ids) for number in order]
    for number, part in zip(order, torch.cat(losses).split(counts) if losses else [], strict=False):
        yield number, _names(lm, encoded[number]), (-part).tolist()


def _encoded(lm: LoadedModel, texts: list[str]) -> Iterator[Any]:
    """The `tokenizers.Encoding` of each text, without special tokens."""
    if not lm.kind.causal:
        return TextEncoder(lm.tokenizer).encode(texts)
    # Causal tokenizers may lack the tokens that sequences of masked models need.
    return iter(lm.tokenizer(texts, add_special_tokens=False, verbose=False).encodings or [] if texts else [])


def _padded(sequences: list[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Sequences as ids [R, S], and the document number at each position [R, S]; None where nothing is padding."""
    lengths = np.array([len(row) for row in sequences])
    ids = np.full((len(sequences), int(lengths.max())), pad, np.int64)
    for number, row in enumerate(sequences):
        ids[number, : len(row)] = row
    if (lengths == ids.shape[1]).all():
        return torch.from_numpy(ids).to(device), None
    documents = np.where(np.arange(ids.shape[1])[None] < lengths[:, None], 0, PADDING)
    return torch.from_numpy(ids).to(device), torch.from_numpy(documents).to(device)
