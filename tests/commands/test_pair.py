"""A pair in memory: its losses and gradients against plain formulas, its sequences against those of a run."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job import save_model
from naive import definition
from tiny import named_terms, text_config

from distill.commands.api.pair import Pair, load_pair
from distill.commands.prediction import predict
from distill.config.settings import StudentConfig
from distill.data.tokens import corpus_text, prepare
from distill.models.loaded import LoadedModel, load_model
from distill.objective.terms import VocabularyTerm
from distill.runtime.errors import SettingError
from distill.tasks import find_task

TEXTS = ["the cat and an owl sat.", "of the owls", "and ran to the end of it"]
WITHOUT_DROPOUT = StudentConfig(layers=[0], dropout=0.0)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("teacher") / "model", "bert", 2)


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("causal") / "model", "gpt2", 2)


def pair_of(teacher: Path, **options: Any) -> Pair:
    return load_pair(teacher, WITHOUT_DROPOUT, sequence_length=24, device="cpu", **options)


def test_losses_and_gradients_are_those_of_the_formulas(teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of(teacher)
    terms = {"soft": {"weight": 5.0, "cutoff": 0.0}, "mlm": 2.0, "cosine": 1.0}
    objective = pair.objective(terms, temperature=3.0)
    losses = objective(TEXTS, step=4)
    losses.total.backward()
    found = [parameter.grad.clone() for parameter in objective.parameters() if parameter.grad is not None]
    monkeypatch.setattr("naive.VOCAB", len(pair.student.tokenizer))
    soft = {"weight": 5.0, "cutoff": 0.0, "positions": "all"}
    settings = named_terms(temperature=3.0, soft=soft, mlm={"weight": 2.0}, cosine={"weight": 1.0})
    student, frozen = pair.student.model.double(), pair.teacher.model.double()
    student.zero_grad()
    total, means = definition(settings, student, frozen, [pair.batch(TEXTS, step=4)])
    total.backward()
    assert losses.total.item() == pytest.approx(total.item(), rel=1e-5)
    assert losses.terms == pytest.approx(means, rel=1e-4)
    assert losses.counts["mlm"] == len(pair.batch(TEXTS, step=4).targets.positions) > 0
    expected = [parameter.grad for parameter in student.parameters() if parameter.grad is not None]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-6)


class Distance(VocabularyTerm):
    def __init__(self, power: float = 1.0) -> None:
        self.power = power

    def losses(self, student: torch.Tensor, teacher: Any, targets: torch.Tensor) -> torch.Tensor:
        return (student.softmax(-1) - teacher.softmax(-1)).abs().pow(self.power).sum(-1)


def distance(student: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return Distance().losses(student, teacher, targets)


def test_classes_functions_and_objects_are_losses_as_in_distill(teacher: Path) -> None:
    pair = pair_of(teacher)
    forms: list[Any] = [
        Distance,
        {"_target_": Distance, "power": 1.0},
        {"_target_": distance, "weight": 1.0},
        Distance(),
    ]
    losses = [pair.objective({"mine": form})(TEXTS).total.item() for form in forms]
    assert losses == pytest.approx([losses[0]] * 4) and losses[0] > 0
    half = pair.objective({"mine": {"_target_": Distance, "weight": 0.5}})(TEXTS).total.item()
    assert half == pytest.approx(losses[0] / 2)


def test_a_loop_of_ones_own_learns(teacher: Path) -> None:
    pair = pair_of(teacher)
    objective = pair.objective({"soft": 1.0, "hidden_mse": 1.0})
    optimizer = torch.optim.AdamW(objective.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = objective(TEXTS).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(parameter.grad is None for parameter in pair.teacher.model.parameters())


def test_masks_follow_step_and_seed(teacher: Path) -> None:
    pair, other = pair_of(teacher), pair_of(teacher, seed=1)
    masks = [each.batch(TEXTS * 4, step).ids for each, step in ((pair, 0), (pair, 0), (pair, 1), (other, 0))]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2]) and not torch.equal(masks[0], masks[3])


def test_a_causal_pair(causal: Path) -> None:
    """The words' term is transformers' own loss of the text between two end-of-text tokens, but for the first."""
    pair = load_pair(causal, StudentConfig(layers=[1], dropout=0.0), sequence_length=64, device="cpu")
    losses = pair.objective({"soft": 1.0, "clm": 2.0})(TEXTS[:1])
    ids = torch.tensor([[*pair.student.tokenizer(TEXTS[0])["input_ids"], pair.student.tokenizer.eos_token_id]])
    expected = pair.student.model(input_ids=ids, labels=ids).loss.item()
    assert losses.terms["clm"] == pytest.approx(expected, rel=1e-5) and losses.counts["clm"] == ids.shape[1] - 1
    assert losses.total.item() == pytest.approx(losses.terms["soft"] + 2 * expected, rel=1e-4)


def test_texts_are_cut_as_a_run_cuts_them(teacher: Path, causal: Path, tmp_path: Path) -> None:
    """Names of special tokens are text too; but for ends of fewer than 8 tokens, which a run leaves out."""
    texts = ["the cat [SEP] and an owl sat. " * 20, "of the owls <|endoftext|> and ran to the end of it"]
    for folder, task in ((teacher, "mlm"), (causal, "clm")):
        pair = load_pair(folder, WITHOUT_DROPOUT, sequence_length=24, device="cpu")
        config = text_config(sequence_length=24, heldout=0.0, kind="jsonl", path=str(tmp_path / "texts.jsonl"))
        config = config.changed(data=config.data.changed(cache=str(tmp_path), workers=1))
        (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        corpus, data = config.corpus, config.data
        format = find_task(task).sequence_format  # type: ignore[attr-defined]
        stored = prepare(corpus_text(corpus, data), pair.student.tokenizer, corpus, data, "train", format)
        mine = pair._sequences(texts)
        long_enough = mine if task == "clm" else mine[(mine != pair.student.tokenizer.pad_token_id).sum(1) >= 10]
        assert long_enough.tolist() == stored.sequences[np.arange(len(stored.sequences))].tolist()
        assert len(mine) - len(long_enough) == (task == "mlm")


def test_a_student_is_saved_with_all_that_it_needs(teacher: Path, tmp_path: Path) -> None:
    pair = pair_of(teacher)
    folder = pair.save(tmp_path / "runs" / "mine")
    assert pair.save(folder) == folder
    again = load_model(folder, "cpu")
    same = zip(again.model.state_dict().values(), pair.student.model.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in same) and again.tokenizer("the cat") == pair.student.tokenizer(
        "the cat"
    )
    with pytest.raises(SettingError, match=r"^folder=.*: not replaced, as it holds mine, which is none of"):
        pair.save(tmp_path / "runs")
    (folder / "optimizer.pt").touch()
    with pytest.raises(SettingError, match=r"it holds optimizer\.pt, which is none of a saved student's files"):
        pair.save(folder)
    (tmp_path / "empty").mkdir()
    assert (pair.save(tmp_path / "empty") / "model.safetensors").is_file()


def test_students_and_generators(teacher: Path) -> None:
    before = torch.get_rng_state()
    half = load_pair(teacher, num_layers=1, layers="first", device="cpu")
    assert half.student.num_parameters < half.teacher.num_parameters and "teacher=BertForMaskedLM" in repr(half)
    saved = load_pair(teacher, student=teacher, device="cpu")
    assert saved.student.num_parameters == saved.teacher.num_parameters
    assert torch.equal(torch.get_rng_state(), before)


def test_generators_of_gpus_are_not_seeded(teacher: Path, causal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.manual_seed` would seed every GPU of the process."""
    monkeypatch.setattr("torch.cuda.manual_seed_all", lambda seed: pytest.fail("seeded all GPUs"))
    load_pair(teacher, device="cpu")
    assert len(predict(load_model(causal, "cpu"), ["the cat"], max_new_tokens=2, sample=True, seed=1)) == 1


@pytest.mark.parametrize(
    ("terms", "temperature", "setting"),
    [
        ({"soft": {"weight": {"start": 1.0, "end": 0.0}}}, 2.0, "objective.soft.weight: a schedule from 1.0 to 0.0"),
        ({"soft": {"temperature": {"start": 4.0, "end": 1.0}}}, 2.0, "objective.soft.temperature: a schedule"),
        ({"soft": 1.0, "mlm": 1.0}, {"start": 4.0, "end": 1.0}, "objective.temperature: a schedule from 4.0 to 1.0"),
    ],
)
def test_schedules_are_refused(teacher: Path, terms: Any, temperature: Any, setting: str) -> None:
    with pytest.raises(SettingError, match=f"^{setting}"):
        pair_of(teacher).objective(terms, temperature=temperature)


def test_what_does_not_fit(teacher: Path, causal: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"^layers and num_layers are for a student from the teacher's layers"):
        load_pair(teacher, student=teacher, layers=[0])
    with pytest.raises(SettingError, match=r"^layers=auto scores sequences of a corpus"):
        load_pair(teacher, StudentConfig(layers="auto"), device="cpu")
    with pytest.raises(SettingError, match=r"^layers=auto scores sequences of a corpus"):
        load_pair(teacher, layers="auto", device="cpu")
    with pytest.raises(SettingError, match=r"^teacher=.*nothing does not load"):
        load_pair(tmp_path / "nothing")
    pair = pair_of(teacher)
    with pytest.raises(SettingError, match=r"^objective\.clm: predicts clm"):
        pair.objective({"clm": 1.0})
    with pytest.raises(SettingError, match=r"^objective\.sot: no such loss"):
        pair.objective({"sot": 1.0})
    with pytest.raises(SettingError, match=r"^texts: none of them has a token"):
        pair.objective({"mlm": 1.0})([""])
    with pytest.raises(SettingError, match=r"^texts: one string; give a list of texts$"):
        pair.objective({"mlm": 1.0})("the cat and an owl")
    with pytest.raises(SettingError, match=r"^student\.path=.*: a masked language model needs"):
        load_pair(teacher, student=causal, device="cpu")


def test_what_a_causal_pair_does_not_allow(causal: Path) -> None:
    """The same that a run refuses: a first position that has seen nothing of its sequence."""
    pair = load_pair(causal, StudentConfig(layers=[1], dropout=0.0), sequence_length=24, device="cpu")
    for term in ({"pooled": {"weight": 1.0, "pooling": "cls"}}, {"patient": 1.0}):
        with pytest.raises(SettingError, match=r"^objective\.(pooled|patient): reads the first position of a sequence"):
            pair.objective(term)
    assert pair.objective({"pooled": 1.0})(TEXTS).counts == {"pooled": len(TEXTS)}


def test_models_in_memory_are_a_pair(teacher: Path) -> None:
    """The same losses as with their folders."""
    one, other = load_model(teacher, "cpu"), load_model(teacher, "cpu")
    other.model.requires_grad_(True)
    pair = load_pair(
        LoadedModel.of(one.model, one.tokenizer), LoadedModel.of(other.model, other.tokenizer), sequence_length=24
    )
    assert pair.student.model.training and not any(p.requires_grad for p in pair.teacher.model.parameters())
    expected = load_pair(teacher, teacher, sequence_length=24)
    for made in (pair, expected):
        made.student.model.eval()
    terms = {"soft": 1.0, "mlm": 1.0}
    assert pair.objective(terms)(TEXTS).terms == pytest.approx(expected.objective(terms)(TEXTS).terms)
    assert load_pair(one, layers=[0], sequence_length=24).student.model.config.num_hidden_layers == 1
    with pytest.raises(SettingError, match=r"^teacher is a BertForMaskedLM in memory, .*: give \(model, tokenizer\)$"):
        load_pair(one.model)  # type: ignore[arg-type]
    tupled = load_pair((one.model, one.tokenizer), (other.model, other.tokenizer), sequence_length=24)
    tupled.student.model.eval()
    assert tupled.objective(terms)(TEXTS).terms == pytest.approx(expected.objective(terms)(TEXTS).terms)
    with pytest.raises(SettingError, match=r"^model: a Linear is no masked"):
        LoadedModel.of(torch.nn.Linear(1, 1), one.tokenizer)


def test_two_tokenizers_are_a_pair(teacher: Path, tmp_path: Path) -> None:
    """By vectors of whole sequences, which are those of the text that both read."""
    own = save_model(tmp_path / "student", "mpnet", 2)
    pair = load_pair(teacher, own, sequence_length=24, device="cpu")
    assert not pair.shares_tokenizer and len(pair.student.tokenizer) != len(pair.teacher.tokenizer)
    objective = pair.objective({"pooled": 1.0, "mlm": 1.0})
    losses = objective(TEXTS)
    assert losses.counts["pooled"] == len(TEXTS)
    losses.total.backward()
    assert all(parameter.grad is None for parameter in pair.teacher.model.parameters())
    batch = pair.batch(TEXTS)
    alone = {"pooled": {"weight": 1.0, "distance": "l2"}}
    pair.student.model.eval()
    with torch.no_grad():
        ids = [torch.tensor([pair.teacher.tokenizer(text)["input_ids"]]) for text in TEXTS]
        expected = torch.stack([pair.teacher.model.base_model(one)[0][0].mean(0) for one in ids])
        states = pair.student.model.base_model(batch.ids, batch.documents == 0 if batch.documents is not None else None)
        valid = torch.ones_like(batch.ids) if batch.documents is None else (batch.documents == 0).long()
        mean = (states[0] * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
    made = pair.objective(alone)
    if (module := made.objective.modules()) and len(list(module.parameters())):
        mean = mean @ next(iter(module.parameters())).T
    assert made(TEXTS).terms["pooled"] == pytest.approx((mean - expected).square().sum(1).mean().item(), rel=1e-3)
    in_memory = load_pair(load_model(teacher, "cpu"), load_model(own, "cpu"), sequence_length=24)
    assert not in_memory.shares_tokenizer and in_memory.objective(alone)(TEXTS).counts == {"pooled": len(TEXTS)}


def test_what_two_tokenizers_do_not_allow(teacher: Path, tmp_path: Path) -> None:
    own = save_model(tmp_path / "student", "mpnet", 2)
    pair = load_pair(teacher, own, sequence_length=24, device="cpu")
    with pytest.raises(SettingError) as error:
        pair.objective({"soft": 1.0, "cosine": 1.0, "mlm": 1.0})
    assert str(error.value).startswith("objective.soft and objective.cosine pair tokens, but the student has another")
    assert "give objective.soft.weight=0 objective.cosine.weight=0 objective.pooled.weight=1" in str(error.value)
    with pytest.raises(SettingError, match=r"^student\.init=layers takes the teacher's embeddings, but student\.tok"):
        load_pair(teacher, StudentConfig(tokenizer=str(own)), device="cpu")
    with pytest.raises(SettingError, match=r"^student\.tokenizer=corpus: no corpus is here"):
        load_pair(teacher, StudentConfig(tokenizer="corpus"), device="cpu")


def test_losses_of_heads_that_no_pair_has_are_refused(teacher: Path, causal: Path) -> None:
    for pair in (pair_of(teacher), pair_of(causal)):
        for name, head in (("soft_classes", "class"), ("soft_span", "span")):
            words = rf"^objective\.{name}: reads a head for {head}, .*; leave it out$"
            with pytest.raises(SettingError, match=words):
                pair.objective({name: 1})


def test_a_teacher_limits_the_length_where_it_reads_the_same_tokens(teacher: Path, tmp_path: Path) -> None:
    """Of the text of sequences of another tokenizer it reads as much as it takes."""
    short = save_model(tmp_path / "short", "bert", 2, max_position_embeddings=16)
    own = save_model(tmp_path / "student", "mpnet", 2)
    pair = load_pair(short, own, sequence_length=24, device="cpu")
    assert math.isfinite(pair.objective({"pooled": 1.0})(["the cat " * 30]).total.item())
    words = r"^corpus\.sequence_length=24 exceeds the 16 positions of teacher: lower it$"
    with pytest.raises(SettingError, match=words):
        load_pair(load_model(short, "cpu"), load_model(teacher, "cpu"), sequence_length=24, device="cpu")
