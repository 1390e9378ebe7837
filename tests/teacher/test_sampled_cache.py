"""A cache of draws: what it holds, when it is another one, copied, resumed and damaged, and runs that learn from it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job import Shelf, assert_same, metrics, results
from test_teacher_cache import SINGLE, Desk, content, counting, log_probs_of, never, positions_of, small_parts
from tiny import make_model

from distill.config import settings as conf
from distill.runs.describe import cache_facts
from distill.teacher.build_cache import Recorder
from distill.teacher.cache import CachedTeacher
from distill.teacher.distributions import Samples
from distill.teacher.live import LiveTeacher


def sampled(folder: Path, tokenizer: Any, teacher: Any, top_k: int | None = 3) -> Desk:
    desk = Desk(folder, tokenizer, teacher)
    desk.set("teacher.cache", desk.config.teacher.cache.changed(top_k=top_k, sampled=5))
    return desk


@pytest.fixture
def desk(tmp_path: Path, tokenizer: Any, teacher: Any) -> Desk:
    return sampled(tmp_path, tokenizer, teacher)


@pytest.mark.parametrize("soft_positions", ["all", "masked"])
@pytest.mark.parametrize("top_k", [3, None])
def test_it_holds_what_the_teacher_says(
    tmp_path: Path, tokenizer: Any, teacher: Any, top_k: int | None, soft_positions: str
) -> None:
    desk = sampled(tmp_path, tokenizer, teacher, top_k)
    desk.soft_positions = soft_positions
    cache = desk.build()
    reader, exact = CachedTeacher(cache, SINGLE), top_k or 0
    for batch in desk.batches().window(2):
        (output,) = reader.outputs([reader.read_ahead(batch)], desk.objective().teacher_spec)
        source, positions = output.distribution, positions_of(desk, batch)
        assert isinstance(source, Samples) and len(source.ids) == len(positions)
        p = log_probs_of(teacher, batch, positions, 2.0).exp()
        torch.testing.assert_close(source.weights[:, :exact], p.topk(exact).values, rtol=3e-3, atol=0)
        torch.testing.assert_close(source.weights.sum(1), torch.ones(len(p)), rtol=2e-3, atol=0)
        torch.testing.assert_close(source.neg_entropy[:, 0], (p * p.log()).sum(1), rtol=1e-3, atol=1e-3)
        heads, draws = source.ids[:, :exact], source.ids[:, exact:]
        assert not (draws[:, :, None] == heads[:, None]).any()
    facts, files = cache_facts(cache), sum(map(len, content(cache.folder)))
    assert facts.bytes == pytest.approx(files, abs=200)
    assert facts.kept_mass is not None and (facts.kept_mass > 0) == (exact > 0)
    position = (4 * exact + 2 if exact else 0) + 2 * 5 + 2
    assert facts.bytes_per_token == pytest.approx(position + 8 * 41 / facts.positions)
    assert (facts.sampled, facts.sample_seed) == (5, 0)


CHANGES: dict[str, Callable[[Desk], object]] = {
    "sampled": lambda desk: desk.set("teacher.cache.sampled", 6),
    "no draws": lambda desk: desk.set("teacher.cache", conf.TeacherCacheConfig(top_k=3)),
    "seed": lambda desk: desk.set("teacher.cache.seed", 1),
    "top_k": lambda desk: desk.set("teacher.cache.top_k", None),
    "temperature": lambda desk: setattr(desk, "temperature", 3.0),
}


def test_what_changes_the_draws_makes_another(desk: Desk) -> None:
    found = {desk.find().folder}
    for change in CHANGES.values():
        before = desk.config, desk.temperature
        change(desk)
        found.add(desk.find().folder)
        desk.config, desk.temperature = before
    assert len(found) == 1 + len(CHANGES)


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(
    desk: Desk, tmp_path: Path, tokenizer: Any, teacher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = desk.build()
    other = sampled(tmp_path / "other", tokenizer, teacher)
    with monkeypatch.context() as patch:  # in other parts and forwards
        small_parts(patch)
        questions = counting(patch, most=7)
        with pytest.raises(RuntimeError, match="lights"):
            other.build()
        assert questions
    with monkeypatch.context() as patch:
        small_parts(patch)
        again = other.build()
    assert again.key == whole.key and content(again.folder)[-1] == content(whole.folder)[-1]
    records = b"".join(content(whole.folder)[:-1])
    assert records == b"".join(content(again.folder)[:-1])
    desk.set("teacher.cache.seed", 1)
    before, seeded = (np.frombuffer(each, whole.layout.record) for each in (records, content(desk.build().folder)[0]))
    assert np.array_equal(seeded["ids"], before["ids"]) and not np.array_equal(seeded["draws"], before["draws"])


def test_a_copy_serves_another_machine(
    desk: Desk, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own folder of caches, number format and copy of the teacher, without what the build left beside."""
    made = desk.build()
    monkeypatch.setattr(Recorder, "records", never)
    there = tmp_path / "elsewhere"
    shutil.copytree(made.folder, there / "teacher" / made.key)
    other = sampled(there, tokenizer, make_model("bert", 4))
    other.set("precision.teacher", "bf16")
    found = other.build()
    assert found.ready and found.folder.is_relative_to(there) and cache_facts(found) == cache_facts(made)
    assert cache_facts(found).precision == "fp32", "that of the machine that made it"
    meta = (found.folder / "meta.json").read_text()
    assert str(tmp_path) not in meta and "cuda" not in meta and "cpu" not in meta


STATIC = ["objective.masking.static=true", "objective.cosine.weight=0"]


def test_a_run_from_draws_and_another_from_a_copy_of_them(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    settings = [*STATIC, "teacher.cache.sampled=24", "teacher.cache.top_k=4", "train.steps=3"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert shelf.run(first, *settings, f"data.cache={tmp_path / 'here'}") == 0
    recorded = results(first)
    facts = recorded["teacher"]["cache"]
    assert (facts["top_k"], facts["sampled"]) == (4, 24)
    assert 4 * 4 + 2 + 2 * 24 + 2 < facts["bytes_per_token"] < 4 * 4 + 2 + 2 * 24 + 3
    assert any(
        "4 most probable" in note and "24 draws" in note and "without bias" in note for note in recorded["notes"]
    )
    (made,) = (tmp_path / "here" / "teacher").iterdir()
    assert f"soft targets are read from the cache {made}" in capfd.readouterr().err and made.name == facts["key"]
    assert all(np.isfinite(line["loss/soft"]) for line in metrics(first))
    shutil.copytree(made, tmp_path / "there" / "teacher" / made.name)
    monkeypatch.setattr(Recorder, "records", never)
    monkeypatch.setattr(LiveTeacher, "outputs", never)
    assert shelf.run(second, *settings, f"data.cache={tmp_path / 'there'}") == 0
    assert_same(second, first)
    assert shelf.run(first, *settings, f"data.cache={tmp_path / 'there'}", "teacher.cache.seed=4") == 2
    assert "teacher.cache.seed was 0 and is now 4" in capfd.readouterr().err
    assert "sampled" in json.dumps(recorded["identity"])
