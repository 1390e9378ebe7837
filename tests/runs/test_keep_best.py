"""The best student: kept and published whatever ends or kills a run, the same on all ranks; and how long it waits."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job import Shelf, assert_alike, assert_same, distill, lines_of, results, whole_run

from distill.runs.checkpoint import Checkpoints
from distill.runs.facts import Best, HistoryPoint
from distill.runs.periodic_evaluation import PeriodicEvaluation
from distill.runs.record import Record
from distill.runs.run_folder import RunFolder

BY_STEPS = ("schedule=constant", "train.epochs=null", "evaluate.every_steps=2", "train.keep=1", "train.save_every=100")
EIGHT = (*BY_STEPS, "train.steps=8")


class Kill(BaseException):
    """Stands for a process that ends between two instructions."""


def near(center: float) -> list[str]:
    """Settings that make the best evaluation the one whose loss is nearest to a number."""
    return [f"evaluate.measures.near={{_target_: own_metrics.Near, center: {center}}}", "train.keep_best=heldout.near"]


@pytest.fixture(scope="module")
def short(shelf: Shelf) -> Path:
    """Four steps."""
    assert shelf.run(shelf.root / "best-short", *BY_STEPS, "train.steps=4") == 0
    return shelf.root / "best-short"


@pytest.fixture(scope="module")
def best(short: Path) -> list[str]:
    """Settings by which the student after four steps is the best."""
    return near(math.log(results(short)["student"]["perplexity"]["heldout"]))


@pytest.fixture(scope="module")
def kept(shelf: Shelf, best: list[str]) -> Path:
    """Eight steps, evaluated after 2, 4, 6 and 8, of which the second is the best."""
    assert shelf.run(shelf.root / "best", *EIGHT, *best) == 0
    return shelf.root / "best"


def test_the_best_is_published_and_described(kept: Path, short: Path) -> None:
    """As if the run had ended there."""
    found, other = results(kept), results(short)
    scores = [line["near"]["heldout"] for line in found["history"]]
    assert scores[1] == min(scores) < 1e-6
    assert found["best"] == {
        "measure": "near", "set": "heldout", "lower_is_better": True, "patience": None, "step": 4, "score": scores[1],
        "last_score": scores[3], "later": 2,
    }  # fmt: skip
    assert_same(kept, short)
    for measure in ("perplexity", "pseudo_perplexity"):
        assert found["student"][measure] == other["student"][measure]
    assert found["agreement"] == other["agreement"]
    assert found["training"]["steps"] == 8 and found["training"]["ended_by"] == "steps"
    assert sorted(path.name for path in (kept / "checkpoints").iterdir())[::2] == ["step-00000004", "step-00000008"]
    for page in ("report.md", "report.html", "student/README.md"):
        words = "The student after step 4 of 8 was kept, the best by near on heldout"
        assert words in (kept / page).read_text(), page
    assert "4, kept" in (kept / "report.md").read_text() and "6, kept" not in (kept / "report.md").read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("evaluate.max_sequences=4", "the set by which train.keep_best chooses has other sequences now"),
        ("evaluate.measures.near.center=0.5", "evaluate.measures.near was "),
        ("train.keep_best=null", "train.keep_best was heldout.near and is now None"),
    ],
)
def test_what_decides_the_best_stays(
    shelf: Shelf, kept: Path, best: list[str], change: str, words: str, capfd: pytest.CaptureFixture
) -> None:
    assert shelf.run(kept, *EIGHT, *best, change) == 2
    assert words in capfd.readouterr().err
    assert shelf.run(kept, *EIGHT, *best, "evaluate.batch_size=4") == 0


@pytest.mark.slow
def test_patience_ends_a_run_and_more_of_it_continues(shelf: Shelf, kept: Path, best: list[str]) -> None:
    """The best but one is the sixth step's, whose checkpoint a later loss has shown to be good."""
    folder = shelf.root / "patient"

    def run(patience: int) -> tuple[int, str, int]:
        assert shelf.run(folder, *EIGHT, *best, f"train.patience={patience}") == 0
        found = results(folder)
        return found["training"]["steps"], found["training"]["ended_by"], found["best"]["step"]

    for _ in range(2):
        assert run(1) == (6, "patience", 4)
        assert_same(folder, kept)
    assert run(3) == (8, "steps", 4)
    assert_same(folder, kept)
    # Where its checkpoint is damaged, the best of the others is taken.
    (folder / "results.json").unlink()
    shutil.copy(folder / "checkpoints/step-00000004/state.json", folder / "checkpoints/step-00000004/model.safetensors")
    assert run(3) == (8, "steps", 6) and (folder / "checkpoints" / "damaged-step-00000004").is_dir()


def killing(owner: Any, name: str, at: Callable[..., bool], before: bool) -> Any:
    """The method, which is a process's last where `at` is true of its arguments."""
    method = getattr(owner, name)

    def last(*arguments: Any) -> Any:
        if at(*arguments) and before:
            raise Kill
        result = method(*arguments)
        if at(*arguments):
            raise Kill
        return result

    return last


@pytest.mark.slow
def test_killed_at_every_point_around_an_evaluation(
    shelf: Shelf, kept: Path, best: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run, killed and resumed nine times, ends as one that was left alone."""
    folder, arguments = shelf.root / "best-killed", [*EIGHT, "train.patience=1", *best]

    def step(number: int) -> Callable[..., bool]:
        return lambda _, state, *rest: state.step == number

    def always(*_: Any) -> bool:
        return True

    places: list[tuple[Any, str, Callable[..., bool], bool]] = [
        (PeriodicEvaluation, "_line", step(4), True),
        (PeriodicEvaluation, "_line", step(4), False),
        (Checkpoints, "prune", step(6), True),
        (PeriodicEvaluation, "_line", step(6), True),
        (PeriodicEvaluation, "_line", step(6), False),
        (RunFolder, "load_best", always, True),
        (RunFolder, "load_best", always, False),
        (whole_run, "write_outputs", always, True),
        (RunFolder, "write_results", always, True),
    ]
    for owner, name, at, before in places:
        with monkeypatch.context() as patch, pytest.raises(Kill):
            patch.setattr(owner, name, killing(owner, name, at, before))
            shelf.run(folder, *arguments)
    assert shelf.run(folder, *arguments) == 0
    found = results(folder)
    assert [line["step"] for line in found["history"]] == [2, 4, 6]
    assert found["best"]["step"] == 4 and found["training"]["ended_by"] == "patience"
    assert found["student"]["near"] == results(kept)["student"]["near"]
    assert_same(folder, kept)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["train.keep_best=perplexty"], ["train.keep_best=perplexty", "did you mean", "heldout.perplexity"]),
        (["train.keep_best=training.seconds"], ["train.keep_best=training.seconds"]),
        (["train.keep_best=perplexity", "train.epochs=1"], ["only at its end", "evaluate.every_steps=N below"]),
        (["train.keep_best=perplexity", "evaluate.every_epoch=false"], ["only at its end"]),
        (["train.keep_best=perplexity", "evaluate.every_steps=8"], ["only at its end"]),
        (["train.keep_best=perplexity", "evaluate.sets=[]"], ["evaluate.sets=[]"]),
        (["train.patience=2"], ["train.patience=2", "set train.keep_best=perplexity"]),
    ],
)
def test_refused(settings: list[str], words: list[str], shelf: Shelf, capfd: pytest.CaptureFixture) -> None:
    assert shelf.run(shelf.root / "best-refused", *settings) == 2
    (line,) = lines_of(capfd)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("scores", "lower", "steps", "step", "later"),
    [
        ((3.0, 1.0, 2.0), True, None, 4, 1),
        ((3.0, 1.0, 2.0), False, None, 2, 2),
        ((2.0, 1.0, 1.0, 1.0), True, None, 4, 2),  # of equal ones the first
        ((2.0, None, None), True, None, 2, 2),  # what is not finite is no better
        ((None, None), True, None, None, 2),
        ((3.0, 1.0, 2.0), True, {2, 6}, 6, 0),  # without a checkpoint it cannot be published
        ((), True, None, None, 0),
    ],
)
def test_the_best_of_several(
    scores: tuple[float | None, ...], lower: bool, steps: set[int] | None, step: int | None, later: int
) -> None:
    points = [HistoryPoint(step=2 * n, m={"s": score}) for n, score in enumerate(scores, 1)]
    choice = Best(measure="m", data="s", lower_is_better=lower)
    found = choice.among(points, steps)
    assert (found.step, found.later, found.last_score) == (step, later, scores[-1] if scores else None)
    assert choice.among([*points, HistoryPoint(step=99, m={})], steps) == found
    lines = [
        {"step": point.step, "epoch": 1, "loss": {}, "m": {"s": score}}
        for point, score in zip(points, scores, strict=True)
    ]
    assert steps or Record(best=choice).with_history(lines).best == found, "as the live page has it"


@pytest.mark.slow
def test_beside_a_baseline_the_best_is_the_one_that_is_compared(shelf: Shelf) -> None:
    """The losses of each sequence that the last evaluation has left are those of another student."""
    base, folder, more = shelf.root / "best-base", shelf.root / "best-beside", (*BY_STEPS, "evaluate.max_sequences=16")
    settings = [
        each for each in shelf.arguments(base, *more, "train.steps=6") if not each.startswith(("+", "objective="))
    ]
    assert distill("+recipe=distilbert_gutenberg_baseline", *settings) == 0
    plain = shelf.root / "best-beside-plain"
    assert shelf.run(plain, *more, "train.steps=4") == 0
    score = results(plain)["student"]["perplexity"]["heldout"]
    assert shelf.run(folder, *more, "train.steps=6", *near(math.log(score)), f"evaluate.baseline={base}") == 0
    found = results(folder)
    assert found["best"]["step"] == 4 and found["student"]["perplexity"]["heldout"] == score
    drawn = found["baseline"]["conclusions"]["perplexity"]["heldout"]
    assert drawn["difference"] == pytest.approx(score / found["baseline"]["perplexity"]["heldout"], rel=1e-5)
    assert "train.keep_best was None and is now heldout.near" in (folder / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_on_two_ranks(backend: str, shelf: Shelf, kept: Path, best: list[str]) -> None:
    """Twice, as a run that was killed before its results; a sharded student comes from the parts of a checkpoint."""
    folder, ranks = shelf.root / f"best-{backend}", (f"backend={backend}", "backend.processes=2", "train.accumulate=1")
    for _ in range(2):
        shelf.run_alone(folder, *EIGHT, *best, "train.patience=2", *ranks)
        found = results(folder)
        assert (found["best"]["step"], found["training"]["steps"]) == (4, 8)
        assert found["training"]["ended_by"] == "steps"
        assert_alike(folder, kept)
        (folder / "results.json").unlink()  # as a kill before the last line of the run
