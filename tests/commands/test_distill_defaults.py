"""What `distill.distill` takes where nothing is said: a student of the teacher's own family."""

from pathlib import Path
from typing import Any

import datasets
import pytest
from job import book, results, save_model
from prediction_models import save_fine_tuned
from transformers import AutoConfig, AutoModelForSequenceClassification

import distill
from distill.commands.api.distill import _Job as Job
from distill.runtime.errors import SettingError

TEXTS = [book(number, 2).strip() for number in range(60)]
SMALL: dict[str, Any] = {
    "train": {"steps": 2, "epochs": None, "batch_size": 8},
    "precision": "fp32",
    "evaluate": {"max_sequences": 8, "curve": {"points": 0}},
    "corpus": {"sequence_length": 32},
}


@pytest.mark.parametrize("student", [None, distill.StudentConfig(layers=[0, 2])])
def test_layers_of_a_masked_model_that_is_no_bert(tmp_path: Path, student: Any) -> None:
    teacher = save_model(tmp_path / "teacher", "roberta", 4)
    more = {"settings": {"data.cache": str(tmp_path / "cache"), "data.workers": 1}, "folder": tmp_path / "run"}
    run = distill.distill(teacher=teacher, student=student, data=TEXTS, **SMALL, **more)
    config = AutoConfig.from_pretrained(run.student)
    assert config.model_type == "roberta" and config.num_hidden_layers == 2


def test_layers_of_a_classifier(tmp_path: Path) -> None:
    loaded = distill.load_model(save_fine_tuned(tmp_path / "teacher", AutoModelForSequenceClassification), "cpu")
    rows = {"text": TEXTS, "label": [number % 2 for number in range(60)]}
    data = datasets.Dataset.from_dict(rows).train_test_split(0.2, seed=0)
    folder = tmp_path / "run"
    run = distill.distill(teacher=(loaded.model, loaded.tokenizer), data=data, folder=folder, **SMALL)
    assert AutoConfig.from_pretrained(run.student).num_hidden_layers == loaded.model.config.num_hidden_layers // 2
    assert results(folder)["finished"]


def test_sets_by_their_dotted_name_are_scored(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": TEXTS, "label": [number % 2 for number in range(60)]})
    job = Job("table", tmp_path, {"settings": {"evaluate.sets": ["mine"]}})
    job.add_data(rows)
    job.add_settings(None)
    assert job.given.values["evaluate.sets"] == ["mine"]
    job = Job("table", tmp_path, {})
    job.add_data(rows)
    with pytest.raises(SettingError, match=r"^evaluation=None, and nothing is held out of labelled data"):
        job.add_settings(None)
