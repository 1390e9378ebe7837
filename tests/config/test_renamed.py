"""Names that settings had in earlier releases: refused with the new one, and read where old runs hold them."""

import re
from pathlib import Path

import pytest
from job import composed, distill

from distill import load_pair
from distill.config.renamed import OPTIONS, RECIPES_OF_SCALES, new_name, renamed, renamed_tree
from distill.runs.located import locate
from distill.runtime.errors import SettingError

OLD = {
    "corpus.rows=10": "corpus.max_sequences",
    "corpus.share=0.5": "corpus.fraction",
    "corpus.max_bad=0.1": "corpus.max_invalid",
    "corpus.unreadable=stop": "corpus.invalid_files",
    "corpus.unknown=0.3": "corpus.max_unknown",
    "corpus.cache=cache": "data.cache",
    "corpus={tokens: rows}": "data.tokens",
    "corpus.shard_bytes=1": "data.shard_bytes",
    "corpus.compression=zstd": "data.compression",
    "corpus.local=disk": "data.local",
    "corpus.local_bytes=1": "data.local_bytes",
    "corpus.shuffle_bytes=1": "data.shuffle_bytes",
    "+corpus.workers=1": "data.workers",
    "objective.masking.share=0.2": "objective.masking.mlm_probability",
    "objective.masking={most: 3}": "objective.masking.max_predictions",
    "objective.soft.rows=all": "objective.soft.positions",
    "objective.cosine.rows=masked": "objective.cosine.positions",
    "train.rows_per_step=64": "train.sequences_per_step",
    "train.milestones=[1]": "train.snapshots",
    "train={milestone_every: 4}": "train.snapshot_every",
    "evaluate.rows=3": "evaluate.max_sequences",
    "evaluate.by_set.heldout.rows=3": "evaluate.by_set.heldout.max_sequences",
    "evaluate.pseudo_perplexity.share=1": "evaluate.pseudo_perplexity.fraction",
    "evaluate.curve.rows=3": "evaluate.curve.sequences",
    "evaluate.twin=runs/x": "evaluate.baseline",
    "student.kind=config": "student.init (config is random now)",
    "student={kind: layers}": "student.init (",
    "student.start=neighbours": "student.init (random and neighbours are values of it",
}


@pytest.mark.parametrize("override", OLD)
def test_an_old_name_is_refused_with_the_new_one(override: str, capfd: pytest.CaptureFixture) -> None:
    assert distill("+recipe=smoke", override) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert f"give {OLD[override]}" in line


@pytest.mark.parametrize("option", OPTIONS)
def test_an_old_option_is_refused_with_the_new_one(option: str, capfd: pytest.CaptureFixture) -> None:
    group, _, name = option.partition("/")
    assert distill(f"{'+' * (group == 'recipe')}{group}={name}") == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert f"give {group}={OPTIONS[option]}" in line


@pytest.mark.parametrize("scale", RECIPES_OF_SCALES)
def test_a_scale_is_refused_with_its_recipe(scale: str, capfd: pytest.CaptureFixture) -> None:
    assert distill("+recipe=distilbert_gutenberg", f"scale={scale}") == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert f"scale={scale} is a recipe now: give +recipe={RECIPES_OF_SCALES[scale]}," in line
    assert composed(f"+recipe={RECIPES_OF_SCALES[scale]}").teacher.kind in ("bundled_deep", "pretrained", "none")


@pytest.mark.parametrize("recipe", ["defaults: [override /scale: paper, _self_]", "scale: paper"])
def test_a_recipe_of_the_users_with_a_scale_is_refused(
    recipe: str, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(f"# @package _global_\n{recipe}\n")
    assert distill("--config-dir", str(tmp_path), "+recipe=mine") == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert re.match("distill: scale(=paper is a recipe now| is not a setting any more): ", line)
    assert "distilbert_paper" in line


def test_the_identity_of_an_earlier_run_is_read_by_the_names_of_today() -> None:
    before = {"objective.masking.share": 0.3, "objective.soft.rows": "all", "train.rows_per_step": 8, "seed": 0}
    assert renamed(before) == {
        "objective.masking.mlm_probability": 0.3,
        "objective.soft.positions": "all",
        "train.sequences_per_step": 8,
        "seed": 0,
    }
    assert new_name("train.steps") is None


def test_nested_settings_of_an_earlier_run_are_read_by_the_names_of_today() -> None:
    before = {
        "corpus": {"cache": "c", "rows": 3, "near": {"shingle": 5}},
        "evaluate": {"rows": None, "sets": []},
        "a": 1,
    }
    assert renamed_tree(before) == {
        "corpus": {"max_sequences": 3, "near": {"shingle": 5}},
        "data": {"cache": "c"},
        "evaluate": {"max_sequences": None, "sets": []},
        "a": 1,
    }


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"student.kind": "config", "student.start": "neighbours"}, "neighbours"),
        ({"student.kind": "config", "student.start": "random"}, "random"),
        ({"student.kind": "config"}, "random"),  # of before there was that setting
        ({"student.kind": "layers", "student.start": "random"}, "layers"),
        ({"student.kind": "pretrained", "student.start": "random"}, "pretrained"),
    ],
)
def test_where_the_weights_came_from_is_one_setting_now(before: dict[str, str], now: str) -> None:
    assert renamed({"seed": 0, **before}) == {"seed": 0, "student.init": now}


def test_a_student_of_a_callable_began_with_no_setting_of_ours() -> None:
    assert renamed({"student._target_": "mine.make", "student.start": "random"}) == {"student._target_": "mine.make"}


@pytest.mark.parametrize(("before", "now"), [("bundled", "bundled_small"), ("embedded_deep", "bundled_deep")])
def test_a_teacher_of_an_earlier_run_is_read_by_its_name_of_today(before: str, now: str) -> None:
    members = {"a": {"kind": before, "weight": 2}, "b": {"kind": "pretrained"}}
    settings = renamed_tree({"teacher": {"kind": before, "members": members}, "corpus": {"kind": "text"}})
    assert settings["teacher"]["kind"] == settings["teacher"]["members"]["a"]["kind"] == now
    assert settings["teacher"]["members"]["b"]["kind"] == "pretrained" and settings["corpus"]["kind"] == "text"


@pytest.mark.parametrize("override", ["teacher.kind=bundled", "+teacher.members.a={kind: bundled}"])
def test_a_teacher_by_its_old_name_is_refused_with_the_new_one(override: str, capfd: pytest.CaptureFixture) -> None:
    setting = "teacher.kind" if "members" not in override else "teacher.members.a.kind"
    several = ["teacher=several"] * ("members" in override)
    assert distill("+recipe=smoke", *several, override) == 2
    assert f"distill: {setting}=bundled has another name now: give bundled_small" in capfd.readouterr().err
    with pytest.raises(SettingError, match=r"^model=bundled has another name now: give bundled_small"):
        locate(["bundled"])
    with pytest.raises(SettingError, match=r"^teacher=bundled has another name now: give bundled_small"):
        load_pair("bundled")
