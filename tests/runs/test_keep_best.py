"""The best student: kept and published whatever ends or kills a run, the same on all ranks; and how long it waits."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job import ROOT, Shelf, assert_alike, assert_same, command, distill, results, whole_run

from distill.runs.checkpoint import Checkpoints
from distill.runs.facts import Best, HistoryPoint
from distill.runs.periodic_evaluation import PeriodicEvaluation
from distill.runs.record import Record
from distill.runs.run_folder import RunFolder

BY_STEPS = ("schedule=constant", "train.epochs=null", "evaluate.every_steps=2", "train.keep=1", "train.save_every=100")


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
def center(short: Path) -> float:
    """The loss after four steps."""
    return math.log(results(short)["student"]["perplexity"]["heldout"])


@pytest.fixture(scope="module")
def kept(shelf: Shelf, center: float) -> Path:
    """Eight steps, evaluated after 2, 4, 6 and 8, of which the second is the best."""
    assert shelf.run(shelf.root / "best", *BY_STEPS, "train.steps=8", *near(center)) == 0
    return shelf.root / "best"


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))


def test_the_best_is_published_and_described(kept: Path, short: Path) -> None:
    """As if the run had ended there."""
    content, other = results(kept), results(short)
    scores = [line["near"]["heldout"] for line in content["history"]]
    assert scores[1] == min(scores) < 1e-6
    assert content["best"] == {
        "measure": "near", "set": "heldout", "lower_is_better": True, "patience": None, "step": 4, "score": scores[1],
        "last_score": scores[3], "later": 2,
    }  # fmt: skip
    assert_same(kept, short)
    for measure in ("perplexity", "pseudo_perplexity"):
        assert content["student"][measure] == other["student"][measure]
    assert content["agreement"] == other["agreement"]
    assert content["training"]["steps"] == 8 and content["training"]["ended_by"] == "steps"
    assert saved(kept)[0] == 4 and saved(kept)[-1] == 8
    for page in ("report.md", "report.html", "student/README.md"):
        text = (kept / page).read_text()
        assert "The student after step 4 of 8 was kept, the best by near on heldout" in text, page
    report = (kept / "report.md").read_text()
    assert "4, kept" in report and "6, kept" not in report and "Dotted line: the student that was kept." in report


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("evaluate.max_sequences=4", "the set by which train.keep_best chooses has other sequences now"),
        ("evaluate.measures.near.center=0.5", "evaluate.measures.near was "),
        ("train.keep_best=null", "train.keep_best was heldout.near and is now None"),
    ],
)
def test_what_decides_the_best_stays(
    shelf: Shelf, kept: Path, center: float, change: str, words: str, capfd: pytest.CaptureFixture
) -> None:
    capfd.readouterr()
    assert shelf.run(kept, *BY_STEPS, "train.steps=8", *near(center), change) == 2
    assert words in capfd.readouterr().err
    assert shelf.run(kept, *BY_STEPS, "train.steps=8", *near(center), "evaluate.batch_size=4") == 0


@pytest.mark.slow
def test_patience_ends_a_run_and_more_of_it_continues(shelf: Shelf, kept: Path, center: float) -> None:
    """The best but one is the sixth step's, whose checkpoint a later loss has shown to be good."""
    folder, settings = shelf.root / "patient", [*BY_STEPS, "train.steps=8", *near(center)]
    assert shelf.run(folder, *settings, "train.patience=1") == 0
    content = results(folder)
    assert content["training"]["steps"] == 6 and content["training"]["ended_by"] == "patience"
    assert content["best"]["step"] == 4 and content["best"]["patience"] == 1
    assert_same(folder, kept)
    before = (folder / "results.json").read_bytes()
    assert shelf.run(folder, *settings, "train.patience=1") == 0
    assert (folder / "results.json").read_bytes() == before
    assert shelf.run(folder, *settings, "train.patience=3") == 0
    assert results(folder)["training"]["ended_by"] == "steps" and results(folder)["best"]["step"] == 4
    assert_same(folder, kept)
    # Where its checkpoint is damaged, the best of the others is taken.
    (folder / "results.json").unlink()
    shutil.copy(folder / "checkpoints/step-00000004/state.json", folder / "checkpoints/step-00000004/model.safetensors")
    assert shelf.run(folder, *settings, "train.patience=3") == 0
    assert results(folder)["best"]["step"] == 6 and (folder / "checkpoints" / "damaged-step-00000004").is_dir()
    assert "The student after step 6 of 8 was kept" in (folder / "report.md").read_text()


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
    shelf: Shelf, kept: Path, center: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run, killed and resumed nine times, ends as one that was left alone."""
    folder = shelf.root / "best-killed"
    arguments = [*BY_STEPS, "train.steps=8", "train.patience=1", *near(center)]

    def step(number: int) -> Callable[..., bool]:
        return lambda _, state, *rest: state.step == number

    places: list[tuple[Any, str, Callable[..., bool], bool]] = [
        (PeriodicEvaluation, "_line", step(4), True),
        (PeriodicEvaluation, "_line", step(4), False),
        (Checkpoints, "prune", step(6), True),
        (PeriodicEvaluation, "_line", step(6), True),
        (PeriodicEvaluation, "_line", step(6), False),
        (RunFolder, "load_best", lambda *_: True, True),
        (RunFolder, "load_best", lambda *_: True, False),
        (whole_run, "write_outputs", lambda *_: True, True),
        (RunFolder, "write_results", lambda *_: True, True),
    ]
    for owner, name, at, before in places:
        with monkeypatch.context() as patch, pytest.raises(Kill):
            patch.setattr(owner, name, killing(owner, name, at, before))
            shelf.run(folder, *arguments)
    assert shelf.run(folder, *arguments) == 0
    assert [line["step"] for line in results(folder)["history"]] == [2, 4, 6]
    assert results(folder)["best"]["step"] == 4 and results(folder)["training"]["ended_by"] == "patience"
    assert results(folder)["student"]["near"] == results(kept)["student"]["near"]
    assert_same(folder, kept)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["train.keep_best=perplexty"], ["train.keep_best=perplexty", "did you mean", "heldout.perplexity"]),
        (["train.keep_best=training.seconds"], ["train.keep_best=training.seconds", "choose one of"]),
        (["train.keep_best=perplexity", "train.epochs=1"], ["scored only at its end", "evaluate.every_steps=N below"]),
        (["train.keep_best=perplexity", "evaluate.every_epoch=false"], ["scored only at its end"]),
        (["train.keep_best=perplexity", "evaluate.every_steps=8"], ["scored only at its end"]),
        (["train.keep_best=perplexity", "evaluate.sets=[]"], ["evaluate.sets=[] has none"]),
        (["train.patience=2"], ["train.patience=2", "set train.keep_best=perplexity"]),
    ],
)
def test_refused(settings: list[str], words: list[str], shelf: Shelf, capfd: pytest.CaptureFixture) -> None:
    assert shelf.run(shelf.root / "best-refused", *settings) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert all(word in line for word in words), line


def points(*scores: float | None) -> list[HistoryPoint]:
    return [HistoryPoint(step=2 * n, m={"s": score}) for n, score in enumerate(scores, 1)]


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
    found = Best(measure="m", data="s", lower_is_better=lower).among(points(*scores), steps)
    assert (found.step, found.later, found.last_score) == (step, later, scores[-1] if scores else None)
    unscored = HistoryPoint(step=99, m={})
    assert Best(measure="m", data="s", lower_is_better=lower).among([*points(*scores), unscored], steps) == found


def test_the_live_page_has_the_best_so_far() -> None:
    lines = [{"step": 2 * n, "epoch": n, "loss": {}, "m": {"s": score}} for n, score in enumerate((3.0, 1.0, 2.0), 1)]
    expected = Best(measure="m", data="s", step=4, score=1.0, last_score=2.0, later=1)
    assert Record(best=Best(measure="m", data="s")).with_history(lines).best == expected
    assert Record().with_history(lines).best is None


@pytest.mark.slow
def test_beside_a_baseline_the_best_is_the_one_that_is_compared(shelf: Shelf, center: float) -> None:
    """The losses of each sequence that the last evaluation has left are those of another student."""
    base, folder, more = shelf.root / "best-base", shelf.root / "best-beside", (*BY_STEPS, "evaluate.max_sequences=16")
    settings = [
        each for each in shelf.arguments(base, *more, "train.steps=6") if not each.startswith(("+", "objective="))
    ]
    assert distill("+recipe=distilbert_gutenberg_baseline", *settings) == 0
    plain = shelf.root / "best-beside-plain"
    assert shelf.run(plain, *more, "train.steps=4") == 0
    nearest = near(math.log(results(plain)["student"]["perplexity"]["heldout"]))
    assert shelf.run(folder, *more, "train.steps=6", *nearest, f"evaluate.baseline={base}") == 0
    content = results(folder)
    score, other = (content[model]["perplexity"]["heldout"] for model in ("student", "baseline"))
    assert content["best"]["step"] == 4 and score == results(plain)["student"]["perplexity"]["heldout"]
    ratio = content["baseline"]["bootstrap"]["perplexity"]["heldout"]["ratio"]
    assert ratio == pytest.approx(score / other, rel=1e-5)
    assert "train.keep_best was None and is heldout.near here" in (folder / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_on_two_ranks(backend: str, shelf: Shelf, kept: Path, center: float) -> None:
    """Twice, as a run that was killed before its results; a sharded student comes from the parts of a checkpoint."""
    folder, ranks = shelf.root / f"best-{backend}", (f"backend={backend}", "backend.processes=2", "train.accumulate=1")
    settings = [*BY_STEPS, "train.steps=8", *near(center), "train.patience=2", *ranks]
    for _ in range(2):
        process = command(*shelf.arguments(folder, *settings), path=ROOT / "tests")
        _, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors
        content = results(folder)
        assert content["best"]["step"] == 4 and content["training"]["ended_by"] == "steps"
        assert content["training"]["steps"] == 8
        assert_alike(folder, kept)
        (folder / "results.json").unlink()  # as a kill before the last line of the run
