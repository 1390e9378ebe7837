"""Steps, hours and money by hand; what grows with nodes, bytes and rates; what binds, and what would help."""

from dataclasses import replace

import pytest
from workloads import TEACHER, machine, same_cases, shape, workload

from distill.errors import SettingError
from distill.project.choose import Limits, choose, project_all
from distill.project.exchange import Link
from distill.project.machines import MachineCases
from distill.project.memory import needed
from distill.project.run import project, project_run
from distill.project.step import project_step, storage_seconds
from distill.project.stragglers import expected_maximum

# A row: the teacher's forward and the student's three, each 1 Gop and 20 x 1 Mop; ten of them on 1 Tflop/s.
MICRO_BATCH = 4 * 10 * (1e9 + 20e6) / 1e12


def test_a_step_by_hand() -> None:
    step = project_step(workload(), machine(), 2)
    assert step.compute == pytest.approx(4 * MICRO_BATCH)
    assert step.optimizer == pytest.approx(8 * 4 * 1e6 / 1e12)
    assert step.exchange == step.transfer == pytest.approx(2 * 7 / 8 * 4e6 / 1e9)  # over the link between the nodes
    assert (step.gathering, step.stragglers, step.storage) == (0, 0, 0)
    assert step.total == pytest.approx(step.compute + step.optimizer + step.exchange)
    assert step.binds == "compute" and step.fits


def test_a_run_by_hand() -> None:
    """100 steps, two saves of 12 MB at 1 GB/s, a start of 36 s; two nodes at 2 an hour."""
    found = project(workload(), same_cases(machine()), 2)
    run = found.run
    assert run.training == pytest.approx(100 * run.step.total) and run.saving == pytest.approx(0.024)
    assert found.hours.usual == pytest.approx((36 + run.training + run.saving) / 3600)
    assert found.cost.usual == pytest.approx(4 * found.hours.usual)
    assert found.hours.least == found.hours.most == found.hours.usual
    assert run.tokens == 100 * 4 * 10 * 8 * 100 and run.rows_of_step == 320
    alone = 32 * MICRO_BATCH + 8 * 4 * 1e6 / 1e12
    assert run.efficiency == pytest.approx(alone / (8 * run.step.total))


def test_scores_are_a_part_of_the_run() -> None:
    """Of 80 rows, each in full and ten times as a masked copy: a forward of 110 rows on each of 8 ranks."""
    work = workload(score_rows=80, score_copies=10.0, score_every=30)
    run = project_run(work, machine(), 2)
    assert run.scoring == pytest.approx((2 + 3) * 110 * 1.02e9 / 1e12)  # student and teacher at the end, three points


def test_epochs_need_the_size_of_the_corpus() -> None:
    assert workload(steps=None, epochs=3, corpus_rows=1000).total_steps(8) == 3 * 4  # 320 rows a step
    assert workload(steps=5, epochs=3, corpus_rows=1000).total_steps(8) == 5
    with pytest.raises(SettingError, match=r"train\.epochs=3, but the size of the corpus.*tokens=NUMBER"):
        workload(steps=None, epochs=3).total_steps(8)


def test_the_clock_may_end_a_run() -> None:
    run = project_run(workload(steps=None, minutes=30), machine(), 2)
    assert run.training == pytest.approx(1800)
    assert project_run(workload(steps=1, minutes=30), machine(), 2).training == pytest.approx(run.step.total)


def test_rows_of_a_step_are_shared_by_the_ranks() -> None:
    fixed = workload(rows_per_step=320)
    assert [fixed.window(ranks) for ranks in (1, 8, 64, 320)] == [(32, 10), (4, 10), (1, 5), (1, 1)]
    assert workload().window(64) == (4, 10) and workload().rows_of_step(64) == 2560


def test_an_exchange_for_every_micro_batch_costs_as_often() -> None:
    window, every = (project_step(workload(sync=sync), machine(), 2) for sync in ("window", "every"))
    assert every.exchange == pytest.approx(4 * window.exchange) and every.compute == window.compute
    half = project_step(workload(compression="bf16"), machine(), 2)
    assert half.exchange == pytest.approx(window.exchange / 2)


def test_an_exchange_hides_behind_the_last_backward() -> None:
    hiding = machine(overlap=1.0)
    hidden = project_step(workload(), hiding, 2)
    assert hidden.exchange == pytest.approx(hidden.transfer / 5)  # the first of the blocks and the rest is waited for
    clipped = project_step(workload(overlaps=False), hiding, 2)
    assert clipped.exchange == pytest.approx(clipped.transfer)


def test_divided_weights_by_hand() -> None:
    """The student's blocks twice and the rest once for each micro-batch, in bf16; gradients once a window, in fp32."""
    work = workload(shard_student=True, backend="fsdp")
    step, links = project_step(work, machine(), 2), 7 / 8 / 1e9
    assert step.gathering == pytest.approx(4 * 2 * (2 * 800_000 + 200_000) * links)
    assert step.exchange == pytest.approx(4e6 * links)
    both = project_step(replace(work, shard_teacher=True), machine(), 2)
    assert both.gathering - step.gathering == pytest.approx(4 * 2 * 800_000 * links)
    joined = replace(work, shard_teacher=True, teachers=(replace(TEACHER, micro_batches=4),))
    assert project_step(joined, machine(), 2).gathering - step.gathering == pytest.approx(2 * 800_000 * links)
    assert project_step(replace(work, shard_teacher=True), machine(gpus=1), 1).gathering == 0


def test_stragglers_wait_once_a_window() -> None:
    uneven = machine(jitter=0.1)
    window, every = (project_step(workload(sync=sync), uneven, 2) for sync in ("window", "every"))
    assert window.stragglers == pytest.approx(0.1 * MICRO_BATCH * 2 * expected_maximum(8))
    assert every.stragglers == pytest.approx(2 * window.stragglers)  # four times, without the root of four


def test_storage_is_waited_for_where_it_is_slower_than_the_step() -> None:
    fast = project_step(workload(), machine(), 2)
    slow = machine(storage=1e4)  # 160 rows of 200 bytes a node and step
    step = project_step(workload(), slow, 2)
    assert storage_seconds(workload(), slow, 2) == pytest.approx(160 * 200 / 1e4)
    assert step.total == pytest.approx(3.2) and step.storage == pytest.approx(3.2 - fast.total)
    assert step.binds == "storage"
    # Shared storage does not grow with the nodes, that of each node does.
    shared = machine(shared=1e6)
    assert storage_seconds(workload(), shared, 8) == pytest.approx(4 * storage_seconds(workload(), shared, 2))
    assert storage_seconds(workload(), slow, 8) == pytest.approx(storage_seconds(workload(), slow, 2))


def test_a_cached_teacher_does_not_run() -> None:
    cached = workload(teachers=(replace(TEACHER, cached=8),))
    assert project_step(cached, machine(), 2).compute == pytest.approx(
        3 * project_step(workload(), machine(), 2).compute / 4
    )


def test_starting_kernels_takes_a_small_step_at_least() -> None:
    slow = machine(call=0.01)
    assert project_step(workload(), slow, 2).compute == pytest.approx(4 * (3 * 4 + 4) * 0.01)


def test_memory_by_hand() -> None:
    """Student: 16 bytes a parameter, a copy of 2, 34 a token, layer and width; teacher: 2, and one block's inside."""
    work, tokens = workload(positions=0.0), 10 * 100
    student = 18 * 1e6 + 34 * tokens * 4 * 100
    teacher = 2 * (1e6 + tokens * (2 * 100 + 3 * 400))
    assert needed(work, 8, 10, "bf16", ("bf16",)) == pytest.approx(student + teacher)
    assert needed(work, 8, 10, "fp32", ("fp32",)) > needed(work, 8, 10, "bf16", ("bf16",))
    divided = replace(work, shard_student=True, shard_teacher=True)
    assert needed(divided, 8, 10, "bf16", ("bf16",)) < needed(work, 8, 10, "bf16", ("bf16",))


def test_a_run_that_does_not_fit_names_what_would_help() -> None:
    large = shape(parameters=10**9, in_blocks=9 * 10**8, largest_block=10**7, blocks=90, layers=90)
    work = workload(student=large, teachers=())
    step = project_step(work, machine(), 2)
    assert not step.fits and step.binds == "memory"
    assert step.cures == ("backend=fsdp",)
    assert project_step(work, machine(memory=5e9), 2).cures == ("backend=fsdp backend.sync=every",)
    rows = project_step(workload(batch_size=4096, accumulate=1), machine(memory=1e9), 2)
    # 16.4 kB a position; of 1 GB weights take 20 MB and the logits 268: 43,400 positions, and 256 rows are 25,600.
    assert not rows.fits and rows.cures[0] == "train.batch_size=256 train.accumulate=16"
    assert project_step(replace(work, batch_size=1), machine(memory=1e6), 2).cures == ()


def test_a_number_format_that_the_machine_does_not_have() -> None:
    with pytest.raises(
        SettingError, match="machine=round has no rate for fp16, only for fp32, bf16: set precision=bf16"
    ):
        project_step(workload(precision="fp16"), machine(), 1)
    assert project_step(workload(precision="auto"), machine(), 1).total == project_step(workload(), machine(), 1).total
    plain = machine(reached={"fp32": 1e11, "bf16": 1.1e11})
    work = workload(teachers=(), precision="auto")
    assert project_step(work, plain, 1).compute == pytest.approx(4 * 3 * 10 * 1.02e9 / 1e11)  # fp32


NODES = (1, 2, 8, 64, 512)


@pytest.mark.parametrize("rows_per_step", [None, 20480])
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_more_nodes_are_faster_and_never_cheaper(rows_per_step: int | None, backend: str) -> None:
    real = machine(jitter=0.02, between=Link(1e9, 1e-5), start=0.0)
    divided = {"backend": backend, "shard_student": backend == "fsdp", "shard_teacher": backend == "fsdp"}
    work = workload(steps=None, epochs=1, corpus_rows=20480 * 100, rows_per_step=rows_per_step, **divided)
    found = [project(work, same_cases(real), nodes) for nodes in NODES]
    hours, costs = [each.hours.usual for each in found], [each.cost.usual for each in found]
    assert hours == sorted(hours, reverse=True) and costs == sorted(costs)
    efficiencies = [each.efficiency.usual for each in found]
    assert efficiencies == sorted(efficiencies, reverse=True) and 0 < efficiencies[-1] < efficiencies[0] <= 1


def test_what_is_slower_makes_a_run_longer() -> None:
    usual = project_run(workload(), machine(), 8).seconds
    slower = [
        machine(reached={"bf16": 5e11}), machine(between=Link(1e8, 0.0)), machine(between=Link(1e9, 1e-3)),
        machine(jitter=0.1), machine(storage=1e3), machine(start=100.0), machine(save=1e6), machine(memory_rate=1e10),
    ]  # fmt: skip
    assert all(project_run(workload(), each, 8).seconds > usual for each in slower)


def test_the_range_holds_the_usual_case() -> None:
    cases = MachineCases(
        machine(reached={"bf16": 5e11}, jitter=0.2), machine(), machine(reached={"bf16": 2e12}), (), ""
    )
    found = project(workload(), cases, 2)
    assert found.hours.least < found.hours.usual < found.hours.most
    assert found.cost.least < found.cost.usual < found.cost.most
    assert found.efficiency.least <= found.efficiency.usual <= found.efficiency.most


def test_the_fastest_and_the_cheapest_within_limits() -> None:
    dear = replace(machine(reached={"fp32": 1e11, "bf16": 4e12}), name="dear", price=20.0)
    work = workload(rows_per_step=3200, steps=10_000)
    found, left_out = project_all(work, [same_cases(machine()), same_cases(dear)], (1, 4))
    assert len(found) == 4 and not left_out
    best = choose(found, Limits())
    assert best.fastest is not None and (best.fastest.machine.name, best.fastest.nodes) == ("dear", 4)
    assert best.cheapest is not None and (best.cheapest.machine.name, best.cheapest.nodes) == ("round", 1)
    poor = choose(found, Limits(budget=1.01 * best.cheapest.cost.usual))
    assert poor.fastest is poor.cheapest is best.cheapest
    hasty = choose(found, Limits(hours=best.fastest.hours.usual))
    assert hasty.cheapest is best.fastest
    assert choose(found, Limits(hours=1e-6)).fastest is None


def test_machines_that_cannot_run_it_are_left_out() -> None:
    old = replace(machine(reached={"fp32": 1e11}), name="old")
    found, left_out = project_all(workload(), [same_cases(old), same_cases(machine())], (1,))
    assert [each.machine.name for each in found] == ["round"]
    assert len(left_out) == 1 and "machine=old has no rate for bf16, only for fp32: set precision=fp32" in left_out[0]
    with pytest.raises(SettingError, match="machine=old"):
        project_all(workload(), [same_cases(old)], (1,))
    with pytest.raises(SettingError, match=r"train\.rows_per_step=3 leaves GPUs of 1 x round without a row"):
        project_all(workload(rows_per_step=3), [same_cases(machine())], (1,))
