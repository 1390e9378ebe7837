"""Steps on text that the student writes itself: on-policy distillation, as generalised by Agarwal et al.

"On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes" (2024, GKD): a step learns from
completions of the student with the probability `fraction`, else from those of the text. No gradient passes through the
drawing of a token. One coin decides for all ranks.

Prompts are completed in groups that depend on the step alone, and groups are dealt to the ranks whole. So a step's
completions are the same on any number of ranks and in any micro-batches, and after a resume, as far as the weights are.

Shapes: n sequences of a step, of all ranks; S positions; N new tokens at most.
"""

import hashlib
import logging
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from distill.config.objective import OnPolicyConfig, is_zero, value_at
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.data.collate.clm import CausalLM
from distill.data.prompts import Prompt, prompt_of
from distill.data.sequence_store import padded, recorded
from distill.distributed import Ranks
from distill.evaluation.speed import uncompiled
from distill.models.generation import Completion, complete, ends_of, repeated_ngrams
from distill.models.language_model import LanguageModel, idle_forward
from distill.models.precision import autocast
from distill.runs.run import Run
from distill.runtime.jsonl import LogLine
from distill.runtime.seed import key, uniform

PREFIX = "samples/"  # of numbers in metrics.jsonl
COLLAPSED = 0.1  # of the mean length of the text's own completions: shorter ones are no text any more

logger = logging.getLogger(__name__)


class Samples(NamedTuple):
    """What the student has written in a step, on all ranks."""

    sha256: str  # of all tokens, in the order of the step's sequences
    mean_length: float  # tokens of a completion, without those of the text
    text_length: float  # tokens by which the text goes on at the same places, as far as a completion may go
    ended: float  # fraction of the completions that end the text by themselves
    entropy: float  # mean over the tokens, of the student's distribution at each, in nats
    repeated: float  # fraction of the 4-grams that stand further ahead in the same completion

    @property
    def collapsed(self) -> bool:
        return self.mean_length < COLLAPSED * self.text_length

    def metrics(self) -> LogLine:
        """By their names in metrics.jsonl."""
        numbers = {f"{PREFIX}{name}": value for name, value in self._asdict().items() if name != "sha256"}
        return {"samples_sha256": self.sha256, **numbers}


def written(line: LogLine) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl on what the student has written; empty where it has written nothing."""
    return {name.removeprefix(PREFIX): value for name, value in line.items() if name.startswith(PREFIX)}


@dataclass(frozen=True)
class OnPolicy:
    """Completes the prompts of a step by the student as it is.

    Attributes:
        student: of a transformers model, as training runs it.
        ends: the tokens that end a text.
        vocab: of the tokenizer.
    """

    settings: OnPolicyConfig
    batches: Batches
    collator: CausalLM  # of these batches
    student: LanguageModel
    ends: frozenset[int]
    vocab: int
    ranks: Ranks

    def applies(self, step: int, progress: float) -> bool:
        """Whether a step learns from the student's completions: the same answer on all ranks, and after a resume."""
        coin = float(uniform(key(self.batches.seed, "on_policy", step)))
        return coin < value_at(self.settings.fraction, progress)

    def window(self, step: int, progress: float) -> tuple[list[Batch], Samples]:
        """This rank's micro-batches of a step, whose completions the student has written; all ranks call it."""
        numbers = self.batches.numbers_of(step)
        seeded = int(value_at(self.settings.seeded_tokens, progress))
        prompts = [self._prompt(sequence, seeded) for sequence in self.batches.sequences[numbers]]
        new, entropy = self._complete(prompts, key(self.batches.seed, "samples", step, numbers))
        written = [self._written(prompt, tokens[tokens >= 0]) for prompt, tokens in zip(prompts, new, strict=True)]
        return self.batches.window(step, self._padded(written)), self._samples(prompts, new, entropy)

    @cached_property
    def _most_new(self) -> int:
        """N: half of a sequence at most is written anew."""
        return min(self.settings.max_new_tokens, self.batches.sequences.shape[1] // 2)

    def _prompt(self, sequence: np.ndarray, seeded: int) -> Prompt:
        """The prompt of a sequence [S], with the first tokens of its completion by the text as targets in it."""
        room = self.batches.sequences.shape[1] - self._most_new
        prompt = prompt_of(sequence, self.collator.format, self.settings.prompt_tokens, room)
        # What the text ends with stays to be written, or nothing would be left to write.
        count = min(seeded, room - len(prompt.tokens), max(len(prompt.rest) - 1, 0))
        tokens = recorded(np.concatenate([prompt.tokens, prompt.rest[:count]]))
        tokens["loss_mask"][: len(prompt.tokens)] = False
        if not len(tokens):  # of documents without a token, the first of which goes on behind its end
            tokens = recorded(sequence[:1].copy())
            tokens["loss_mask"], tokens["inner"] = False, True
        return Prompt(tokens, prompt.rest[count:])

    def _complete(self, prompts: list[Prompt], keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that all ranks draw, -1 behind the last [n, N], and the sum of the entropies at them [n]."""
        size, groups = self.settings.group_size, range(0, len(prompts), self.settings.group_size)
        table = torch.zeros(len(prompts), self._most_new, dtype=torch.int32)  # one more than a token
        entropy = torch.zeros(len(prompts), dtype=torch.float64)
        model, ranks = self.student.model, self.ranks
        lockstep = ranks.in_lockstep([model], idle_forward)
        with autocast(self.student.precision, ranks.device), uncompiled([model]), lockstep:
            for start in groups[ranks.rank :: ranks.size]:
                here = slice(start, start + size)
                for row, completion in enumerate(self._group(prompts[here], keys[here]), start):
                    table[row, : len(completion.tokens)] = torch.from_numpy(completion.tokens + 1)
                    entropy[row] = float(completion.entropy.sum())
        ranks.barrier()  # one may write for longer than the others wait in an exchange
        return ranks.sum(table).numpy() - 1, ranks.sum(entropy).numpy()

    def _group(self, prompts: list[Prompt], keys: np.ndarray) -> list[Completion]:
        tokens = self._padded([prompt.tokens for prompt in prompts])
        ids = self.collator.collate(tokens, keys, np.arange(len(prompts))).ids.numpy()  # as training reads them
        given = [row[: len(prompt.tokens)] for row, prompt in zip(ids, prompts, strict=True)]
        settings = self.settings.changed(max_new_tokens=self._most_new)
        return complete(self.student.model, given, keys, settings, self.ends, self.vocab)

    def _padded(self, rows: list[np.ndarray]) -> np.ndarray:
        return padded(rows, self.batches.sequences.shape[1], self.collator.pad_id)

    def _written(self, prompt: Prompt, completion: np.ndarray) -> np.ndarray:
        new = np.zeros(len(completion), prompt.tokens.dtype)
        new["id"], new["loss_mask"], new["inner"] = completion, True, True
        return np.concatenate([prompt.tokens, new])

    def _samples(self, prompts: list[Prompt], new: np.ndarray, entropy: np.ndarray) -> Samples:
        completions = [row[row >= 0] for row in new]
        lengths = np.array([len(tokens) for tokens in completions])
        ended = np.mean([int(tokens[-1]) in self.ends for tokens in completions])
        repeated, grams = map(sum, zip(*(repeated_ngrams(tokens.tolist()) for tokens in completions), strict=True))
        of_text = np.mean([min(len(prompt.rest), self._most_new) for prompt in prompts])
        return Samples(
            sha256=hashlib.sha256(np.ascontiguousarray(new, np.int32).tobytes()).hexdigest(),
            mean_length=float(lengths.mean()),
            text_length=float(of_text),
            ended=float(ended),
            entropy=float(entropy.sum() / lengths.sum()),
            repeated=repeated / max(1, grams),
        )


def make_on_policy(run: Run, student: LanguageModel) -> OnPolicy | None:
    """What writes the text of some steps; None where the student learns from the corpus alone."""
    settings, models = run.config.objective.on_policy, [student.model, *(one.model for one in run.pair.teachers)]
    if is_zero(settings.fraction):
        return None
    ends = ends_of(*models, tokenizer=run.pair.tokenizer)
    named = run.pair.tokenizer.convert_ids_to_tokens(sorted(ends))
    logger.info(f"what the student writes ends at {', '.join(named)}")
    collator = run.data.batches.collator
    assert isinstance(collator, CausalLM), "the rules refuse other tasks"
    return OnPolicy(settings, run.data.batches, collator, student, ends, run.pair.vocabulary, run.ranks)
