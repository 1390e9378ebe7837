"""Live teachers, joint forwards cut up by batch; and the forms of distributions, of which draws have no bias."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import make
from job import Shelf, distill, results
from pairs import window
from tiny import HIDDEN, PAD, SEP, make_batches, make_model, make_rows, make_tokenizer, only, records, text_config
from torch import Tensor
from transformers import AutoModel

from distill.config.settings import BackendConfig, StudentConfig, TeacherConfig
from distill.data.batch import Batch
from distill.data.collate.clm import CausalLM
from distill.data.sequence_format import SequenceFormat
from distill.distributed.single import Single as OneRank
from distill.models.language_model import LAST, Head, LanguageModel, OutputSpec
from distill.models.pooling import CLS, MEAN, saved_pooling
from distill.objective import losses
from distill.objective.build import make_terms
from distill.objective.terms import Term
from distill.runs.pair import Teachers, load_teachers
from distill.runs.tokenizers import refuse_pairs_of_tokens
from distill.runtime.errors import SettingError
from distill.tasks import find_task
from distill.teacher import cache
from distill.teacher.cache import Layout
from distill.teacher.distributions import Logits, Mixture, Samples, Single, StudentRows, TopK, top_k_log_probs
from distill.teacher.live import LiveTeacher, RetokenizedTeacher
from distill.teacher.sampling import as_samples, kept_entries, offsets_of, stored


@pytest.mark.parametrize("family", ["bert", "modernbert", "llama"])
@pytest.mark.parametrize("case", ["padded", "mixed", "without padding"])
def test_a_joint_forward_is_cut_up_by_batch(family: str, case: str) -> None:
    model, batches = LanguageModel(make(family)), window(2, shortest=None if case == "without padding" else 4)
    if case == "mixed":  # the first has no padding: a joint forward has masks for the others all the same
        batches = [replace(batches[0], documents=None, valid_positions=None), *batches[1:]]

    def outputs(**more: Any) -> list[Any]:
        wanted = lambda batch: OutputSpec(True, batch.targets.positions, (0, 2, LAST), (1, 3), (CLS, MEAN))  # noqa: E731
        return list(LiveTeacher(model, **more).outputs(batches, wanted))

    for batch, one, other in zip(batches, outputs(micro_batches=len(batches)), outputs(), strict=True):
        torch.testing.assert_close(one.distribution.rows, other.distribution.rows)
        valid = torch.ones_like(batch.ids).bool() if batch.documents is None else batch.documents >= 0
        for layer in (0, 2, LAST):
            assert one.outputs.hidden[layer].shape[:2] == batch.ids.shape
            torch.testing.assert_close(one.outputs.hidden[layer][valid], other.outputs.hidden[layer][valid])
        for kind in (CLS, MEAN):
            torch.testing.assert_close(one.outputs.pooled[kind], other.outputs.pooled[kind])
        for block in (1, 3):
            found, expected = one.outputs.qkv[block], other.outputs.qkv[block]
            for values, own in zip(found[:3], expected[:3], strict=True):
                torch.testing.assert_close(values.transpose(1, 2)[valid], own.transpose(1, 2)[valid])
            size = (len(batch.ids), 1, *[batch.ids.shape[1]] * 2)
            masks = [torch.ones(size).bool() if m is None else m.expand(size) for m in (found.mask, expected.mask)]
            assert torch.equal(*(each.transpose(1, 2)[valid] for each in masks)) and found.scaling == expected.scaling


def test_a_joint_forward_keeps_documents_apart_where_the_first_batch_has_one_a_sequence() -> None:
    rows = make_rows(6)
    rows[4:, 5] = SEP  # two documents, in the last of three batches alone
    model, clm = (
        LanguageModel(make("llama")),
        CausalLM(SequenceFormat(None, None, None, SEP, None, PAD, 1), packed=True),
    )
    batches = make_batches(rows, clm, 2, 3).window(0)
    batches.sort(key=lambda batch: "position_ids" in batch.inputs)
    wanted, forwards = lambda batch: OutputSpec(layers=(LAST,)), list[int]()
    model.register_forward_hook(lambda *_: forwards.append(1))
    joint, alone = (list(LiveTeacher(model, number).outputs(batches, wanted)) for number in (3, 1))
    assert len(forwards) == 1 + 3  # of ranks with other text as many, or sharded teachers would wait for each other
    for one, other in zip(joint, alone, strict=True):
        torch.testing.assert_close(one.outputs.hidden[LAST], other.outputs.hidden[LAST])


@pytest.mark.parametrize("head", [False, True])
def test_last_states_at_the_positions_are_cut_up_by_batch(head: bool) -> None:
    """Also those of a last block that computes no others; where nothing is wanted the model is not asked."""
    model, batches = LanguageModel(make("bert")), window(2, shortest=4)
    teacher = LiveTeacher(model, micro_batches=len(batches))
    parts = teacher.outputs(batches, lambda batch: OutputSpec(head, batch.targets.positions, last_rows=True))
    for batch, part in zip(batches, parts, strict=True):
        whole = model(batch.inputs, batch.documents, OutputSpec(layers=(LAST,))).hidden[LAST]
        torch.testing.assert_close(part.outputs.last_rows, whole.flatten(0, 1)[batch.targets.positions])
    nobody = LiveTeacher(None)  # type: ignore[arg-type]
    assert all(output.distribution is None for output in nobody.outputs(batches, lambda batch: OutputSpec()))


# --- another tokenizer


class Logarithms(Term):
    """A loss that claims to compare two vocabularies."""

    across_tokenizers, student_reads, teacher_reads = True, OutputSpec(head=True), OutputSpec(head=True)

    def count(self, batch: Batch) -> int:
        return 1

    def loss_sum(self, student: Any, teacher: Any, batch: Batch) -> Tensor:
        raise AssertionError


def test_a_loss_on_all_logits_is_of_pairs_of_tokens() -> None:
    with pytest.raises(SettingError, match=r"objective\.mine pairs tokens"):
        refuse_pairs_of_tokens(make_tokenizer(), make_tokenizer(("whale",)), {"mine": Logarithms()}, from_layers=False)


SPEC = OutputSpec(pooled=("mean",))


def batch_of(rows: np.ndarray) -> Batch:
    ids = torch.from_numpy(rows.astype(np.int64))
    return Batch({"input_ids": torch.zeros_like(ids)}, None, {}, None, np.arange(len(rows))[::-1].copy())


def test_the_teacher_reads_the_text_of_each_row() -> None:
    """Its vectors are those of the decoded text, prompts too, whatever was masked in the student's batch."""
    own, other = make_tokenizer(), make_tokenizer(("whale",))
    rows, teacher = make_rows(5, shortest=4), make_model("bert", 2, vocab=len(other))
    batch, columns = batch_of(rows), np.arange(rows.shape[1])

    def asked(sequences: np.ndarray, longest: int | None = None) -> RetokenizedTeacher:
        return RetokenizedTeacher(LanguageModel(teacher), sequences, own, other, longest)

    read = asked(rows).read_ahead(batch)
    (output,) = asked(rows).outputs([read], lambda _: SPEC)
    for number, row in enumerate(batch.row_ids):
        text = own.decode(rows[row].astype(int), skip_special_tokens=True)
        with torch.no_grad():
            expected = teacher.base_model(torch.tensor([other(text).input_ids]))[0][0].mean(0)
        torch.testing.assert_close(output.outputs.pooled["mean"][number], expected, rtol=1e-4, atol=1e-5)
    assert output.distribution is None and asked(rows, 4).read_ahead(batch).teacher_data["input_ids"].shape == (5, 4)
    prompts = records(rows, loss_mask=columns >= 5, inner=columns == 6)
    assert torch.equal(asked(prompts).read_ahead(batch).teacher_data["input_ids"], read.teacher_data["input_ids"])


def models_of(folder: Path, other_tokenizer: bool) -> Teachers:
    """Those of a run on sequences of 24 tokens, whose teacher takes 16."""
    make_model("bert", 1, max_position_embeddings=16).save_pretrained(folder / "teacher")
    make_tokenizer().save_pretrained(folder / "teacher")
    make_tokenizer(("whale",)).save_pretrained(folder / "tokenizer")
    tokenizer = str(folder / "tokenizer") if other_tokenizer else None
    sizes = {**HIDDEN, "num_hidden_layers": 1}
    config = text_config(kind="text", path=str(folder), sequence_length=24, cache=str(folder / "cache")).changed(
        teacher=TeacherConfig(path=str(folder / "teacher")),
        student=StudentConfig(init="random", architecture="bert", tokenizer=tokenizer, config=sizes),
        objective=only(pooled={"weight": 1.0}),
    )
    terms = make_terms(config.objective)
    return load_teachers(config, find_task("mlm", terms.values()), terms, OneRank(BackendConfig(device="cpu")))


def test_a_teacher_limits_the_length_where_it_reads_the_same_tokens(tmp_path: Path) -> None:
    assert models_of(tmp_path, other_tokenizer=True).teacher_tokenizer is not None
    with pytest.raises(SettingError, match=r"^corpus\.sequence_length=24 exceeds the 16 positions of teacher"):
        models_of(tmp_path, other_tokenizer=False)


BPE = ["student=bert", "student.init=random", "student.layers=null", "corpus.max_unknown=1"]
BPE += ["student.config={hidden_size: 24, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32}"]
ALONE = ["objective.soft.weight=0", "objective.cosine.weight=0", "objective.mlm.weight=0", "objective.pooled.weight=1"]


@pytest.fixture(scope="module")
def own(shelf: Shelf) -> str:
    """The setting that gives the student another tokenizer than the teacher's."""
    make_tokenizer(("river", "house")).save_pretrained(shelf.root / "tokenizer")
    return f"student.tokenizer={shelf.root / 'tokenizer'}"


def test_a_run_across_tokenizers_pairs_vectors_alone(
    shelf: Shelf, own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What needs pairs of tokens is refused, and what the line advises runs."""
    for arguments, words in (
        (BPE, ("objective.soft and objective.cosine pair tokens", "objective.pooled.weight=1")),
        (["+objective.pooled.weight=1", *ALONE[:2]], ("student.init=layers", "student.tokenizer=null")),
    ):
        assert shelf.run(tmp_path / "run", *arguments, own) == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert all(word in line for word in words)
        if advised := line.partition(": give ")[2].partition(",")[0]:
            assert shelf.run(tmp_path / "advised", *arguments, own, "train.epochs=1", *advised.split()) == 0
    content: dict[str, Any] = results(tmp_path / "advised")
    assert content["training"]["final_loss"]["pooled"] > 0 and content["agreement"] is None
    assert "perplexity" not in content["teacher"] and content["teacher"]["parameters"] > 0
    assert any("another tokenizer" in note for note in content["notes"])


def test_of_vectors_alone_their_loss_is_scored_and_no_head_that_nobody_trained(
    shelf: Shelf, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert shelf.run(run, *BPE, *ALONE, own) == 0
    content: dict[str, Any] = results(run)
    assert list(content["measures"]) == ["pooled_loss"] and content["student"]["pooled_loss"]["heldout"] > 0
    for page in ("report.md", "report.html", "student/README.md"):
        text = (run / page).read_text()
        assert "oss of pooled vectors" in text and not re.search(r"erplexity (is|\|)", text)
    card = (run / "student" / "README.md").read_text()
    assert "pipeline_tag: feature-extraction" in card and "fill-mask" not in card
    saved = saved_pooling(AutoModel.from_pretrained(run / "student"))  # as sentence-transformers reads it
    assert saved is not None and saved.kind == "mean" and not saved.unsupported
    (code,) = re.findall(r"## Use\n\n```python\n(.*?)```", card, flags=re.DOTALL)
    capsys.readouterr()
    for model in (run, run / "student"):
        assert distill("evaluate", f"model={model}") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"model={model}: no loss of its run trained the head" in line
    monkeypatch.chdir(run / "student")
    exec(code.replace("print(", "vector = ("), defined := dict[str, Any]())
    documents = torch.where(defined["inputs"]["attention_mask"].bool(), 0, -1)  # of two texts, one of which is padded
    inputs = {"input_ids": defined["inputs"]["input_ids"]}
    expected = LanguageModel(defined["model"].eval())(inputs, documents, SPEC).pooled["mean"]
    torch.testing.assert_close(defined["vector"], expected)


ROWS, VOCAB, TEMPERATURE = 5, 17, 1.7


def numbers(*sizes: int, seed: int) -> Tensor:
    return 2 * torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


VALUES, BIAS = numbers(ROWS, VOCAB, seed=1), numbers(VOCAB, seed=2)
TOP: TopK = top_k_log_probs(VALUES, 4, TEMPERATURE)
SAMPLES = Samples(
    torch.tensor([[3, 9, 3]] * ROWS, dtype=torch.int32), numbers(ROWS, 3, seed=3).abs(), -numbers(ROWS, 1, seed=4).abs()
)
# By name: a form, its cut-off, and the formula of `losses` for the student's logits.
FORMS: dict[str, tuple[Single, float, Callable[[Tensor], Tensor]]] = {
    "logits": (Logits(VALUES, BIAS), 0.0, lambda z: losses.soft(z, VALUES + BIAS, TEMPERATURE)),
    "cut": (Logits(VALUES), 0.05, lambda z: losses.soft(z, VALUES, TEMPERATURE, 0.05)),
    "largest": (TOP, 0.0, lambda z: losses.soft_topk(z, *TOP, TEMPERATURE)),
    "samples": (SAMPLES, 0.0, lambda z: losses.soft_sampled(z, *SAMPLES, TEMPERATURE)),
}


def student_rows(logits: Tensor, teacher: Single) -> StudentRows:
    z = logits / TEMPERATURE
    top = z.amax(-1, keepdim=True)
    # Where a form reads no exponentials it may be given anything.
    v = (z - top).exp() if teacher.reads_exponentials else torch.full_like(z, torch.nan)
    return StudentRows(z, top, v, TEMPERATURE)


@pytest.mark.parametrize("form", FORMS)
def test_soft_targets_are_those_of_the_formulas(form: str) -> None:
    teacher, cutoff, formula = FORMS[form]
    logits, weight = numbers(ROWS, VOCAB, seed=5).requires_grad_(), torch.tensor(0.3 * TEMPERATURE, dtype=torch.float64)
    want = formula(logits)
    (gradient,) = torch.autograd.grad((0.3 * want).sum(), logits)
    loss, by_hand = teacher.soft_targets(student_rows(logits.detach(), teacher), weight, cutoff)
    torch.testing.assert_close(TEMPERATURE**2 * loss[:, 0], want.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(by_hand, gradient, rtol=1e-12, atol=1e-12)
    for rows in (slice(1, 3), torch.tensor([4, 0])):
        part = teacher.rows(rows)
        some = part.soft_targets(student_rows(logits.detach()[rows], part), weight, cutoff)
        torch.testing.assert_close(some, (loss[rows], by_hand[rows]), rtol=0, atol=0)


def test_logits_of_several_teachers_are_one_distribution_and_others_losses_are_averaged() -> None:
    other = Logits(numbers(ROWS, VOCAB, seed=6))
    mixture = Mixture((Head(VALUES, BIAS), Head(VALUES, BIAS)), (0.25, 0.75), TEMPERATURE)
    ((weight, mixed),) = mixture.combined([Logits(VALUES, BIAS), other], torch.float64)
    first, second = ((logits / TEMPERATURE).softmax(-1) for logits in (VALUES + BIAS, other.values))
    assert weight == 1.0 and isinstance(mixed, Logits) and mixed.bias is None
    torch.testing.assert_close((mixed.values / TEMPERATURE).exp(), 0.25 * first + 0.75 * second)
    members = (Logits(VALUES), TOP)
    averaged = Mixture(members, (0.25, 0.75))
    assert averaged.combined(members, torch.float64) == [(0.25, members[0]), (0.75, members[1])]
    assert Mixture.of(averaged) is averaged and Mixture.of(TOP).combined([TOP], torch.float64) == [(1.0, TOP)]
    assert Mixture.of(None).combined([], torch.float64) == [(1.0, None)]


# --- draws

WORDS, POSITIONS, TIMES = 31, 3, 20_000


def logits(seed: int, rows: int = POSITIONS) -> Tensor:
    return numbers(rows, WORDS, seed=seed) / 2


def kept(teacher: Tensor, top_k: int, sampled: int, offsets: Tensor | None = None) -> dict[str, Tensor]:
    if offsets is None:
        offsets = torch.rand(len(teacher), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return kept_entries(teacher, top_k, sampled, 2.0, offsets)


def deviation(student: Tensor, teacher: Tensor, samples: Samples) -> float:
    """The most standard errors that a mean over TIMES draws is from the exact loss and gradient."""

    def of(loss: Callable[..., Tensor], rows: Tensor, *arguments: Tensor) -> Tensor:
        rows = rows.detach().requires_grad_()
        values = loss(rows, *arguments, 2.0)
        (gradient,) = torch.autograd.grad(values.sum(), rows)
        return torch.cat([values.detach()[:, None], gradient], 1)

    found = of(losses.soft_sampled, student.repeat(TIMES, 1), *samples).view(TIMES, POSITIONS, -1)
    error = found.std(0) / TIMES**0.5
    return float(((found.mean(0) - of(losses.soft, student, teacher)).abs() / (error + 1e-5)).max())


@pytest.mark.parametrize(("top_k", "sampled"), [(0, 1), (0, 6), (3, 1), (3, 6), (WORDS - 1, 2)])
def test_value_and_gradient_have_the_exact_mean(top_k: int, sampled: int) -> None:
    """Without the rounding of what is stored; and what is biased is found out."""
    teacher, student = logits(1), logits(2)
    samples = as_samples(kept(teacher.repeat(TIMES, 1), top_k, sampled))
    assert samples.ids.shape == samples.weights.shape == (TIMES * POSITIONS, top_k + sampled)
    assert deviation(student, teacher, samples) < 4.5
    if top_k == 3:  # all the probability on the largest entries
        weights = samples.weights[:, :3] / samples.weights[:, :3].sum(1, keepdim=True)
        assert deviation(student, teacher, samples._replace(ids=samples.ids[:, :3], weights=weights)) > 10


def test_a_token_is_drawn_as_often_as_it_should_be_to_within_one() -> None:
    """And over all offsets on average exactly so often."""
    grid, (top_k, sampled) = 4000, (2, 9)
    teacher = logits(3, 1).repeat(grid, 1)
    found = kept(teacher, top_k, sampled, (torch.arange(grid, dtype=torch.float64) + 0.5) / grid)
    counts = torch.nn.functional.one_hot(found["draws"], WORDS).sum(1).double()
    rest = (teacher[0] / 2.0).softmax(0)
    rest[found["ids"][0]] = 0
    wanted = sampled * rest / rest.sum()
    assert (counts - wanted).abs().max() < 1 and (counts.mean(0) - wanted).abs().max() <= 2 / grid
    assert not (found["draws"][:, :, None] == found["ids"][:, None]).any(), "what is kept exactly is not drawn"


@pytest.mark.parametrize("top_k", [0, 2])
def test_extreme_teachers_give_finite_entries(top_k: int) -> None:
    """A sure one, one that knows two tokens alone, and one without any preference; both ends of the offsets."""
    teacher = torch.zeros(6, WORDS)
    teacher[0:2, 7], teacher[2:4, WORDS - 2 :] = 6e4, 6e4
    offsets = torch.tensor([2.0**-53, 1 - 2.0**-53] * 3, dtype=torch.float64)
    records = stored(kept(teacher, top_k, 5, offsets), Layout(top_k, 5, WORDS).record)
    samples = as_samples({name: cache._tensor(records[name]) for name in records.dtype.names or ()})
    assert int(samples.ids.min()) >= 0 and int(samples.ids.max()) < WORDS
    assert all(each.isfinite().all() for each in (samples.weights, samples.neg_entropy))
    torch.testing.assert_close(samples.weights.sum(1), torch.ones(6), rtol=2e-3, atol=0)
    wanted = (teacher.double() / 2.0).softmax(-1)[:4]
    found = torch.zeros(6, WORDS, dtype=torch.float64).scatter_add_(1, samples.ids, samples.weights.double())[:4]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.11)  # a fifth more or less of a half
    assert (found[wanted == 0] == 0).all(), "nothing without probability is drawn"


def test_offsets_belong_to_the_row_and_the_place_in_it() -> None:
    rows, counts = np.array([3, 9, 4]), np.array([2, 0, 5])
    found = offsets_of(rows, counts, "one")
    assert found.shape == (7,) and ((found > 0) & (found < 1)).all() and len(set(found)) == 7
    apart = [offsets_of(rows[i : i + 1], counts[i : i + 1], "one") for i in range(3)]
    assert np.array_equal(found, np.concatenate(apart)) and not set(found) & set(offsets_of(rows, counts, "another"))
    many = offsets_of(np.arange(2000), np.full(2000, 5), "one")
    assert abs(many.mean() - 0.5) < 0.015 and abs(many.std() - 12**-0.5) < 0.01
