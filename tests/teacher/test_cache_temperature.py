"""The temperature of a teacher cache is that of the term that reads it."""

from pathlib import Path

import pytest
from job import Shelf, metrics

STATIC = ["objective.masking.static=true", "objective.cosine.weight=0"]


def test_the_cache_is_kept_at_the_temperature_of_the_term(shelf: Shelf, tmp_path: Path) -> None:
    """Almost all entries kept: the loss of the first step is the live teacher's, at another temperature than usual."""
    settings = [*STATIC, "objective.soft.temperature=4", "train.steps=1", f"data.cache={tmp_path}/cache"]
    losses = []
    for name, cache in (("live", "null"), ("cached", "217")):
        assert shelf.run(tmp_path / name, *settings, f"teacher.cache.top_k={cache}") == 0
        losses.append(metrics(tmp_path / name)[0]["loss/soft"])
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def test_terms_of_two_temperatures_cannot_share_a_cache(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    other = "+objective.other={kind: soft, weight: 1, temperature: 3}"
    assert shelf.run(shelf.root / "two", *STATIC, "teacher.cache.top_k=16", other) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "objective.soft.temperature=2" in line and "objective.other.temperature=3" in line
