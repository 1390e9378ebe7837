"""A pair in memory: its losses and gradients against plain formulas, its students, and what does not fit."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from job import save_model
from naive import definition
from tiny import named_terms

from distill.commands.api.pair import Pair, load_pair
from distill.commands.prediction import predict
from distill.config.settings import MaskingConfig, StudentConfig
from distill.models.loaded import LoadedModel, load_model
from distill.objective.terms import VocabularyTerm
from distill.runtime.errors import SettingError

TEXTS = ["the cat and an owl sat.", "of the owls", "and ran to the end of it"]
WITHOUT_DROPOUT = StudentConfig(layers=[0], dropout=0.0)
LENGTH = {"sequence_length": 24, "device": "cpu"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> dict[str, Path]:
    """Models of two layers; `mpnet` has a tokenizer of its own, `short` reads 16 tokens."""
    root = tmp_path_factory.mktemp("models")
    folders = {family: save_model(root / family, family, 2) for family in ("bert", "gpt2", "mpnet")}
    return folders | {"short": save_model(root / "short", "bert", 2, max_position_embeddings=16)}


@pytest.fixture(scope="module")
def teacher(folders: dict[str, Path]) -> Path:
    return folders["bert"]


def pair_of(teacher: Path, student: Any = WITHOUT_DROPOUT, **options: Any) -> Pair:
    return load_pair(teacher, student, **LENGTH | options)


def test_losses_and_gradients_are_those_of_the_formulas(teacher: Path, monkeypatch: Any) -> None:
    pair = pair_of(teacher)
    objective = pair.objective({"soft": {"weight": 5.0, "cutoff": 0.0}, "mlm": 2.0, "cosine": 1.0}, temperature=3.0)
    losses = objective(TEXTS, step=4)
    losses.total.backward()
    found = [parameter.grad.clone() for parameter in objective.parameters() if parameter.grad is not None]
    monkeypatch.setattr("naive.VOCAB", len(pair.student.tokenizer))
    soft = {"weight": 5.0, "cutoff": 0.0, "positions": "all"}
    settings = named_terms(temperature=3.0, soft=soft, mlm={"weight": 2.0}, cosine={"weight": 1.0})
    student, frozen = pair.student.model.double(), pair.teacher.model.double()
    student.zero_grad()
    batch = objective.batch(objective.sequences(TEXTS), step=4)
    total, means = definition(settings, student, frozen, [batch])
    total.backward()
    assert losses.total.item() == pytest.approx(total.item(), rel=1e-5)
    assert losses.terms == pytest.approx(means, rel=1e-4)
    assert losses.counts["mlm"] == len(batch.targets.positions) > 0
    expected = [parameter.grad for parameter in student.parameters() if parameter.grad is not None]
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=1e-3, atol=1e-6)


class Distance(VocabularyTerm):
    def __init__(self, power: float = 1.0) -> None:
        self.power = power

    def losses(self, student: torch.Tensor, teacher: Any, targets: torch.Tensor) -> torch.Tensor:
        return (student.softmax(-1) - teacher.softmax(-1)).abs().pow(self.power).sum(-1)


def distance(student: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return Distance().losses(student, teacher, targets)


def test_classes_functions_and_objects_are_losses_as_in_distill(teacher: Path) -> None:
    pair, half = pair_of(teacher), {"_target_": Distance, "weight": 0.5}
    forms = [Distance, {"_target_": Distance, "power": 1.0}, {"_target_": distance, "weight": 1.0}, Distance(), half]
    losses = [pair.objective({"mine": form})(TEXTS).total.item() for form in forms]
    assert losses == pytest.approx([*[losses[0]] * 4, losses[0] / 2]) and losses[0] > 0


def test_a_loop_of_ones_own_learns_and_saves(teacher: Path, tmp_path: Path) -> None:
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
    folder = pair.save(tmp_path / "runs" / "mine")
    assert pair.save(folder) == folder
    again = load_model(folder, "cpu")
    same = zip(again.model.state_dict().values(), pair.student.model.state_dict().values(), strict=True)
    assert all(torch.equal(one, saved) for one, saved in same)
    assert again.tokenizer("the cat") == pair.student.tokenizer("the cat")
    (folder / "optimizer.pt").touch()
    with pytest.raises(SettingError, match=r"^folder=.*: not replaced, as it holds optimizer\.pt"):
        pair.save(folder)


def test_texts_are_cut_by_the_tokenizer_and_masked_by_seed_and_step(teacher: Path) -> None:
    objective, of_seed = (pair_of(teacher, seed=seed).objective({"mlm": 1.0}) for seed in (0, 1))
    long = "the cat and an owl sat. " * 8
    cut = objective.sequences([long, "", TEXTS[1]])
    expected = objective.pair.student.tokenizer(long, add_special_tokens=False)["input_ids"]
    assert len(cut) == math.ceil(len(expected) / 22) + 1 and cut.shape[1] == 24
    assert [id_ for row in cut[:-1] for id_ in row[1:-1] if id_][: len(expected)] == expected
    ids = [one.batch(cut, step).ids.tolist() for one, step in ((objective, 0), (objective, 0), (objective, 1))]
    assert ids[0] == ids[1] != ids[2] and of_seed.batch(cut, 0).ids.tolist() != ids[0]
    for texts in ([""], "the cat and an owl", []):
        with pytest.raises(SettingError, match=r"^texts: .*; give a list of texts$"):
            objective(texts)


def test_a_causal_pair(folders: dict[str, Path]) -> None:
    """The words' term is transformers' own loss up to the end-of-text token; no first position stands for a text."""
    pair = pair_of(folders["gpt2"], StudentConfig(layers=[1], dropout=0.0))
    losses = pair.objective({"soft": 1.0, "clm": 2.0})(TEXTS[:1])
    ids = torch.tensor([[*pair.student.tokenizer(TEXTS[0])["input_ids"], pair.student.tokenizer.eos_token_id]])
    expected = pair.student.model(input_ids=ids, labels=ids).loss.item()
    assert losses.terms["clm"] == pytest.approx(expected, rel=1e-5) and losses.counts["clm"] == ids.shape[1] - 1
    assert losses.total.item() == pytest.approx(losses.terms["soft"] + 2 * expected, rel=1e-4)
    with pytest.raises(SettingError, match=r"^objective\.pooled: reads the first position of a sequence"):
        pair.objective({"pooled": {"weight": 1.0, "pooling": "cls"}})
    assert pair.objective({"pooled": 1.0})(TEXTS).counts == {"pooled": len(TEXTS)}


def test_nothing_else_is_seeded(folders: dict[str, Path], monkeypatch: Any) -> None:
    """`torch.manual_seed` would seed every GPU of the process."""
    monkeypatch.setattr("torch.cuda.manual_seed_all", lambda seed: pytest.fail("seeded all GPUs"))
    before = torch.get_rng_state()
    half = load_pair(folders["bert"], num_layers=1, layers="first", device="cpu")
    assert half.student.num_parameters < half.teacher.num_parameters and "teacher=BertForMaskedLM" in repr(half)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(predict(load_model(folders["gpt2"], "cpu"), ["the cat"], max_new_tokens=2, sample=True, seed=1)) == 1


def test_what_does_not_fit(folders: dict[str, Path], tmp_path: Path) -> None:
    teacher, both = folders["bert"], load_model(folders["bert"], "cpu")
    other = StudentConfig(tokenizer=str(folders["mpnet"]))
    for models, options, line in (
        ((teacher, teacher), {"layers": [0]}, r"layers and num_layers are for a student from the teacher's layers"),
        ((teacher, StudentConfig(layers="auto")), {}, r"layers=auto scores sequences of a corpus"),
        ((teacher, StudentConfig(refit=True)), {}, r"student.refit=True: reads sequences of a corpus"),
        ((teacher, StudentConfig(intermediate_size=8)), {}, r"student.intermediate_size=8: reads sequences"),
        ((tmp_path / "nothing",), {}, r"teacher=.*nothing does not load"),
        ((teacher, folders["gpt2"]), {}, r"student\.path=.*: a masked language model needs"),
        ((both, both), {}, r"student is the very model of the teacher"),
        ((both.model,), {}, r"teacher is a BertForMaskedLM in memory, .*: give \(model, tokenizer\)$"),
        ((teacher, other), {}, r"student\.init=layers takes the teacher's embeddings"),
        ((teacher, StudentConfig(tokenizer="corpus")), {}, r"student\.tokenizer=corpus: no corpus is here"),
        ((folders["short"], teacher), LENGTH, r"corpus\.sequence_length=24 exceeds the 16 positions of teacher"),
        ((teacher,), {"sequence_length": 2}, r"corpus\.sequence_length=2: "),
    ):
        with pytest.raises(SettingError, match=f"^{line}"):
            load_pair(*models, **options)
    pair, schedule = pair_of(teacher), {"start": 1.0, "end": 0.5}
    for terms, line in (
        ({"soft": {"weight": schedule}}, r"objective\.soft: a schedule"),
        ({"soft": {"temperature": schedule}}, r"objective\.soft: a schedule"),
        ({"clm": 1.0}, r"objective\.clm: is a term of objective\.task=clm, but"),
        ({"soft_classes": 1.0}, r"objective\.soft_classes: reads a head for class, "),
        ({"sot": 1.0}, r"objective\.sot: no such loss"),
        ({}, r"objective: .* there is nothing to learn"),
    ):
        with pytest.raises(SettingError, match=f"^{line}"):
            pair.objective(terms)


def test_models_in_memory_are_a_pair(teacher: Path) -> None:
    """The same losses as with their folders; the student is the very model that was given, and learns."""
    expected, terms = pair_of(teacher, teacher), {"soft": 1.0, "mlm": 1.0}
    expected.student.model.eval()
    for form in (
        lambda one: one,
        lambda one: (one.model, one.tokenizer),
        lambda one: LoadedModel.of(one.model, one.tokenizer),
    ):
        one, learns = load_model(teacher, "cpu"), load_model(teacher, "cpu")
        pair = load_pair(form(one), form(learns), **LENGTH)
        assert pair.student.model is learns.model and pair.student.model.training
        pair.student.model.eval()
        losses = pair.objective(terms)(TEXTS)
        assert losses.terms == pytest.approx(expected.objective(terms)(TEXTS).terms)
        losses.total.backward()
        assert all(weight.requires_grad for weight in learns.model.parameters())
        assert not any(weight.requires_grad for weight in pair.teacher.model.parameters())


def test_two_tokenizers_are_a_pair(folders: dict[str, Path]) -> None:
    """By vectors of whole sequences, which are those of the text that both read."""
    pair = load_pair(load_model(folders["bert"], "cpu"), load_model(folders["mpnet"], "cpu"), **LENGTH)
    assert not pair.shares_tokenizer and len(pair.student.tokenizer) != len(pair.teacher.tokenizer)
    losses = pair.objective({"pooled": 1.0, "mlm": 1.0})(TEXTS)
    assert losses.counts["pooled"] == len(TEXTS)
    losses.total.backward()
    pair.student.model.eval()
    as_it_is = MaskingConfig(mask=0.0, keep=1.0)
    made = pair.objective({"pooled": {"weight": 1.0, "distance": "l2"}}, masking=as_it_is)
    with torch.no_grad():
        vectors = []
        for one in (pair.student, pair.teacher):
            ids = [torch.tensor([one.tokenizer(text)["input_ids"]]) for text in TEXTS]
            vectors.append(torch.stack([one.model.base_model(row)[0][0].mean(0) for row in ids]))
        if weights := [weight for module in made.objective.modules().values() for weight in module.parameters()]:
            vectors[0] = vectors[0] @ weights[0].T
    difference = (vectors[0] - vectors[1]).square().sum(1).mean().item()
    assert made(TEXTS).terms["pooled"] == pytest.approx(difference, rel=1e-3)
    with pytest.raises(SettingError, match=r"^objective\.soft and objective\.cosine pair tokens, but the student has"):
        pair.objective({"soft": 1.0, "cosine": 1.0, "mlm": 1.0})
    # Of the text of sequences of another tokenizer a teacher reads as much as it takes.
    objective = pair_of(folders["short"], folders["mpnet"]).objective({"pooled": 1.0})
    assert math.isfinite(objective(["the cat " * 30]).total.item())
