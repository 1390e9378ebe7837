"""Losses over a sliced vocabulary on 2 and 3 ranks: values and gradients of the whole, exchanges, and memory."""

import importlib
import inspect
import pkgutil
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from heads import largest_allocation
from slices import LIVE, NONE, SAMPLES, SEVERAL, SEVERAL_KINDS, TEACHER_WIDTH, TOP_K, VOCAB, Case
from torch import Tensor

from distill.objective import terms as registry
from distill.objective.blocks import Compiled
from distill.objective.terms import VocabularyTerm
from distill.objective.terms.clm import Clm
from distill.objective.terms.jsd import Jsd
from distill.objective.terms.mlm import Mlm
from distill.objective.terms.reverse_kl import ReverseKl
from distill.objective.terms.soft import Soft, SoftPositions
from distill.teacher.signal import TopK


class Entropy(VocabularyTerm):
    """A term at every position that needs neither a teacher nor a target, as someone's own might be."""

    needs_teacher = False

    def losses(self, student: Tensor, teacher: Tensor | TopK | None, targets: Tensor) -> Tensor:
        log_q = student.log_softmax(-1)
        return -(log_q.exp() * log_q).sum(-1)


def registered() -> list[VocabularyTerm]:
    """Every loss over the vocabulary that there is a file for, with its default settings."""
    found: list[VocabularyTerm] = []
    for module in pkgutil.iter_modules(registry.__path__):
        for _, each in inspect.getmembers(
            importlib.import_module(f"{registry.__name__}.{module.name}"), inspect.isclass
        ):
            here = each.__module__ == f"{registry.__name__}.{module.name}"
            if here and issubclass(each, VocabularyTerm) and not inspect.isabstract(each):
                found.append(each())
    return found


# --- the cases -----------------------------------------------------------------------------------------------------

MASKED_SOFT = Soft(temperature=1.5, rows=SoftPositions.masked, cutoff=0.01)
CHUNKS = 1500  # bytes: three or so rows of logits
OTHER_CUT = (VOCAB, VOCAB + 30)  # the teacher's slices begin elsewhere
FLOAT32 = {"dtype": torch.float32, "relative": 2e-6}
BFLOAT16 = {"matrix_dtype": torch.bfloat16, "dtype": torch.float32, "relative": 0.03}
CASES: dict[str, Case] = {
    "pair": Case([Soft(), Mlm()]),
    "pair in chunks": Case([Mlm(), Soft(3.7)], budget=CHUNKS),
    "pair at temperature 1, next words": Case([Soft(1.0), Clm()], budget=CHUNKS, upstream=-2.5),
    "soft alone": Case([Soft()], masked=0.0),
    "soft in chunks, no bias": Case([Soft()], bias=False, budget=CHUNKS),
    "words alone": Case([Mlm()], NONE, budget=CHUNKS),
    "words alone, everywhere": Case([Clm()], NONE, masked=1.0),
    "words alone, nowhere": Case([Mlm()], NONE, masked=0.0),
    "no rows": Case([Soft(), Mlm()], rows=(0, 0, 0)),
    "no rows, by whole rows": Case([Jsd()], rows=(0, 0, 0)),
    "top k": Case([Soft(), Mlm()], TOP_K, budget=CHUNKS),
    "top k alone": Case([Soft()], TOP_K, upstream=-2.5),
    "top k, several temperatures": Case([Soft(), Soft(1.0), Mlm()], TOP_K, budget=CHUNKS),
    "samples": Case([Soft(), Mlm()], SAMPLES, budget=CHUNKS),
    "samples alone": Case([Soft()], SAMPLES, upstream=-2.5),
    "samples, several temperatures": Case([Soft(), Soft(1.0), Mlm()], SAMPLES, budget=CHUNKS),
    "an empty slice, samples": Case([Soft(), Mlm()], SAMPLES, slices=(VOCAB, 4, 0), budget=CHUNKS),
    "softcap": Case([Soft(), Mlm()], softcap=2.0, budget=CHUNKS),
    "softcap, by whole rows": Case([Jsd(), Mlm()], softcap=2.0, budget=CHUNKS),
    "cutoff": Case([Soft(cutoff=0.02), Mlm()], budget=CHUNKS),
    "teacher cut at other places": Case([Soft(), Mlm()], padded=OTHER_CUT, budget=CHUNKS),
    "empty slices": Case([Soft(), Mlm()], slices=(0, VOCAB, 4), masked=0.7),
    "empty slices, words alone": Case([Clm()], NONE, slices=(0, VOCAB, 4)),
    "an empty slice, top k": Case([Soft(), Mlm()], TOP_K, slices=(VOCAB, 4, 0), budget=CHUNKS),
    "slices of 3 and of all others": Case([Soft(), Mlm()], TOP_K, slices=(3, VOCAB - 3, 0), padded=(VOCAB, VOCAB)),
    "empty slices, by whole rows": Case([ReverseKl(), Entropy()], slices=(0, 54, 3), budget=CHUNKS),
    "several teachers": Case([Soft(), Mlm()], SEVERAL, budget=CHUNKS),
    "several teachers, other terms": Case([Jsd(beta=0.3), Soft(), Mlm()], SEVERAL),
    "several kinds": Case([Soft(), Mlm()], SEVERAL_KINDS, budget=CHUNKS),
    "own term": Case([Entropy()], NONE, budget=CHUNKS),
    "own term beside words": Case([Mlm(), Entropy()], NONE),
    "masked soft among all": Case([MASKED_SOFT, Mlm(), Soft(), Entropy()], budget=CHUNKS, upstream=0.5),
    "all there are": Case(registered(), budget=CHUNKS),
    "extreme logits": Case([Soft(), Mlm()], spread=3e3, relative=1e-9),
    "fp32": Case([Soft(), Mlm()], budget=CHUNKS, **FLOAT32),
    "fp32, top k": Case([Soft(), Mlm()], TOP_K, budget=CHUNKS, **FLOAT32),
    "fp32, samples": Case([Soft(), Mlm()], SAMPLES, budget=CHUNKS, **FLOAT32),
    "fp32, by whole rows": Case([Jsd(), Mlm()], budget=CHUNKS, **FLOAT32),
    "bf16": Case([Soft(), Mlm()], budget=CHUNKS, **BFLOAT16),
    "bf16, by whole rows": Case([Jsd(), Mlm()], budget=CHUNKS, **BFLOAT16),
}


def failed_cases(group: dist.ProcessGroup) -> list[str]:
    """Names of the cases that failed on this rank, each with the reason."""
    failed = []
    for name, case in CASES.items():
        try:
            case.run(group)
        except AssertionError as error:
            failed.append(f"{name}: {error}")
    return failed


# --- exchanges, memory, and what is not wanted -----------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The exchanges of this rank while it is open, by name."""
    calls: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def call(*args: Any, **named: Any) -> Any:
            calls[name] += 1
            return original(*args, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "all_to_all_single", "all_reduce", "broadcast", "reduce_scatter"):
            patch.setattr(dist, name, counting(name))
        yield calls


def exchanges(group: dist.ProcessGroup, terms: list[VocabularyTerm], teacher: str) -> list[dict[str, int]]:
    """Of a loss in one chunk, and what two chunks more take beside."""
    columns, heads = -(-(VOCAB + 4) // dist.get_world_size(group)), 2 if teacher == LIVE else 1
    row = columns * heads * 8 * (1 if isinstance(terms[0], Soft) else 2)  # bytes; whole rows take as much again
    counts = []
    for budget in (12 * row, 4 * row):
        case = Case(terms, teacher, rows=(8, 4, 0), budget=budget)
        with counted() as calls:
            case.run(group)
        counts.append(calls)
    return [dict(counts[0]), dict(counts[1] - counts[0])]


def largest_of_many_rows(group: dist.ProcessGroup) -> tuple[int, int]:
    """Bytes of the largest tensor in a visit of 2,000 rows by each rank, and those of all their rows."""
    case = Case([Soft(), Mlm()], rows=(2000, 2000, 2000)[: dist.get_world_size(group)], budget=1 << 16)
    part = case.part(group)
    return largest_allocation(lambda: case.loss(group, *part)), sum(case.counts) * TEACHER_WIDTH * 8


def frozen(group: dist.ProcessGroup) -> tuple[list[bool], bool]:
    """Which of rows, weight and bias get a gradient where rank 0 alone wants one, for its rows; whether losses agree
    with and without gradients."""
    case, rank = Case([Soft(), Mlm()]), dist.get_rank(group)
    student, *others = case.part(group)
    student.rows.requires_grad_(rank == 0)
    loss, _ = case.loss(group, student, *others)
    if rank == 0:
        loss.backward()
    with torch.no_grad():
        again, _ = case.loss(group, student, *others)
    return [each.grad is not None for each in student[:3] if each is not None], bool(again == loss)


def refusals(group: dist.ProcessGroup) -> list[str]:
    """What is said of slices that are too short, and of scales that differ."""
    messages = []
    with pytest.raises(ValueError) as error:
        Case([Mlm()], NONE, slices=(10, 10, 10)).run(group)
    messages.append(str(error.value))
    case = Case([Mlm()], NONE)
    part = case.part(group)
    case.scales *= dist.get_rank(group)
    with pytest.raises(ValueError) as error:
        case.loss(group, *part)
    return [*messages, str(error.value)]


# --- the ranks -------------------------------------------------------------------------------------------------------


def results(group: dist.ProcessGroup) -> dict[str, Any]:
    return {
        "failed": failed_cases(group),
        "largest": largest_of_many_rows(group),
        "frozen": frozen(group),
        "refusals": refusals(group),
        "pair": exchanges(group, [Soft(), Mlm()], LIVE),
        "top k": exchanges(group, [Soft(), Mlm()], TOP_K),
        "whole rows": exchanges(group, [Jsd(), Mlm()], LIVE),
    }


def in_a_rank() -> dict[int, dict[str, Any]]:
    """Results by the size of the group: of all three ranks, and of two of them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 2])
    found = {3: results(dist.group.WORLD)}
    if dist.get_rank() != 1:
        found[2] = results(pair)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def all_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, dict[str, Any]]]:
    return run_ranks(3, tmp_path_factory.mktemp("ranks"), in_a_rank)


@pytest.fixture(params=[2, 3])
def ranks(all_ranks: list[dict[int, dict[str, Any]]], request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Results by rank of the group."""
    return [found[request.param] for found in all_ranks if request.param in found]


def test_each_rank_gets_its_part_of_the_whole(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert not found["failed"], f"rank {rank}\n" + "\n".join(found["failed"])


def test_a_chunk_of_the_pair_takes_one_exchange(ranks: list[dict[str, Any]]) -> None:
    """Beside, once: the sizes, the rows of both heads, the targets, and the gradient of the rows."""
    for found in ranks:
        assert found["pair"] == [{"all_gather": 2, "all_to_all_single": 4}, {"all_gather": 2}]
        assert found["top k"] == [{"all_gather": 2, "all_to_all_single": 5}, {"all_gather": 2}]


def test_a_chunk_of_whole_rows_takes_one_for_each_head_the_gradient_and_the_losses(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        once, of_two_chunks = found["whole rows"]
        assert of_two_chunks == {"all_to_all_single": 6, "all_reduce": 2}
        assert once == {"all_gather": 1, "all_to_all_single": 4 + 2 + 3, "all_reduce": 1}, "and the biases, once"


def test_nothing_of_rows_by_vocabulary_is_made(ranks: list[dict[str, Any]]) -> None:
    """The rows themselves are the largest, though there are more columns in a slice than a row has numbers."""
    assert -(-VOCAB // 3) > TEACHER_WIDTH
    for found in ranks:
        largest, rows = found["largest"]
        assert largest <= rows


def test_only_what_is_wanted_gets_a_gradient(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert found["frozen"] == ([rank == 0, False, False], True)


def test_what_would_train_another_student_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        short, scaled = found["refusals"]
        assert short == f"slices of {[10] * len(ranks)} entries hold no vocabulary of 53"
        assert "scale their losses differently" in scaled


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
@pytest.mark.parametrize("teacher", [LIVE, pytest.param(TOP_K, marks=pytest.mark.slow)])
def test_compiled_gives_the_result_of_the_whole(teacher: str) -> None:
    """On one rank, which has one slice."""
    assert Compiled.works
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # falling back would be said by a warning
            for rows in (9, 20):
                Case([Soft(), Mlm()], teacher, rows=(rows,), budget=4 * CHUNKS, compiled=True).run(dist.group.WORLD)
    finally:
        dist.destroy_process_group()
