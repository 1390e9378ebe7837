"""Text that a causal model writes. Each token is drawn by a number that its prompt and its place decide.

The numbers are functions of keys (`distill.runtime.seed`) and come from no generator: what a prompt is continued by
does not depend on what was drawn before, nor on how many ranks draw. transformers' `generate` calls the model and keeps
keys and values of what it has read.

Shapes: G prompts of a group, P tokens of the longest of them, N new tokens at most, V vocabulary.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from distill.config.objective import SamplingConfig
from distill.models.blocks import in_evaluation_mode
from distill.runtime.seed import key, uniform

NGRAM = 4  # whose repetition shows a model that goes round in circles


class Completion(NamedTuple):
    """What follows a prompt."""

    tokens: np.ndarray  # [n] int64, n from 1 to N; the last one ends the text where `ended`
    ended: bool
    log_probs: np.ndarray  # [n] float64, of these tokens, before temperature, top_k and top_p
    entropy: np.ndarray  # [n] float64, of the model's distribution at each of them, in nats


class InverseCDF(LogitsProcessor):
    """Draws token n of prompt g by the number uniforms[g, n]: the first whose cumulative probability is above it."""

    def __init__(self, uniforms: Tensor, width: int, settings: SamplingConfig, vocab: int) -> None:
        """
        Args:
            uniforms: [G, N] float64 from 0 to 1.
            width: P, the tokens that the model has read before the first draw.
            vocab: V; what only pads the model's head is not drawn.
        """
        self.uniforms, self.width, self.temperature, self.vocab = uniforms, width, settings.temperature, vocab
        self.filters = LogitsProcessorList()
        if settings.top_k is not None:
            self.filters.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p < 1:
            self.filters.append(TopPLogitsWarper(settings.top_p))
        self.log_probs, self.entropy = torch.empty(2, *uniforms.shape, dtype=torch.float64, device=uniforms.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits [G, V or more] of the next token -> the same shape, -inf but at the token that is drawn."""
        place, logits = input_ids.shape[1] - self.width, scores[:, : self.vocab].float()
        log_probs = logits.log_softmax(-1)
        if self.temperature == 0:
            token = logits.argmax(-1, keepdim=True)
        else:
            # torch refuses a GPU's running sums under `precision.deterministic`, those of top_p too.
            device = "cpu" if torch.are_deterministic_algorithms_enabled() else logits.device
            kept = self.filters(input_ids, (logits / self.temperature).to(device))  # type: ignore[arg-type]
            cumulative = kept.softmax(-1).double().cumsum(-1)
            cumulative = cumulative / cumulative[:, -1:]  # to exactly 1, which no number reaches
            # Above the number, so that a token of probability 0 is never drawn; of logits that are nan the last is.
            numbers = self.uniforms[:, place : place + 1].to(device).contiguous()
            token = torch.searchsorted(cumulative, numbers, right=True).to(logits.device)
            token = token.clamp(max=logits.shape[1] - 1)
        self.log_probs[:, place] = log_probs.gather(1, token)[:, 0]
        self.entropy[:, place] = -(log_probs.exp() * log_probs.nan_to_num(neginf=0.0)).sum(-1)
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)


def can_complete(model: Any) -> bool:
    """Whether a model has the `generate` of transformers, or of PEFT; one of a module of the user's is another."""
    return hasattr(model, "generate") and hasattr(model, "generation_config")


@torch.no_grad()
def complete(
    model: Any,
    prompts: Sequence[np.ndarray],
    keys: np.ndarray,
    settings: SamplingConfig,
    ends: Collection[int],
    vocab: int,
) -> list[Completion]:
    """What a transformers model writes behind the prompts of one group, which it reads side by side.

    Products of other shapes are rounded otherwise: a group that is put together anew may get other tokens.

    Args:
        prompts: G arrays of token ids, each of one token at least.
        keys: [G] uint64, one for each prompt.
        settings: how tokens are drawn; the model's own `generation_config` is not read.
        ends: the tokens that end a text.
        vocab: V, of the tokenizer.
    """
    device, width = next(model.parameters()).device, max(map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.from_numpy(prompt), 1
    places = np.arange(settings.max_new_tokens)
    uniforms = torch.from_numpy(uniform(key(0, "draw", keys[:, None], places[None])))
    draw = InverseCDF(uniforms.to(device), width, settings, vocab)
    config = GenerationConfig(max_new_tokens=len(places), do_sample=False, eos_token_id=sorted(ends), pad_token_id=0)
    own, model.generation_config = model.generation_config, GenerationConfig()  # from which what is left out is read
    try:
        with in_evaluation_mode(model):
            output = model.generate(
                ids.to(device), attention_mask=mask.to(device), generation_config=config,
                logits_processor=LogitsProcessorList([draw]), synced_gpus=False,
            )  # fmt: skip
    finally:
        model.generation_config = own
    new = output[:, width:].cpu().numpy()
    log_probs, entropy = draw.log_probs.cpu().numpy(), draw.entropy.cpu().numpy()
    lengths = [next((n + 1 for n, token in enumerate(row) if token in ends), len(row)) for row in new.tolist()]
    return [
        Completion(row[:n], int(row[n - 1]) in ends, log_probs[number, :n], entropy[number, :n])
        for number, (row, n) in enumerate(zip(new, lengths, strict=True))
    ]


def repeated_ngrams(tokens: Sequence[int]) -> tuple[int, int]:
    """How many of the 4-grams of these tokens stand further ahead, too, and how many there are."""
    grams = [*zip(*(tokens[n:] for n in range(NGRAM)), strict=False)]
    return len(grams) - len({*grams}), len(grams)


def ends_of(*models: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text for any of these models: those that they name, and the tokenizer's end of text.

    Without those that the tokenizer lacks, as a configuration may have been written for another one.
    """
    ends = {tokenizer.eos_token_id}
    for model in models:
        named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        ends |= set(named) if isinstance(named, list) else {named}
    return frozenset(ends & {*range(len(tokenizer))})
