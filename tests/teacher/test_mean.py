"""Several teachers as one: against the definition in float64, to the bit for a single one, and read from caches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from naive import attention_of, targets_of
from tiny import VOCAB, make_masks, make_model, make_objective, make_rows, objective_config

from distill.config import settings as conf
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.distributed.single import Single
from distill.models.identity import model_digest
from distill.models.language_model import LanguageModel, OutputSpec
from distill.objective.objective import Objective
from distill.objective.trainable import Trainable
from distill.teacher.build_cache import Recorder, build
from distill.teacher.cache import CachedTeacher, find
from distill.teacher.distributions import Mixture
from distill.teacher.live import LiveTeacher
from distill.teacher.output import MeanTeacher, Teacher, TeacherOutput, Wanted

WEIGHTS = (1.0, 3.0)
ROWS = make_rows(8, shortest=5)


@pytest.fixture
def teachers() -> list[Any]:
    """Two of different families whose embeddings are padded to different sizes, with entries that would win."""
    models = [make_model("bert", 2, seed=11, vocab=VOCAB + 24), make_model("distilbert", 1, seed=12, vocab=VOCAB + 3)]
    with torch.no_grad():
        models[0].cls.predictions.bias[VOCAB:] = 50.0
        models[1].vocab_projector.bias[VOCAB:] = 50.0
    return [model.requires_grad_(False) for model in models]


def batches(tokenizer: Any) -> Batches:
    return tiny.make_batches(ROWS, make_masks(tokenizer, ROWS, mlm_probability=0.3, static=True), 4, 2, 0, static=True)


def step(objective: Objective, teacher: Teacher, window: list[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of a window."""
    student = make_model("distilbert", 1, seed=2)
    model, total = Trainable(LanguageModel(student)), 0.0
    window = [teacher.read_ahead(batch) for batch in window]
    scales = objective.scales(objective.count(window), torch.device("cpu"))
    for batch, output in zip(window, teacher.outputs(window, objective.teacher_spec), strict=True):
        loss, _ = objective(model, output, batch, scales)
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in student.named_parameters() if p.grad is not None}


def live(models: list[Any], *micro_batches: int) -> list[Teacher]:
    return [
        LiveTeacher(LanguageModel(model), many) for model, many in zip(models, micro_batches or (1, 1), strict=False)
    ]


def objective(teacher: Any, **settings: Any) -> Objective:
    return make_objective(objective_config(**settings), make_model("distilbert", 1), teacher)


def expected(models: list[Any], window: list[Batch], temperature: float) -> tuple[float, dict[str, torch.Tensor]]:
    """5 * soft targets + 2 * masked tokens + 1 * cosine of the first teacher's hidden states, position by position."""
    student = make_model("distilbert", 1, seed=2).double()
    values: dict[str, list[torch.Tensor]] = {"soft": [], "mlm": [], "cosine": []}
    for batch in window:
        attention, targets = attention_of(batch), targets_of(batch)
        inputs = {"input_ids": batch.ids, "attention_mask": attention, "output_hidden_states": True}
        own = student(**inputs)
        with torch.no_grad():
            asked = [model.double()(**inputs) for model in models]
        for position in attention.flatten().nonzero()[:, 0].tolist():
            row, column = divmod(position, batch.ids.shape[1])
            z = own.logits[row, column][:VOCAB]
            p = sum(
                weight / sum(WEIGHTS) * (output.logits[row, column][:VOCAB] / temperature).softmax(0)
                for weight, output in zip(WEIGHTS, asked, strict=True)
            )
            q = (z / temperature).softmax(0)
            values["soft"].append(temperature**2 * (p * (p.log() - q.log())).sum())
            if position in targets:
                values["mlm"].append(-z.log_softmax(0)[targets[position]])
            a, b = own.hidden_states[-1][row, column], asked[0].hidden_states[-1][row, column]
            values["cosine"].append(1 - (a @ b) / (a.norm() * b.norm()))
    total = sum(w * torch.stack(values[n]).mean() for n, w in (("soft", 5.0), ("mlm", 2.0), ("cosine", 1.0)))
    total.backward()
    for model in models:
        model.float()
    return total.item(), {name: p.grad for name, p in student.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kernel", ["plain", "fused"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_loss_is_that_of_the_mean_distribution(
    tokenizer: Any, teachers: list[Any], temperature: float, kernel: str
) -> None:
    window = batches(tokenizer).window(0)
    before = [tiny.weights_of(model) for model in teachers]
    mean = MeanTeacher(live(teachers, 1, 2), WEIGHTS)
    loss, found = step(objective(teachers[0], temperature=temperature, kernel=kernel), mean, window)
    want, wanted = expected(teachers, window, temperature)
    assert loss == pytest.approx(want, rel=1e-5)
    tiny.assert_close(found, wanted, rtol=1e-3, atol=2e-6)
    for model, weights in zip(teachers, before, strict=True):
        assert all(torch.equal(value, weights[name]) for name, value in model.named_parameters()), "teachers are frozen"
        assert all(parameter.grad is None for parameter in model.parameters())


class Watched:
    """A teacher that notes what is wanted of it."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher, self.specs = teacher, list[OutputSpec]()

    def read_ahead(self, batch: Batch) -> Batch:
        return self.teacher.read_ahead(batch)

    def outputs(self, window: list[Batch], wanted: Wanted) -> Iterator[TeacherOutput]:
        self.specs += [wanted(batch) for batch in window]
        return self.teacher.outputs(window, wanted)


def test_hidden_states_are_asked_of_the_first_alone(tokenizer: Any, teachers: list[Any]) -> None:
    window, watched = batches(tokenizer).window(0), [Watched(each) for each in live(teachers)]
    wanted = objective(teachers[0]).teacher_spec
    outputs = list(MeanTeacher(watched, WEIGHTS).outputs(window, wanted))
    assert all(isinstance(output.distribution, Mixture) and output.outputs.hidden for output in outputs)
    assert all(spec.head and spec.layers for spec in watched[0].specs)
    assert all(spec.head and not spec.layers for spec in watched[1].specs)
    only_hidden = objective(teachers[0], soft=0.0).teacher_spec
    outputs = list(MeanTeacher(live(teachers), WEIGHTS).outputs(window, only_hidden))
    assert all(output.distribution is None and output.outputs.hidden for output in outputs)


# --- members that are read from caches


def cached(folder: Path, model: Any, source: Batches, own: Objective, top_k: int) -> CachedTeacher:
    origin = {"teacher": model_digest(model), "vocabulary": VOCAB, "temperature": own.top_k_temperature}
    cache = find(conf.TeacherCacheConfig(top_k=top_k), origin, source, own.positions, str(folder))
    assert own.top_k_temperature is not None
    ranks = Single(conf.BackendConfig(device="cpu"))
    build(Recorder(cache, LanguageModel(model), source, own.positions, own.top_k_temperature, ranks.device), ranks)
    return CachedTeacher(cache, ranks)


@pytest.mark.parametrize("kernel", ["plain", "fused"])
@pytest.mark.parametrize("which", ["both", "second"])
def test_cached_members_give_the_gradient_of_the_mean(
    tokenizer: Any, teachers: list[Any], tmp_path: Path, which: str, kernel: str
) -> None:
    """With almost all entries kept; each member has a cache and entries of its own."""
    source = batches(tokenizer)
    own = objective(teachers[0], cosine=0.0, kernel=kernel)
    want, wanted = step(own, MeanTeacher(live(teachers), WEIGHTS), source.window(0))
    members: list[Teacher] = [cached(tmp_path, model, source, own, VOCAB - 1) for model in teachers]
    assert len(list((tmp_path / "teacher").iterdir())) == 2
    members = members if which == "both" else [live(teachers)[0], members[1]]
    loss, found = step(own, MeanTeacher(members, WEIGHTS), source.window(0))
    assert loss > want + 0.1, "larger by how far the members are from each other"
    flat, wanted_flat = (torch.cat([gradient.flatten() for gradient in each.values()]) for each in (found, wanted))
    assert float((flat - wanted_flat).norm()) < 2e-3 * float(wanted_flat.norm())
