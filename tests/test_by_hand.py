"""Chaining by hand: a run is the teacher or the start of the next one, whichever of its folders is named."""

import shutil
from pathlib import Path

import pytest
import torch
from job import Shelf, composed, distill, metrics, results, weights

from distill.config.settings import StudentConfig, TeacherConfig
from distill.models.load import load_pretrained, load_tokenizer
from distill.models.teacher import load_teacher
from distill.runtime.errors import SettingError


@pytest.mark.parametrize("part", ["", "student"])  # of snapshots: test_snapshots.py
def test_a_run_and_its_student_are_teachers(done: Path, part: str) -> None:
    model, tokenizer, _ = load_teacher(TeacherConfig(path=str(done / part)))
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in weights(done).items())
    assert tokenizer is not None and len(tokenizer) <= model.get_input_embeddings().weight.shape[0]


def test_its_path_alone_makes_it_the_teacher(shelf: Shelf, done: Path, tmp_path: Path) -> None:
    arguments = [each for each in shelf.arguments(tmp_path / "run") if not each.startswith("teacher")]

    assert distill(*arguments, f"teacher.path={done}", "student.layers=[0]", "train.steps=2") == 0
    content = results(tmp_path / "run")
    assert content["teacher"]["name"] == str(done)
    assert content["teacher"]["perplexity"] == pytest.approx(results(done)["student"]["perplexity"])
    assert content["student"]["start"] == {"init": "layers", "from": str(done), "layers": [0]}


def test_what_the_path_stands_for_is_the_command_lines_to_say(tmp_path: Path) -> None:
    main = "+recipe=distilbert_gutenberg"
    for option in ([], ["teacher=pretrained"], ["teacher=bundled_small"], ["teacher=none"]):
        assert composed(main, *option, f"teacher.path={tmp_path}").teacher == TeacherConfig(path=str(tmp_path))
    assert composed(main, "teacher.path=null").teacher.is_none
    assert composed(main, "teacher.path=bundled_small").teacher.bundled
    with pytest.raises(SettingError, match=r"choose student=pretrained"):  # layers may be meant as well
        composed(main, f"student.path={tmp_path}")


@pytest.mark.parametrize("recipe", ["distilbert_gutenberg", "smoke", "distilgpt2_gutenberg", "mixture"])
def test_layers_of_a_recipe_are_none_of_a_student_that_is_there(recipe: str, tmp_path: Path) -> None:
    """With each recipe that chooses layers, which are those of the option that another one replaces."""
    corpus = ["corpus.sources={a: {kind: text, path: x, weight: 1}, b: {kind: bundled, weight: 1}}"]
    arguments = [f"+recipe={recipe}", *corpus * (recipe == "mixture")]
    saved = composed(*arguments, "student=pretrained", f"student.path={tmp_path}").student
    assert saved == StudentConfig(init="pretrained", path=str(tmp_path), dropout=composed(*arguments).student.dropout)
    assert composed(*arguments, f"teacher.path={tmp_path}").teacher == TeacherConfig(path=str(tmp_path))


def test_a_run_that_has_not_finished_is_no_model_yet(done: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "run"
    (unfinished / "checkpoints").mkdir(parents=True)
    shutil.copy(done / "config.yaml", unfinished)
    with pytest.raises(SettingError, match=r"to finish it$"):
        load_pretrained("student.path", str(unfinished))
    for step in (50, 100):
        (unfinished / "snapshots" / f"step-{step}").mkdir(parents=True)
    for load in (load_pretrained, load_tokenizer):
        with pytest.raises(SettingError) as error:
            load("teacher.path", str(unfinished))
        text = str(error.value)
        assert text.startswith(f"teacher.path={unfinished} is a run that has not finished") and "\n" not in text
        assert text.endswith(f"or name its snapshot {unfinished / 'snapshots' / 'step-100'}")


def test_a_run_that_cannot_be_continued_is_begun_from(
    shelf: Shelf, done: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """What the refusal advises."""
    assert shelf.run(done, "train.epochs=3") == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert "train.epochs was 2 and is now 3" in line and "follows a schedule that is made for one length" in line
    assert line.endswith("another run from its student with student=pretrained student.path=RUN hydra.run.dir=DIR")
    advised = ["student=pretrained", f"student.path={done}"]
    lowest = "optimizer.lr=1e-12"  # so that the student stays where it begins
    assert shelf.run(tmp_path / "run", "student.layers=null", "train.epochs=1", *advised, lowest) == 0
    assert len(metrics(tmp_path / "run")) == 4
    before, after = weights(done), weights(tmp_path / "run")
    assert all(torch.allclose(before[name], after[name], atol=1e-8) for name in before)
    start = results(tmp_path / "run")["student"]["start"]
    assert start == {"init": "pretrained", "from": str(done)}
