"""What must match to resume or to call a run finished: weights, code, and every setting that can change the student."""

import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from job import Shelf, assert_same, composed, distill, lines_of, metrics, results, save_ordered, whole_run
from safetensors.torch import load_file, save_file
from tiny import make_batches, make_rows

from distill.config.settings import Config, DataConfig, SourceConfig
from distill.data.sources import find_source
from distill.data.tokens import Text, key_of
from distill.distributed.rank_identity import refuse_differing_ranks
from distill.evaluation.sets import EvaluationSet
from distill.models.kind import MASKED, ORDERED
from distill.models.load import load_pretrained
from distill.models.loaded import model_digest, saved_digest
from distill.runs.identity import refuse_other_settings, run_identity, set_digests
from distill.runtime.errors import SettingError
from distill.teacher.members import settings_by_member

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
    "teacher.cache.hidden_states=true",  # which rounds, as a number format does
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


def test_a_run_from_before_a_setting_goes_on_where_that_does_nothing() -> None:
    newer = ("student.refit", "student.intermediate_size", "objective.on_")
    before = {name: value for name, value in identity().items() if not name.startswith(newer)}
    refuse_other_settings(before, identity(), "resume=RUN")
    with pytest.raises(SettingError, match=r"student\.refit was None and is now True"):
        refuse_other_settings(before, identity("student.refit=true"), "resume=RUN")


def test_what_counts_only_with_something_else() -> None:
    assert identity("train.sequences_per_step=32", ranks=3, given=32) == identity(ranks=2) == identity(ranks=4)
    assert identity("train.sequences_per_step=33", ranks=3, given=33) != identity(ranks=2)
    assert identity("optimizer.scale_lr=sqrt", "optimizer.base_batch=64") != identity()
    clipping, drawn = "optimizer.clip_each_rank=true", "teacher.cache.sampled=4"
    assert identity(clipping, ranks=2) != identity(clipping, ranks=4)
    assert identity(drawn, "teacher.cache.seed=1") != identity(drawn)


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
    before, now = (identity("schedule=constant", *settings, f"train.epochs={n}", steps=10 * n) for n in (3, 5))
    assert (before == now) == is_open
    if not is_open:
        with pytest.raises(SettingError, match=r"was 3\S* and is now 5"):
            refuse_other_settings(before, now, "hydra.run.dir=x")


# --- code of the user's --------------------------------------------------------------------------------------------

LOSS = """
from distill.objective.terms import VocabularyTerm

class Loss(VocabularyTerm):
    positions = "all"

    def losses(self, student, teacher, targets):
        return 1.0 * (student.softmax(-1) - teacher.softmax(-1)).abs().sum(-1)
"""
SOURCE = """
from distill.data.sources import Shard, Source

class Mine(Source):
    def shards(self):
        return [Shard(("a",))]

    def documents(self, shard):
        yield from ()
"""
TEACHER = """
from transformers import AutoModelForMaskedLM

def model(folder="", heads=2, api_key=""):
    return AutoModelForMaskedLM.from_pretrained(folder)
"""
CHANGED = r"the code or the arguments of {} have changed"


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that modules are imported from."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def digests(config: Any) -> dict[str, Any]:
    return run_identity(config, dict(DIGESTS), make_batches(np.zeros((500, 4)), COLLATOR, 16, seed=0), 10)


def test_a_finished_run_whose_loss_was_edited_is_refused_and_an_interrupted_one_goes_on(
    shelf: Shelf, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder, changed = code / "edited_loss.py", code / "run", CHANGED.format("edited_loss.Loss")
    more = ("+objective.mine={_target_: edited_loss.Loss, weight: 1.0}", "train.epochs=null", "train.steps=2")
    for text, status in ((LOSS, 0), (LOSS.replace("class", "# a comment\nclass"), 0), (LOSS.replace("1.0", "2.0"), 2)):
        file.write_text(text)
        capsys.readouterr()
        assert shelf.run(folder, *more) == status
    assert changed in capsys.readouterr().err
    (folder / "results.json").unlink()
    assert shelf.run(folder, *more) == 0, "it may have failed for the code that was edited"
    assert f"{changed} since then; the run resumes with the present code" in capsys.readouterr().err
    assert shelf.run(folder, *more) == 0 and changed not in capsys.readouterr().err


@pytest.mark.parametrize(
    "overrides",
    [
        ["+optimizer._target_=edited_part.Part"],
        ["+schedule._target_=edited_part.Part"],
        ["student=custom", "student._target_=edited_part.Part"],
        ["+evaluate.measures.mine._target_=edited_part.Part", "train.keep_best=heldout.mine"],
    ],
)
def test_code_of_every_part_that_decides_the_student_counts(overrides: list[str], code: Path) -> None:
    config, file = composed("+recipe=distilbert_gutenberg", *overrides), code / "edited_part.py"
    file.write_text("class Part:\n    x = 1\n")
    before = digests(config)
    file.write_text("class Part:\n    x = 2\n")
    with pytest.raises(SettingError, match=CHANGED.format(r"edited_part\.Part")):
        refuse_other_settings(before, digests(config), "hydra.run.dir=x")


def test_a_teacher_of_other_arguments_or_code_is_another(code: Path) -> None:
    def made(*arguments: str, more: str = "") -> Any:
        (code / "edited_teacher.py").write_text(TEACHER + more)
        teacher = ["teacher=custom", "teacher._target_=edited_teacher.model", *arguments]
        config = composed("+recipe=distilbert_gutenberg", *teacher)
        return settings_by_member(config)[""].code, digests(config)

    (one, before), (other, now) = made("+teacher.heads=2"), made("+teacher.heads=4")
    assert one != other != made("+teacher.heads=4", more="x = 1\n")[0]
    assert one == made("+teacher.heads=2", "teacher.micro_batches=4", "+teacher.device=cuda:1")[0], "of each host"
    with pytest.raises(SettingError, match=CHANGED.format(r"edited_teacher\.model")):
        refuse_other_settings(before, now, "hydra.run.dir=x")
    assert not [name for name in digests(config_of()) if name.startswith("code.")]


def test_the_sequences_of_an_edited_source_are_others_and_a_fault_in_it_names_its_line(
    code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def key(text: str) -> str:
        (code / "edited_source.py").write_text(text)
        source = find_source(SourceConfig(**{"_target_": "edited_source.Mine"}), "corpus", DataConfig())
        assert source is not None
        return key_of(Text((source,), "corpus"), {}, DataConfig(cache=str(code / "cache")))

    assert key(SOURCE) == key(SOURCE + "\n\n# a remark\n") != key(SOURCE.replace("()", '("text",)'))
    (code / "faulty_source.py").write_text(SOURCE.replace("yield", "open(shard.paths[0])\n        yield"))
    arguments = ["corpus=custom", "corpus._target_=faulty_source.Mine", "data.cache=cache", "data.workers=1"]
    assert distill("+recipe=smoke", *arguments, f"hydra.run.dir={code / 'run'}") == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "FileNotFoundError" in line and "(faulty_source.py, line 9: open(" in line


# --- as a user meets it --------------------------------------------------------------------------------------------


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
    for _ in range(2):  # the finished run is that of another teacher, and so is the checkpoint
        assert shelf.run(folder, f"teacher.path={moved}", length) == 2
        (line,) = lines_of(capfd)
        assert "the teacher has other weights" in line and str(folder) in line
        (folder / "results.json").unlink(missing_ok=True)


def test_a_finished_run_is_continued_where_the_schedule_allows(shelf: Shelf, tmp_path: Path) -> None:
    constant = ("schedule=constant", "schedule.warmup=0", "student.dropout=0.1")
    for name, epochs in (("once", 3), ("twice", 1), ("twice", 3)):
        assert shelf.run(tmp_path / name, *constant, f"train.epochs={epochs}") == 0
    assert_same(tmp_path / "once", tmp_path / "twice")
    losses = [[line["loss/total"] for line in metrics(tmp_path / name)] for name in ("once", "twice")]
    assert losses[0] == losses[1] and len(losses[0]) == 12
    assert [line["epoch"] for line in results(tmp_path / "twice")["history"]] == [1.0, 2.0, 3.0]


def test_the_kept_digest_of_a_folder_is_that_of_the_model_that_it_was_read_as(tmp_path: Path) -> None:
    """A folder with two heads is another teacher where one of them is left out."""
    folder = save_ordered(tmp_path / "both")
    models = [load_pretrained("teacher.path", str(folder), kind) for kind in (ORDERED, MASKED)]
    found = [saved_digest(str(folder), model, None, str(tmp_path / "cache")) for model in models]
    assert found == [model_digest(model) for model in models] and found[0] != found[1]


def test_ranks_compare_their_evaluation_sets_before_they_train(
    shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(seed: int) -> dict[str, Any]:
        sets = {"imdb": make_rows(2), "books": make_rows(3, seed=seed)}
        return set_digests([EvaluationSet(name, "", rows, 1) for name, rows in sets.items()])

    ranks: Any = SimpleNamespace(size=2, barrier=lambda: None, gather=lambda own: [own, of(4)])
    refuse_differing_ranks(of(4), ranks)
    with pytest.raises(SettingError, match=r"^rank 1 would .*: evaluate\.sets: books is \w+") as error:
        refuse_differing_ranks(of(3), ranks)
    assert "imdb" not in str(error.value)

    def refuse(identity: dict[str, Any], ranks: Any) -> None:
        raise SettingError(f"compared: {', '.join(identity)}")

    monkeypatch.setattr(whole_run, "refuse_differing_ranks", refuse)
    assert shelf.run(tmp_path / "run") == 2
    assert "compared: evaluate.sets: heldout" in lines_of(capfd)[-1]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
