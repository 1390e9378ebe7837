"""Damage of every file that a run reads: named before a step uses it, or made good; never a traceback."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from job import Shelf, assert_same
from text import some_text, tokens_of
from tiny import Fit, changed, make_masks, make_rows, parts, text_config

from distill.config.settings import BackendConfig, TeacherCacheConfig, TrainConfig
from distill.data.new_tokenizer import wordpiece
from distill.distributed.single import Single
from distill.models.language_model import LanguageModel
from distill.runs.run_folder import RunFolder
from distill.runs.state import State
from distill.runtime.errors import Damaged, SettingError, StorageFailed
from distill.runtime.files import MANIFEST, check_digests, read_manifest, write_manifest
from distill.runtime.jsonl import read_lines
from distill.teacher.build_cache import Recorder, build
from distill.teacher.cache import CachedTeacher, find

SINGLE = Single(BackendConfig(device="cpu"))


def flip(path: Path, at: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 4
    path.write_bytes(content)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "a flipped bit in front": lambda path: flip(path, 0.0),
    "a flipped bit": flip,
    "a flipped bit at the end": lambda path: flip(path, 1.0),
    "another file": lambda path: path.write_bytes(b'{"train": [1], "heldout": 2}'),
    "removed": lambda path: path.unlink(),
    "a folder": to_folder,
}

# --- what is prepared once, for many runs

Reader = Callable[[], Any]  # all that an artefact holds, read from its files now


def sequences(part: str = "train", kind: str = "jsonl", **places: str) -> Callable[..., Reader]:
    """The prepared sequences of a text; `kind` tokens: without it."""

    def opened(folder: Path, tokenizer: Any, teacher: Any) -> Reader:
        (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": some_text(n, 60)}) for n in range(60)))
        given = {"cache": "cache", "path": "a.jsonl", **places}
        given = {name: str(folder / place) for name, place in given.items()} | {"workers": 1, "heldout": 0.2}
        config = text_config(kind="jsonl", sequence_length=32, **given)
        if kind == "tokens":
            tokens_of(config, tokenizer, part)
            config = changed(config, kind="tokens", path=str(folder / "shared"))
        found = tokens_of(config, tokenizer, part)
        return lambda: (tiny.all_of(found.sequences).tobytes(), found.counts.tobytes(), found.digest)

    return opened


def trained(folder: Path, tokenizer: Any, teacher: Any) -> Reader:
    """A tokenizer of one's own."""
    (folder / "a.txt").write_text(some_text(0, 2000))
    given = {"heldout": 0.0, "vocab_size": 300, "workers": 1, "cache": str(folder / "cache")}
    return wordpiece(*parts(text_config(kind="text", path=f"{folder}/a.txt", **given))).backend_tokenizer.to_str


def cached(folder: Path, tokenizer: Any, teacher: Any, **kept: Any) -> Reader:
    """What is kept of a teacher."""
    rows, settings = make_rows(40, shortest=5), TeacherCacheConfig(**kept or {"top_k": 8})
    positions = tiny.make_objective(tiny.objective_config(1.0, 2.0, 0.0), teacher, teacher).positions
    batches = tiny.make_batches(rows, make_masks(tokenizer, rows, static=True), 8, 2, 0, static=True)
    cache = find(settings, {"vocabulary": tiny.VOCAB, "hidden_states": 32}, batches, positions, str(folder))
    build(Recorder(cache, LanguageModel(teacher), batches, positions, 2.0, torch.device("cpu")), SINGLE)
    reader = CachedTeacher(cache, SINGLE)
    return lambda: reader.read(np.arange(40)).tobytes()


# By name: what opens it, its file, and what is promised: its damage is named until it is restored or deleted; is named
# once, or only logged, and made good by the same command; or is made good at once.
NAMED, ONCE, MENDED = "named", "once", "mended"
ARTEFACTS: dict[str, tuple[Callable[..., Reader], str, str]] = {
    "shard": (sequences(), "cache/tokens/*/train-*.bin", NAMED),
    "held-out shard": (sequences("heldout"), "cache/tokens/*/heldout-*.bin", NAMED),
    "index": (sequences(), "cache/tokens/*/index.json", NAMED),
    "shared shard": (sequences(tokens="shared"), "shared/*/train-*.bin", NAMED),
    "shared index": (sequences(tokens="shared"), "shared/*/index.json", NAMED),
    "shard without its text": (sequences(kind="tokens", tokens="shared"), "shared/*/train-*.bin", NAMED),
    "copy on this machine": (sequences(tokens="shared", local="node"), f"node/shards/{'[0-9a-f]' * 64}", MENDED),
    "tokenizer": (trained, "cache/wordpiece/*.json", MENDED),
    "digest of a tokenizer": (trained, "cache/wordpiece/*.sha256", MENDED),
    "part of a teacher cache": (cached, "teacher/*/part-00000.bin", ONCE),
    "part of a cache of hidden states": (partial(cached, hidden_states=True), "teacher/*/part-00000.bin", ONCE),
    "offsets of a teacher cache": (cached, "teacher/*/offsets.npy", ONCE),
    "meta of a teacher cache": (cached, "teacher/*/meta.json", ONCE),
}


# A folder in the place of a file is named, and not made good.
CASES = [
    (name, damage) for name, case in ARTEFACTS.items() for damage in DAMAGES if damage != "a folder" or NAMED in case
]


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_damage_is_noticed_before_it_is_used(
    name: str, damage: str, tmp_path: Path, tokenizer: Any, teacher: Any, lines: list[str]
) -> None:
    opened, pattern, promise = ARTEFACTS[name]

    def again() -> Any:
        return opened(tmp_path, tokenizer, teacher)()

    def is_refused(read: Reader) -> bool:
        """Whether its damage is named; else all that it holds is there."""
        try:
            assert read() == before
        except (SettingError, StorageFailed) as error:
            assert str(path) in str(error) and "\n" not in str(error), error
            return True
        return False

    reader = opened(tmp_path, tokenizer, teacher)
    before, (path,) = reader(), tmp_path.glob(pattern)
    content = path.read_bytes()
    DAMAGES[damage](path)
    lines.clear()
    if path.suffix == ".bin" or promise == MENDED:  # an open one looks again at what it reads
        assert is_refused(reader) == (promise != MENDED)
    elif promise == ONCE and damage != "removed":
        opened(tmp_path, tokenizer, teacher)
        assert any(f"{path.parent} is damaged" in line for line in lines)
    refusals = [is_refused(again), is_refused(again)]
    if promise == NAMED:
        assert all(refusals) != ((path.name, damage) == ("index.json", "removed"))  # which was never finished
        if path.is_dir():
            path.rmdir()
        path.write_bytes(content)
        assert again() == before
        if "without" not in name:
            shutil.rmtree(path.parent)
    assert again() == before and (promise == NAMED or not refusals[1])


# --- checkpoints and the files of a run


def fit_in(folder: Path, tokenizer: Any, rows: np.ndarray) -> Fit:
    student = tiny.make_model("distilbert", 1, seed=5).train()
    settings = TrainConfig(batch_size=4, accumulate=2, epochs=1, save_every=1, keep=3)
    return Fit(folder / "checkpoints", tokenizer, rows, None, student, tiny.only(mlm=1.0), settings)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, rows: np.ndarray) -> Path:
    """A run folder with the checkpoints of steps 1 to 3; tests copy it."""
    folder = tmp_path_factory.mktemp("run")
    fit_in(folder, tokenizer, rows).run()
    return folder


@pytest.fixture
def fit(checkpoints: Path, tmp_path: Path, tokenizer: Any, rows: np.ndarray) -> Fit:
    shutil.copytree(checkpoints, tmp_path / "run")
    return fit_in(tmp_path / "run", tokenizer, rows)


def begun(fit: Fit, resume: str = "auto") -> State:
    """Where a run resumes in the folder, which is its own from then on."""
    with RunFolder(fit.folder.parent, resume, 3, SINGLE) as folder:
        folder.identify({"run": "tiny"})
        state = folder.load(fit.model, fit.made)
        folder.begin(state, "")
    return state


def put_in_place(path: Path, target: str | None) -> None:
    """A link, as where a second disk is not there, or a file in the place of a checkpoint."""
    shutil.rmtree(path)
    path.write_text("x") if target is None else path.symlink_to(target)


OF_CHECKPOINTS = {
    f"{damage} of {name}": lambda path, damage=damage, name=name: DAMAGES[damage](path / name)
    for name in ("model.safetensors", "optimizer.safetensors", "state.json", MANIFEST)
    for damage in ("cut short", "emptied", "a flipped bit", "removed", "a folder")
}
OF_CHECKPOINTS |= {
    f"a link to {target}": lambda path, target=target: put_in_place(path, target)
    for target in ("nowhere", "step-00000003", None)
}


@pytest.mark.parametrize("damage", OF_CHECKPOINTS)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(fit: Fit, lines: list[str], damage: str) -> None:
    newest = fit.folder / "step-00000003"
    OF_CHECKPOINTS[damage](newest)
    for resume in ("strict", str(newest)):
        with pytest.raises(SettingError, match=r"step-00000003 is damaged"):
            begun(fit, resume)
    (fit.folder / "step-00000009").mkdir()
    (fit.folder / "step-x").mkdir()  # of somebody else
    assert begun(fit).step == 2
    assert any("step-00000003 is damaged" in line and "taking step-00000002" in line for line in lines), lines
    assert os.path.lexists(fit.folder / "damaged-step-00000003") and not os.path.lexists(newest)


def test_when_all_are_damaged_the_run_starts_anew_and_loses_nothing(fit: Fit, lines: list[str]) -> None:
    for path in fit.folder.iterdir():
        flip(path / "state.json")
    (fit.folder.parent / "metrics.jsonl").write_text('{"step": 1, "seconds": 1.0, "data_wait": 0.0}\n')
    assert begun(fit).step == 0 and "starting from the first step" in lines[-1]
    assert sorted(path.name for path in fit.folder.iterdir()) == [f"damaged-step-0000000{n}" for n in (1, 2, 3)]
    assert (fit.folder.parent / "damaged-metrics.jsonl").exists()


GOOD = '{"step": 1, "seconds": 1.0, "data_wait": 0.0, "loss/total": null}'


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        *[("metrics", GOOD, bad) for bad in ("[2]", "x", '{"step": "2"}', "[" * 100_000, "\0\0", GOOD[:-20] + "}")],
        ("history", '{"step": 1, "epoch": 0.5, "loss": {}}', '{"step": 2, "epoch": "a", "loss": {}}'),
    ],
)
def test_a_damaged_line_is_set_aside(fit: Fit, lines: list[str], name: str, good: str, bad: str) -> None:
    path = fit.folder.parent / f"{name}.jsonl"
    path.write_text(f"{good}\n{bad}\n{good.replace('1', '3')}\n")
    before = path.read_bytes()
    with pytest.raises(SettingError, match=rf"resume=strict.*{name}.jsonl.*line 2"):
        begun(fit, "strict")
    begun(fit)
    assert [line["step"] for line in read_lines(path)] == [1, 3]
    assert (path.parent / f"damaged-{name}.jsonl").read_bytes() == before
    assert any(f"{name}.jsonl is damaged (line 2" in line and "2 good lines" in line for line in lines)


def test_a_manifest_lists_what_sha256sum_would(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abc")
    write_manifest(tmp_path)
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc", in FIPS 180-2
    assert (tmp_path / MANIFEST).read_text() == f"{known}  a\n"
    (tmp_path / "a").write_text("abd")
    with pytest.raises(Damaged, match="a is not as it was written"):
        check_digests(tmp_path, read_manifest(tmp_path))


@pytest.mark.slow
def test_a_finished_run_with_damage_ends_with_the_same_student(
    shelf: Shelf, done: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Newest checkpoint, results and history at once; then the student alone, and then all that made it."""
    folder = Path(shutil.copytree(done, tmp_path / "run"))
    flip(folder / "checkpoints" / "step-00000008" / "optimizer.safetensors")
    assert shelf.run(folder, "resume=strict") == 0, "it needs no checkpoint"
    (folder / "history.jsonl").write_text("{}\n")
    for damaged, names in (
        ("results.json", ("step-00000008", "results.json", "history.jsonl", "damaged")),
        ("student/model.safetensors", ("making the student again",)),
    ):
        flip(folder / damaged)
        capfd.readouterr()
        assert shelf.run(folder) == 0
        said = capfd.readouterr().err
        assert all(name in said for name in names), said
        assert_same(folder, done)
    shutil.rmtree(folder / "student")
    shutil.rmtree(folder / "checkpoints")
    assert shelf.run(folder) == 2 and "there is no checkpoint to continue it from" in capfd.readouterr().err
