"""Counts of tokens by group are folded while a text is prepared, and their sum is that of all sequences."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shards import VOCABULARY, prepare, read_rows, write_text

from distill.data.shards import host, token_counts
from distill.data.shards.destination import LocalFolder
from distill.data.shards.records import PARTS
from distill.data.shards.token_counts import fold_counts, total_counts, write_counts
from distill.data.sources import _files


@pytest.fixture(autouse=True)
def small_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is a unit of work, and two groups are a fold."""
    monkeypatch.setattr(_files, "SHARD_BYTES", 1)
    monkeypatch.setattr(token_counts, "FOLD", 2)
    monkeypatch.setattr(host, "POLL", 0.0)


def written(place: Path, groups: int) -> tuple[LocalFolder, np.ndarray]:
    """Counts [groups, P, V] of made-up groups."""
    folder = LocalFolder(str(place))
    counts = np.random.default_rng(0).integers(0, 1 << 40, (groups, len(PARTS), 7))
    for number, each in enumerate(counts):
        for part, values in zip(PARTS, each, strict=True):
            write_counts(folder, number, part, values)
    return folder, counts


def test_few_files_of_counts_are_there_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = [0]
    end_group = host.Host._end_group

    def watched(self: Any, number: int) -> None:
        end_group(self, number)
        most.append(len([name for name in self.folder.names("parts") if name.endswith(".counts.npy")]))

    monkeypatch.setattr(host.Host, "_end_group", watched)
    text = write_text(tmp_path / "text", files=9)
    prepare(text, tmp_path / "place", tmp_path / "scratch", shard_bytes=4000)
    # Of nine groups: two that wait for others, and two that are next; on a busy machine a fold takes its time.
    assert 0 < max(most) <= 7 * len(PARTS)
    for part in PARTS:
        counts = np.load(tmp_path / "place" / f"{part}.counts.npy")
        expected = np.bincount(read_rows(tmp_path / "place", part).ravel(), minlength=VOCABULARY)
        np.testing.assert_array_equal(counts, expected)


@pytest.mark.parametrize("folded", [[], [0], [1], [0, 1]])
@pytest.mark.parametrize("groups", [1, 4, 5])
def test_the_sum_is_the_same_whatever_is_folded(tmp_path: Path, groups: int, folded: list[int]) -> None:
    folder, counts = written(tmp_path, groups)
    for fold in [each for each in folded if 2 * each + 2 <= groups]:
        fold_counts(folder, fold)
        fold_counts(folder, fold)  # by another host
    total = total_counts(folder, groups)
    np.testing.assert_array_equal(np.stack([total[part] for part in PARTS]), counts.sum(0))


def test_a_group_that_is_published_again_counts_once(tmp_path: Path) -> None:
    folder, counts = written(tmp_path, 4)
    fold_counts(folder, 0)
    write_counts(folder, 1, PARTS[0], counts[1, 0])  # by a host that was taken for gone
    np.testing.assert_array_equal(total_counts(folder, 4)[PARTS[0]], counts[:, 0].sum(0))


def test_another_host_may_fold_while_the_counts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, counts = written(tmp_path, 2)
    read, calls = folder.read, []

    def raced(name: str) -> bytes:
        calls.append(name)
        if len(calls) == 2:  # the fold was not there, and the first group is about to be read
            fold_counts(LocalFolder(folder.place), 0)
        return read(name)

    monkeypatch.setattr(folder, "read", raced)
    np.testing.assert_array_equal(total_counts(folder, 2)[PARTS[1]], counts[:, 1].sum(0))
    assert len(calls) > 3


def test_counts_that_are_gone_are_an_error(tmp_path: Path) -> None:
    """As when another host has finished: whoever calls looks whether that is so."""
    folder, _ = written(tmp_path, 2)
    folder.remove("parts")
    with pytest.raises(FileNotFoundError):
        total_counts(folder, 2)
    with pytest.raises(FileNotFoundError):
        fold_counts(folder, 0)
