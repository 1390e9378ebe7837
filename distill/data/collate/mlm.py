"""Masked language modelling: which positions of a sequence are to be predicted, and what the models see there instead.

Shapes: B sequences, S positions, V vocabulary.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from distill.config.settings import MaskingConfig
from distill.data.batch import PADDING, Batch, Labels
from distill.data.sequence_store import ids_of
from distill.runtime.errors import SettingError
from distill.runtime.seed import key, uniform

IGNORE = -100  # target of a position that is not predicted


@dataclass(frozen=True)
class MaskedLM:
    """Masks sequences of token ids, each from its own key, so that any sequence's mask can be recomputed."""

    settings: MaskingConfig
    mask_id: int
    pad_id: int
    maskable: np.ndarray  # [V] bool: may be chosen; never a special token
    weights: np.ndarray  # [V] relative chance of a token to be chosen
    is_continuation: np.ndarray  # [V] bool: the token continues the word of the token before it

    @property
    def identity(self) -> str:
        """sha256 of everything that decides the masks of a sequence besides its key."""
        digest = hashlib.sha256(repr((sorted(self.settings), self.mask_id)).encode())
        for values in (self.maskable, self.weights, self.is_continuation):
            digest.update(values.tobytes())
        return digest.hexdigest()

    def collate(self, ids: np.ndarray, row_keys: np.ndarray, row_ids: np.ndarray) -> Batch:
        """A micro-batch of the sequences ids [B, S], each masked by its own key [B]."""
        ids = ids_of(ids)
        inputs, targets = self.mask(ids, row_keys)
        valid = ids != self.pad_id
        positions, masked = np.flatnonzero(valid), np.flatnonzero(targets != IGNORE)
        full = len(positions) == ids.size
        return Batch(
            inputs={"input_ids": torch.from_numpy(inputs)},
            documents=None if full else torch.from_numpy(np.where(valid, 0, PADDING)),
            labels={"mlm": Labels(torch.from_numpy(masked), torch.from_numpy(targets.reshape(-1)[masked]))},
            valid_positions=None if full else torch.from_numpy(positions),
            row_ids=row_ids,
        )

    def mask(self, ids: np.ndarray, row_keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """ids [B, S] int64, row_keys [B] uint64 -> inputs [B, S], targets [B, S] (IGNORE where not predicted)."""
        keys = key(0, "position", row_keys[:, None], np.arange(ids.shape[1]))
        chosen = self._choose(ids, keys)
        action = uniform(key(0, "fate", keys))
        masked = chosen & (action < self.settings.mask)
        random = chosen & (action >= self.settings.mask + self.settings.keep)
        replacements = np.flatnonzero(self.maskable)
        drawn = replacements[(uniform(key(0, "token", keys)) * len(replacements)).astype(np.int64)]
        inputs = np.where(masked, self.mask_id, np.where(random, drawn, ids))
        return inputs, np.where(chosen, ids, IGNORE)

    def _choose(self, ids: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Draw `mlm_probability` of a sequence's maskable positions without replacement, each with its token's weight.

        Weighted sampling by exponential races (Efraimidis, Spirakis 2006): the smallest values of -log(u) / weight win.
        """
        candidates = self.maskable[ids]
        num_positions = np.rint(self.settings.mlm_probability * candidates.sum(1)).astype(np.int64)
        num_positions = np.where(candidates.any(1), np.maximum(num_positions, 1), 0)
        if self.settings.max_predictions is not None:
            num_positions = np.minimum(num_positions, self.settings.max_predictions)
        race = np.where(candidates, -np.log(uniform(keys)) / self.weights[ids], np.inf)
        if self.settings.ngrams > 1:
            lengths = self._ngram_lengths(keys)
            return np.stack(
                [self._choose_ngrams(*row) for row in zip(ids, candidates, race, lengths, num_positions, strict=True)]
            )
        if self.settings.whole_words:
            return self._choose_words(ids, candidates, race, num_positions)
        ordered = np.sort(race, axis=1)
        threshold = np.take_along_axis(ordered, np.maximum(num_positions - 1, 0)[:, None], axis=1)
        return candidates & (race <= threshold) & (num_positions > 0)[:, None]

    def _choose_words(
        self, ids: np.ndarray, candidates: np.ndarray, race: np.ndarray, num_positions: np.ndarray
    ) -> np.ndarray:
        """The same race between words: a word runs with its first token and is chosen whole.

        The draw ends at the first word that would overrun the number of positions wanted; one is always chosen.
        """
        begins = self._begins(ids, candidates)
        chosen = np.zeros_like(candidates)
        for row in range(len(ids)):
            starts = np.flatnonzero(begins[row])
            word = np.cumsum(begins[row]) - 1
            lengths = np.bincount(word[candidates[row]], minlength=len(starts))
            order = np.argsort(race[row, starts], kind="stable")
            taken = np.cumsum(lengths[order]) <= num_positions[row]
            taken[:1] = True
            is_chosen = np.zeros(len(starts), bool)
            is_chosen[order[taken]] = True
            chosen[row] = candidates[row] & is_chosen[word] if len(starts) else False
        return chosen

    def _begins(self, ids: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Which positions begin a word: ids and candidates [..., S] -> bool [..., S]."""
        begins = candidates & ~self.is_continuation[ids]
        begins[..., 0] = candidates[..., 0]
        begins[..., 1:] |= candidates[..., 1:] & ~candidates[..., :-1]  # whatever follows a special token begins a word
        return begins

    def _ngram_lengths(self, keys: np.ndarray) -> np.ndarray:
        """How many words would be chosen together at each position: 1 to `ngrams`, n with p ~ 1/n."""
        shares = 1 / np.arange(1, self.settings.ngrams + 1)
        return 1 + np.searchsorted(np.cumsum(shares / shares.sum())[:-1], uniform(key(0, "ngram", keys)))

    def _choose_ngrams(
        self, ids: np.ndarray, candidates: np.ndarray, race: np.ndarray, lengths: np.ndarray, num_positions: int
    ) -> np.ndarray:
        """The race between words of one sequence, each argument [S]: the words of an n-gram are chosen together.

        As in the code published with Lan et al., "ALBERT" (2020), section 4.1: an n-gram that does not fit into the
        rest of `num_positions` is shortened word by word, and passed over if none is left or a word of it is chosen
        already.
        """
        begins = np.flatnonzero(self._begins(ids, candidates))
        barriers = np.append(np.flatnonzero(~candidates), len(ids))  # a word ends before a special token
        stops = np.minimum(np.append(begins[1:], len(ids)), barriers[np.searchsorted(barriers, begins)])
        # Lists: the draw goes word by word, for which arrays are several times slower.
        order = np.argsort(race[begins], kind="stable").tolist()
        starts, ends, num_words = begins.tolist(), stops.tolist(), lengths[begins].tolist()
        taken = [False] * len(starts)
        left = int(num_positions)
        for first in order:
            if not left:
                break
            last = first  # the last of as many words as stand side by side and fit
            while last - first + 1 < num_words[first] and last + 1 < len(starts) and ends[last] == starts[last + 1]:
                last += 1
            while last >= first and ends[last] - starts[first] > left:
                last -= 1
            if last >= first and not any(taken[first : last + 1]):
                taken[first : last + 1] = [True] * (last + 1 - first)
                left -= ends[last] - starts[first]
        if num_positions and order and not any(taken):  # every word is longer than what is wanted
            taken[order[0]] = True
        chosen = np.zeros_like(candidates)
        for start, end, take in zip(starts, ends, taken, strict=True):
            if take:
                chosen[start:end] = True
        return chosen


def masked_lm(settings: MaskingConfig, tokenizer: PreTrainedTokenizerBase, counts: np.ndarray) -> MaskedLM:
    """The masking of a tokenizer's sequences.

    `counts` [V]: how often each token occurs in the training sequences, for the smoothing of the choice.
    """
    vocab = len(counts)
    maskable = np.ones(vocab, bool)
    maskable[list(tokenizer.all_special_ids)] = False
    maskable[len(tokenizer) :] = False  # rows that only pad the embedding matrix
    tokens = [token or "" for token in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
    by_words = settings.whole_words or settings.ngrams > 1
    # WordPiece marks what continues a word, byte-level BPE and SentencePiece, which have ## as text, what begins one.
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    mark = getattr(model, "continuing_subword_prefix", None)
    is_continuation = np.zeros(vocab, bool)
    is_continuation[: len(tokens)] = [
        token.startswith(mark) if mark else token != "" and not token.startswith(("\u0120", "\u2581"))
        for token in tokens
    ]
    if by_words and not (~is_continuation[maskable]).any():
        override = "whole_words=true" if settings.whole_words else f"ngrams={settings.ngrams}"
        raise SettingError(
            f"objective.masking.{override}: this tokenizer does not mark where words begin; set "
            "whole_words=false ngrams=1"
        )
    weights = np.maximum(counts, 1).astype(np.float64) ** -settings.smoothing
    assert tokenizer.mask_token_id is not None and tokenizer.pad_token_id is not None
    return MaskedLM(settings, tokenizer.mask_token_id, tokenizer.pad_token_id, maskable, weights, is_continuation)
