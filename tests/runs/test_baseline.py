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
from distill.report.summary import setting
from distill.runs.baseline import advice, check_baseline, doubt, find_baseline
from distill.runs.check import check
from distill.runs.facts import Baseline, Refit, Start, Student
from distill.runs.identity import run_identity
from distill.runs.record import Record
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


def of(*overrides: str, **digests: Any) -> Record:
    """A finished baseline of these settings."""
    return finished(identity(BASELINE, *overrides, **digests))


def checked(baseline: Record, *overrides: str, **digests: Any) -> list[str]:
    """The remarks on a baseline of the main job with these settings."""
    config = composed(MAIN, "evaluate.baseline=runs/x", *overrides)
    own = identity(MAIN, *overrides, **digests)
    return check_baseline(config, baseline, own, 625, make_terms(config.objective))


def refused(baseline: Record, *overrides: str, **digests: Any) -> str:
    with pytest.raises(SettingError, match=r"^evaluate.baseline=runs/x is no baseline of this run: ") as error:
        checked(baseline, *overrides, **digests)
    return str(error.value)


SAVED = ("student=pretrained", "student.path=x")
CLOCK = ("train.epochs=null", "train.minutes=5")
PATIENT = ("train.keep_best=perplexity", "train.patience=2")


def test_a_run_of_the_same_settings_without_a_teacher_is_one() -> None:
    assert checked(of()) == checked(of(), "objective.temperature=4", "precision=bf16") == []
    for ends in (CLOCK, PATIENT):
        assert checked(finished(identity(BASELINE, *ends), steps=100), *ends) == [], "it may take any steps"
    assert checked(of(*SAVED, student="s"), *SAVED, student="s", teacher="any") == []


@pytest.mark.parametrize(
    ("baseline", "words"),
    [
        (("seed=1",), "seed was 1 and is now 0"),
        (("train.sequences_per_step=16",), "sequences_per_step was 16 and is now 8"),
        (("student.dropout=0.1",), "student.dropout was 0.1 and is now 0.0"),
        (("student.frozen=[embeddings]",), "frozen was ['embeddings'] and is now []"),
        (("student=bert",), "student.config.hidden_size was 192 and is now None"),
        (("student.layers=[0,2]",), "student.layers was [0, 2] and is now [0, 1]"),
        ({"corpus": "other"}, "the corpus has another text now"),
        ({"rows": 60}, "corpus.num_sequences was 60 and is now 5000"),
        ({"teacher": "retrained"}, "the student starts from other weights now"),
    ],
    ids=str,
)
def test_a_baseline_of_other_settings_is_none(baseline: Any, words: str) -> None:
    record = of(**baseline) if isinstance(baseline, dict) else of(*baseline)
    assert words in refused(record, "student.layers=[0,1]")


def test_any_other_run_is_none() -> None:
    assert "it took 100 steps, and this run takes 625" in refused(finished(identity(BASELINE), steps=100))
    with_teacher = finished(identity(MAIN), "soft mlm", teacher={"name": "t"})
    assert "learned from a teacher (soft, mlm)" in refused(with_teacher)
    assert re.search(r"corpus.num_sequences was None and is now 5000.* and \d more; name a run", refused(Record()))


def test_what_a_student_starts_from_is_compared() -> None:
    assert "other weights" in refused(of(*SAVED, student="s"), *SAVED, student="t")
    frozen = of(**{"student.frozen": "a"})
    assert "other parameters of the student are frozen now" in refused(frozen, **{"student.frozen": "b"})
    several = ("teacher=several", "+teacher.members.a={path: x}", "+teacher.members.b={path: y}")
    digests = {"teacher": None, "teacher.members.a": "t", "teacher.members.b": "u"}  # it starts from the first
    of_one = {name: of("teacher=pretrained", "teacher.path=x", teacher=name) for name in "tu"}
    assert checked(of_one["t"], *several, **digests) == []
    assert "other weights" in refused(of_one["u"], *several, **digests)


@pytest.mark.parametrize(
    ("own", "baseline", "remark"),
    [
        ((), ("optimizer.weight_decay=0.1",), "optimizer.weight_decay was 0.1 and is now 0.01"),
        ((), ("objective.masking.mlm_probability=0.15",), "mlm_probability was 0.15 and is now 0.3"),
        (("train.keep_best=perplexity",), (), "train.keep_best was None and is now perplexity"),
    ],
)
def test_what_may_differ_is_remarked(own: tuple[str, ...], baseline: tuple[str, ...], remark: str) -> None:
    (line,) = checked(of(*baseline), *own)
    assert remark in line


def test_a_refit_is_a_part_of_what_the_teacher_is_worth() -> None:
    assert checked(of(), "student.refit=true") == []
    refitted = of("student.refit=true").changed(student=Student(start=Start(refit=Refit(tokens=5))))
    for own in ("true", "false"):
        remarks = checked(refitted, f"student.refit={own}")
        seen = doubt(Baseline(remarks=remarks, steps=625), Student(), 625)
        assert seen == "the baseline has seen the teacher, to which its start was fitted"


def test_as_many_minutes_may_be_other_steps(tmp_path: Path) -> None:
    limits = ["train.epochs=null", "train.minutes=10"]
    config, own = composed(MAIN, *limits, f"evaluate.baseline={tmp_path}"), identity(MAIN, *limits)

    def found(minutes: float, *settings: str) -> Baseline | None:
        record = of(*limits, *settings)
        length = config.train.length | {"minutes": minutes}
        write_results(tmp_path / "results.json", record.changed(training=record.training.changed(length=length)))
        return find_baseline(config, own, 625, make_terms(config.objective))

    for minutes, fair in ((10.0, True), (9.0, False)):
        baseline = found(minutes)
        assert baseline is not None and (doubt(baseline.changed(steps=900), Student(), 600) == "") is fair
    larger = found(10.0, "train.sequences_per_step=16")
    assert larger is not None and (larger.remarks, larger.sequences_per_step) == ([], 16)
    with pytest.raises(SettingError, match="sequences_per_step was 16 and is now 8"):
        found(9.0, "train.sequences_per_step=16")


def test_the_command_of_a_baseline_has_no_refit_and_no_cache_of_its_recipe() -> None:
    content = {
        "command": "python -m distill +recipe=distil_scarce student.refit=auto +objective.hidden_mse.weight=1 "
        "++objective.soft.weight=5.0",
        "identity": {"objective.task": "clm"},
        "teacher": {"name": "t", "cache": {"hidden_states": 576}},
        "student": {"start": {"init": "layers", "refit": {"tokens": 5}}},
    }
    command = re.findall("`(.*?)`", advice(Record.from_json(content), Path("r")))[0]
    words = ["student.refit=false", "teacher.cache.hidden_states=false", "objective=clm", "hydra.run.dir=r_baseline"]
    assert shlex.split(command)[3:] == ["+recipe=distil_scarce", *words]


def test_labels_formats_and_code_that_differ_are_remarked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = checked(finished(identity(BASELINE), terms="mlm sop"))
    assert "it learned from mlm, sop, this student from mlm besides its teacher" in line
    in_fp32 = of().changed(precision={"student": "fp32", "teacher": "bf16"})
    assert checked(in_fp32, "precision=fp32") == []
    (line,) = checked(in_fp32, "precision=bf16")
    assert "precision.student was fp32 and is bf16 here" in line
    monkeypatch.syspath_prepend(str(tmp_path))
    part = "+optimizer._target_=part_of_both.Part"
    (tmp_path / "part_of_both.py").write_text("class Part:\n    x = 1\n")
    baseline = of(part)
    assert not [line for line in checked(baseline, part) if "the code" in line]
    (tmp_path / "part_of_both.py").write_text("class Part:\n    x = 2\n")
    assert [line for line in checked(baseline, part) if "the code or the arguments of part_of_both.Part have" in line]


def test_layers_that_were_found_are_compared_once_they_are_known() -> None:
    """Both may have been searched for, or one of them given: the numbers count."""
    for layers in ("auto", "[0,2]"):
        assert checked(of(f"student.layers={layers}")) == []
    searched = of("student.layers=auto", "student.num_layers=2")
    found = {layers: searched.changed(student=Student(start=Start(layers=[*layers]))) for layers in ((0, 1), (0, 2))}
    assert checked(found[0, 1], "student.layers=[0,1]") == []
    words = "student started from layers [0, 2], and this one starts from [0, 1]"
    assert words in refused(found[0, 2], "student.layers=[0,1]")


@pytest.mark.parametrize(("task", "init", "fair"), [("classes", "layers", False), ("spans", "layers", False),
    ("classes", "pretrained", True), ("mlm", "layers", True)])  # fmt: skip
def test_a_baseline_of_layers_of_a_fine_tuned_teacher_has_seen_it(task: str, init: str, fair: bool) -> None:
    """Then all is unclear, whatever the numbers, and the advice is another one."""
    kept = {"corpus.digest": "c", "objective.task": task, "student.init": init, "teacher.digest": "tuned"}
    config = composed(MAIN, "evaluate.baseline=runs/x")
    terms = make_terms(config.objective)
    remarks = check_baseline(config, finished(kept), kept, 625, terms)
    seen = doubt(Baseline(remarks=remarks, steps=625), Student(), 625)
    assert seen == ("" if fair else "the baseline has seen the teacher, from whose layers it started")
    before = finished(kept | {"teacher.digest": "before"})
    before = before.changed(student=Student(start=Start(layers=[0, 1], new_head=True)))
    if not fair:  # the layers of the same model before it was fine-tuned
        assert check_baseline(config, before, kept, 625, terms) == []
    line = "python -m distill +recipe=table corpus.path=a student=layers"
    own = [] if fair else ["student.num_layers=2", "teacher=pretrained", "teacher.path=t"]
    content = {
        "recipe": "table",
        "command": f"{line} {' '.join(own)} objective=distil_{task} objective.hidden_mse.weight=1 hydra.run.dir=r",
        "identity": kept | {"student.layers": "auto"},
        "teacher": {"name": "t"},
        "student": {"start": {"init": init, "from": "MODEL", "layers": [0, 1]}},
    }
    alone = Record.from_json({**content, "teacher": None})
    assert ("fine-tuned for this task" in setting(alone)) != fair
    assert advice(alone, Path("r")) == advice(Record.from_json({**content, "baseline": {}}), Path("r")) == ""
    command, again = re.findall("`(.*?)`", advice(Record.from_json(content), Path("runs/r")))
    own = [] if fair else ["teacher=pretrained", "teacher.path=MODEL", "student.layers=[0,1]"]
    assert shlex.split(command) == [*shlex.split(line), *own, f"objective={task}", "hydra.run.dir=runs/r_baseline"]
    assert shlex.split(again) == ["evaluate.baseline=runs/r_baseline", "hydra.run.dir=runs/r_beside_baseline"]


def test_a_baseline_of_other_size_or_steps_leaves_it_unclear() -> None:
    baseline, student = Baseline(steps=625, parameters=2000), Student(parameters=2000)
    assert doubt(baseline, student, 625) == ""
    assert doubt(baseline, student, 1200) == "the baseline took 625 steps and the student 1,200"
    assert doubt(baseline, Student(parameters=1000), 625) == "the baseline has 2,000 parameters and the student 1,000"
    remarks = ["The baseline was trained in another number format."]
    assert doubt(baseline.changed(remarks=remarks), student, 625) == "the baseline differs in more than its teacher"


def test_a_learning_rate_of_its_own_is_fair(tmp_path: Path) -> None:
    """It is kept for the report, and no remark: each of the two learns best at another one."""
    config, own = composed(MAIN, f"evaluate.baseline={tmp_path}"), identity(MAIN)
    for rate, kept in (("2e-3", 2e-3), ("1e-3", None)):
        write_results(tmp_path / "results.json", of(f"optimizer.lr={rate}"))
        found = find_baseline(config, own, 625, make_terms(config.objective))
        assert found is not None and (found.remarks, found.learning_rate) == ([], kept)
        assert (found.folder, found.steps, [*found.objective.terms]) == (str(tmp_path), 625, ["mlm"])


def test_a_run_without_a_teacher_needs_no_baseline(tmp_path: Path) -> None:
    for recipe, words in ((BASELINE, "no term of this objective learns from a teacher"), (MAIN, "is no finished run")):
        with pytest.raises(SettingError, match=words):
            check(composed(recipe, f"evaluate.baseline={tmp_path}"))
