"""Scores and caches of any number of ranks, of sharded models too, are those of one process; training goes on."""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
from distributed import run_ranks
from families import without_dropout
from tiny import PAD, VOCAB, assert_close
from vocabularies import special_ids, vocabulary_of

from distill.config.settings import BackendConfig, EvaluateConfig, PrecisionConfig, PseudoPerplexityConfig, TrainConfig
from distill.data.collate.clm import CausalLM
from distill.data.collate.mlm import masked_lm
from distill.data.sequence_format import causal_format
from distill.distributed import Ranks, join_ranks
from distill.distributed.shard import compute_in, is_sharded, whole
from distill.evaluation.evaluator import Evaluator
from distill.evaluation.measures import Scoring
from distill.evaluation.readers import MeanModel
from distill.evaluation.samples import continue_with_each
from distill.evaluation.sets import MASKING, EvaluationSet
from distill.evaluation.speed import check_memory, tokens_per_second
from distill.models.language_model import LanguageModel
from distill.models.precision import dtype_of
from distill.runs.setup import blocks_of
from distill.runtime.errors import SettingError
from distill.tasks import find_task
from distill.teacher.build_cache import Recorder, build
from distill.teacher.cache import HEADER, Cache, Layout

NUM_ROWS = (16, 7, 2, 1)  # of the sets: 3 divides none of them, the last two have fewer rows than there are ranks
NEAR = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3}


def divided(ranks: Ranks, model: Any, trained: bool = False) -> Any:
    """A model as a run shards it, where the backend does."""
    if ranks.shards:
        ranks.shard(model, *blocks_of(model), trained=trained)
    assert is_sharded(model) == bool(ranks.shards)
    return model


def noisy(seed: int) -> Any:
    """Alike enough to the student to agree with it here and there."""
    model = tiny.make_model("distilbert", 2)
    with torch.no_grad():
        model.vocab_projector.bias.add_(torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)))
    return model.requires_grad_(False)


def masked_scores(ranks: Ranks) -> dict[str, Any]:
    """Every measure of a student, a teacher, and of two teachers together, and how alike they are."""
    student = divided(ranks, tiny.make_model("distilbert", 2), trained=True)
    one, other = (divided(ranks, noisy(seed)) for seed in (8, 9))
    both = MeanModel([one, other], [0.25, 0.75])
    rows = [tiny.make_rows(number, shortest=4, seed=number) for number in NUM_ROWS]
    sets = [EvaluationSet(f"{len(each)} rows", "", each, 1) for each in rows]
    masks = masked_lm(MASKING, tiny.make_tokenizer(), np.bincount(rows[0].reshape(-1), minlength=VOCAB))
    found: dict[str, Any] = {}
    for share in (1.0, 0.3):  # of the positions for pseudo-perplexity; the second is drawn as in a run
        chosen = EvaluateConfig(batch_size=4, pseudo_perplexity=PseudoPerplexityConfig(fraction=share, batch_size=5))
        evaluator = tiny.make_evaluator(chosen, masks, PrecisionConfig(), ranks)
        models = {"student": student} if share == 1 else {"student": student, "teacher": one, "both": both}
        for label, model in models.items():
            values_of, losses = evaluator.score_by_sequence(model, label, sets)
            for measure, values in values_of.items():
                found |= {f"{label} {measure} {share} {name}": value for name, value in values.items()}
            for (measure, name), by_row in losses.items():
                found |= {f"{label} {measure} {share} {name} row {n}": loss for n, loss in enumerate(by_row.losses)}
            for name, values in (evaluator.agree(student, model, sets) if label != "student" else {}).items():
                found |= {f"agreement {label} {measure} {share} {name}": value for measure, value in values.items()}
        found |= {f"described {share} {data.name}": evaluator.describe(data) for data in sets}
    check_memory(evaluator, [student, one], sets)
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


class SmallParts(Cache):
    """A cache of parts of 5 rows: 23 rows are 5 parts, which neither 2 nor 3 ranks share evenly."""

    sequences_per_part = property(lambda self: 5)  # type: ignore[assignment]


class WithoutNumbers(Recorder):
    """Of a teacher that has none in the second part."""

    def records(self, indices: np.ndarray) -> np.ndarray:
        found = super().records(indices)
        if indices[0] == 5:
            raise SettingError("no numbers in it", setting="teacher")
        return found


def cached(ranks: Ranks, folder: Path, kind: type[Recorder] = Recorder) -> dict[str, str]:
    """What the parts of a teacher cache hold."""
    rows = tiny.make_rows(23, shortest=5)
    masks = tiny.make_masks(tiny.make_tokenizer(), rows, mlm_probability=0.3, static=True)
    batches = tiny.make_batches(rows, masks, 8, 1, 0, static=True)
    offsets = np.concatenate([[0], np.cumsum((rows != PAD).sum(1))]).astype(np.int64)
    folder.mkdir(parents=True, exist_ok=True)
    cache = SmallParts(folder, {"vocabulary": VOCAB, "top_k": 6, "of": "a test"}, offsets, Layout(6, 0, VOCAB), False)
    teacher = LanguageModel(divided(ranks, without_dropout("bert").requires_grad_(False)))

    def positions(batch: Any) -> torch.Tensor:
        return (batch.ids.reshape(-1) != PAD).nonzero()[:, 0]

    build(kind(cache, teacher, batches, positions, 2.0, ranks.device), ranks)
    return {path.name: hashlib.sha256(path.read_bytes()[HEADER:]).hexdigest() for path in folder.glob("part-*.bin")}


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
    student, only_tokens = without_dropout("bert").train(), tiny.objective_config(soft=0.0, mlm=1.0, cosine=0.0)
    divided(ranks, student, trained=True)
    if is_sharded(student):
        compute_in(student, dtype_of(precision))
    settings = TrainConfig(batch_size=2, accumulate=4 // ranks.size, epochs=None, steps=4, log_every=1, save_every=9)
    fit = tiny.Fit(
        folder, tiny.make_tokenizer(), tiny.make_rows(16, shortest=5), None, student, only_tokens, settings,
        ranks=ranks, precision=precision, **tiny.plain_sgd(0.02),
    )  # fmt: skip
    sets, chosen = [EvaluationSet("rows", "", tiny.make_rows(5, shortest=4), 1)], EvaluateConfig(batch_size=2)
    evaluator = tiny.make_evaluator(chosen, fit.batches.collator, PrecisionConfig(student=precision), ranks)
    seen = list[float]()

    def score(_: tiny.Fit, __: Any) -> None:
        seen.append(evaluator.score(student, "student", sets)["perplexity"]["rows"])

    fit.on_log = score if evaluates else None
    with reduced_in() as dtypes:
        fit.run()
    assert fit.state.step == 4 and fit.state.skipped == 0 and len(seen) == 4 * evaluates
    assert dtypes == ({torch.float32} if ranks.shards else set()), "gradients are summed in fp32"
    found = {name: whole(parameter.detach()).clone() for name, parameter in fit.model.named_parameters()}
    return {**found, "scores": torch.tensor(seen)}


def on_a_rank(name: str, folder: Path | None = None) -> dict[str, Any]:
    """Masked scores; with a folder all else too."""
    torch.set_num_threads(1)
    ranks = join_ranks(BackendConfig(name=name, device="cpu", timeout=60.0))
    samples: dict[str, list[list[int]]] = {}
    found: dict[str, Any] = {"masked": masked_scores(ranks), "samples": samples}
    if folder is not None:
        found |= {"causal": causal_scores(ranks, samples), "cache": cached(ranks, folder / f"cache-{ranks.size}")}
        for precision in NEAR if ranks.size < 3 else ():
            for scored in (True, False):
                where = folder / f"{ranks.size}-{precision}-{scored}"
                found[f"{precision} {scored}"] = trained_weights(ranks, where, precision, scored)
    ranks.close()
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return on_a_rank("single")


@pytest.fixture(scope="module")
def all_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return on_a_rank("single", tmp_path_factory.mktemp("alone"))


def assert_same_scores(rank: dict[str, Any], alone: dict[str, Any], kind: str) -> None:
    assert rank[kind].keys() == alone[kind].keys()
    for name, value in alone[kind].items():
        near = value if name.startswith("described") else pytest.approx(value, rel=1e-5, nan_ok=True)
        assert rank[kind][name] == near, name


@pytest.mark.parametrize("size", [2, 3])
def test_scores_do_not_depend_on_the_number_of_ranks(size: int, alone: dict[str, Any], tmp_path: Path) -> None:
    assert 0 < alone["masked"]["agreement teacher top1 0.3 16 rows"] < 1
    assert sum(name.startswith("student pseudo_perplexity") for name in alone["masked"]) > 2 * len(NUM_ROWS)
    for rank in run_ranks(size, tmp_path, on_a_rank, "ddp"):
        assert_same_scores(rank, alone, "masked")


def slow_rank(timeout: float) -> dict[str, float]:
    """Scores of a model that takes longer on rank 1 than ranks wait in an exchange."""
    ranks = join_ranks(BackendConfig(name="ddp", device="cpu", threads=1, timeout=timeout))
    model, rows = tiny.make_model("distilbert", 1), tiny.make_rows(4)
    if ranks.rank == 1:
        model.register_forward_pre_hook(lambda *_: time.sleep(1.5 * timeout))
    masks = masked_lm(MASKING, tiny.make_tokenizer(), np.bincount(rows[0], minlength=VOCAB))
    evaluator = tiny.make_evaluator(EvaluateConfig(batch_size=4), masks, PrecisionConfig(), ranks)
    scores = evaluator.score(model, "student", [EvaluationSet("rows", "", rows, 1)])
    ranks.close()
    return scores["perplexity"]


def test_a_rank_may_score_for_longer_than_an_exchange_waits(tmp_path: Path) -> None:
    one, other = run_ranks(2, tmp_path, slow_rank, 2.0)
    assert one == other and one["rows"] > 1


def refused_by_one(folder: Path, timeout: float) -> str:
    """What a rank says where another one cannot make its part of a cache; exchanges wait as long as is set."""
    torch.set_num_threads(1)
    ranks = join_ranks(BackendConfig(name="fsdp", device="cpu", timeout=timeout))
    mesh = ranks._make_mesh(1)  # type: ignore[attr-defined]
    groups = [group._get_backend(torch.device("cpu")) for group in mesh.get_all_groups()]
    assert [group.options._timeout.total_seconds() for group in groups] == [timeout] * 2
    with pytest.raises(SettingError) as error:
        cached(ranks, folder, WithoutNumbers)
    ranks.close()
    return str(error.value)


def test_ranks_that_shard_a_teacher_say_why_a_cache_cannot_be_made(tmp_path: Path) -> None:
    assert run_ranks(2, tmp_path / "out", refused_by_one, tmp_path / "cache", 60.0) == ["teacher: no numbers in it"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_sharded_models_are_scored_and_trained_as_in_one_process(
    size: int, all_alone: dict[str, Any], tmp_path: Path
) -> None:
    """Scores, samples and caches; a training goes on unharmed by scores in another format."""
    assert len(all_alone["causal"]) == 4 and [len(each) for each in all_alone["samples"].values()] == [2, 2]
    found = run_ranks(size, tmp_path / "out", on_a_rank, "fsdp", tmp_path)
    assert [rank["samples"] for rank in found] == [all_alone["samples"], *[{}] * (size - 1)]
    for rank in found:
        for kind in ("masked", "causal"):
            assert_same_scores(rank, all_alone, kind)
        assert rank["cache"] == all_alone["cache"]
        for precision, near in NEAR.items() if size == 2 else ():
            scored, without = rank[f"{precision} True"], rank[f"{precision} False"]
            assert_close(scored, all_alone[f"{precision} True"], rtol=near, atol=near)
            assert_close(scored | {"scores": without["scores"]}, without, rtol=0, atol=0)
