"""Special tokens beyond a model's vocabulary, as that of images in Gemma 3's tokenizer: no text holds them."""

from pathlib import Path

import pytest
from job import Shelf, distill, refused_line, results, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill.models.check import check_vocabulary_size
from distill.runtime.errors import SettingError

SMALL = ["train.steps=2", "corpus.max_sequences=60", "corpus.sequence_length=32", "evaluate=heldout", "precision=fp32"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("surplus") / "model", "gpt2", 4)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    return folder


def arguments(shelf: Shelf, teacher: Path, folder: Path) -> list[str]:
    recipe = ["+recipe=distilgpt2_gutenberg", *shelf.corpus, f"teacher.path={teacher}"]
    return [*recipe, *SMALL, f"hydra.run.dir={folder}"]


def test_a_run_learns_from_such_a_model(shelf: Shelf, teacher: Path, tmp_path: Path) -> None:
    assert distill(*arguments(shelf, teacher, tmp_path / "run"), "student.layers=[0,2]") == 0
    assert results(tmp_path / "run")["student"]["perplexity"]["heldout"] > 1
    assert "<image>" in AutoTokenizer.from_pretrained(tmp_path / "run" / "student").get_vocab()


def test_a_token_beyond_one_of_two_models_is_refused(
    shelf: Shelf, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both heads have to give as many logits."""
    larger = AutoModelForCausalLM.from_pretrained(teacher)
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    larger.resize_token_embeddings(len(tokenizer))
    for part in (larger, tokenizer):
        part.save_pretrained(tmp_path / "larger")
    line = refused_line(
        capsys,
        *arguments(shelf, teacher, tmp_path / "run"),
        "student=pretrained",
        f"student.path={tmp_path / 'larger'}",
    )
    size = len(tokenizer)
    assert f"has {size} tokens" in line and f"teacher predicts {size - 1} and student predicts {size}" in line


def test_other_tokens_beyond_are_refused(teacher: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    check_vocabulary_size(len(tokenizer) - 1, "teacher", tokenizer)
    with pytest.raises(SettingError, match=r"^teacher: its vocabulary has"):
        check_vocabulary_size(len(tokenizer) - 2, "teacher", tokenizer)
    tokenizer.chat_template = "{% for message in messages %}<image>{{ message['content'] }}{% endfor %}"
    with pytest.raises(SettingError, match=r"^teacher: its vocabulary has"):
        check_vocabulary_size(len(tokenizer) - 1, "teacher", tokenizer)
