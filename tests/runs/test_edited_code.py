"""Code of the user's that was edited: a finished run is another one, and so are caches; an interrupted one goes on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job import Shelf, composed, distill
from tiny import make_batches

from distill.config.settings import DataConfig, SourceConfig
from distill.data.sources import find_source
from distill.data.tokens import Text, key_of
from distill.runs.identity import refuse_other_settings, run_identity
from distill.runtime.errors import SettingError
from distill.teacher.members import settings_by_member

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
from own_models import Convolutions

def model(heads=2, api_key=""):
    return Convolutions(width=24)
"""


def digests(config: Any, **more: Any) -> dict[str, Any]:
    batches = make_batches(np.zeros((500, 4)), None, 16, seed=0)
    return run_identity(config, {"teacher": "t", "student": None, "corpus": "c", **more}, batches, 10)


def test_a_finished_run_whose_loss_was_edited_is_refused_and_an_interrupted_one_goes_on(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file, folder, more = tmp_path / "edited_loss.py", tmp_path / "run", ("train.epochs=null", "train.steps=2")
    file.write_text(LOSS)
    term = "+objective.mine={_target_: edited_loss.Loss, weight: 1.0}"
    assert shelf.run(folder, term, *more) == 0
    file.write_text(LOSS.replace("class", "# a comment\nclass"))
    assert shelf.run(folder, term, *more) == 0, "finished"
    file.write_text(LOSS.replace("1.0 *", "2.0 *"))
    changed = "the code or the arguments of edited_loss.Loss have changed since then"
    assert shelf.run(folder, term, *more) == 2 and changed in capsys.readouterr().err
    (folder / "results.json").unlink()
    assert shelf.run(folder, term, *more) == 0, "it may have failed for the code that was edited"
    assert f"{changed}; the run resumes with the present code" in capsys.readouterr().err
    assert shelf.run(folder, term, *more) == 0 and changed not in capsys.readouterr().err


@pytest.mark.parametrize(
    "overrides",
    [
        ["+optimizer._target_=edited_part.Part"],
        ["+schedule._target_=edited_part.Part"],
        ["student=custom", "student._target_=edited_part.Part"],
        ["+evaluate.measures.mine._target_=edited_part.Part", "train.keep_best=heldout.mine"],
    ],
)
def test_code_of_every_part_that_decides_the_student_counts(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    config, file = composed("+recipe=distilbert_gutenberg", *overrides), tmp_path / "edited_part.py"
    file.write_text("class Part:\n    x = 1\n")
    before = digests(config)
    file.write_text("class Part:\n    x = 2\n")
    with pytest.raises(SettingError, match=r"\(the code or the arguments of edited_part\.Part have changed"):
        refuse_other_settings(before, digests(config), "hydra.run.dir=x")


def test_a_teacher_of_other_arguments_or_code_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))

    def made(*arguments: str, width: int = 24) -> Any:
        (tmp_path / "edited_teacher.py").write_text(TEACHER.replace("24", str(width)))
        teacher = ["teacher=custom", "teacher._target_=edited_teacher.model", *arguments]
        config = composed("+recipe=distilbert_gutenberg", *teacher)
        return settings_by_member(config)[""].code, digests(config)

    (one, before), (other, now) = made("+teacher.heads=2"), made("+teacher.heads=4")
    assert one != other != made("+teacher.heads=4", width=32)[0]
    assert one == made("+teacher.heads=2", "teacher.micro_batches=4")[0]
    assert one == made("+teacher.heads=2", "+teacher.device=cuda:1")[0], "each host has its own"
    with pytest.raises(SettingError, match=r"the code or the arguments of edited_teacher\.model have changed"):
        refuse_other_settings(before, now, "hydra.run.dir=x")
    assert settings_by_member(composed("+recipe=distilbert_gutenberg"))[""].code is None
    assert not [name for name in digests(composed("+recipe=distilbert_gutenberg")) if name.startswith("code.")]


def test_the_cache_of_another_teacher_is_not_read(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "cached_teacher.py").write_text(
        "from transformers import AutoModelForMaskedLM\n\n"
        "def model(folder, heads=2):\n    return AutoModelForMaskedLM.from_pretrained(folder)\n"
    )
    folder = shelf.teacher / "student"
    teacher = ["teacher=custom", "teacher.path=null", "teacher._target_=cached_teacher.model", "teacher.cache.top_k=4"]
    teacher += [f"+teacher.folder={folder}", f"teacher.tokenizer={folder}", f"data.cache={tmp_path / 'cache'}"]
    teacher += ["objective.masking.static=true", "objective.cosine.weight=0"]
    for number, heads in enumerate((2, 4, 2)):
        more = (*teacher, f"+teacher.heads={heads}", "train.epochs=null", "train.steps=1")
        assert shelf.run(tmp_path / str(number), *more) == 0
    assert len([*(tmp_path / "cache" / "teacher").glob("*/meta.json")]) == 2


def test_the_sequences_of_an_edited_source_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))

    def key(text: str) -> str:
        (tmp_path / "edited_source.py").write_text(text)
        source = find_source(SourceConfig(**{"_target_": "edited_source.Mine"}), "corpus", DataConfig())
        assert source is not None
        return key_of(Text((source,), "corpus"), {}, DataConfig(cache=str(tmp_path / "cache")))

    assert key(SOURCE) == key(SOURCE + "\n\n# a remark\n") != key(SOURCE.replace("()", '("text",)'))


def test_a_fault_in_a_source_of_the_users_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    opens = "        open(shard.paths[0])\n        yield from ()"
    (tmp_path / "faulty_source.py").write_text(SOURCE.replace("        yield from ()", opens))
    arguments = ["corpus=custom", "corpus._target_=faulty_source.Mine", f"data.cache={tmp_path / 'cache'}"]
    assert distill("+recipe=smoke", *arguments, "data.workers=1", f"hydra.run.dir={tmp_path / 'run'}") == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "Mine, a source of yours, fails: FileNotFoundError" in line and "(faulty_source.py, line 9: open(" in line
