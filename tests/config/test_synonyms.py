"""Names of other libraries, and of Hydra: refused with what to give here."""

import re

import pytest
from job import distill
from omegaconf import OmegaConf

from distill.config.command_line import options_of
from distill.config.compose import _schema
from distill.config.synonyms import SYNONYMS

BAD = {
    "optimizer.learning_rate=1e-3": "optimizer.learning_rate is not known (did you mean optimizer.lr?)",
    "+learning_rate=1e-3": "(did you mean optimizer.lr?)",
    "--learning-rate=1e-3": "(did you mean optimizer.lr?)",
    "+optimizer.warmup_ratio=0.1": "(did you mean schedule.warmup?)",
    "+schedule.warmup_ratio=0.1": "(did you mean schedule.warmup?)",
    "train.num_train_epochs=3": "(did you mean train.epochs?)",
    "+train.num_epochs=3": "(did you mean train.epochs?)",
    "train.max_steps=3": "(did you mean train.steps?)",
    "gradient_accumulation_steps=2": "(did you mean train.accumulate?)",
    "train.per_device_train_batch_size=2": "(did you mean train.batch_size?)",
    "+corpus.max_seq_length=64": "(did you mean corpus.sequence_length?)",
    "objective.mlm_probability=0.2": "(did you mean objective.masking.mlm_probability?)",
    "output_dir=runs/mine": "(did you mean hydra.run.dir?)",
    "precision.bf16=true": "(did you mean precision=bf16?)",
    "recipe=smoke": "give +recipe=smoke",
    "recipe=smok": "give +recipe=smok (did you mean smoke?)",
    "recipe=smoke,albert_aws": "give +recipe=smoke,albert_aws",
    "--config-dir=": "--config-dir : no such folder",
    "hydra.searchpath=null": "hydra.searchpath=null: give a list of folders",
    "hydra.searchpath=my_recipes": "hydra.searchpath=my_recipes: give a list of folders",
    "smoke": "give +recipe=smoke",
    "--config-name=smoke": "+recipe=smoke",
    "~student": "choose one of albert, bert,",
    "~teacher": "choose one of bert_base, bundled_deep,",
}


@pytest.mark.parametrize("argument", BAD)
def test_the_line_names_what_it_is_called_here(argument: str, capfd: pytest.CaptureFixture) -> None:
    assert distill(argument) == 2
    output = capfd.readouterr()
    lines = [line for line in output.err.splitlines() if line.startswith("distill: ")]
    assert len(lines) == 1 and BAD[argument] in lines[0] and not output.out, output


def test_the_short_option_of_hydra_names_the_recipe(capfd: pytest.CaptureFixture) -> None:
    assert distill("-cn", "smoke") == 2
    assert "give" in (line := capfd.readouterr().err) and "+recipe=smoke" in line


def test_every_synonym_stands_for_a_setting_that_there_is() -> None:
    schema = OmegaConf.merge(_schema(), {"hydra": {"run": {"dir": ""}}})
    for text in SYNONYMS.values():
        name, is_option, option = re.split(", | or ", text)[0].partition("=")
        if name in ("optimizer", "schedule", "precision", "tracker", "corpus") and is_option:
            assert option.partition(" ")[0] in options_of(name), text
        elif not name.startswith(("student.config.", "objective.", "optimizer.", "schedule.")):
            assert OmegaConf.select(schema, name, default="no") != "no", text


def test_all_refused_settings_stand_in_one_line(capfd: pytest.CaptureFixture) -> None:
    bad = ["train.steps=0", "train.epochs=x", "optimizer.lr=fast", "backend.name=mpi", "student.init=layer"]
    assert distill("+recipe=smoke", *bad) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    for setting in bad:
        assert setting in line, line
    assert line.count("; and ") == len(bad) - 1
