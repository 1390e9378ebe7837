"""Files that are changed while a run reads them: no step trains on what was written there, and one line names them."""

import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from job import Shelf, assert_same, save_model
from stored import write_shards

from distill.config.settings import DataConfig
from distill.data.shards import block_cache, block_store
from distill.data.shards import open as shards
from distill.models.kind import CAUSAL
from distill.models.load import load_pretrained
from distill.runs.metrics import Metrics
from distill.runtime import file_in_use
from distill.runtime.errors import StorageFailed
from distill.runtime.file_in_use import FileInUse, FilesInUse

ROWS = np.random.default_rng(0).integers(1, 300, (200, 16)).astype(np.uint16)
DAMAGES: dict[str, Callable[[Path], object]] = {
    "zeros": lambda path: path.open("r+b").write(bytes(path.stat().st_size)),
    "zeros in the middle": lambda path: os.pwrite(os.open(path, os.O_WRONLY), bytes(64), path.stat().st_size // 2),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_stored_sequences(compression: str | None, damage: str, tmp_path: Path) -> None:
    """Of a plain folder, and of the blocks of a cache."""
    write_shards(tmp_path / "shards", ROWS, 50, 100, compression)
    settings = DataConfig(cache=str(tmp_path / "cache"), shuffle_bytes=1000)
    store = shards.open_sequences(str(tmp_path / "shards"), "train", settings)
    numbers = np.arange(150, 200)
    np.testing.assert_array_equal(store[numbers], ROWS[numbers])
    files = sorted((tmp_path / "shards").glob("*.rows")) or sorted((tmp_path / "cache/blocks/files").iterdir())
    for path in files:
        DAMAGES[damage](path)
    with pytest.raises(StorageFailed, match=rf"^{files[0].parent}/\S+ was changed while this run read it: the same co"):
        store[numbers]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_few_files_are_open_at_a_time(compression: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 GiB of blocks, or of shards, were more files than a process may have open."""
    monkeypatch.setattr(file_in_use, "MOST", 4)
    monkeypatch.setattr(block_store, "AT_ONCE", 4)
    write_shards(tmp_path / "shards", ROWS, 5, 5, compression)
    settings = DataConfig(cache=str(tmp_path / "cache"), shuffle_bytes=1000)
    store = shards.open_sequences(str(tmp_path / "shards"), "train", settings)
    checked = Mock(wraps=block_cache._is_whole)
    monkeypatch.setattr(block_cache, "_is_whole", checked)
    for seed in range(3):
        numbers = np.random.default_rng(seed).integers(0, len(ROWS), 300)
        np.testing.assert_array_equal(store[numbers], ROWS[numbers])
        opened = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        assert 1 <= sum(name.startswith(f"{tmp_path}/") for name in opened) <= 4
    assert not checked.called  # once, when they came


@pytest.mark.parametrize("damage", [*DAMAGES, "removed"])
def test_a_file_that_was_closed_is_the_same_or_gone(damage: str, tmp_path: Path) -> None:
    files = FilesInUse(limit=1)
    for number in (0, 1):
        (tmp_path / str(number)).write_bytes(b"content" * 100)
        files[number] = FileInUse(tmp_path / str(number))
    assert files[0].read(0, 7) == b"content" and files.numbers() == [0, 1]
    (tmp_path / "1").unlink() if damage == "removed" else DAMAGES[damage](tmp_path / "1")
    with pytest.raises(StorageFailed, match="was changed while this run read it"):
        files[1]
    assert 1 not in files


@pytest.mark.parametrize("replace", [True, False])
def test_a_file_that_is_replaced_or_removed_stays_as_it_was_opened(replace: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "other").write_bytes(b"another")
    file = FileInUse(tmp_path / "file")
    (tmp_path / "other").rename(tmp_path / "file") if replace else (tmp_path / "file").unlink()
    assert file.read(0, 7) == b"content"
    file.require_unchanged()


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_are_those_that_were_loaded(damage: str, tmp_path: Path) -> None:
    model = load_pretrained("teacher.path", str(save_model(tmp_path / "gpt2")), CAUSAL)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    DAMAGES[damage](tmp_path / "gpt2" / "model.safetensors")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
    assert model.lm_head.weight is model.transformer.wte.weight  # tied as before


@pytest.mark.parametrize(
    "name", ["tokens/*/train-00000.rows", pytest.param("teacher/*/log_probs", marks=pytest.mark.slow)]
)
def test_a_run_ends_in_one_line_and_resumes_to_the_same_student(
    name: str, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = ["teacher.cache.top_k=4", "objective.masking.static=true", f"data.cache={tmp_path / 'cache'}"]
    cache += ["objective.cosine.weight=0", "corpus.max_sequences=null", "train.epochs=null", "train.steps=20"]
    assert shelf.run(tmp_path / "undisturbed", *cache) == 0
    (path,) = (tmp_path / "cache").glob(name)
    sound, after_step = path.read_bytes(), Metrics.after_step

    def zeroed(self: Metrics, state: object, result: object) -> None:
        after_step(self, state, result)  # type: ignore[arg-type]
        if state.step == 3:  # type: ignore[attr-defined]
            DAMAGES["zeros"](path)

    monkeypatch.setattr(Metrics, "after_step", zeroed)
    capsys.readouterr()
    assert shelf.run(tmp_path / "run", *cache) == 74
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"distill: {path} was changed while this run read it: ")
    monkeypatch.undo()
    if name.startswith("teacher"):  # a cache is refused where it is damaged, not made again over hours
        assert shelf.run(tmp_path / "run", *cache) == 2
        path.write_bytes(sound)
    assert shelf.run(tmp_path / "run", *cache) == 0
    assert_same(tmp_path / "run", tmp_path / "undisturbed")
