"""Scores and teacher caches of models that are divided between ranks are those of one process; training goes on."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from families import without_dropout
from tiny import (
    PAD,
    VOCAB,
    Fit,
    assert_close,
    make_batches,
    make_evaluator,
    make_masks,
    make_model,
    make_rows,
    make_tokenizer,
    objective_config,
    plain_sgd,
)  # fmt: skip
from vocabularies import special_ids, vocabulary_of

from distill.config.settings import (
    BackendConfig,
    EvaluateConfig,
    PrecisionConfig,
    PseudoPerplexityConfig,
    TrainConfig,
)
from distill.data.collate.clm import CausalLM
from distill.data.collate.mlm import masked_lm
from distill.data.sequence_format import causal_format
from distill.distributed import Ranks, join_ranks
from distill.distributed.formats import compute_in
from distill.distributed.shard import is_sharded, whole
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.measures import Scoring
from distill.evaluation.readers import MeanModel
from distill.evaluation.samples import continue_with_each
from distill.evaluation.sets import MASKING, EvaluationSet
from distill.evaluation.speed import check_memory, tokens_per_second
from distill.models.language_model import LanguageModel
from distill.models.precision import dtype_of
from distill.runs.setup import blocks_of
from distill.tasks import find_task
from distill.teacher.build_cache import Recorder, build
from distill.teacher.cache import HEADER, Cache, Layout

NUM_ROWS = (16, 7, 2, 1)  # of the sets: 3 divides none of them, the last two have fewer rows than there are ranks
PART = 5  # rows of a part of the cache: 23 rows are 5 parts, which neither 2 nor 3 ranks share evenly


def divided(ranks: Ranks, model: Any, trained: bool = False) -> Any:
    """A model as a run divides it, where the backend does."""
    if ranks.shards:
        ranks.shard(model, *blocks_of(model), trained=trained)
    return model


def noisy(model: Any, seed: int) -> Any:
    """Alike enough to agree with another one here and there."""
    with torch.no_grad():
        model.vocab_projector.bias.add_(torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)))
    return model.requires_grad_(False)


def masked_scores(ranks: Ranks) -> dict[str, float]:
    """Every measure of a student, a teacher, and of two teachers together, and how alike they are."""
    student = divided(ranks, make_model("distilbert", 2), trained=True)
    one, other = (divided(ranks, noisy(make_model("distilbert", 2), seed)) for seed in (8, 9))
    both = MeanModel([one, other], [0.25, 0.75])
    assert all(is_sharded(each) == bool(ranks.shards) for each in (student, one, both))
    rows = [make_rows(number, shortest=4, seed=number) for number in NUM_ROWS]
    sets = [EvaluationSet(f"{len(each)} rows", "", each, 1) for each in rows]
    chosen = EvaluateConfig(batch_size=4, pseudo_perplexity=PseudoPerplexityConfig(fraction=0.5, batch_size=5))
    masks = masked_lm(MASKING, make_tokenizer(), np.bincount(rows[0].reshape(-1), minlength=VOCAB))
    evaluator = make_evaluator(chosen, masks, PrecisionConfig(), ranks)
    check_memory(evaluator, [student, one], sets)
    found: dict[str, float] = {}
    for label, model in (("student", student), ("teacher", one), ("both", both)):
        for measure, values in evaluator.score(model, label, sets).items():
            found |= {f"{label} {measure} {name}": value for name, value in values.items()}
        if label != "student":
            for name, values in evaluator.agree(student, model, sets).items():
                found |= {f"agreement {label} {measure} {name}": value for measure, value in values.items()}
    assert all(speed > 0 for speed in tokens_per_second(evaluator, [one, student, both], sets[0]))
    return found


def causal_scores(ranks: Ranks, samples: dict[str, list[list[int]]]) -> dict[str, float]:
    """Perplexity by a sliding window, and bits per byte, of packed and of padded documents.

    Args:
        samples: gets what the model writes behind two beginnings, on rank 0.
    """
    tokenizer, found = vocabulary_of("llama"), {}
    for packed in (True, False):
        model = divided(ranks, without_dropout("llama", **special_ids(tokenizer)), trained=True)
        collator = CausalLM(causal_format(tokenizer), packed)
        ids = np.random.default_rng(4).integers(5, 40, (11, 12)).astype(np.uint16)
        ids[3, 4] = ids[7, 0] = causal_format(tokenizer).document_end
        scoring = Scoring(collator, tokenizer, EvaluateConfig(batch_size=2, stride=5), ranks)
        evaluator = Evaluator(scoring, find_task("clm").passes(scoring), PrecisionConfig())
        scores = evaluator.score(model, "student", [EvaluationSet("set", "", ids, 1)])
        found |= {f"{measure} {packed}": values["set"] for measure, values in scores.items()}
        samples |= continue_with_each({f"student {packed}": model}, [ids[0, :5], ids[1]], evaluator, 6)
    return found


def cached(ranks: Ranks, folder: Path) -> dict[str, str]:
    """What the parts of a teacher cache hold."""
    rows = make_rows(23, shortest=5)
    masks = make_masks(make_tokenizer(), rows, mlm_probability=0.3, static=True)
    batches = make_batches(rows, masks, 8, 1, 0, static=True)
    lengths = (rows != PAD).sum(1)
    origin = {"vocabulary": VOCAB, "top_k": 6, "of": "a test"}
    folder.mkdir(parents=True, exist_ok=True)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    cache = SmallParts(folder, origin, offsets, Layout(6, 0, VOCAB), False)
    teacher = divided(ranks, without_dropout("bert").requires_grad_(False))

    def positions(batch: Any) -> torch.Tensor:
        return (batch.ids.reshape(-1) != PAD).nonzero()[:, 0]

    build(Recorder(cache, LanguageModel(teacher), batches, positions, 2.0, ranks.device), ranks)
    parts = sorted(folder.glob("part-*.bin"))
    return {part.name: hashlib.sha256(part.read_bytes()[HEADER:]).hexdigest() for part in parts}


class SmallParts(Cache):
    """A cache of parts of a few rows."""

    sequences_per_part = property(lambda self: PART)  # type: ignore[assignment]


@contextmanager
def reduced_in() -> Iterator[set[torch.dtype]]:
    """The number formats of the gradients that are exchanged while it is open."""
    dtypes: set[torch.dtype] = set()
    reduce_scatter = dist.reduce_scatter_single

    def seen(output: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        dtypes.add(output.dtype)
        return reduce_scatter(output, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "reduce_scatter_single", seen)
        yield dtypes


def trained_weights(ranks: Ranks, folder: Path, precision: str, evaluates: bool) -> dict[str, torch.Tensor]:
    """Weights after four steps in a number format, with and without scores in fp32 between them."""
    student = divided(ranks, without_dropout("bert").train(), trained=True)
    if is_sharded(student):
        compute_in(student, dtype_of(precision))
    rows = make_rows(16, shortest=5)
    settings = TrainConfig(batch_size=2, accumulate=4 // ranks.size, epochs=None, steps=4, log_every=1, save_every=9)
    objective = objective_config(soft=0.0, mlm=1.0, cosine=0.0)
    fit = Fit(folder, make_tokenizer(), rows, None, student, objective, settings, ranks=ranks, precision=precision,
              **plain_sgd(0.02))  # fmt: skip
    sets = [EvaluationSet("rows", "", make_rows(5, shortest=4), 1)]
    evaluator = make_evaluator(
        EvaluateConfig(batch_size=2, pseudo_perplexity=PseudoPerplexityConfig(fraction=0.5, batch_size=4)),
        fit.batches.collator,
        PrecisionConfig(student=precision), ranks,
    )  # fmt: skip
    seen = []

    def score(_: Fit, __: Any) -> None:
        seen.append(evaluator.score(student, "student", sets)["perplexity"]["rows"])

    fit.on_log = score if evaluates else None
    with reduced_in() as dtypes:
        fit.run()
    assert fit.state.step == 4 and fit.state.skipped == 0
    assert dtypes == ({torch.float32} if ranks.shards else set()), "gradients are summed in fp32"
    found = {name: whole(parameter.detach()).clone() for name, parameter in fit.model.named_parameters()}
    return {**found, "scores": torch.tensor(seen)}


def on_a_rank(name: str, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    ranks = join_ranks(BackendConfig(name=name, device="cpu", timeout=60.0))
    samples: dict[str, list[list[int]]] = {}
    found = {"masked": masked_scores(ranks), "causal": causal_scores(ranks, samples), "samples": samples}
    found["cache"] = cached(ranks, folder / f"cache-{ranks.size}")
    if ranks.size < 3:
        for precision in ("fp32", "bf16", "fp16"):
            for evaluates in (True, False):
                where = folder / f"{ranks.size}-{precision}-{evaluates}"
                found[f"{precision} {evaluates}"] = trained_weights(ranks, where, precision, evaluates)
    ranks.close()
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return on_a_rank("single", tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    return run_ranks(2, folder / "out", on_a_rank, "fsdp", folder)


def assert_same_scores(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert len(alone["samples"]) == 2 and all(len(each) == 2 for each in alone["samples"].values())
    assert [rank["samples"] for rank in ranks] == [alone["samples"], *[{}] * (len(ranks) - 1)]
    for rank in ranks:
        for kind in ("masked", "causal"):
            assert rank[kind].keys() == alone[kind].keys()
            for name, value in alone[kind].items():
                assert rank[kind][name] == pytest.approx(value, rel=1e-5, nan_ok=True), name
        assert rank["cache"] == alone["cache"]


@pytest.mark.slow
def test_scores_and_caches_of_two_ranks(two_ranks: list[Any], alone: dict[str, Any]) -> None:
    assert len(alone["causal"]) == 4 and 0 < alone["masked"]["agreement teacher top1 16 rows"] < 1
    assert sum("pseudo" in name for name in alone["masked"]) == 3 * len(NUM_ROWS)
    assert_same_scores(two_ranks, alone)


@pytest.mark.slow
def test_scores_and_caches_of_three_ranks_with_uneven_shares(alone: dict[str, Any], tmp_path: Path) -> None:
    assert_same_scores(run_ranks(3, tmp_path / "out", on_a_rank, "fsdp", tmp_path), alone)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_goes_on_unharmed_by_scores_in_another_format(
    precision: str, two_ranks: list[Any], alone: dict[str, Any]
) -> None:
    for rank in two_ranks:
        with_scores, without = dict(rank[f"{precision} True"]), dict(rank[f"{precision} False"])
        scores = with_scores.pop("scores")
        assert len(scores) == 4 and len(without.pop("scores")) == 0
        assert_close(with_scores, without, rtol=0, atol=0)
        expected = alone[f"{precision} True"]
        near = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3}[precision]
        assert_close({**with_scores, "scores": scores}, expected, rtol=near, atol=near)
