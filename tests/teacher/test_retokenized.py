"""A teacher with a tokenizer of its own: it reads the same text, and only vectors of whole sequences are compared."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import make_family
from job import Shelf, distill, results
from tiny import HIDDEN, make_model, make_rows, make_tokenizer, only, records, text_config
from transformers import AutoModel

from distill.config.settings import BackendConfig, StudentConfig, TeacherConfig
from distill.data.batch import Batch
from distill.distributed.single import Single
from distill.models.language_model import LanguageModel, OutputSpec
from distill.models.pooling import saved_pooling
from distill.objective.build import make_terms
from distill.report.comparison.columns import numbers_of
from distill.report.summary import findings, tiles
from distill.runs.pair import Teachers, load_teachers
from distill.runs.record import Record
from distill.runtime.errors import SettingError
from distill.tasks import find_task
from distill.teacher.live import RetokenizedTeacher

SPEC = OutputSpec(pooled=("mean",))
BPE = ["student=bert", "student.init=random", "student.layers=null"]
TINY = "student.config={hidden_size: 24, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32}"
ALONE = ["objective.soft.weight=0", "objective.cosine.weight=0", "objective.mlm.weight=0", "objective.pooled.weight=1"]
POOLED = ["objective.soft.weight=0", "objective.cosine.weight=0", "+objective.pooled.weight=1"]


def batch_of(rows: np.ndarray) -> Batch:
    ids = torch.from_numpy(rows.astype(np.int64))
    return Batch({"input_ids": torch.zeros_like(ids)}, None, {}, None, np.arange(len(rows))[::-1].copy())


def test_the_teacher_reads_the_text_of_each_row() -> None:
    """Its vectors are those of the decoded text, whatever was masked in the student's batch."""
    own, other = make_tokenizer(), make_tokenizer(("whale",))
    rows, teacher = make_rows(5, shortest=4), make_model("bert", 2, vocab=len(other))
    asked = RetokenizedTeacher(LanguageModel(teacher), rows, own, other, None)
    batch = asked.read_ahead(batch_of(rows))
    (output,) = asked.outputs([batch], lambda _: SPEC)
    for number, row in enumerate(batch.row_ids):
        text = own.decode(rows[row].astype(int), skip_special_tokens=True)
        ids = torch.tensor([other(text).input_ids])
        with torch.no_grad():
            expected = teacher.base_model(ids)[0][0].mean(0)
        torch.testing.assert_close(output.outputs.pooled["mean"][number], expected, rtol=1e-4, atol=1e-5)
    assert output.distribution is None


def test_rows_are_cut_to_what_the_teacher_takes() -> None:
    own = make_tokenizer()
    asked = RetokenizedTeacher(LanguageModel(make_family("gpt2")), make_rows(3), own, own, 4)
    assert asked.read_ahead(batch_of(make_rows(3))).teacher_data["input_ids"].shape == (3, 4)


def test_the_teacher_reads_prompts_too() -> None:
    own, rows = make_tokenizer(), make_rows(3)
    columns = np.arange(rows.shape[1])
    plain, found = (
        RetokenizedTeacher(LanguageModel(make_family("gpt2")), each, own, own, None).read_ahead(batch_of(rows))
        for each in (rows, records(rows, loss_mask=columns >= 5, inner=columns == 6))
    )
    assert torch.equal(found.teacher_data["input_ids"], plain.teacher_data["input_ids"])


@pytest.fixture(scope="module")
def own(shelf: Shelf) -> str:
    """The setting that gives the student another tokenizer than the teacher's."""
    make_tokenizer(("river", "house")).save_pretrained(shelf.root / "tokenizer")
    return f"student.tokenizer={shelf.root / 'tokenizer'}"


@pytest.fixture(scope="module")
def done_pooled(shelf: Shelf, own: str) -> Path:
    folder = shelf.root / "pooled"
    assert shelf.run(folder, *BPE, TINY, *POOLED, own, "corpus.max_unknown=1") == 0
    return folder


def test_a_run_across_tokenizers(done_pooled: Path, shelf: Shelf) -> None:
    content: dict[str, Any] = results(done_pooled)
    assert content["training"]["final_loss"]["pooled"] > 0 and content["agreement"] is None
    assert "perplexity" not in content["teacher"] and content["teacher"]["parameters"] > 0
    assert any("another tokenizer" in note for note in content["notes"])
    vocab = json.loads((done_pooled / "student" / "tokenizer.json").read_text())["model"]["vocab"]
    its_teachers = json.loads((shelf.teacher / "student" / "tokenizer.json").read_text())["model"]["vocab"]
    assert vocab != its_teachers and (done_pooled / "report.html").is_file()


@pytest.fixture(scope="module")
def done_alone(shelf: Shelf, own: str) -> Path:
    folder = shelf.root / "vectors_alone"
    assert shelf.run(folder, *BPE, TINY, *ALONE, own, "corpus.max_unknown=1") == 0
    return folder


def test_the_headline_of_vectors_alone_is_their_loss(done_alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has trained a head: no page, no card and no number of the comparison is about perplexity."""
    content: dict[str, Any] = results(done_alone)
    assert list(content["measures"]) == ["pooled_loss"] and content["student"]["pooled_loss"]["heldout"] > 0
    assert any("No loss trains the head that predicts tokens" in note for note in content["notes"])
    record = Record.from_json(content)
    assert "Its loss of pooled vectors is" in findings(record) and "erplexity" not in findings(record)
    assert ("loss of pooled vectors on heldout" in text for _, text in tiles(record))
    for page in ("report.md", "report.html", "student/README.md"):
        text = (done_alone / page).read_text().replace("pseudo_perplexity", "")  # a setting
        assert "erplexity is" not in text and "erplexity |" not in text and "higher perplexity" not in text
        assert "oss of pooled vectors" in text
    names = [column.name for column in numbers_of(record)]
    assert "heldout.pooled_loss" in names and not any("perplexity" in name for name in names)
    card = (done_alone / "student" / "README.md").read_text()
    assert "pipeline_tag: feature-extraction" in card and "fill-mask" not in card and "\nmetrics:" not in card
    saved = saved_pooling(AutoModel.from_pretrained(done_alone / "student"))  # as sentence-transformers reads it
    assert saved is not None and saved.kind == "mean" and not saved.unsupported
    (code,) = re.findall(r"## Use\n\n```python\n(.*?)```", card, flags=re.DOTALL)
    monkeypatch.chdir(done_alone / "student")
    exec(code.replace("print(", "vector = ("), defined := dict[str, Any]())
    inputs = {"input_ids": defined["inputs"]["input_ids"]}
    documents = torch.where(defined["inputs"]["attention_mask"].bool(), 0, -1)  # of two texts, one of which is padded
    expected = LanguageModel(defined["model"].eval())(inputs, documents, SPEC).pooled["mean"]
    torch.testing.assert_close(defined["vector"], expected)


def test_evaluate_scores_no_head_that_nobody_trained(done_alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model in (done_alone, done_alone / "student"):
        assert distill("evaluate", f"model={model}") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"model={model}: no loss of its run trained the head" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*BPE, TINY], ("objective.soft and objective.cosine pair tokens", "objective.pooled.weight=1")),
        ([*POOLED], ("student.init=layers", "student.tokenizer=null")),
    ],
)
def test_what_needs_pairs_of_tokens_is_refused(
    arguments: list[str],
    words: tuple[str, ...],
    shelf: Shelf,
    own: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shelf.run(tmp_path / "run", *arguments, own) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(word in line for word in words)
    if advised := line.partition(": give ")[2].partition(",")[0]:
        assert (
            shelf.run(tmp_path / "advised", *arguments, own, "corpus.max_unknown=1", "train.epochs=1", *advised.split())
            == 0
        )


def models_of(folder: Path, other_tokenizer: bool, **teacher: Any) -> Teachers:
    """Those of a run on sequences of 24 tokens, whose teacher takes 16."""
    make_model("bert", 1, max_position_embeddings=16).save_pretrained(folder / "teacher")
    make_tokenizer().save_pretrained(folder / "teacher")
    make_tokenizer(("whale",)).save_pretrained(folder / "tokenizer")
    tokenizer = str(folder / "tokenizer") if other_tokenizer else None
    sizes = {**HIDDEN, "num_hidden_layers": 1}
    config = text_config(kind="text", path=str(folder), sequence_length=24, cache=str(folder / "cache")).changed(
        teacher=TeacherConfig(path=str(folder / "teacher"), **teacher),
        student=StudentConfig(init="random", architecture="bert", tokenizer=tokenizer, config=sizes),
        objective=only(pooled={"weight": 1.0}),
    )
    terms = make_terms(config.objective)
    return load_teachers(config, find_task("mlm", terms.values()), terms, Single(BackendConfig(device="cpu")))


def test_a_teacher_limits_the_length_where_it_reads_the_same_tokens(tmp_path: Path) -> None:
    assert models_of(tmp_path, other_tokenizer=True).teacher_tokenizer is not None
    words = r"^corpus\.sequence_length=24 exceeds the 16 positions of teacher: lower it$"
    with pytest.raises(SettingError, match=words):
        models_of(tmp_path, other_tokenizer=False)
