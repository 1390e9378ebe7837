"""Several teachers as one: what each of them is asked for, and the gradient of those that are read from caches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import VOCAB, make_masks, make_model, make_objective, make_rows, objective_config

from distill.config import settings as conf
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.distributed.single import Single
from distill.models.language_model import LanguageModel, OutputSpec
from distill.models.loaded import model_digest
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


@pytest.mark.parametrize("which", ["both", "second"])
def test_cached_members_give_the_gradient_of_the_mean(
    tokenizer: Any, teachers: list[Any], tmp_path: Path, which: str
) -> None:
    """With almost all entries kept; each member has a cache and entries of its own."""
    source = batches(tokenizer)
    own = objective(teachers[0], cosine=0.0)
    want, wanted = step(own, MeanTeacher(live(teachers), WEIGHTS), source.window(0))
    members: list[Teacher] = [cached(tmp_path, model, source, own, VOCAB - 1) for model in teachers]
    assert len(list((tmp_path / "teacher").iterdir())) == 2
    members = members if which == "both" else [live(teachers)[0], members[1]]
    loss, found = step(own, MeanTeacher(members, WEIGHTS), source.window(0))
    assert loss > want + 0.1, "larger by how far the members are from each other"
    flat, wanted_flat = (torch.cat([gradient.flatten() for gradient in each.values()]) for each in (found, wanted))
    assert float((flat - wanted_flat).norm()) < 2e-3 * float(wanted_flat.norm())
