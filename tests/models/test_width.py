"""student.intermediate_size: which neurons stay, and the least-squares problem that their weights solve."""

from typing import Any

import pytest
import torch
from families import CAUSAL, FAMILIES, depth_fields, make_family
from test_refit import batches, kind_of, teacher_of
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from distill.config.settings import StudentConfig
from distill.models import kind, width
from distill.models.blocks import block_list
from distill.models.language_model import LanguageModel
from distill.models.layers import block_prefix
from distill.models.mlp import projection_of, weight_of, width_of
from distill.models.student import from_layers
from distill.models.width import PENALTY, narrow
from distill.runtime.errors import SettingError

KEPT, CHOSEN = 20, [0, 2, 3]
SETTINGS = StudentConfig(dropout=0.0, intermediate_size=KEPT)
KNOWN = [family for family in FAMILIES if family != "albert"]


def narrowed(teacher: Any, family: str, fits: bool = True, precision: str = "fp32") -> dict[str, Tensor]:
    """New weights of the student that starts from CHOSEN, by name."""
    student = from_layers(SETTINGS, teacher, CHOSEN, kind_of(family), alias=True)
    like, prefix = block_list(student.base_model, len(CHOSEN))[0], block_prefix(student)
    found = narrow(LanguageModel(teacher, precision), CHOSEN, like, batches(), fits)
    return {f"{prefix}{CHOSEN.index(one.layer)}.{name}": each for one in found for name, each in one.weights.items()}


def seen_by(teacher: Any) -> tuple[list[Tensor], list[Tensor], list[Any]]:
    """At all positions that count, of each block: what its last projection reads [N, F], its output [N, H]; these."""
    blocks = block_list(teacher.base_model, 6)
    projections = [block.get_submodule(str(projection_of(block))) for block in blocks]
    read: list[list[Tensor]] = [[] for _ in blocks]
    given: list[list[Tensor]] = [[] for _ in blocks]
    for number, (block, projection) in enumerate(zip(blocks, projections, strict=True)):
        projection.register_forward_pre_hook(lambda _, inputs, n=number: read[n].append(inputs[0]))
        block.register_forward_hook(
            lambda _, __, output, n=number: given[n].append(output if isinstance(output, Tensor) else output[0])
        )
    for batch in batches():
        kept = batch.documents >= 0  # type: ignore[operator]
        teacher(input_ids=batch.ids, attention_mask=kept.long())
        for seen in (*read, *given):
            seen[-1] = seen[-1].view(*kept.shape, -1)[kept]
    return [torch.cat(one) for one in read], [torch.cat(one) for one in given], projections


@pytest.mark.parametrize("family", KNOWN)
@torch.no_grad()
def test_an_mlp_of_fewer_neurons_gives_what_is_nearest_to_that_of_all(family: str) -> None:
    """Against torch.linalg.lstsq in float64, on the neurons that add most; the other weights are the teacher's."""
    teacher = teacher_of(family)
    assert width_of(teacher) == (128 if family == "gpt2" else 48)
    made = narrowed(teacher, family)
    student = from_layers(SETTINGS, teacher, CHOSEN, kind_of(family), alias=False).eval()
    assert not student.load_state_dict(made, strict=False).unexpected_keys and width_of(student) == KEPT
    read, given, projections = seen_by(teacher)
    for block, layer in zip(block_list(student.base_model, 3), CHOSEN, strict=True):
        z, scale = read[layer].double(), given[layer].double().square().mean(1, keepdim=True).rsqrt()
        old, new = projections[layer], block.get_submodule(str(projection_of(block)))
        weight = weight_of(old).double()
        score = (scale * z).square().sum(0).sqrt() * weight.norm(dim=1)
        kept = score.topk(KEPT).indices.sort().values
        ones = [] if old.bias is None else [torch.ones_like(z[:, :1])]
        target = z @ weight + (0 if old.bias is None else old.bias)
        rows, start = torch.cat([z[:, kept], *ones], 1), weight[kept]
        start = start if old.bias is None else torch.cat([start, old.bias.double()[None]])
        strength = (PENALTY * (scale * rows).square().sum(0).mean()).sqrt()
        system = torch.cat([scale * rows, strength * torch.eye(rows.shape[1], dtype=rows.dtype)])
        expected = torch.linalg.lstsq(system, torch.cat([scale * target, strength * start])).solution
        found = weight_of(new) if old.bias is None else torch.cat([weight_of(new), new.bias[None]])
        torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-4)
        assert isinstance(new, Conv1D) == isinstance(old, Conv1D)
    states = {name: tensor for name, tensor in student.state_dict().items() if name not in made}
    whole = from_layers(StudentConfig(dropout=0.0), teacher, CHOSEN, kind_of(family), alias=True).state_dict()
    assert states and all(torch.equal(tensor, whole[name]) for name, tensor in states.items())


@pytest.mark.parametrize("family", ["bert", "modernbert", "gpt2", "llama", "gemma2"])
@torch.no_grad()
def test_neurons_are_taken_with_their_inputs_and_gates(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first block whose lost neurons add nothing computes what the teacher's does; with one moment at a time too."""
    monkeypatch.setattr(width, "MOST_BYTES", 1)
    teacher, count = teacher_of(family), 128 if family == "gpt2" else 48
    blocks = block_list(teacher.base_model, 6)
    dead = torch.randperm(count, generator=torch.Generator().manual_seed(0))[KEPT:]
    for block in blocks:
        weight_of(block.get_submodule(str(projection_of(block))))[dead] = 0
    for fits in (False, True):
        student = from_layers(SETTINGS, teacher, CHOSEN, kind_of(family), alias=False).eval()
        student.load_state_dict(narrowed(teacher, family, fits), strict=False)
        whole = from_layers(StudentConfig(dropout=0.0), teacher, CHOSEN, kind_of(family), alias=False).eval()
        (batch,) = batches(16, seed=1)
        found, expected = (model(input_ids=batch.ids).logits for model in (student, whole))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_under_autocast_moments_are_summed_in_fp32() -> None:
    teacher = teacher_of("llama")
    exact, found = (narrowed(teacher, "llama", precision=precision) for precision in ("fp32", "bf16"))
    projections = [name for name in exact if "down_proj" in name]
    assert len(projections) == len(CHOSEN)
    for name in projections:
        assert float((found[name] - exact[name]).norm() / exact[name].norm()) < 0.02


def test_what_has_no_fewer_neurons_is_refused() -> None:
    for size, family, words in ((48, "llama", "have 48 neurons"), (20, "albert", "are not known")):
        with pytest.raises(SettingError, match=f"student.intermediate_size={size}: .*{words}") as error:
            from_layers(SETTINGS.changed(intermediate_size=size), teacher_of(family), [0], kind_of(family), alias=True)
        assert "\n" not in str(error.value)
    bert, other = teacher_of("bert"), SETTINGS.changed(architecture="distilbert")
    with pytest.raises(SettingError, match=r"with student\.architecture=distilbert"):
        from_layers(other, bert, [0], kind.MASKED, alias=True)
    assert [family for family in CAUSAL if width_of(make_family(family, **depth_fields(family, 3))) is None] == []
