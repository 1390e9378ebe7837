"""How good a masked language model is: perplexity, pseudo-perplexity, agreement with the teacher, speed.

Every value is a sum over positions divided by their number, so it depends neither on batch size nor on padding nor on
the number of ranks. Shapes: B rows, S positions, N positions scored, V vocabulary.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torchmetrics.text import Perplexity
from transformers import PreTrainedTokenizerBase

from distill.backends import Workers
from distill.config import Config, Evaluate, Kind, Masking, Missing
from distill.data import corpus
from distill.data.batches import Batch, make_batch, some_rows
from distill.data.collate.mlm import Masker
from distill.data.tokens import prepare
from distill.errors import SettingError
from distill.evaluation.masked_copies import Copies, hidden_at_masks
from distill.kernels import packed_linear as frozen
from distill.kernels.precision import autocast
from distill.models.load import hidden_states, logits
from distill.progress import Progress
from distill.seed import key, uniform

# The mask of an evaluation set never changes, whatever the seed of the run: runs stay comparable.
SEED = 0
MASKING = Masking(share=0.15, mask=0.8, keep=0.1, smoothing=0.0)
SPEED_ROUNDS = 5
COPY = 128  # longest copy of which `pseudo_perplexity.batch_size` are in one forward


@dataclass(frozen=True)
class EvaluationSet:
    """Rows to score, under the name by which the report calls them."""

    name: str
    description: str
    rows: np.ndarray  # [num_rows, S]
    documents: int

    @property
    def num_rows(self) -> int:
        return len(self.rows)


def load_sets(
    config: Config, tokenizer: PreTrainedTokenizerBase, tell: Callable[[str], None]
) -> tuple[list[EvaluationSet], list[str]]:
    """The sets that `evaluate.sets` names, and a line for each that is not to be had and may be left out.

    Raises:
        SettingError: a name without a source, or a set that is not to be had while `evaluate.missing=stop`.
    """
    sets, left_out = [], []
    for name in config.evaluate.sets:
        source = config.evaluate.sources.get(name)
        if source is None:
            known = ", ".join(sorted(config.evaluate.sources))
            raise SettingError(
                f"evaluate.sets: {name} has no source; choose from {known} or add evaluate.sources.{name}"
            )
        if source.kind is Kind.heldout:
            tokens = prepare(config.corpus, tokenizer, "heldout", log=tell)
        elif corpus.locate(source, f"evaluate.sources.{name}") is not None:
            tokens = prepare(config.corpus, tokenizer, "all", source, log=tell, setting=f"evaluate.sources.{name}")
        elif config.evaluate.missing is Missing.skip:
            left_out.append(
                f"The evaluation set {name} is left out: it lies neither in evaluate.sources.{name}.path nor "
                "under $DISTILL_DATA."
            )
            continue
        else:
            raise SettingError(
                f"evaluate.sets: {name} is not to be had; give evaluate.sources.{name}.path, set DISTILL_DATA, or set "
                "evaluate.missing=skip"
            )
        rows = some_rows(tokens.rows, config.evaluate.rows, f"evaluated rows of {name}")
        sets.append(EvaluationSet(name, tokens.name, rows, tokens.documents))
    return sets, left_out


class Evaluator:
    """Scores models on evaluation sets; each rank takes its share of the rows, the sums are exchanged."""

    def __init__(
        self, settings: Evaluate, masker: Masker, pad_id: int, vocab: int, precision: str, backend: Workers
    ) -> None:
        self.settings, self.masker, self.pad_id, self.vocab = settings, masker, pad_id, vocab
        self.precision, self.backend = precision, backend

    def score(self, model: Any, label: str, sets: list[EvaluationSet]) -> dict[str, dict[str, float]]:
        """Perplexity and, where a share of the positions is to be scored, pseudo-perplexity on every set."""
        scores: dict[str, dict[str, float]] = {"perplexity": {}, "pseudo_perplexity": {}}
        for data in sets:
            with self._progress(f"{label}, perplexity on {data.name}", data.num_rows, "rows") as done:
                scores["perplexity"][data.name] = self.perplexity(model, data, done)[0]
            if self.settings.pseudo_perplexity.share > 0:
                count = len(self.pseudo_positions(data))
                with self._progress(f"{label}, pseudo-perplexity on {data.name}", count, "positions") as done:
                    scores["pseudo_perplexity"][data.name] = self.pseudo_perplexity(model, data, done)[0]
        return scores

    def agree(self, student: Any, teacher: Any, sets: list[EvaluationSet]) -> dict[str, dict[str, float]]:
        """`agreement` on every set."""
        scores = {}
        for data in sets:
            with self._progress(f"agreement on {data.name}", data.num_rows, "rows") as done:
                scores[data.name] = self.agreement(student, teacher, data, done)
        return scores

    def describe(self, data: EvaluationSet) -> dict[str, Any]:
        """What the set holds and how many of its positions each measure scores, on all ranks."""
        targets = sum(batch.num_targets for batch in self._masked_batches(data, lambda _: None))
        return {
            "name": data.name,
            "description": data.description,
            "documents": data.documents,
            "rows": data.num_rows,
            "tokens": int((data.rows != self.pad_id).sum()),
            "positions": int(self.backend.sum(torch.tensor(targets))),
            "pseudo_positions": len(self.pseudo_positions(data)),
        }

    def perplexity(self, model: Any, data: EvaluationSet, done: Callable[[int], None]) -> tuple[float, int]:
        """exp of the mean cross-entropy at the masked positions of a fixed mask, and how many positions that are.

        15 % of the ordinary positions of each row, all alike; 80 % of them masked, 10 % random, 10 % kept (BERT's
        training task). `done` is told how many rows were scored since the last call.
        """
        metric = self._metric()
        with self._scoring(model) as laid_out:
            for batch in self._masked_batches(data, done):
                scores = self._logits(laid_out, batch, batch.masked)
                # In float64: torchmetrics takes the logarithm of a softmax, which in fp32 can be the logarithm of 0.
                metric.update(scores.double()[None], batch.targets[batch.masked][None])
        return self._mean_exp(metric)

    def pseudo_perplexity(self, model: Any, data: EvaluationSet, done: Callable[[int], None]) -> tuple[float, int]:
        """exp of the mean negative log-likelihood of tokens that are masked one at a time, and their number.

        Salazar et al. 2020, "Masked Language Model Scoring". A seeded `pseudo_perplexity.share` of all ordinary
        positions is scored, drawn position by position.
        """
        metric = self._metric()
        # One context around all: autocast then casts a trained weight once, not in each forward.
        with self._scoring(model) as laid_out, autocast(self.precision, self.backend.device):
            for copies, targets in self._masked_copies(data, done):
                # Only the masked position reaches the vocabulary-sized head.
                scores = logits(laid_out, hidden_at_masks(laid_out, copies), self.vocab)
                metric.update(scores.double()[None], targets[None])
        return self._mean_exp(metric)

    def agreement(
        self, student: Any, teacher: Any, data: EvaluationSet, done: Callable[[int], None]
    ) -> dict[str, float]:
        """At the positions of `perplexity`: share of equal first choices, and mean KL(teacher || student) in nats."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.backend.device)
        with self._scoring(student) as one, self._scoring(teacher) as other:
            for batch in self._masked_batches(data, done):
                ours, theirs = (self._logits(m, batch, batch.masked).float() for m in (one, other))
                log_q, log_p = ours.log_softmax(-1), theirs.log_softmax(-1)
                sums[0] += (ours.argmax(-1) == theirs.argmax(-1)).sum()
                sums[1] += (log_p.exp() * (log_p - log_q)).sum(-1).double().sum()
                sums[2] += len(ours)
        top1, kl, count = self.backend.sum(sums).tolist()
        return {"top1": top1 / max(count, 1), "kl": kl / max(count, 1)}

    def tokens_per_second(self, models: list[Any], data: EvaluationSet) -> list[float]:
        """Positions per second of the whole forward, hidden states and head at every position, on one batch.

        The models take turns and the median round counts, so that what else the machine does meets them alike. All are
        laid out as for scoring: what training has made of the student's kernels gives it no advantage.
        """
        models = [frozen.for_evaluation(model, self.precision, self.backend.device) for model in models]
        ids = np.resize(data.rows.astype(np.int64), (self.settings.batch_size, data.rows.shape[1]))
        batch = make_batch(ids, np.arange(len(ids), dtype=np.uint64), self.masker, self.pad_id).to(self.backend.device)
        everywhere = torch.arange(batch.inputs.numel(), device=self.backend.device)
        seconds: list[list[float]] = [[] for _ in models]
        for _ in range(SPEED_ROUNDS + 1):
            for model, times in zip(models, seconds, strict=True):
                with _evaluating(model):
                    self._wait()
                    began = time.perf_counter()
                    self._logits(model, batch, everywhere)
                    self._wait()
                    times.append(time.perf_counter() - began)
        return [ids.size / float(np.median(times[1:])) for times in seconds]  # the first round warms up

    def pseudo_positions(self, data: EvaluationSet) -> np.ndarray:
        """The flat places of `data.rows` that pseudo-perplexity scores, [N] int64."""
        ordinary = np.flatnonzero(self.masker.ordinary[data.rows].reshape(-1))
        drawn = uniform(key(SEED, "pseudo-perplexity", ordinary)) < self.settings.pseudo_perplexity.share
        return ordinary[drawn]

    def _masked_batches(self, data: EvaluationSet, done: Callable[[int], None]) -> Iterator[Batch]:
        lengths = (data.rows != self.pad_id).sum(1)
        order = np.argsort(-lengths, kind="stable")[self.backend.rank :: self.backend.size]
        for start in range(0, len(order), self.settings.batch_size):
            numbers = order[start : start + self.settings.batch_size]
            ids = data.rows[numbers].astype(np.int64)[:, : max(int(lengths[numbers].max()), 1)]
            yield make_batch(ids, key(SEED, "evaluation mask", numbers), self.masker, self.pad_id).to(
                self.backend.device
            )
            done(len(numbers))

    def _masked_copies(self, data: EvaluationSet, done: Callable[[int], None]) -> Iterator[tuple[Copies, torch.Tensor]]:
        """This rank's batches of copies, each with the tokens that its masks hide, [B]; of alike length, longest first.

        A batch holds `pseudo_perplexity.batch_size` copies, fewer of rows longer than 128: the memory is bounded.
        """
        width = data.rows.shape[1]
        lengths = (data.rows != self.pad_id).sum(1)
        places = self.pseudo_positions(data)
        # Copies of one row stay side by side, and so share what can be computed once per row.
        places = places[np.argsort(-lengths[places // width], kind="stable")]
        sizes = self.settings.pseudo_perplexity.batch_size * COPY // np.maximum(lengths[places // width], COPY)
        starts = [0]
        while starts[-1] < len(places):
            starts.append(starts[-1] + max(int(sizes[starts[-1]]), 1))
        for start, end in list(pairwise(starts))[self.backend.rank :: self.backend.size]:
            numbers, row = np.unique(places[start:end] // width, return_inverse=True)
            column = places[start:end] % width
            rows = data.rows[numbers, : lengths[numbers].max()].astype(np.int64)
            attention = None if (rows != self.pad_id).all() else self._tensor(rows != self.pad_id)
            copies = Copies(self._tensor(rows), attention, self._tensor(row), self._tensor(column), self.masker.mask_id)
            yield copies, self._tensor(rows[row, column])
            done(len(row))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.backend.device)

    @contextmanager
    def _progress(self, label: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Rank 0 shows how far all ranks are, judged by its own share."""
        progress = Progress(label, total, unit, quiet=self.backend.rank != 0)
        count = 0

        def done(more: int) -> None:
            nonlocal count
            count += more * self.backend.size
            progress.update(min(count, total))

        yield done
        progress.close()

    def _hidden(self, model: Any, ids: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor:
        with autocast(self.precision, ids.device):
            return hidden_states(model, ids, attention)

    def _logits(self, model: Any, batch: Batch, places: torch.Tensor) -> torch.Tensor:
        """[len(places), V] at flat places of the batch."""
        hidden = self._hidden(model, batch.inputs, batch.attention).flatten(0, 1)
        with autocast(self.precision, batch.inputs.device):
            return logits(model, hidden.index_select(0, places), self.vocab)

    def _metric(self) -> Perplexity:
        metric = Perplexity().to(self.backend.device)
        metric.set_dtype(torch.float64)
        return metric

    def _mean_exp(self, metric: Perplexity) -> tuple[float, int]:
        # torchmetrics would exchange through torch.distributed alone; our backends include others.
        sums = torch.stack([metric.total_log_probs.double(), metric.count.double()])
        total, count = self.backend.sum(sums).tolist()
        # A numpy exp: a hopeless model's value is inf, where math.exp would end the run with OverflowError.
        with np.errstate(over="ignore"):
            return (float(np.exp(total / count)) if count else float("nan")), int(count)

    @contextmanager
    def _scoring(self, model: Any) -> Iterator[Any]:
        """Gives `model` in evaluation mode and without gradients, laid out for many forward passes."""
        with _evaluating(model):
            yield frozen.for_evaluation(model, self.precision, self.backend.device)

    def _wait(self) -> None:
        if self.backend.device.type == "cuda":
            torch.cuda.synchronize(self.backend.device)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients, and back to the mode before."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)
