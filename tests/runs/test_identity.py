"""What must match to resume: the teacher's weights wherever they lie, and no setting that cannot change the student."""

import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from job import Shelf, assert_same, composed, metrics, results, save_ordered, whole_run
from safetensors.torch import load_file, save_file
from tiny import make_batches, make_rows

from distill.config.settings import Config
from distill.distributed.rank_identity import refuse_differing_ranks
from distill.evaluation.sets import EvaluationSet
from distill.models.kind import MASKED, ORDERED
from distill.models.load import load_pretrained
from distill.models.loaded import model_digest, saved_digest
from distill.runs.identity import refuse_other_settings, run_identity, set_digests
from distill.runtime.errors import SettingError

DIGESTS = {"teacher": "t", "student": None, "corpus": "c"}
COLLATOR: Any = None  # no batch is made


def identity(*overrides: str, steps: int = 100, ranks: int = 2, given: int | None = None) -> dict[str, Any]:
    sequences = 32 if given is None else given
    batches = make_batches(np.zeros((5000, 4)), COLLATOR, 16 // ranks, seed=0, size=ranks, sequences=sequences)
    return run_identity(config_of(*overrides), dict(DIGESTS), batches, steps)


@cache
def config_of(*overrides: str) -> Config:
    return composed("+recipe=distilbert_gutenberg", *overrides)


LEFT_OUT = [
    *("objective.kernel=fused", "teacher.micro_batches=4", "teacher.path=elsewhere", "teacher.cache.gigabytes=3"),
    *("data.cache=elsewhere", "data.local=elsewhere", "data.workers=1", "train.workers=0"),
    "corpus.path=elsewhere",  # its text stands there by its digest
    "train.batch_size=4",  # with the accumulation in it, by their product
    *("train.log_every=7", "train.save_every=7", "train.keep=7", "precision.kernels=plain", "precision.student=bf16"),
    *("backend.threads=1", "tracker=wandb", "evaluate.max_sequences=3", "resume=never"),
    "+objective.extra={kind: mlm, weight: 0}",
    "objective.soft.weight=5",  # as it is
]
COUNTED = [
    *("objective.temperature=3", "objective.soft.positions=all", "objective.mlm.weight=7"),
    *("+objective.extra={kind: mlm, weight: 1}", "objective.masking.mlm_probability=0.2", "student.dropout=0.3"),
    *("student.layers=[1,3]", "optimizer.lr=1", "optimizer=lamb", "optimizer.clip_each_rank=true", "schedule=cosine"),
    *("schedule.floor=0.1", "schedule=polynomial", "schedule.warmup_steps=10", "schedule.end_lr=1e-5"),
    *("+optimizer._target_=my_optimizers.Lion", "+schedule._target_=my_schedules.Triangle"),
    *("objective.soft.weight={start: 5.0, end: 5.0}", "objective.temperature={start: 2.0, end: 1.0}"),
    *("train.epochs=77", "seed=1", "teacher.cache.top_k=4", "teacher.cache.sampled=4"),
]


@pytest.mark.parametrize("override", [*LEFT_OUT, *COUNTED])
def test_what_can_change_the_student_is_in_and_nothing_else(override: str) -> None:
    assert (identity(override) != identity()) == (override in COUNTED)


def test_the_rows_of_a_step_count_however_they_are_given() -> None:
    assert identity("train.sequences_per_step=32", ranks=3, given=32) == identity(ranks=2) == identity(ranks=4)
    assert identity("train.sequences_per_step=33", ranks=3, given=33) != identity(ranks=2)
    assert identity("optimizer.scale_lr=sqrt", "optimizer.base_batch=64") != identity()
    clipping = "optimizer.clip_each_rank=true"
    assert identity(clipping, ranks=2) != identity(clipping, ranks=4)


@pytest.mark.parametrize(
    ("settings", "is_open"),
    [
        (("schedule.warmup=0",), True),
        (("schedule.warmup=0.1",), False),  # rises over a share of the run: another length, another rise
        (("schedule.warmup=0", "schedule.warmup_steps=3"), True),
        (("schedule.warmup=0", "objective.soft.weight={start: 0.0, end: 0.0}"), True),  # no weight, no schedule
        (("schedule.warmup=0", "objective.soft.weight={start: 5.0, end: 1.0}"), False),
        (("schedule.warmup=0", "objective.temperature={start: 4.0, end: 1.0}"), False),
        (("schedule.warmup=0", "+schedule._target_=my_schedules.Triangle"), False),  # whatever stands beside it
    ],
)
def test_with_a_constant_schedule_the_length_is_left_out(settings: tuple[str, ...], is_open: bool) -> None:
    before, now = (
        identity("schedule=constant", *settings, f"train.epochs={epochs}", steps=10 * epochs) for epochs in (3, 5)
    )
    assert (before == now) == is_open
    if not is_open:
        with pytest.raises(SettingError, match=r"was 3\S* and is now 5"):
            refuse_other_settings(before, now, "hydra.run.dir=x")


def test_the_cure_for_another_length_is_a_constant_schedule_or_another_run() -> None:
    with pytest.raises(SettingError, match=r"train\.epochs was 3 and is now 5.* made for one length \(schedule=cons"):
        refuse_other_settings({"train.epochs": 3}, {"train.epochs": 5}, "hydra.run.dir=x")


# --- as a user meets it


def refused(capfd: pytest.CaptureFixture, *words: str) -> None:
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert len(lines) == 1 and all(word in lines[0] for word in words), lines


def test_a_teacher_that_moved_is_the_same_and_one_retrained_in_place_is_another(
    shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    folder, length = tmp_path / "run", "train.steps=2"
    teacher = Path(shutil.copytree(shelf.teacher / "student", tmp_path / "teacher"))
    assert shelf.run(folder, f"teacher.path={teacher}", length) == 0
    moved = teacher.rename(tmp_path / "moved")
    capfd.readouterr()
    assert shelf.run(folder, f"teacher.path={moved}", length) == 0
    assert "finished" in capfd.readouterr().err
    weights = load_file(moved / "model.safetensors")
    weights["bert.encoder.layer.0.attention.self.query.bias"] += 1e-3
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    assert shelf.run(folder, f"teacher.path={moved}", length) == 2  # finished, but with another teacher
    refused(capfd, "the teacher has other weights", str(folder), "hydra.run.dir=DIR")
    (folder / "results.json").unlink()
    assert shelf.run(folder, f"teacher.path={moved}", length) == 2  # the checkpoint is that of another teacher
    refused(capfd, "the teacher has other weights")


def test_a_finished_run_is_continued_where_the_schedule_allows(shelf: Shelf, tmp_path: Path) -> None:
    constant = ("schedule=constant", "schedule.warmup=0", "student.dropout=0.1")
    assert shelf.run(tmp_path / "once", *constant, "train.epochs=3") == 0
    assert shelf.run(tmp_path / "twice", *constant, "train.epochs=1") == 0
    assert shelf.run(tmp_path / "twice", *constant, "train.epochs=3") == 0
    assert_same(tmp_path / "once", tmp_path / "twice")
    losses = [[line["loss/total"] for line in metrics(tmp_path / name)] for name in ("once", "twice")]
    assert losses[0] == losses[1] and len(losses[0]) == 12
    assert [line["epoch"] for line in results(tmp_path / "twice")["history"]] == [1.0, 2.0, 3.0]


def test_the_kept_digest_of_a_folder_is_that_of_the_model_that_it_was_read_as(tmp_path: Path) -> None:
    """A folder with two heads is another teacher where one of them is left out."""
    folder = save_ordered(tmp_path / "both")
    cache = str(tmp_path / "cache")
    models = [load_pretrained("teacher.path", str(folder), kind) for kind in (ORDERED, MASKED)]
    digests = [saved_digest(str(folder), model, None, cache) for model in models]
    assert digests == [model_digest(model) for model in models] and digests[0] != digests[1]


def test_a_rank_with_another_evaluation_set_is_refused_by_its_name() -> None:
    def digests(seed: int) -> dict[str, Any]:
        sets = {"imdb": make_rows(2), "books": make_rows(3, seed=seed)}
        return set_digests([EvaluationSet(name, "", rows, 1) for name, rows in sets.items()])

    ranks: Any = SimpleNamespace(size=2, barrier=lambda: None, gather=lambda own: [own, digests(4)])
    refuse_differing_ranks(digests(4), ranks)
    with pytest.raises(SettingError, match=r"^rank 1 would .*: evaluate\.sets: books is \w+") as error:
        refuse_differing_ranks(digests(3), ranks)
    assert "imdb" not in str(error.value)


def test_ranks_compare_their_evaluation_sets_before_they_train(
    shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(identity: dict[str, Any], ranks: Any) -> None:
        raise SettingError(f"compared: {', '.join(identity)}")

    monkeypatch.setattr(whole_run, "refuse_differing_ranks", refuse)
    assert shelf.run(tmp_path / "run") == 2
    refused(capfd, "compared: evaluate.sets: heldout")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
