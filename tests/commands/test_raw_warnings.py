"""No line of transformers stands between those of Distill where a text is longer than a model reads."""

import logging
from collections.abc import Callable, Iterator
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
from distill.teacher.retokenized import RetokenizedTeacher

LONG = "the river house " * 300


@pytest.fixture
def raw() -> Iterator[list[str]]:
    """What transformers logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    yield lines
    logging.getLogger("transformers").removeHandler(handler)


def saved(folder: Path, family: str) -> str:
    save_model(folder, family)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 16
    tokenizer.save_pretrained(folder)
    return str(folder)


def scored(model: str) -> None:
    with pytest.raises(SettingError):
        score(LONG, model)


def predicted(model: str) -> None:
    masked = Path(model).name == "bert"
    assert distill("predict", f"model={model}", f"text={LONG}" + " [MASK]" * masked) == 2


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("use", [scored, predicted])
def test_a_text_that_is_too_long_is_one_line(
    use: Callable[[str], None], family: str, tmp_path: Path, raw: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / family, family)
    capsys.readouterr()
    use(folder)
    assert raw == []
    assert len(capsys.readouterr().err.splitlines()) == (use is predicted)


def test_a_teacher_with_another_tokenizer_reads_long_sequences(raw: list[str]) -> None:
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 4
    rows = make_rows(2)
    batch = Batch({}, None, {}, None, np.arange(2))
    RetokenizedTeacher(LanguageModel(make_model("bert", 1)), rows, tokenizer, tokenizer, None).read_ahead(batch)
    assert raw == []
