"""A run that reads its teacher from a cache: what of the teacher is in memory."""

from pathlib import Path
from typing import Any

import pytest
from job import Shelf

from distill.models.kernels.packed_linear import pack_teacher
from distill.runs import setup


def test_a_teacher_that_a_cache_stands_for_is_not_packed(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second copy of the weights would lie in memory for nothing."""
    packed = list[Any]()
    monkeypatch.setattr(setup, "pack_teacher", lambda teacher, *rest: packed.append(1) or pack_teacher(teacher, *rest))
    settings = ["objective.masking.static=true", "objective.cosine.weight=0", "teacher.cache.top_k=4"]
    settings += [f"data.cache={tmp_path / 'cache'}", "train.epochs=null", "train.steps=1"]
    for number, so_far in enumerate((1, 1)):
        assert shelf.run(tmp_path / str(number), *settings) == 0
        assert len(packed) == so_far
