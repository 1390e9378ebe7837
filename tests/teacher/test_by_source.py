"""teacher.members.X.sources: each sequence has the teachers of its source, which read no other one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import make_family
from job import Shelf, assert_same, distill, interrupted, metrics, results
from text import some_text
from tiny import CLS, PAD, SEP, make_masks, make_rows, make_tokenizer, records

from distill.data.batch import Batch
from distill.data.collate.clm import CausalLM
from distill.data.sequence_format import causal_format
from distill.models.language_model import LanguageModel, OutputSpec
from distill.teacher.by_source import TeachersBySource
from distill.teacher.distributions import Logits, Mixture
from distill.teacher.live import LiveTeacher
from distill.teacher.prompted import PromptedTeacher

OFFSETS = np.array([0, 10, 20, 30])  # of three sources
WEIGHTS = np.array([[2.0, 0.0, 1.0], [0.0, 0.5, 3.0]])
ROW_IDS = np.array([3, 12, 29, 8, 10, 0])
OF_ROWS = torch.tensor([[1, 0], [0, 1], [0.25, 0.75], [1, 0], [0, 1], [1, 0]])


class Counting(LanguageModel):
    """How many sequences each forward has read."""

    read: list[int]

    def forward(self, inputs: Any, documents: Any, spec: Any) -> Any:
        self.read.append(len(inputs["input_ids"]))
        return super().forward(inputs, documents, spec)


def counting(family: str, seed: int) -> Counting:
    model = Counting(make_family(family, seed=seed).eval())
    model.read = []
    return model


def causal_batch() -> Batch:
    """Packed documents, and padding."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "[SEP]"
    rows = make_rows(6, 12).astype(np.int64)
    rows[0, 5], rows[2, 3], rows[2, 8], rows[4, 9:] = SEP, SEP, SEP, PAD
    return CausalLM(causal_format(tokenizer), True, None).collate(records(rows), np.zeros(6, np.uint64), ROW_IDS)


def masked_batch() -> Batch:
    rows = make_rows(6, 12, shortest=5)
    return make_masks(make_tokenizer(), rows, mlm_probability=0.3).collate(rows, np.arange(6, dtype=np.uint64), ROW_IDS)


@pytest.mark.parametrize("context", [(), (CLS, 11, 12)])
@pytest.mark.parametrize("family", ["llama", "bert"])
@torch.no_grad()
def test_each_position_has_the_teachers_of_its_source(family: str, context: tuple[int, ...]) -> None:
    if family == "bert" and context:
        pytest.skip("for causal models")
    models, batch = [counting(family, seed) for seed in (1, 2)], causal_batch() if family == "llama" else masked_batch()
    members: list[Any] = [LiveTeacher(model) for model in models]
    if context:
        members[1] = PromptedTeacher(members[1], context, None, "b")
    teacher = TeachersBySource(members, WEIGHTS, OFFSETS)
    for positions in (batch.targets.positions, None):
        wanted = lambda _, positions=positions: OutputSpec(True, positions)  # noqa: E731
        (found,) = teacher.outputs([teacher.read_ahead(batch)], wanted)
        assert [model.read.pop() for model in models] == [4, 3]
        mixture = found.distribution
        assert isinstance(mixture, Mixture)
        ((_, mean),) = mixture.combined([Logits(head.logits()) for head in mixture.members], torch.float32)
        rows = (torch.arange(72) if positions is None else positions) // 12
        torch.testing.assert_close(mixture.weights, OF_ROWS[rows])
        alone = [
            next(member.outputs([member.read_ahead(batch)], wanted)).distribution.logits().softmax(-1)
            for member in members
        ]
        expected = sum(weight[:, None] * each for weight, each in zip(OF_ROWS[rows].T, alone, strict=True))
        for model in models:
            model.read.clear()
        valid = torch.ones_like(batch.ids, dtype=torch.bool) if batch.documents is None else batch.documents >= 0
        kept = slice(None) if positions is not None else valid.flatten()
        torch.testing.assert_close(mean.values.softmax(-1)[kept], expected[kept], rtol=1e-4, atol=1e-6)


def test_a_teacher_without_a_sequence_reads_one_for_nothing() -> None:
    models, batch = [counting("llama", seed) for seed in (1, 2)], causal_batch()
    teacher = TeachersBySource([LiveTeacher(model) for model in models], WEIGHTS, np.array([0, 30, 31, 32]))
    (found,) = teacher.outputs([teacher.read_ahead(batch)], lambda one: OutputSpec(True, one.targets.positions))
    assert [model.read for model in models] == [[6], [1]] and not found.distribution.weights[:, 1].any()


def arguments(shelf: Shelf, folder: Path, *more: str) -> list[str]:
    notes, other = shelf.root / "by-source", shelf.root / "other-teacher"
    if not notes.exists():
        notes.mkdir()
        for number in range(20):
            (notes / f"{number}.txt").write_text(some_text(number, 12))
    if not other.exists():
        assert (
            distill(
                "+recipe=bert_pretrain",
                *shelf.corpus,
                "train.steps=2",
                f"teacher.path={shelf.teacher}",
                "student=layers",
                "student.layers=[0,1,2,3]",
                "objective=mlm",
                f"hydra.run.dir={other}",
            )
            == 0
        )
    sources = f"{{notes: {{kind: text, document: file, path: {notes}, weight: 3}}, "
    sources += f"books: {{kind: gutenberg, path: {shelf.books}, weight: 1}}}}"
    corpus = [each for each in shelf.corpus if not each.startswith("corpus.path")]
    corpus += [f"corpus.sources={sources}", "corpus.max_sequences=60", "evaluate.pseudo_perplexity.fraction=0"]
    members = [f"teacher.members.a={{path: {shelf.teacher}}}", f"teacher.members.b={{path: {other}}}"]
    train = ["objective=masked", "objective.cosine.weight=0", "train.steps=6", "train.save_every=2", "train.keep=9"]
    train += ["train.log_every=1", "train.batch_size=8", "train.accumulate=1", "precision=fp32", "student.layers=[0,1]"]
    run = ["corpus=mixture", "evaluate=heldout", "teacher=several", *corpus, *members, *train]
    return [*run, *more, f"hydra.run.dir={folder}"]


def test_runs_whose_sources_have_their_own_teachers(shelf: Shelf, tmp_path: Path) -> None:
    chosen = ["teacher.members.a.sources=[notes]", "teacher.members.b.sources=[books]"]
    done, mean, again = tmp_path / "done", tmp_path / "mean", tmp_path / "again"
    assert distill(*arguments(shelf, done, *chosen)) == 0 and distill(*arguments(shelf, mean)) == 0
    losses = [[line["loss/soft"] for line in metrics(folder)] for folder in (done, mean)]
    assert all(one != other for one, other in zip(*losses, strict=True))
    assert distill(*arguments(shelf, interrupted(done, again), *chosen)) == 0
    assert_same(again, done)
    assert results(done)["identity"]["teacher.members.a.sources"] == ["notes"]
    of_each, of_both = results(done), results(mean)
    members = [member for content in (of_each, of_both) for member in content["teacher"]["members"].values()]
    assert all(member["perplexity"] for member in members)
    # Their mean has taught nothing.
    assert "perplexity" not in of_each["teacher"] and of_each["agreement"] is None
    assert of_both["teacher"]["perplexity"] and of_both["agreement"]
    (again / "results.json").unlink()
    assert distill(*arguments(shelf, again, *chosen[:1])) == 2, "those would be other teachers"


def test_one_teacher_of_all_sources_is_the_only_one(shelf: Shelf, tmp_path: Path) -> None:
    arguments_of_two = arguments(shelf, tmp_path / "run", "teacher.members.a.sources=[books,notes]")
    assert distill(*(each for each in arguments_of_two if not each.startswith("teacher.members.b"))) == 0
    assert results(tmp_path / "run")["teacher"]["perplexity"]
