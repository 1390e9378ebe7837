"""Models that teach or learn less than most: an encoder without a head, and a student of frozen weights alone."""

from pathlib import Path
from typing import Any

import own_models
import pytest
from job import Shelf, results
from transformers import AutoModel, AutoTokenizer

from distill.config.settings import StudentConfig, TeacherConfig
from distill.models.student import make_student
from distill.models.teacher import load_teacher
from distill.runtime.errors import SettingError


def frozen_model(**_: Any) -> Any:
    return own_models.Convolutions().requires_grad_(False)


def test_a_student_of_frozen_weights(tmp_path: Path) -> None:
    made = StudentConfig(**{"_target_": f"{__name__}.frozen_model"})
    with pytest.raises(SettingError, match=r"^student\._target_=.*frozen_model: no weight .* requires_grad_\(True\)"):
        make_student(made, None, None, 12)  # type: ignore[arg-type]


def test_an_encoder_without_a_head_teaches_what_reads_none(
    tmp_path: Path, shelf: Shelf, capfd: pytest.CaptureFixture
) -> None:
    """As a sentence encoder does; its scores would be those of a head that is not there."""
    folder = tmp_path / "encoder"
    AutoModel.from_pretrained(shelf.teacher / "student").save_pretrained(folder)
    AutoTokenizer.from_pretrained(shelf.teacher / "student").save_pretrained(folder)
    with pytest.raises(SettingError, match="lacks weights of a masked language model"):
        load_teacher(TeacherConfig(path=str(folder)))
    pooled = ["objective.soft.weight=0", "objective.cosine.weight=0", "objective.pooled.weight=1", "train.epochs=1"]
    pooled.append(f"teacher.path={folder}")
    tiny = "{hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16}"
    new = [*pooled, "student=bert", "student.layers=null", f"student.config={tiny}"]
    assert shelf.run(tmp_path / "run", *new) == 0
    content: dict[str, Any] = results(tmp_path / "run")
    assert content["agreement"] is None and "perplexity" not in content["teacher"]
    assert any("without a head" in note for note in content["notes"])
    assert shelf.run(tmp_path / "run", *new) == 0  # the same teacher again
    assert shelf.run(tmp_path / "other", *pooled, "student.layers=auto") == 2
    assert "lacks weights of a masked language model" in capfd.readouterr().err
    saved = ["student=pretrained", f"student.path={folder}", "student.layers=null", "objective.mlm.weight=0"]
    assert shelf.run(tmp_path / "saved", *pooled, *saved) == 0
    assert not results(tmp_path / "saved")["student"].get("perplexity"), "as its head is new"
