"""A model's linear layers, of either class: what they compute, and which are left out."""

import families
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from distill.models.kernels.linear_layers import linear_layers


class Scaled(nn.Linear):
    """A layer of one's own, which computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_either_class_is_given_as_torchs() -> None:
    torch.manual_seed(0)
    conv = Conv1D(7, 5)
    nn.init.normal_(conv.bias)
    model = nn.Sequential(nn.Linear(3, 5), conv, nn.Sequential(nn.Linear(7, 2, bias=False)), Scaled(2, 2))
    found = list(linear_layers(model))
    assert [(parent is model, name) for parent, name, *_ in found] == [(True, "0"), (True, "1"), (False, "0")]
    for _, _, layer, linear in found:
        x = torch.randn(4, 6, linear.in_features)
        assert type(linear) is nn.Linear
        torch.testing.assert_close(linear(x), layer(x))
    assert found[0][2] is found[0][3] and found[1][3].weight.data_ptr() == conv.weight.data_ptr()


def test_layers_may_be_replaced_on_the_way() -> None:
    model = families.make_family("gpt2")
    for parent, name, _, _ in linear_layers(model):
        setattr(parent, name, nn.Identity())
    assert not list(linear_layers(model)) and sum(type(m) is nn.Identity for m in model.modules()) == 2 * 4 + 1
