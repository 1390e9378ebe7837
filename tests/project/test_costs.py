"""The formulas of a projection against arithmetic by hand: exchanges, stragglers, memory, operations."""

import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import FAMILIES, make_family
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForMaskedLM

from distill.project.exchange import Fabric, Link, exposed
from distill.project.memory import divided_student_bytes, divided_teacher_bytes
from distill.project.model_shape import ModelShape, shape_of
from distill.project.stragglers import expected_maximum, waiting

FAST, SLOW = Link(100e9, 5e-6), Link(10e9, 20e-6)


def test_a_ring_passes_every_byte_twice_but_for_each_ranks_own_share() -> None:
    """Eight hosts, 40 MB: 2 x 7/8 x 40 MB / 10 GB/s and 14 messages after each other."""
    fabric = Fabric(8, 1, FAST, SLOW)
    assert fabric.all_reduce(40e6) == pytest.approx(2 * 7 / 8 * 40e6 / 10e9 + 14 * 20e-6)


def test_gathering_and_scattering_are_the_halves_of_a_sum() -> None:
    fabric = Fabric(2, 4, FAST, SLOW)
    assert fabric.gather(1e9) == pytest.approx(fabric.all_reduce(1e9) / 2)
    assert fabric.gather(1e9) == pytest.approx(7 / 8 * 1e9 / 10e9 + 3 * 5e-6 + 20e-6)
    assert fabric.gather(1e9, times=5) - fabric.gather(1e9) == pytest.approx(4 * fabric.latency)


def test_the_slowest_link_on_the_way_sets_the_pace() -> None:
    assert Fabric(1, 8, FAST, SLOW).rate == 100e9
    assert Fabric(2, 8, FAST, SLOW).rate == 10e9
    assert Fabric(2, 1, Link(1.0, 0.0), SLOW).rate == 10e9  # a node of one GPU uses no link inside
    assert Fabric(1, 1, FAST, SLOW).all_reduce(1e9) == 0
    capped = replace(SLOW, flow=2e9)
    assert [Fabric(2, 8, FAST, capped, rings=n).rate for n in (1, 4, 8)] == [2e9, 8e9, 10e9]


def test_trees_pass_fewer_messages_between_many_nodes() -> None:
    ring, tree = (Fabric(512, 8, FAST, SLOW, trees) for trees in (False, True))
    assert ring.latency == pytest.approx(7 * 5e-6 + 511 * 20e-6)
    assert tree.latency == pytest.approx(7 * 5e-6 + 9 * 20e-6)


def test_what_computing_hides_of_a_transfer() -> None:
    assert exposed(1.0, beside=10.0, overlap=0.0) == 1.0
    assert exposed(1.0, beside=10.0, overlap=0.5) == 0.0
    assert exposed(1.0, beside=10.0, overlap=0.5, pieces=4) == pytest.approx(0.25)  # the first piece is waited for
    assert exposed(8.0, beside=10.0, overlap=0.5, pieces=4) == pytest.approx(3.0)


@pytest.mark.parametrize("number", [2, 8, 64, 512, 4096])
def test_the_expected_maximum_is_that_of_its_integral(number: int) -> None:
    """E[max] = integral of x n phi(x) Phi(x)^(n-1), summed up here with steps of 0.002."""
    normal, step = statistics.NormalDist(), 0.002
    points = [-8 + step * n for n in range(8001)]
    exact = sum(x * number * normal.pdf(x) * normal.cdf(x) ** (number - 1) for x in points) * step
    assert expected_maximum(number) == pytest.approx(exact, abs=0.03)


def test_waiting_for_the_slowest_of_windows() -> None:
    """Drawn 2,000 times: 16 ranks, windows of 9 micro-batches of 1 s with a deviation of a tenth."""
    draw = random.Random(0)
    slowest = [max(sum(draw.gauss(1.0, 0.1) for _ in range(9)) for _ in range(16)) for _ in range(2000)]
    assert waiting(1.0, 0.1, 9, 16) == pytest.approx(statistics.mean(slowest) - 9, abs=0.02)
    assert waiting(1.0, 0.1, 9, 1) == 0 and waiting(1.0, 0.0, 9, 16) == 0
    # Of the time of a window the wait is a share that falls with the root of its length.
    assert waiting(1.0, 0.1, 36, 16) / 36 == pytest.approx(waiting(1.0, 0.1, 9, 16) / 9 / 2)


def test_memory_of_divided_models_by_hand() -> None:
    """1,000 parameters, 200 of them outside, blocks of 100, on 4 ranks."""
    assert divided_teacher_bytes(1000, 200, 100, 50, 4) == 2 * (250 + 450)
    assert divided_teacher_bytes(1000, 300, 100, 0, 4) == 2 * (250 + 600)  # embeddings exist twice
    assert divided_student_bytes(1000, 200, 100, 77, 4, every=False) == 4 * 3 * 250 + 4 * 1000 + 2 * 400 + 77
    assert divided_student_bytes(1000, 200, 100, 77, 4, every=True) == 4 * 4 * 250 + 4 * 400 + 2 * 400 + 77


def bert(**fields: Any) -> ModelShape:
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    with torch.device("meta"):
        model = BertForMaskedLM(BertConfig(**{**sizes, "intermediate_size": 128, **fields})).eval()
        return shape_of(model, 16, "student")


def test_operations_of_a_bert_are_those_of_the_formula() -> None:
    """A layer 8 H^2 + 4 H I + 4 S H a token; the head H^2 for its transform and H V, twice."""
    shape = bert()
    assert shape.encoder_operations == 3 * 16 * (24 * 32**2 + 4 * 16 * 32)
    assert shape.head_operations == 2 * 32 * (32 + 100)
    assert shape.operations(4) == shape.encoder_operations + 4 * shape.head_operations
    assert (shape.layers, shape.blocks, shape.width, shape.inner, shape.vocabulary) == (3, 3, 32, 128, 100)


def test_parameters_are_those_of_the_model() -> None:
    shape = bert()
    model = BertForMaskedLM(BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                                       intermediate_size=128))  # fmt: skip
    assert shape.parameters == sum(each.numel() for each in model.parameters())
    assert (
        shape.in_blocks
        == sum(each.numel() for each in model.bert.encoder.layer.parameters())
        == 3 * (shape.largest_block)
    )
    assert shape.outside == shape.parameters - shape.in_blocks


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_of_every_family_are_those_of_its_forward(family: str) -> None:
    """Beside what torch counts while a model with weights runs, all of its heads' positions included."""
    model = make_family(family).requires_grad_(False)
    model.config._attn_implementation = "eager"  # whose products torch counts on every device
    ids, shape = torch.arange(32)[None] % 8, shape_of(model, 32, family)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    # DeBERTa's attention has products with relative positions besides, which are left out: little beside wide layers.
    few = 0.5 if family.startswith("deberta") else 0.95
    assert few < shape.operations(32) / counter.get_total_flops() < 1.05
