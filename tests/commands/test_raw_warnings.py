"""No line of transformers stands between those of Distill where a text is longer than a model reads."""

import logging
from pathlib import Path

import numpy as np
import pytest
from job import distill, save_model
from tiny import make_model, make_rows, make_tokenizer
from transformers import AutoTokenizer

from distill import score
from distill.data.batch import Batch
from distill.models.language_model import LanguageModel
from distill.runtime.errors import SettingError
from distill.teacher.live import RetokenizedTeacher

LONG = "the river house " * 300


class Kept(logging.Handler):
    """Keeps what is logged about lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "long" in record.getMessage() or "length" in record.getMessage():
            self.lines.append(record.getMessage())


@pytest.fixture
def raw(request: pytest.FixtureRequest) -> list[str]:
    """What transformers logs about lengths."""
    kept, logger = Kept(), logging.getLogger("transformers")
    logger.addHandler(kept)
    request.addfinalizer(lambda: logger.removeHandler(kept))
    return kept.lines


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_text_that_is_too_long_is_one_line(
    family: str, tmp_path: Path, raw: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(save_model(tmp_path / family, family))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 16
    tokenizer.save_pretrained(folder)
    with pytest.raises(SettingError):
        score(LONG, folder)
    capsys.readouterr()
    assert distill("predict", f"model={folder}", f"text={LONG}" + " [MASK]" * (family == "bert")) == 2
    assert raw == [] and len(capsys.readouterr().err.splitlines()) == 1


def test_a_teacher_with_another_tokenizer_reads_long_sequences(raw: list[str]) -> None:
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 4
    batch = Batch({}, None, {}, None, np.arange(2))
    teacher = RetokenizedTeacher(LanguageModel(make_model("bert", 1)), make_rows(2), tokenizer, tokenizer, None)
    teacher.read_ahead(batch)
    assert raw == []
