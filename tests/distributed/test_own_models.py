"""Models of a user's own that are divided: parameters of a single number, ties, a baseline of the same class."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from own_models import Convolutions
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distill.config.settings import BackendConfig
from distill.distributed import Ranks, gradient_sync, join_ranks
from distill.distributed.gather import empty_copy, put_together, skeleton_of
from distill.models.loaded import load_weights
from distill.runs.setup import blocks_of


class Scaled(Convolutions):
    """With a learned factor, its output embedding's weight tied to that of the words, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.head.weight = self.base_model.words.weight
        self.register_buffer("shift", torch.full((24,), 0.25), persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.base_model(input_ids, attention_mask)
        logits: Tensor = self.head(hidden * self.factor + self.shift)
        return logits


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = join_ranks(BackendConfig(name="fsdp", device="cpu"))
    yield made
    made.close()


def make(seed: int = 0) -> Scaled:
    torch.manual_seed(seed)
    return Scaled()


def test_a_single_number_stays_whole_and_is_trained(ranks: Ranks) -> None:
    plain, model = make(), make()
    ranks.shard(model, *blocks_of(model), trained=True)
    sync = gradient_sync(ranks, model)
    assert not isinstance(model.factor, DTensor) and isinstance(model.head.weight, DTensor)
    ids = torch.tensor([[5, 6, 7]])
    sync.zero()
    for each in (plain, model):
        each(ids).square().mean().backward()
    sync.all_reduce_gradients()
    found = {name: each.grad for name, each in model.named_parameters()}
    for name, each in plain.named_parameters():
        got: Any = found[name]
        torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got, each.grad)
    assert plain.factor.grad is not None and plain.factor.grad != 0
    sync.scale(0.5)
    torch.testing.assert_close(model.factor.grad, plain.factor.grad * 0.5)


def test_it_is_put_together_again(ranks: Ranks) -> None:
    plain, model = make(), make()
    skeleton = skeleton_of(model)
    assert all(each.is_meta for each in skeleton.parameters())
    ranks.shard(model, *blocks_of(model), trained=True)
    made = put_together(model, skeleton, keep=True)
    assert put_together(model, skeleton, keep=False) is None
    assert type(made) is Scaled and made.head.weight is made.base_model.words.weight
    assert all(torch.equal(each, made.get_parameter(name)) for name, each in plain.named_parameters())


def test_a_baseline_of_a_divided_student_has_weights_of_its_own(ranks: Ranks, tmp_path: Path) -> None:
    model, other = make(), make(seed=1)
    skeleton = skeleton_of(model)
    ranks.shard(model, *blocks_of(model), trained=True)
    save_model(other, str(tmp_path / "model.safetensors"))
    baseline = empty_copy(skeleton)
    load_weights(baseline, "evaluate.baseline", str(tmp_path))
    assert baseline.head.weight is baseline.base_model.words.weight
    assert all(torch.equal(each, baseline.get_parameter(name)) for name, each in other.named_parameters())
    assert torch.equal(baseline.shift, other.shift)
    assert all(each.is_meta for each in skeleton.parameters()), "the skeleton stays one"
