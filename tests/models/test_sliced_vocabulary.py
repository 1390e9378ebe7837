"""Models whose vocabulary is cut into slices and whose body is divided, on 4 ranks: gradients of the whole model."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
from distributed import run_ranks
from families import make_family
from tiny import PAD
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from distill.data.batch import Batch, Labels
from distill.distributed.sliced_vocabulary import replace_everywhere, slice_vocabulary
from distill.models.language_model import block_list
from distill.models.protocol import depth_of
from distill.objective.vocabulary_parallel import sliced_loss

VOCAB = 41  # neither 2 nor 4 divides it
ROWS, LENGTH = (2, 1, 3, 1), 6  # of each rank's batch; the last one's reach no head, as those of a filler


def batches() -> list[Batch]:
    """Of each rank, with next words to predict at some positions."""
    random, found = torch.Generator().manual_seed(5), []
    for rank, rows in enumerate(ROWS):
        ids = torch.randint(1, VOCAB, (rows, LENGTH), generator=random)
        ids[0, -2:] = PAD
        positions = torch.arange(ids.numel() if rank < 3 else 0)
        labels = Labels(positions[::2], ids.flatten()[positions[::2] + 1])
        found.append(Batch({"input_ids": ids}, None, {"clm": labels}, positions, np.arange(rows)))
    return found


def pair(family: str) -> tuple[Any, Any]:
    student = make_family(family, vocab_size=VOCAB).double()
    teacher = copy.deepcopy(student).requires_grad_(False)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.1)
    return student, teacher


def parameters_of(modules: list[nn.Module]) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


def divide(model: Any, sliced: list[nn.Module], replicas: Any) -> None:
    """The body over all ranks; the slices over those that hold the same one, or left as they are where none do."""
    slices = parameters_of(sliced)
    if replicas.size() > 1:
        fully_shard(sliced, mesh=replicas, reshard_after_forward=False)
        for old, new in zip(slices, parameters_of(sliced), strict=True):
            replace_everywhere(model, old, new)
        slices = parameters_of(sliced)
    everyone, blocks = init_device_mesh("cpu", (4,)), block_list(model.base_model, depth_of(model))
    for module in [*blocks, model]:
        fully_shard(module, mesh=everyone, reshard_after_forward=False, ignored_params=set(slices))
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def check(family: str, num_replicas: int) -> None:
    """Raises AssertionError where a gradient is not that of the whole model on the rows of all ranks."""
    student, teacher = pair(family)
    objective = tiny.make_objective(tiny.only(soft=0.3, clm={"weight": 0.7}), student, teacher, vocab=VOCAB)
    window = batches()
    counts = objective.count(window)
    loss, sums = tiny.loss_of(objective, student, teacher, window, counts)
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in student.named_parameters()}

    student, teacher = pair(family)
    mesh = init_device_mesh("cpu", (num_replicas, 4 // num_replicas), mesh_dim_names=("replicas", "vocabulary"))
    sliced = slice_vocabulary(student, mesh["vocabulary"])
    slice_vocabulary(teacher, mesh["vocabulary"])
    divide(student, sliced, mesh["replicas"])
    objective.visit = partial(sliced_loss, group=mesh["vocabulary"].get_group())
    own, own_sums = tiny.loss_of(objective, student, teacher, [window[dist.get_rank()]], counts)
    own.backward()
    everyones = torch.tensor(list(own_sums.values()), dtype=torch.float64)
    dist.all_reduce(everyones)
    torch.testing.assert_close(everyones, torch.tensor(list(sums.values()), dtype=torch.float64), rtol=1e-10, atol=0)
    found = dict(student.named_parameters())
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        gradient = found[name].grad
        assert isinstance(gradient, DTensor) and want is not None, name
        largest = max(float(want.abs().max()), 1e-3)  # the bias of keys has none but for rounding
        torch.testing.assert_close(
            gradient.full_tensor(), want, rtol=0, atol=1e-10 * largest, msg=lambda text, name=name: f"{name}: {text}"
        )


def in_a_rank() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for family in ("bert", "distilbert", "roberta", "albert", "modernbert", "gpt2", "llama"):
        check(family, num_replicas=2)
    check("bert", num_replicas=1)
    dist.destroy_process_group()


def test_every_family_has_the_gradients_of_the_whole_model(tmp_path: Path) -> None:
    run_ranks(4, tmp_path, in_a_rank)


def test_an_embedding_that_scales_its_vectors_is_refused() -> None:
    with pytest.raises(ValueError, match="does more than look words up"):
        slice_vocabulary(make_family("gemma2"), None)  # type: ignore[arg-type]
