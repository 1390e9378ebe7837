"""Which run may stand beside a student as its baseline without a teacher, and what is said of one that may not."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job import built, hydra_set_up
from tiny import make_batches

from distill.config.settings import Config
from distill.objective.build import make_terms
from distill.report.summary import against_baseline, setting
from distill.runs.baseline import (
    advice,
    check_baseline,
    find_baseline,
)
from distill.runs.check import check
from distill.runs.facts import Model, Start, Student
from distill.runs.identity import run_identity
from distill.runs.record import INHERITED, Record
from distill.runs.results_file import write_results
from distill.runtime.errors import SettingError

MAIN, BASELINE = "+recipe=distilbert_gutenberg", "+recipe=distilbert_gutenberg_baseline"
DIGESTS = {"teacher": "t", "student": None, "corpus": "c"}
NO_COLLATOR: Any = None  # no batch is made


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    """Hydra set up once for all: that takes longer than to compose."""
    with hydra_set_up():
        yield


@cache
def composed(*overrides: str) -> Config:
    return built(*overrides)


def identity(*overrides: str, rows: int = 5000, **digests: Any) -> dict[str, Any]:
    config = composed(*overrides)
    size = config.train.sequences(1)
    batches = make_batches(np.zeros((rows, 4)), NO_COLLATOR, size, seed=config.seed, sequences=size)
    return run_identity(config, DIGESTS | digests, batches, 625)


def finished(identity: dict[str, Any], terms: str = "mlm", steps: int = 625, teacher: Any = None) -> Record:
    """The record of a run, as far as it is looked at."""
    named = {name: {"weight": 1.0} for name in terms.split()}
    training, objective = {"steps": steps}, {"terms": named}
    return Record.from_json({"identity": identity, "teacher": teacher, "objective": objective, "training": training})


def checked(baseline: Record, *overrides: str, **digests: Any) -> list[str]:
    """The remarks on a baseline of the main job with these settings."""
    config = composed(MAIN, "evaluate.baseline=runs/x", *overrides)
    own = identity(MAIN, *overrides, **digests)
    return check_baseline(config, baseline, own, 625, make_terms(config.objective))


def refused(baseline: Record, *overrides: str, **digests: Any) -> str:
    with pytest.raises(SettingError) as error:
        checked(baseline, *overrides, **digests)
    text = str(error.value)
    assert text.startswith("evaluate.baseline=runs/x is no baseline of this run: ") and "\n" not in text
    assert "objective=mlm in another folder" in text
    return text


def test_the_recipes_baseline_is_one() -> None:
    assert checked(finished(identity(BASELINE))) == []
    assert checked(finished(identity(BASELINE)), "objective.temperature=4", "objective.soft.positions=all") == []


def test_a_run_that_had_a_teacher_is_none() -> None:
    baseline = finished(identity(MAIN), "soft mlm cosine", teacher={"name": "the bundled teacher"})
    assert "it learned from a teacher (soft, mlm, cosine)" in refused(baseline)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("seed=1",), "its seed is 1, and here 0"),
        (("train.sequences_per_step=16",), "its sequences a step are 16, and here 8"),
        (("student.dropout=0.1",), "student.dropout was 0.1 and is 0.0 here"),
        (("student.frozen=[embeddings]",), "student.frozen was ['embeddings'] and is [] here"),
        (("student=bert",), "student.config.hidden_size was 192 and is None here"),
    ],
)
def test_one_of_other_settings_is_none(overrides: tuple[str, ...], words: str) -> None:
    assert words in refused(finished(identity(BASELINE, *overrides)))


def test_one_of_another_text_start_or_length_is_none() -> None:
    assert "its text is different" in refused(finished(identity(BASELINE, corpus="other")))
    assert "its number of sequences is 60, and here 5000" in refused(finished(identity(BASELINE, rows=60)))
    assert "its student started from other weights" in refused(finished(identity(BASELINE, teacher="retrained")))
    assert "it took 100 steps, and this run takes 625" in refused(finished(identity(BASELINE), steps=100))
    saved = ("student=pretrained", "student.path=x")
    assert checked(finished(identity(BASELINE, *saved, student="s")), *saved, student="s", teacher="any") == []
    assert "other weights" in refused(finished(identity(BASELINE, *saved, student="s")), *saved, student="t")


def test_several_teachers_give_the_start_by_the_first() -> None:
    several = ("teacher=several", "+teacher.members.a={path: x}", "+teacher.members.b={path: y}")
    digests = {"teacher": None, "teacher.members.a": "t", "teacher.members.b": "u"}
    own = identity(MAIN, *several, **digests)
    config = composed(MAIN, *several, "evaluate.baseline=runs/x")
    terms = make_terms(config.objective)
    for found, fits in (("t", True), ("u", False)):  # the baseline has that teacher alone
        baseline = finished(identity(BASELINE, "teacher=pretrained", "teacher.path=x", teacher=found))
        if fits:
            assert check_baseline(config, baseline, own, 625, terms) == []
        else:
            with pytest.raises(SettingError, match="other weights"):
                check_baseline(config, baseline, own, 625, terms)


def test_a_run_against_the_clock_may_take_any_steps() -> None:
    clock = ("train.epochs=null", "train.minutes=5")
    assert checked(finished(identity(BASELINE, *clock), steps=100), *clock) == []
    patient = ("train.keep_best=perplexity", "train.patience=2")
    assert checked(finished(identity(BASELINE, *patient), steps=100), *patient) == []


def test_what_else_differs_is_said() -> None:
    (line,) = checked(finished(identity(BASELINE, "optimizer.weight_decay=0.1")))
    assert line == "The baseline differs in more than its teacher: optimizer.weight_decay was 0.1 and is 0.01 here."
    (line,) = checked(finished(identity(BASELINE, "objective.masking.mlm_probability=0.15")))
    assert "objective.masking.mlm_probability was 0.15 and is 0.3 here" in line
    (line,) = checked(finished(identity(BASELINE), terms="mlm sop"))
    assert "it learned from mlm, sop, this student from mlm besides its teacher" in line


LABELS = {"objective.task": "classes", "student.init": "layers", "corpus.digest": "c"}


@pytest.mark.parametrize(("task", "init", "fair"), [("classes", "layers", False), ("spans", "layers", False),
    ("classes", "pretrained", True), ("mlm", "layers", True)])  # fmt: skip
def test_layers_of_a_fine_tuned_teacher_make_no_fair_baseline(task: str, init: str, fair: bool, tmp_path: Path) -> None:
    """It begins with what the teacher knows of the task: numbers without a verdict, and a warning in the conclusion."""
    kept = {**LABELS, "objective.task": task, "student.init": init}
    config = composed(MAIN, "evaluate.baseline=runs/x")
    remarks = check_baseline(config, finished(kept, task), kept, 625, make_terms(config.objective))
    assert (INHERITED in remarks) != fair
    start = {"init": init, "from": "MODEL", "layers": [0, 1]}
    content = {
        "recipe": "table",
        "command": "python -m distill +recipe=table corpus.path=a teacher.path=t student=layers student.layers=[0,1] "
        f"objective=distil_{task} objective.hidden_mse.weight=1 hydra.run.dir=r",
        "identity": kept,
        "measures": {"accuracy": {"title": "Accuracy", "lower_is_better": False}},
        "teacher": {"name": "t", "accuracy": {"dev": 80.0}},
        "student": {"name": "s", "start": start, "accuracy": {"dev": 76.3}},
        "training": {"steps": 9},
    }
    baseline = {"name": "s", "steps": 9, "accuracy": {"dev": 75.3}, "remarks": remarks}
    words = against_baseline(Record.from_json({**content, "baseline": baseline}))
    assert (INHERITED in words) != fair and "Learning from the teacher" not in words
    alone = Record.from_json({**content, "teacher": None})
    assert ("fine-tuned for this task" in setting(alone)) != fair
    assert advice(alone, tmp_path) == advice(Record.from_json({**content, "baseline": baseline}), tmp_path) == ""
    command, again = re.findall("`(.*?)`", advice(Record.from_json(content), Path("runs/r")))
    own = [] if fair else ["student=pretrained", "student.path=MODEL"]
    of_layers = ["student=layers", "student.layers=[0,1]"] if fair else []
    words = ["python", "-m", "distill", "+recipe=table", "corpus.path=a", "teacher.path=t", *of_layers, *own]
    assert shlex.split(command) == [*words, f"objective={task}", "hydra.run.dir=runs/r_baseline"]
    assert shlex.split(again) == [
        *own, "evaluate.baseline=runs/r_baseline", "hydra.run.dir=runs/r_beside_baseline"
    ]  # fmt: skip


def test_a_learning_rate_of_its_own_is_fair(tmp_path: Path) -> None:
    """It is kept for the report, and no remark: each of the two learns best at another one."""
    config, own = composed(MAIN, f"evaluate.baseline={tmp_path}"), identity(MAIN)
    for rate, kept in (("2e-3", 2e-3), ("1e-3", None)):
        record = finished(identity(BASELINE, f"optimizer.lr={rate}"))
        write_results(tmp_path / "results.json", record)
        found = find_baseline(config, own, 625, make_terms(config.objective))
        assert found is not None and found.remarks == []
        assert found.beside(Model(), None, {}, {}).learning_rate == kept


def test_a_choice_of_the_best_is_no_teacher() -> None:
    (line,) = checked(finished(identity(BASELINE)), "train.keep_best=perplexity")
    assert "train.keep_best was None and is perplexity here" in line


def test_another_number_format_is_said() -> None:
    """So that no verdict is given."""
    baseline = finished(identity(BASELINE)).changed(precision={"student": "fp32", "teacher": "bf16"})
    assert checked(baseline, "precision=fp32") == [] and checked(finished(identity(BASELINE)), "precision=bf16") == []
    assert checked(baseline, "precision=bf16") == [
        "The baseline was trained in another number format: precision.student was fp32 and is bf16 here."
    ]


def test_layers_that_were_found_are_compared_once_they_are_known() -> None:
    """Both may have been searched for, or one of them given: the numbers count."""
    for layers in ("auto", "[0,2]"):
        assert checked(finished(identity(BASELINE, f"student.layers={layers}"))) == []
    given = finished(identity(BASELINE, "student.layers=[0,2]"))
    assert "student.layers was [0, 2] and is [0, 1] here" in refused(given, "student.layers=[0,1]")
    searched = identity(BASELINE, "student.layers=auto", "student.num_layers=2")
    for layers, fits in (([0, 1], True), ([0, 2], False)):
        record = finished(searched).changed(student=Student(start=Start(layers=layers)))
        if fits:
            assert checked(record, "student.layers=[0,1]") == []
        else:
            assert "student started from layers [0, 2], and this one starts from [0, 1]" in refused(
                record, "student.layers=[0,1]"
            )


def test_other_code_is_remarked_and_other_frozen_parameters_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    part = "+optimizer._target_=part_of_both.Part"
    (tmp_path / "part_of_both.py").write_text("class Part:\n    x = 1\n")
    baseline = finished(identity(BASELINE, part))
    assert not [line for line in checked(baseline, part) if "the code" in line]
    (tmp_path / "part_of_both.py").write_text("class Part:\n    x = 2\n")
    assert [line for line in checked(baseline, part) if "the code of optimizer was different" in line]
    frozen = finished(identity(BASELINE, **{"student.frozen": "a"}))
    assert "other parameters of its student were frozen" in refused(frozen, **{"student.frozen": "b"})


def test_results_that_do_not_say_what_the_baseline_had_are_none() -> None:
    """A setting of the student that one of two releases does not have is not compared."""
    known = {
        name: value for name, value in identity(BASELINE).items() if name not in ("corpus.digest", "student.num_layers")
    }
    assert "no baseline of this run: its text is different; name a run" in refused(finished(known))
    text = refused(Record())
    assert "its number of sequences is None, and here 5000" in text and " and 2 more" in text


def test_a_run_without_a_teacher_needs_no_baseline(tmp_path: Path) -> None:
    config = composed(BASELINE, f"evaluate.baseline={tmp_path}")
    with pytest.raises(SettingError, match="no term of this objective learns from a teacher"):
        check(config)
    with pytest.raises(SettingError, match=f"evaluate.baseline={tmp_path} is no finished run"):
        check(composed(MAIN, f"evaluate.baseline={tmp_path}"))
