"""The benchmark of what each setting is worth: its settings exist, and its table says ratios of the same seed."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from job import composed

from distill.config.settings import Config
from distill.objective.terms.soft import Soft
from distill.runs.check import check

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from ablation import CHANGES, arguments_of, show


@pytest.fixture(scope="module")
def base() -> Config:
    return composed(*arguments_of("base", 0, 4, []))


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_one_of_the_recipe(name: str, base: Config) -> None:
    changed = composed(*arguments_of(name, 0, 4, []))
    check(changed)
    assert (base == changed) == (name == "base")


def test_ratios_are_of_the_same_seed() -> None:
    values = {"base": (50.0, 40.0), "other": (55.0, 42.0)}
    lines = [
        {"change": name, "seed": seed, "perplexity": {"heldout": value}, "training_seconds": 10.0 + seed}
        for name, pair in values.items()
        for seed, value in enumerate(pair)
    ]
    last = [cell.strip() for cell in show(lines, "base").splitlines()[-1].strip("|").split("|")]
    assert last == ["other", "2", "48.50", "1.075", "10"]  # seconds: half of 10 and 11, rounded to even


def test_two_halves_are_two_runs_of_half_of_the_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Settings that a run would take; what the first of them has made is what the second starts from."""
    import ablation

    started: list[list[str]] = []

    def executed(folder: Path, arguments: list[str]) -> dict[str, Any]:
        folder.mkdir()
        started.append([*arguments, f"hydra.run.dir={folder}"])
        return {"training": {"seconds": 2.0}, "student": {"perplexity": {"books": 3.0}}, "teacher": None}

    monkeypatch.setattr(ablation, "execute", executed)
    found = ablation.run_halves("two halves, rows of 64 tokens first", 1, 4, ["corpus.max_sequences=3000"], tmp_path)
    assert found["training_seconds"] == 4.0 and found["perplexity"] == {"books": 3.0}
    first, second = (composed(*(word for word in each if not word.startswith("hydra"))) for each in started)
    for config in (first, second):
        check(config)
    tokens = [each.corpus.sequence_length * each.corpus.max_sequences for each in (first, second)]
    assert tokens == [1500 * 128] * 2 and second.student.path in started[0][-1]
    assert [each.schedule.path.split(".")[-1] for each in (first, second)] == ["Constant", "Linear"]


@pytest.mark.parametrize("name", ["SoftAtRandom", "SoftAtEntropy"])
def test_soft_targets_at_a_share_are_the_mean_over_it(name: str) -> None:
    import ablation_terms

    torch.manual_seed(0)
    student, teacher = torch.randn(40, 11), torch.randn(40, 11)
    term = getattr(ablation_terms, name)(share=0.3)
    whole, found = Soft(1.0).losses(student, teacher, torch.zeros(40)), term.losses(student, teacher, torch.zeros(40))
    taken = found.nonzero()[:, 0]
    assert len(taken) == 12
    torch.testing.assert_close(found.mean(), whole[taken].mean())
    if name == "SoftAtEntropy":
        entropy = torch.distributions.Categorical(logits=student).entropy()
        assert set(taken.tolist()) == set(entropy.topk(12).indices.tolist())
