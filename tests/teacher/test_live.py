"""One forward of a live teacher for several micro-batches gives each what a forward of its own would."""

from dataclasses import replace

import pytest
import torch
from families import make
from pairs import window

from distill.data.batch import Batch
from distill.models.language_model import LAST, LanguageModel, OutputSpec
from distill.models.pooling import CLS, MEAN
from distill.teacher.live import LiveTeacher


def wanted(batch: Batch) -> OutputSpec:
    return OutputSpec(True, batch.targets.positions, (0, 2, LAST), (1, 3), (CLS, MEAN))


def full(batches: list[Batch]) -> list[Batch]:
    """The same where the first says that it has no padding: a joint forward has masks for the others all the same."""
    return [replace(batches[0], documents=None, valid_positions=None), *batches[1:]]


@pytest.mark.parametrize("family", ["bert", "modernbert", "llama"])
@pytest.mark.parametrize("case", ["padded", "mixed", "without padding"])
def test_a_joint_forward_is_cut_up_by_batch(family: str, case: str) -> None:
    model = LanguageModel(make(family))
    batches = window(2, shortest=None if case == "without padding" else 4)
    batches = full(batches) if case == "mixed" else batches
    apart = list(LiveTeacher(model).outputs(batches, wanted))
    joint = list(LiveTeacher(model, micro_batches=len(batches)).outputs(batches, wanted))
    assert len(joint) == len(apart) == len(batches) > 1
    for batch, one, other in zip(batches, joint, apart, strict=True):
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


@pytest.mark.parametrize("head", [False, True])
def test_last_states_at_the_positions_are_cut_up_by_batch(head: bool) -> None:
    """Also those of a last block that computes no others."""
    model, batches = LanguageModel(make("bert")), window(2, shortest=4)
    parts = list(
        LiveTeacher(model, micro_batches=len(batches)).outputs(
            batches, lambda batch: OutputSpec(head, batch.targets.positions, last_rows=True)
        )
    )
    for batch, part in zip(batches, parts, strict=True):
        whole = model(batch.inputs, batch.documents, OutputSpec(layers=(LAST,))).hidden[LAST]
        assert part.outputs.last_rows is not None
        torch.testing.assert_close(part.outputs.last_rows, whole.flatten(0, 1)[batch.targets.positions])


def test_nothing_is_asked_where_nothing_is_wanted() -> None:
    teacher = LiveTeacher(None)  # type: ignore[arg-type]
    outputs = list(teacher.outputs(window(2), lambda batch: OutputSpec()))
    assert all(output.distribution is None and not output.outputs.hidden for output in outputs)
