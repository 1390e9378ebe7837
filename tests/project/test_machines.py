"""Machines from a file: the packaged ones, a user's own, and what is refused in one line."""

from pathlib import Path

import pytest

from distill.errors import SettingError
from distill.project.machines import CASES, FIELDS, choose, load


def own(tmp_path: Path, text: str) -> str:
    path = tmp_path / "machines.yaml"
    path.write_text(text)
    return str(path)


def test_every_packaged_machine_is_worst_at_its_worst() -> None:
    machines = load()
    assert {"p3.16xlarge", "p3dn.24xlarge", "g4dn.12xlarge", "p4d.24xlarge", "p5.48xlarge", "p5en.48xlarge"} <= set(
        machines
    )
    for machine in machines.values():
        worst, usual, best = machine.cases()
        assert machine.note and set(machine.assumed) <= set(FIELDS)
        for name, rate in usual.reached.items():
            assert worst.reached[name] <= rate <= best.reached[name]
        for name in ("storage", "save", "overlap", "memory_rate"):
            assert getattr(worst, name) <= getattr(usual, name) <= getattr(best, name)
        for name in ("jitter", "start", "call", "price"):
            assert getattr(worst, name) >= getattr(usual, name) >= getattr(best, name)
        for name in ("inside", "between"):
            links = [getattr(each, name) for each in machine.cases()]
            assert links[0].rate <= links[1].rate <= links[2].rate
            assert links[0].latency >= links[1].latency >= links[2].latency


def test_units_and_shares() -> None:
    """A V100: 125 TFLOP/s, of which 26 % are reached; 16 GB less 1.5; 25 Gbit/s are at most 3.1 GB/s."""
    usual = load()["p3.16xlarge"].usual
    assert usual.reached["fp16"] == pytest.approx(0.26 * 125e12)
    assert usual.memory == pytest.approx(14.5e9)
    assert usual.between.rate <= 25e9 / 8 and usual.inside.latency == pytest.approx(8e-6)


def test_a_file_changes_a_machine_and_adds_others(tmp_path: Path) -> None:
    text = "p5.48xlarge: {price: 41, between: {latency: 7}}\nhalf: {like: p5.48xlarge, gpus: 4, price: [30, 20, 10]}\n"
    machines = load(own(tmp_path, text))
    packaged, changed, half = load()["p5.48xlarge"], machines["p5.48xlarge"], machines["half"]
    assert (packaged.usual.price, changed.usual.price) == (55.04, 41.0)
    assert changed.usual.between.latency == pytest.approx(7e-6)
    assert changed.usual.between.rate == packaged.usual.between.rate
    assert half.usual.gpus == 4 and [each.price for each in half.cases()] == [30, 20, 10]
    assert half.usual.between == changed.usual.between and len(CASES) == 3


def test_names_are_chosen() -> None:
    machines = load()
    assert [each.name for each in choose(machines, "p5.48xlarge, p3.16xlarge")] == ["p5.48xlarge", "p3.16xlarge"]
    assert "two_cores" not in [each.name for each in choose(machines, "all")]


WHOLE = """\
x: {title: X, gpus: 8, memory: 80, reserved: 1, rate: {bf16: 900}, share: {bf16: 0.4}, memory_rate: 3000, call: 90,
  inside: {rate: 300, latency: 8}, between: {rate: 50, latency: 20}, overlap: 0.5, trees: true, storage: 1, save: 1,
  jitter: 0.02, start: 60, price: 9}
"""


def test_a_machine_of_ones_own_needs_every_field(tmp_path: Path) -> None:
    assert load(own(tmp_path, WHOLE))["x"].usual.reached == {"bf16": pytest.approx(360e12)}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("memory: 80, ", ""), "has no memory: add it (GB of each GPU)"),
        (("price: 9", "price: nine"), "price=nine is no such number: give one of at least 0, or three"),
        (("gpus: 8", "gpus: 0"), "gpus=0 is no such number: give one of at least 1"),
        (("gpus: 8", "gpus: 2.5"), "gpus=2.5 is no number of GPUs"),
        (("jitter: 0.02", "jiter: 0.02"), "x.jiter is not known (did you mean jitter"),
        (("share: {bf16: 0.4}", "share: {fp16: 0.4}"), "rate is given for bf16 and share for fp16: give both"),
        (("share: {bf16: 0.4}", "share: 0.4"), "share=0.4 is nothing by number format: give {bf16: NUMBER}"),
        (("rate: {bf16: 900}", "rate: {tf64: 900}"), "rate.tf64 is not known: choose among fp32, bf16"),
        (("inside: {rate: 300, latency: 8}", "inside: 300"), "inside=300 is no link"),
        (("price: 9", "price: [1, 2]"), "price=[1, 2] is no such number"),
        (("price: 9", "price: 9, assumed: [prize]"), "assumed=['prize']: give a list of its fields"),
        (("x: {title", "x: {like: p6, title"), "x.like=p6 is not known"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, change: tuple[str, str], expected: str) -> None:
    assert change[0] in WHOLE
    path = own(tmp_path, WHOLE.replace(*change))
    with pytest.raises(SettingError) as refused:
        load(path)
    assert expected in str(refused.value) and f"machines={path}" in str(refused.value)


@pytest.mark.parametrize("text", ["", "[1, 2]", "x: 5", "x: {"])
def test_a_file_that_holds_no_machines(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingError, match="machines="):
        load(own(tmp_path, text))


def test_a_file_that_is_not_there_and_a_name_that_is_not_known() -> None:
    with pytest.raises(SettingError, match=r"machines=/no/such.yaml cannot be read"):
        load("/no/such.yaml")
    with pytest.raises(SettingError, match=r"machine=p5.48xlrge is not known \(did you mean p5.48xlarge"):
        choose(load(), "p5.48xlrge")
