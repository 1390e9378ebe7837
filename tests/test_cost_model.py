"""The cost model of the benchmarks against arithmetic by hand: exchanges, stragglers, memory, operations, runs."""

import random
import statistics
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from families import FAMILIES, make_family
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForMaskedLM

from benchmarks.scaling.cost_model.exchange import Fabric, Link, exposed
from benchmarks.scaling.cost_model.machines import Machine, MachineCases, load
from benchmarks.scaling.cost_model.memory import needed, sharded_student_bytes, sharded_teacher_bytes
from benchmarks.scaling.cost_model.model_shape import ModelShape, shape_of
from benchmarks.scaling.cost_model.run import project, project_all, project_run
from benchmarks.scaling.cost_model.step import expected_maximum, project_step, storage_seconds, waiting
from benchmarks.scaling.cost_model.workload import Frozen, Workload

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


def test_memory_of_sharded_models_by_hand() -> None:
    """1,000 parameters, 200 of them outside, blocks of 100, on 4 ranks."""
    assert sharded_teacher_bytes(1000, 200, 100, 50, 4) == 2 * (250 + 450)
    assert sharded_teacher_bytes(1000, 300, 100, 0, 4) == 2 * (250 + 600)  # embeddings exist twice
    assert sharded_student_bytes(1000, 200, 100, 77, 4, every=False) == 4 * 3 * 250 + 4 * 1000 + 2 * 400 + 77
    assert sharded_student_bytes(1000, 200, 100, 77, 4, every=True) == 4 * 4 * 250 + 4 * 400 + 2 * 400 + 77


def bert(**fields: Any) -> ModelShape:
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    with torch.device("meta"):
        model = BertForMaskedLM(BertConfig(**{**sizes, "intermediate_size": 128, **fields})).eval()
        return shape_of(model, 16)


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
    ids, shape = torch.arange(32)[None] % 8, shape_of(model, 32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    # DeBERTa's attention has products with relative positions besides, which are left out: little beside wide layers.
    few = 0.5 if family.startswith("deberta") else 0.95
    assert few < shape.operations(32) / counter.get_total_flops() < 1.05


# A run and a machine with round numbers: 1 M parameters; a forward of a row takes 1 Gop, a position of the head 1 Mop.
SHAPE = ModelShape(
    parameters=1_000_000, in_blocks=800_000, largest_block=200_000, blocks=4, layers=4, width=100, inner=400,
    vocabulary=1000, encoder_operations=1e9, head_operations=1e6,
)  # fmt: skip
# On two nodes 4 micro-batches of 10 rows of 100 positions, 20 of which reach the head, under a live teacher.
WORK = Workload(
    student=SHAPE, teachers=(Frozen(SHAPE, "bf16"),), precision="bf16", length=100, positions=20, batch_size=10,
    rows_per_step=320, steps=100, save_every=50,
)  # fmt: skip
# Nodes of 4 GPUs of 1 Tflop/s reached and 10 GB, with links of 10 and 1 GB/s, at 2 an hour.
MACHINE = Machine(
    name="round", gpus=4, memory=10e9, reached={"fp32": 1e11, "bf16": 1e12}, memory_rate=1e12, call=0.0,
    inside=Link(10e9, 0.0), between=Link(1e9, 0.0), overlap=0.0, trees=True, storage=1e9, save=1e9, jitter=0.0,
    start=36.0, price=2.0,
)  # fmt: skip
# The teacher's forward and the student's three, each 1 Gop and 20 x 1 Mop; ten rows of them on 1 Tflop/s.
MICRO_BATCH = 4 * 10 * (1e9 + 20e6) / 1e12


def test_a_step_by_hand() -> None:
    step = project_step(WORK, MACHINE, 2)
    assert step.compute == pytest.approx(4 * MICRO_BATCH)
    assert step.optimizer == pytest.approx(8 * 4 * 1e6 / 1e12)
    assert step.exchange == step.transfer == pytest.approx(2 * 7 / 8 * 4e6 / 1e9)  # over the link between the nodes
    assert (step.gathering, step.stragglers, step.storage) == (0, 0, 0)
    assert step.total == pytest.approx(step.compute + step.optimizer + step.exchange)
    assert step.binds == "compute" and step.fits
    slow = replace(MACHINE, call=0.01)  # starting kernels takes a small step at least
    assert project_step(WORK, slow, 2).compute == pytest.approx(4 * (3 * 4 + 4) * 0.01)


def test_a_run_by_hand() -> None:
    """100 steps, two saves of 12 MB at 1 GB/s, a start of 36 s; two nodes at 2 an hour."""
    projection = project(WORK, MachineCases(MACHINE, MACHINE, MACHINE), 2)
    run = projection.run
    assert run.training == pytest.approx(100 * run.step.total) and run.saving == pytest.approx(0.024)
    assert projection.hours.usual == pytest.approx((36 + run.training + run.saving) / 3600)
    assert projection.cost.usual == pytest.approx(4 * projection.hours.usual)
    assert projection.hours.least == projection.hours.most == projection.hours.usual
    alone = 32 * MICRO_BATCH + 8 * 4 * 1e6 / 1e12
    assert run.efficiency == pytest.approx(alone / (8 * run.step.total))


def test_evaluations_are_a_part_of_the_run() -> None:
    """Of 80 rows, each in full and ten times as a masked copy: a forward of 110 rows on each of 8 ranks."""
    work = replace(WORK, evaluation_rows=80, evaluation_copies=10.0, evaluations=4)
    assert project_run(work, MACHINE, 2).evaluation == pytest.approx((4 + 1) * 110 * 1.02e9 / 1e12)


def test_rows_of_a_step_are_shared_by_the_ranks() -> None:
    assert [WORK.window(ranks) for ranks in (1, 8, 64, 320)] == [(32, 10), (4, 10), (1, 5), (1, 1)]
    gpus = [each.gpus for each in project_all(WORK, MachineCases(MACHINE, MACHINE, MACHINE), (2, 4, 320, 324))]
    assert gpus == [4, 320]


def test_exchanges_of_a_step() -> None:
    window, every = (project_step(replace(WORK, sync=sync), MACHINE, 2) for sync in ("window", "every"))
    assert every.exchange == pytest.approx(4 * window.exchange) and every.compute == window.compute
    half = project_step(replace(WORK, wire="bf16"), MACHINE, 2)
    assert half.exchange == pytest.approx(window.exchange / 2)
    hidden = project_step(WORK, replace(MACHINE, overlap=1.0), 2)
    assert hidden.exchange == pytest.approx(hidden.transfer / 5)  # the first of the blocks and the rest is waited for
    clipped = project_step(replace(WORK, overlaps=False), replace(MACHINE, overlap=1.0), 2)
    assert clipped.exchange == clipped.transfer


def test_storage_that_is_slower_than_the_step_binds() -> None:
    slow = replace(MACHINE, storage=1e4)  # 160 rows of 200 bytes a node and step
    step = project_step(WORK, slow, 2)
    assert storage_seconds(WORK, slow, 2) == pytest.approx(160 * 200 / 1e4)
    assert step.total == pytest.approx(3.2) and step.binds == "storage"


def test_memory_by_hand() -> None:
    """Student: 16 bytes a parameter, a copy of 2, 34 a token, layer and width; teacher: 2, and one block's inside."""
    work, tokens = replace(WORK, positions=0.0), 10 * 100
    student = 18 * 1e6 + 34 * tokens * 4 * 100
    teacher = 2 * (1e6 + tokens * (2 * 100 + 3 * 400))
    assert needed(work, 8, 10) == pytest.approx(student + teacher)
    assert needed(replace(work, sharded=True), 8, 10) < needed(work, 8, 10)
    step = project_step(work, replace(MACHINE, memory=1e6), 2)
    assert not step.fits and step.binds == "memory"


@pytest.mark.parametrize("sharded", [False, True])
def test_more_nodes_are_faster_and_never_cheaper(sharded: bool) -> None:
    real = replace(MACHINE, jitter=0.02, between=Link(1e9, 1e-5), start=0.0)
    work = replace(WORK, rows_per_step=20480, sharded=sharded)
    projections = [project(work, MachineCases(real, real, real), nodes) for nodes in (1, 2, 8, 64, 512)]
    hours, costs = [each.hours.usual for each in projections], [each.cost.usual for each in projections]
    assert hours == sorted(hours, reverse=True) and costs == sorted(costs)
    efficiencies = [each.efficiency.usual for each in projections]
    assert efficiencies == sorted(efficiencies, reverse=True) and 0 < efficiencies[-1] < efficiencies[0] <= 1


def test_what_is_slower_makes_a_run_longer() -> None:
    usual = project_run(WORK, MACHINE, 8).seconds
    slower: list[dict[str, Any]] = [
        {"reached": {"bf16": 5e11}}, {"between": Link(1e8, 0.0)}, {"between": Link(1e9, 1e-3)}, {"jitter": 0.1},
        {"storage": 1e3}, {"start": 100.0}, {"save": 1e6}, {"memory_rate": 1e10},
    ]  # fmt: skip
    assert all(project_run(WORK, replace(MACHINE, **each), 8).seconds > usual for each in slower)


def test_the_range_holds_the_usual_case() -> None:
    worst = replace(MACHINE, reached={"bf16": 5e11}, jitter=0.2)
    projection = project(WORK, MachineCases(worst, MACHINE, replace(MACHINE, reached={"bf16": 2e12})), 2)
    assert projection.hours.least < projection.hours.usual < projection.hours.most
    assert projection.cost.least < projection.cost.usual < projection.cost.most
    assert projection.efficiency.least <= projection.efficiency.usual <= projection.efficiency.most


def test_every_machine_is_worst_at_its_worst() -> None:
    for machine in load().values():
        worst, usual, best = machine.cases()
        for name, rate in usual.reached.items():
            assert worst.reached[name] <= rate <= best.reached[name]
        for name in ("storage", "save", "overlap", "memory_rate"):
            assert getattr(worst, name) <= getattr(usual, name) <= getattr(best, name)
        for name in ("jitter", "start", "call", "price"):
            assert getattr(worst, name) >= getattr(usual, name) >= getattr(best, name)
        for name in ("inside", "between"):
            links = [getattr(case, name) for case in machine.cases()]
            assert links[0].rate <= links[1].rate <= links[2].rate
            assert links[0].latency >= links[1].latency >= links[2].latency
    assert load()["p3dn.24xlarge"].usual.reached["fp16"] == pytest.approx(0.26 * 125e12)


def test_published_hours_lie_within_the_projected_range() -> None:
    """ALBERT-base on 8 to 64 V100s, from what another model reached on one of them."""
    projection = import_module("benchmarks.scaling.projection")
    checks = projection.albert_checks()
    assert all(check.found.hours.least <= check.hours <= check.found.hours.most for check in checks)
    assert all(abs(check.error) < 0.13 for check in checks) and len(checks) == 4
