"""Tasks by name, and settings that only another task would read."""

from pathlib import Path

import pytest
from job import composed
from vocabularies import vocabulary_of

from distill.data.collate.clm import CausalLM
from distill.data.sequence_format import causal_format, masked_format
from distill.models.kind import CAUSAL, MASKED
from distill.runs.check import check
from distill.runtime.errors import SettingError
from distill.tasks import find_task

MASKED_RUN = ["+recipe=distilbert_gutenberg"]
CAUSAL_RUN = ["+recipe=distilgpt2_gutenberg"]
FROM_SCRATCH = ["+recipe=gpt2_pretrain"]


@pytest.fixture(autouse=True)
def causal_teacher(empty_folder: None) -> None:
    """The folder of the run that the recipe of a causal pair takes its teacher from."""
    Path("runs/gpt2_pretrain").mkdir(parents=True)


def refused(*overrides: str) -> str:
    with pytest.raises(SettingError) as error:
        check(composed(*overrides))
    text = str(error.value)
    assert "\n" not in text
    return text


def test_tasks_have_their_models_and_rows() -> None:
    bert, gpt2 = vocabulary_of("bert"), vocabulary_of("gpt2")
    assert find_task("mlm").kind is MASKED and find_task("mlm").sequence_format(bert) == masked_format(bert)
    assert find_task("clm").kind is CAUSAL and find_task("clm").sequence_format(gpt2) == causal_format(gpt2)
    for packed in ("true", "false"):
        config = composed(*CAUSAL_RUN, f"corpus.cross_documents={packed}")
        task, expected = find_task("clm"), CausalLM(causal_format(gpt2), packed == "true")
        assert task.collator(config, gpt2, None) == task.scoring_collator(config, gpt2) == expected


def test_a_task_that_is_not_known() -> None:
    with pytest.raises(
        SettingError,
        match=r"^objective\.task=translation is not known: choose one of classes, clm, mlm",
    ):
        find_task("translation")
    assert "objective.task=translation" in refused(*MASKED_RUN, "objective.task=translation")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*CAUSAL_RUN, "+objective.mlm.weight=1"], ("objective.mlm", "objective.task=mlm", "objective.mlm.weight=0")),
        ([*MASKED_RUN, "+objective.clm.weight=1"], ("objective.clm", "objective.task=clm", "objective.clm.weight=0")),
        (
            [*CAUSAL_RUN, "objective.masking.mlm_probability=0.3"],
            ("objective.masking", "objective.task=clm", "leave it out"),
        ),
        ([*FROM_SCRATCH, "student.init=neighbours"], ("student.init=neighbours", "objective.task=clm")),
        ([*MASKED_RUN, "evaluate.samples=2"], ("evaluate.samples=2", "causal models", "null")),
        ([*CAUSAL_RUN, "evaluate.stride=128"], ("evaluate.stride=128", "corpus.sequence_length=128")),
    ],
)
def test_what_only_another_task_would_read(overrides: list[str], words: tuple[str, ...]) -> None:
    text = refused(*overrides)
    assert all(word in text for word in words), text
