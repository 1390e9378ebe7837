"""student.refit: least squares as torch solves them, and students of every family that come nearer to their teacher."""

from typing import Any

import numpy as np
import pytest
import torch
from families import CAUSAL, FAMILIES, depth_fields, make_family
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from distill.config.settings import StudentConfig
from distill.data.batch import Batch
from distill.models import kind
from distill.models.blocks import block_list
from distill.models.language_model import LanguageModel
from distill.models.refit import PENALTY, Start, fit, gaps_of, last_block, refit
from distill.models.student import from_layers
from distill.runtime.errors import SettingError

UNKNOWN = ("gemma2", "gemma3_text")  # a norm stands between the projection and the sum
SETTINGS, CHOSEN = StudentConfig(dropout=0.0), [0, 2, 3]


def kind_of(family: str) -> kind.ModelKind:
    return kind.CAUSAL if family in CAUSAL else kind.MASKED


def batches(count: int = 64, seed: int = 0) -> list[Batch]:
    """Sequences of 16 tokens, of which every second one is padded from the tenth on."""
    ids = torch.from_numpy(np.random.default_rng(seed).integers(5, 40, (count, 16)))
    documents = torch.zeros_like(ids)
    documents[::2, 10:] = -1
    return [
        Batch({"input_ids": one}, each, {}, None, np.arange(16))
        for one, each in zip(ids.split(16), documents.split(16), strict=True)
    ]


def teacher_of(family: str) -> Any:
    return make_family(family, **depth_fields(family, 6)).requires_grad_(False)


def states(model: Any, batch: Batch, kept: Tensor) -> tuple[Tensor, ...]:
    mask = (batch.documents >= 0).long()  # type: ignore[operator]
    found = model(input_ids=batch.ids, attention_mask=mask, output_hidden_states=True).hidden_states
    return tuple(state[kept] for state in found)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in (*UNKNOWN, "albert")])
@torch.no_grad()
def test_blocks_before_gaps_give_what_the_next_block_reads_in_the_teacher(family: str) -> None:
    """On other sequences, nearer than copies by far; nothing else changes, and no weight of the teacher."""
    teacher = teacher_of(family)
    before = {name: weight.clone() for name, weight in teacher.state_dict().items()}
    made, errors = dict[str, Tensor](), list[tuple[float, float]]()
    for one in refit(Start(SETTINGS, CHOSEN, {}), teacher, kind_of(family), "fp32", batches()):
        made |= one.weights
        errors.append((one.before, one.after))
    assert all(torch.equal(weight, before[name]) for name, weight in teacher.state_dict().items())
    copy, fitted = (from_layers(SETTINGS, teacher, CHOSEN, kind_of(family), alias=False).eval() for _ in range(2))
    own = {weight.data_ptr() for weight in made.values()}  # else training would change the teacher
    assert not own & {weight.data_ptr() for weight in teacher.parameters()}
    assert not fitted.load_state_dict(made, strict=False).unexpected_keys
    assert len(errors) == 2 and all(after < 0.9 * old for old, after in errors)
    (unseen,) = batches(16, seed=1)
    of_teacher, of_copy, of_fitted = (states(model, unseen, unseen.documents >= 0) for model in (teacher, copy, fitted))
    for block, end in gaps_of(CHOSEN, teacher):
        near, far = (float((each[block + 1] - of_teacher[end]).norm()) for each in (of_fitted, of_copy))
        assert near < 0.95 * far, (block, near, far)


@pytest.mark.parametrize(("family", "factor"), [("gpt2", 1.0), ("llama", 1.0), ("granite", 0.5)])
@torch.no_grad()
def test_the_weights_solve_the_least_squares_problem(family: str, factor: float) -> None:
    """As torch.linalg.lstsq does in float64, with the penalty as further rows; with a bias (GPT-2) and without.

    Of all positions but padding: without the first ones large models lose the state that all attend to.
    """
    teacher, data, penalty = teacher_of(family).double(), batches(32), PENALTY
    student, *cut = (
        from_layers(SETTINGS, teacher, layers, kind.CAUSAL, alias=True).eval() for layers in ([0, 3], [0], [0, 1, 2])
    )
    found, before, after = fit(LanguageModel(cut[0]), LanguageModel(cut[1]), data)
    name = last_block(cut[0])[1]
    layer, inputs, own, target = block_list(student.base_model, 2)[0].get_submodule(name), [], [], []
    layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    for batch in data:
        kept = batch.documents >= 0  # type: ignore[operator]
        own.append(states(student, batch, kept)[1])
        target.append(states(teacher, batch, kept)[3])
        inputs[-1] = inputs[-1][kept]
    z, scale = torch.cat(inputs), factor * torch.cat(target).square().mean(1, keepdim=True).rsqrt()
    y = (torch.cat(target) - torch.cat(own)) / factor + layer(z)
    weight = layer.weight if isinstance(layer, Conv1D) else layer.weight.T
    z = z if layer.bias is None else torch.cat([z, torch.ones_like(z[:, :1])], 1)
    old = weight if layer.bias is None else torch.cat([weight, layer.bias[None]])
    strength = (penalty * (scale * z).square().sum(0).mean()).sqrt()
    rows = torch.cat([scale * z, strength * torch.eye(len(old), dtype=old.dtype)])
    expected = torch.linalg.lstsq(rows, torch.cat([scale * y, strength * old])).solution
    new = found[f"{name}.weight"] if isinstance(layer, Conv1D) else found[f"{name}.weight"].T
    new = new if layer.bias is None else torch.cat([new, found[f"{name}.bias"][None]])
    torch.testing.assert_close(new, expected.float(), rtol=1e-5, atol=1e-6)
    for error, of in ((before, old), (after, expected)):
        assert error == pytest.approx(float((scale * (y - z @ of)).square().mean().sqrt()), rel=1e-6)


def test_what_is_left_alone_and_what_is_refused() -> None:
    llama = teacher_of("llama")  # six layers, of which layer 5 alone is in the top fifth
    assert gaps_of([0, 1, 4], llama) == [(1, 4), (2, 6)] and gaps_of([0, 1, 2, 3, 4, 5], llama) == []
    assert gaps_of([1, 3, 2], llama) == [(0, 3), (2, 6)] and gaps_of([0, 2], teacher_of("albert")) == []
    assert gaps_of([0, 8], make_family("llama", **depth_fields("llama", 10))) == [(0, 8)]
    for family in UNKNOWN:
        with pytest.raises(SettingError, match=f"student.refit: .*{family[:6].title()}.*set it to false") as error:
            list(refit(Start(SETTINGS, CHOSEN, {}), teacher_of(family), kind.CAUSAL, "fp32", batches(16)))
        assert "\n" not in str(error.value)
    llama.model.layers[0].mlp.down_proj.weight.data.fill_(float("nan"))
    with pytest.raises(SettingError, match="not finite"):
        list(refit(Start(SETTINGS, CHOSEN, {}), llama, kind.CAUSAL, "fp32", batches(16)))
