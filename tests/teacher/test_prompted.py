"""teacher.context: what a teacher gives behind a context, by document, and runs whose students learn from it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from families import make, make_family
from job import Shelf, assert_same, distill, interrupted, metrics, results, save_model
from tiny import CLS, PAD, SEP, make_tokenizer, records

from distill.data.batch import Batch, as_dummy
from distill.data.collate.clm import CausalLM
from distill.data.sequence_format import causal_format
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.teacher.live import LiveTeacher
from distill.teacher.prompted import PromptedTeacher, prompted

CONTEXT = (11, 12, 13)
SPEC = {"head": True, "layers": (1, LAST), "last_rows": True}


def batch(first: int | None, packed: bool = True) -> Batch:
    """Rows with three documents, of one token at an end too, with two and padding, with one, with padding alone."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "[SEP]"
    rows = np.full((5, 12), PAD, np.int64)
    rows[0] = [CLS, 20, 21, SEP, CLS, 22, 23, 24, SEP, CLS, 25, 26]
    rows[1, :9] = [30, 31, 32, SEP, CLS, 33, 34, 35, SEP]
    rows[2] = [CLS, *range(20, 31)]
    rows[3] = [CLS, *range(30, 40), SEP]
    rows[4] = [*range(20, 30), SEP, CLS]
    return CausalLM(causal_format(tokenizer), packed, first).collate(
        records(rows), np.zeros(5, np.uint64), np.arange(5)
    )


def documents(one: Batch) -> list[tuple[int, int]]:
    """Begin and end of each, as flat positions, without padding."""
    ends = one.inputs["document_lengths"].cumsum(0).tolist()
    valid = set(range(one.ids.numel())) if one.valid_positions is None else {*one.valid_positions.tolist()}
    return [(begin, end) for begin, end in zip([0, *ends], ends, strict=False) if begin in valid]


@pytest.mark.parametrize("first", [None, CLS])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_each_document_is_read_behind_the_context(family: str, first: int | None) -> None:
    """As by a forward of the context and that document alone, whose tokens of the context are left out."""
    model, one = make_family(family).eval(), batch(first)
    teacher = PromptedTeacher(LiveTeacher(LanguageModel(model)), CONTEXT, first, "")
    whole = lambda _: OutputSpec(positions=None, **SPEC)  # noqa: E731
    targets = lambda batch: OutputSpec(positions=batch.targets.positions, **SPEC)  # noqa: E731
    read = teacher.read_ahead(one)
    (everywhere,), (chosen,) = (list(teacher.outputs([read], spec)) for spec in (whole, targets))
    hidden = everywhere.outputs.hidden[LAST].flatten(0, 1)
    for begin, end in documents(one):
        ids = one.ids.flatten()[begin:end].tolist()
        at = 1 if ids[0] == first and len(ids) > 1 else 0
        behind = torch.tensor([[*ids[:at], *CONTEXT, *ids[at:]]])
        out = model(input_ids=behind, output_hidden_states=True)
        kept = [*range(at), *range(at + len(CONTEXT), len(ids) + len(CONTEXT))]
        logits = everywhere.distribution.logits()[begin:end]
        torch.testing.assert_close(logits, out.logits[0, kept], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(hidden[begin:end], out.hidden_states[-1][0, kept], rtol=1e-4, atol=1e-5)
        inner = everywhere.outputs.hidden[1].flatten(0, 1)[begin:end]
        torch.testing.assert_close(inner, out.hidden_states[1][0, kept], rtol=1e-4, atol=1e-5)
    at_targets = everywhere.outputs.last_rows.index_select(0, one.targets.positions)
    torch.testing.assert_close(chosen.outputs.last_rows, at_targets, rtol=1e-4, atol=1e-5)


def test_one_forward_may_take_several_batches_and_a_batch_that_only_fills_up() -> None:
    window = [batch(CLS), as_dummy(batch(CLS)), batch(CLS, packed=False)]
    model = LanguageModel(make("llama").eval())
    targets = lambda one: OutputSpec(True, one.targets.positions)  # noqa: E731
    found = []
    for micro_batches in (1, 3):
        teacher = PromptedTeacher(LiveTeacher(model, micro_batches), CONTEXT, CLS, "a")
        found.append(list(teacher.outputs([teacher.read_ahead(one) for one in window], targets)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.distribution.rows, other.distribution.rows)
    assert len(found[0][1].distribution.rows) == 0
    live = LiveTeacher(model)
    assert prompted(live, (), None) is live


STEP = [
    "train.batch_size=8",
    "train.accumulate=1",
    "train.steps=6",
    "train.save_every=2",
    "train.keep=9",
    "train.log_every=1",
]
WRITES = ["objective=gkd", "objective.on_policy.fraction=0.5", "objective.on_policy.max_new_tokens=8"]
TALE = ["teacher.context=the fox and the crow"]


def arguments(shelf: Shelf, folder: Path, *more: str) -> list[str]:
    model = shelf.root / "reads-context"
    if not model.exists():
        save_model(model, "llama")
    run = ["+recipe=distilgpt2_gutenberg", *shelf.corpus, f"teacher.path={model}", "student.layers=[0,2]", *STEP]
    return [*run, "precision=fp32", "evaluate.samples=0", *WRITES, *more, f"hydra.run.dir={folder}"]


def test_a_student_learns_from_it_on_its_own_text_too_and_resumes(
    shelf: Shelf, tmp_path: Path, lines: list[str]
) -> None:
    done, plain = tmp_path / "done", tmp_path / "plain"
    assert distill(*arguments(shelf, done, *TALE)) == 0
    assert any("reads a context of" in line and "without the context" in line for line in lines)
    assert distill(*arguments(shelf, plain)) == 0
    on_samples = ["samples_sha256" in line for line in metrics(done)]
    assert any(on_samples) and not all(on_samples)
    losses = [[line["loss/jsd"] for line in metrics(folder)] for folder in (done, plain)]
    assert all(one != other for one, other in zip(*losses, strict=True))
    assert results(done)["teacher"]["perplexity"] == results(plain)["teacher"]["perplexity"]
    again = interrupted(done, tmp_path / "again")
    assert distill(*arguments(shelf, again, *TALE)) == 0
    assert_same(again, done)
    (again / "results.json").unlink()
    assert distill(*arguments(shelf, again)) == 2, "that would be another teacher"


def test_a_loss_on_all_positions_of_both_is_refused(
    shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    relations = ["+objective.relations={weight: 1.0, relation_heads: 2}", "objective.on_policy.fraction=0"]
    assert distill(*arguments(shelf, tmp_path / "run", *TALE, *relations)) == 2
    assert "teacher.context: objective.relations compares all positions" in capfd.readouterr().err


def test_what_is_too_long_is_refused(shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert distill(*arguments(shelf, tmp_path / "run", f"teacher.context={'a ' * 2000}")) == 2
    error = capfd.readouterr().err
    assert "teacher.context: has" in error and "positions; shorten it, or lower corpus.sequence_length" in error
