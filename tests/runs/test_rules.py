"""The rules name what a made-up profile was made to have, with the gain that its numbers give, and nothing else."""

from typing import Any

import pytest
from made_up_profile import STEPS, rank, run, step

from distill.runs.profile.figures import Figures
from distill.runs.profile.finding import Finding
from distill.runs.profile.loader import LoaderTimes
from distill.runs.profile.record import RunProfile
from distill.runs.profile.rules import conclusion, diagnose


def named(profile: RunProfile) -> Finding:
    """The only finding that is named."""
    found = [finding for finding in diagnose(profile) if finding.named]
    assert len(found) == 1, found
    assert found[0].rule in conclusion(profile, found) and found[0].sentence in conclusion(profile, found)
    return found[0]


def waiting(prepared: float, computed: float, threads: int = 1, waited: float = 0.1, **fields: object) -> RunProfile:
    """A run whose loop of 100 ms waits `waited` more for windows that take so many seconds."""
    times = LoaderTimes(STEPS, prepared * STEPS, computed * STEPS, max(threads, 1), in_loop=not threads)
    return run(rank(steps=[step(data=waited)] * STEPS, loader=times, **fields))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_healthy_run_has_none(ranks: int) -> None:
    profile = run(*(rank(number, [step(exchange=0.005)] * STEPS) for number in range(ranks)))
    assert not [finding for finding in diagnose(profile) if finding.named]
    assert conclusion(profile, diagnose(profile)).startswith("No bottleneck: no rule finds 10 % of the time lost")


def test_too_few_steps_say_nothing() -> None:
    profile = run(rank(steps=[step(data=5.0)] * 3))
    assert diagnose(profile) == [] and "fewer than 5 steps" in conclusion(profile, [])


def test_a_loader_that_computes_gets_threads() -> None:
    """200 ms of computing a window for a loop of 100 ms: two threads are enough."""
    found = named(waiting(prepared=0.2, computed=0.19))
    assert found.rule == "CPU-bound loader" and found.change == {"train.workers": 2}
    assert found.lost == pytest.approx(0.5) and found.gain == pytest.approx(2.0)


def test_a_loader_on_busy_cores_gets_none() -> None:
    """All of the two cores are taken, so that a second thread would only share them."""
    busy = {"seconds": [0.5], "process_cpu": [2.0]}
    found = named(waiting(prepared=0.2, computed=0.19, cores=2, samples=busy))
    assert (
        found.rule == "CPU-bound loader"
        and not found.change
        and "cores that this rank can use are busy" in found.advice
    )


def test_cores_that_other_programs_take_are_not_counted() -> None:
    """Of four cores others take three: the one that is left computes already."""
    busy = {"seconds": [0.5], "process_cpu": [1.0], "machine_cpu": [1.0]}
    found = named(waiting(prepared=0.2, computed=0.19, samples=busy, host_cores=4))
    assert not found.change and "The 1.0 cores that this rank can use are busy" in found.advice


def test_threads_that_hold_pythons_lock_get_no_more() -> None:
    found = named(waiting(prepared=0.4, computed=0.13, threads=3))
    assert found.rule == "CPU-bound loader" and not found.change and "one thread at a time" in found.advice


def test_a_loop_that_prepares_its_own_batches() -> None:
    found = named(waiting(prepared=0.1, computed=0.1, threads=0))
    assert found.change == {"train.workers": 1} and found.gain == pytest.approx(2.0)


def test_slow_storage_gets_threads() -> None:
    """Each window waits 400 ms; four threads bring one every 100 ms."""
    found = named(waiting(prepared=0.4, computed=0.01, waited=0.3))
    assert found.rule == "I/O wait" and found.change == {"train.workers": 4} and "corpus.local" in found.advice
    assert found.lost == pytest.approx(0.75) and found.gain == pytest.approx(4.0)


def test_a_slow_exchange_is_sent_in_half_the_bytes() -> None:
    """60 ms stand in the way, of 80 in all: half of these are 40, of which 20 lie beside the backward pass."""
    ranks = [rank(number, [step(exchange=0.06)] * STEPS, exchanges=[0.08] * STEPS) for number in range(2)]
    found = named(run(*ranks, bytes_exchanged=10**7))
    assert found.rule == "exchange" and found.change == {"backend.compression": "bf16"}
    assert found.gain == pytest.approx((0.101 + 0.06) / (0.101 + 0.02))


def test_an_exchange_in_each_micro_batch_becomes_one() -> None:
    ranks = [rank(number, [step(exchange=0.1)] * STEPS) for number in range(2)]
    found = named(run(*ranks, sync="every"))
    assert found.change == {"backend.sync": "window"} and found.gain == pytest.approx(0.201 / 0.126)


def test_a_slow_rank_is_named_and_not_the_exchange_in_which_it_is_awaited() -> None:
    ranks = [rank(0, [step(exchange=0.061)] * STEPS), rank(1, [step(backward=0.1, exchange=0.001)] * STEPS)]
    found = named(run(*ranks))
    assert found.rule == "load imbalance between ranks" and not found.change
    assert "rank 1 on host1" in found.sentence and "backward" in found.sentence
    assert found.gain == pytest.approx(0.162 / 0.102, rel=1e-3)


def test_ranks_that_are_slow_in_turn_are_no_imbalance() -> None:
    slow, quick = step(backward=0.07), step(exchange=0.03)
    ranks = [rank(0, [slow, quick] * (STEPS // 2)), rank(1, [quick, slow] * (STEPS // 2))]
    assert "load imbalance between ranks" not in [finding.rule for finding in diagnose(run(*ranks))]


def test_slow_steps_are_named_with_their_phase() -> None:
    steps = [step(forward=1.02) if number % 10 == 5 else step() for number in range(STEPS)]
    found = named(run(rank(steps=steps)))
    assert found.rule == "step outliers" and "4 of 40 steps" in found.sentence and "forward" in found.sentence
    assert found.gain == pytest.approx((STEPS * 0.101 + 4 * 1.0) / (STEPS * 0.101))


def test_checkpoints_become_rarer() -> None:
    steps = [step(checkpoint=0.5) if number % 5 == 4 else step() for number in range(STEPS)]
    found = named(run(rank(steps=steps), save_every=5))
    share = 8 * 0.5 / (STEPS * 0.101 + 8 * 0.5)
    assert found.rule == "step outliers" and found.change == {"train.save_every": 200}
    assert found.lost == pytest.approx(share) and found.gain == pytest.approx(1 / (1 - share * (1 - 5 / 200)))


def test_evaluations_are_no_outliers() -> None:
    steps = [step(evaluation=5.0) if number % 10 == 9 else step() for number in range(STEPS)]
    assert not [finding for finding in diagnose(run(rank(steps=steps))) if finding.named]


def test_traced_and_first_steps_are_left_out() -> None:
    steps = [step(forward=3.0)] * 5 + [step()] * STEPS
    assert not [finding for finding in diagnose(run(rank(steps=steps, left_out=[0, 1, 2, 3, 4]))) if finding.named]


def test_a_run_that_swaps_gets_smaller_micro_batches() -> None:
    """Of two threads six tenths compute; what the system counts as stalls is less than what is lost."""
    swapping = {"memory_stalled": [0.05, 0.15], "major_faults": [900.0, 1100.0], "process_user": [1.0, 1.4]}
    found = named(run(rank(samples={"seconds": [0.5, 1.0], **swapping}, threads=2)))
    assert found.rule == "memory" and found.change == {"train.batch_size": 4, "train.accumulate": 8}
    assert found.lost == pytest.approx(0.4) and found.gain == pytest.approx(1 / 0.6)


def test_samples_of_the_first_steps_do_not_count() -> None:
    """Three steps of 100 ms in which all was well, then ten of a second: u is 0.2, and 0.22 over the whole time."""
    steps = [step()] * 3 + [step(forward=0.92)] * 10
    times = [0.1 * number for number in range(1, 106)]
    well = [each < 3 * 0.101 for each in times]
    samples = {
        "seconds": times,
        "process_user": [1.0 if each else 0.2 for each in well],
        "memory_stalled": [0.0 if each else 0.5 for each in well],
        "major_faults": [0.0 if each else 900.0 for each in well],
    }
    found = named(run(rank(steps=steps, left_out=[0, 1, 2], samples=samples, threads=1)))
    assert found.rule == "memory" and found.gain == pytest.approx(5.0, rel=0.01)


def test_evaluation_and_outliers_are_left_out_of_what_is_sampled() -> None:
    """One sample each of: five steps, a step, its evaluation, five steps, an outlier, five steps."""
    steps = [step()] * 5 + [step(evaluation=1.0)] + [step()] * 5 + [step(forward=1.02)] + [step()] * 5
    ends = [sum(map(sum, steps[: number + 1])) for number in range(len(steps))]
    times = [ends[4], ends[4] + 0.101, ends[5], ends[10], ends[11], ends[-1]]
    one = rank(steps=steps, samples={"seconds": times, "process_user": [1.0, 1.0, 50.0, 1.0, 0.0, 1.0]})
    figures = Figures(run(one))
    assert figures.sample("process_user", one) == pytest.approx(1.0)
    counted = ends[-1] - 1.0
    assert figures.sample("process_user", one, outliers=True) == pytest.approx((counted - 1.101) / counted)
    assert figures.sample("machine_cpu", one) is None


def test_a_rank_that_is_repaired_takes_cores_from_its_neighbour() -> None:
    """On one host of two cores the ranks need 0.13 s of processors a step each: none takes less than 130 ms."""
    for host, expected in (("host0", 0.162 / 0.13), ("host1", 0.162 / 0.102)):
        known: dict[str, Any] = {
            "samples": {"seconds": [6.5], "process_cpu": [0.13 / 0.162]}, "cores": 2, "local_ranks": 2
        }  # fmt: skip
        slow = rank(1, [step(backward=0.1, exchange=0.001)] * STEPS, **known | {"host": host})
        found = named(run(rank(0, [step(exchange=0.061)] * STEPS, **known), slow))
        assert found.rule == "load imbalance between ranks" and found.gain == pytest.approx(expected, rel=0.01)


def test_threads_that_share_a_core_are_hardly_two() -> None:
    """Two cores of two threads each: 3 threads are busy for 200 ms, which all four would need 200 * 2.22 / 2.44 for."""
    busy = {"seconds": [20.0], "process_cpu": [3.0]}
    plain = named(waiting(prepared=0.2, computed=0.19, samples=busy))
    shared = named(waiting(prepared=0.2, computed=0.19, samples=busy, threads_of_core=2))
    assert plain.gain == pytest.approx(4 / 3, rel=0.02) and shared.gain == pytest.approx(2.44 / 2.22, rel=0.02)


def test_pressure_of_other_programs_is_not_this_runs() -> None:
    pressed = {"seconds": [0.5], "memory_stalled": [0.5], "major_faults": [0.0]}
    assert not [finding for finding in diagnose(run(rank(samples=pressed))) if finding.named]


def test_a_gpu_that_waits_for_the_host_gets_larger_micro_batches() -> None:
    gpu = {"seconds": [0.5], "gpu_busy": [0.45], "gpu_memory": [1e9], "gpu_memory_total": [1e10]}
    found = named(run(rank(samples=gpu)))
    waits = 0.09 * (1 - 0.45 * 0.101 / 0.09)
    assert found.change == {"train.batch_size": 32, "train.accumulate": 1}
    assert found.lost == pytest.approx(waits / 0.101) and found.gain == pytest.approx(0.101 / (0.101 - waits * 0.75))


def test_a_profile_survives_json() -> None:
    import json

    profile = waiting(prepared=0.2, computed=0.19)
    assert RunProfile.of(json.loads(json.dumps(profile.as_dict()))) == profile
