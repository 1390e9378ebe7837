"""The teacher cache: what it holds, when it is another one, when it is refused, and that training from it is right."""

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tiny
import torch
from distributed import run_ranks
from job import Shelf, assert_same, metrics, results
from naive import attention_of
from tiny import (
    LENGTH,
    PAD,
    VOCAB,
    change,
    make_masks,
    make_model,
    make_objective,
    make_rows,
    make_tokenizer,
    objective_config,
)

from distill.config import settings as conf
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.distributed import join_ranks
from distill.distributed.single import Single
from distill.models.kernels.packed_linear import pack_teacher
from distill.models.kind import MASKED
from distill.models.language_model import LanguageModel
from distill.models.loaded import model_digest
from distill.objective.objective import Objective
from distill.objective.trainable import Trainable
from distill.runs import setup
from distill.runs.describe import cache_facts
from distill.runs.learning import FrozenTeachers
from distill.runs.pair import Pair
from distill.runtime.errors import SettingError, StorageFailed
from distill.teacher import build_cache
from distill.teacher import cache as cache_module
from distill.teacher.build_cache import Recorder, build
from distill.teacher.cache import Cache, CachedTeacher, find
from distill.teacher.distributions import TopK
from distill.teacher.live import LiveTeacher
from distill.teacher.members import ONLY, Member
from distill.teacher.output import Teacher

ROWS = make_rows(40, shortest=5)
KINDS = pytest.mark.parametrize("soft_positions", ["all", "masked"])


SINGLE, CPU = Single(conf.BackendConfig(device="cpu")), torch.device("cpu")


class Desk:
    """Settings, sequences, masks and a teacher, and the cache that they want."""

    def __init__(self, folder: Path, tokenizer: Any, teacher: Any, top_k: int = 8, rows: np.ndarray = ROWS) -> None:
        self.config = change(conf.Config(teacher=conf.TeacherConfig(path="x")), "data.cache", str(folder))
        self.set("teacher.cache.top_k", top_k)
        self.soft_positions, self.temperature, self.mlm = "all", 2.0, 2.0
        self.masking = conf.MaskingConfig(mlm_probability=0.3, static=True)
        self.tokenizer, self.teacher, self.rows, self.seed, self.vocab = tokenizer, teacher, rows, 0, VOCAB

    def set(self, name: str, value: Any) -> None:
        self.config = change(self.config, name, value)

    def objective(self) -> Objective:
        settings = objective_config(1.0, self.mlm, 0.0, rows=self.soft_positions, temperature=self.temperature)
        return make_objective(settings, self.teacher, self.teacher)

    def batches(self) -> Batches:
        masks = make_masks(self.tokenizer, self.rows, **dict(self.masking))
        return tiny.make_batches(self.rows, masks, 8, 2, self.seed, static=True)

    @property
    def tokens(self) -> str:
        return hashlib.sha256(self.rows.tobytes()).hexdigest()

    def find(self) -> Cache:
        batches, objective = self.batches(), self.objective()
        origin = {
            "teacher": model_digest(self.teacher),
            "int8": False,  # as the key has it
            "tokens": self.tokens,
            "masks": batches.collator.identity,  # type: ignore[attr-defined]
            "seed": self.seed,
            "soft_positions": self.soft_positions,
            "temperature": self.temperature,
            "vocabulary": self.vocab,
        }
        return find(self.config.teacher.cache, origin, batches, objective.positions, self.config.data.cache)

    def build(self, teacher: Any | None = None, ranks: Any = SINGLE) -> Cache:
        cache = self.find()
        model = LanguageModel(teacher or self.teacher, self.config.precision.teacher)
        positions = self.objective().positions
        build(Recorder(cache, model, self.batches(), positions, self.temperature, CPU), ranks)
        return cache

    def built(self) -> CachedTeacher:
        return CachedTeacher(self.build(), SINGLE)


@pytest.fixture
def desk(tmp_path: Path, tokenizer: Any, teacher: Any) -> Desk:
    return Desk(tmp_path, tokenizer, teacher)


def positions_of(desk: Desk, batch: Batch) -> torch.Tensor:
    """Flat positions that carry soft targets."""
    found = desk.objective().positions(batch)
    return torch.arange(batch.ids.numel()) if found is None else found


def log_probs_of(teacher: Any, batch: Batch, positions: torch.Tensor, temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = teacher(input_ids=batch.ids, attention_mask=attention_of(batch)).logits.flatten(0, 1)
    return (logits[positions] / temperature).log_softmax(-1)


def entries(teacher: CachedTeacher, desk: Desk, batch: Batch) -> TopK:
    (output,) = teacher.outputs([teacher.read_ahead(batch)], desk.objective().teacher_spec)
    assert isinstance(output.distribution, TopK)
    return output.distribution


@KINDS
@pytest.mark.parametrize("full", [False, True])
def test_it_holds_what_the_teacher_says(desk: Desk, soft_positions: str, full: bool) -> None:
    desk.soft_positions = soft_positions
    if full:
        desk.rows = make_rows(40)
    teacher = desk.built()
    for epoch_step in (0, 2, 3):  # 3 steps an epoch
        for batch in desk.batches().window(epoch_step):
            top, positions = entries(teacher, desk, batch), positions_of(desk, batch)
            assert len(positions) == (
                len(batch.labels["mlm"].positions) if soft_positions == "masked" else batch.num_valid
            )
            want = log_probs_of(desk.teacher, batch, positions, 2.0)
            values, ids = want.topk(8)
            assert (top.ids == ids).float().mean() > 0.99  # but for near ties
            torch.testing.assert_close(top.log_probs[:, :8].float(), values, rtol=1e-3, atol=1e-4)
            rest = 1 - values.exp().sum(-1)
            torch.testing.assert_close(top.log_probs[:, 8].float().exp(), rest, rtol=1e-2, atol=1e-5)


def gradient(desk: Desk, teacher: Teacher) -> tuple[float, torch.Tensor]:
    """Loss and whole gradient of a step."""
    objective, student = desk.objective(), make_model("distilbert", 1, seed=2)
    model, total = Trainable(LanguageModel(student)), 0.0
    window = [teacher.read_ahead(batch) for batch in desk.batches().window(1)]
    scales = objective.scales(objective.count(window), torch.device("cpu"))
    for batch, output in zip(window, teacher.outputs(window, objective.teacher_spec), strict=True):
        loss, _ = objective(model, output, batch, scales)
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])


@KINDS
def test_with_all_but_one_entry_training_is_that_of_the_live_teacher(desk: Desk, soft_positions: str) -> None:
    desk.set("teacher.cache.top_k", VOCAB - 1)
    desk.soft_positions = soft_positions
    live, live_gradient = gradient(desk, LiveTeacher(LanguageModel(desk.teacher)))
    cached, cached_gradient = gradient(desk, desk.built())
    assert cached == pytest.approx(live, rel=1e-3) and cached != live
    assert float((cached_gradient - live_gradient).norm()) < 1e-3 * float(live_gradient.norm())


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("the teacher was questions")


def test_it_is_made_once(desk: Desk, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = desk.build()
    assert not first.ready
    monkeypatch.setattr(Recorder, "records", never)
    again = Desk(Path(desk.config.data.cache), tokenizer, make_model("bert", 4)).build()  # another copy of the model
    assert again.ready and again.folder == first.folder and (facts := cache_facts(again)) == cache_facts(first)
    indices = np.array([7, 0, 39, 7])
    assert np.array_equal(*(CachedTeacher(each, SINGLE).read(indices) for each in (first, again)))
    assert facts.positions == int((ROWS != PAD).sum()) and facts.kept_mass is not None and 0 < facts.kept_mass < 1
    files = sum(file.stat().st_size for file in again.folder.glob("*[ny]") if file.suffix != ".json")
    assert facts.bytes == pytest.approx(files, abs=200)
    assert facts.bytes_per_token == pytest.approx(2 * 8 + 2 * 9 + 8 * 41 / facts.positions)


def test_a_complete_cache_needs_no_model(desk: Desk) -> None:
    """A teacher of a run may be without one: it is not scored, placed or asked for anything."""
    member = Member(ONLY, 1.0, None, "elsewhere")
    digests: dict[str, str | None] = {"teacher": model_digest(desk.teacher)}
    pair = Pair([member], Mock(), None, VOCAB, digests, student=Mock(), kind=MASKED, terms={})
    assert pair.teacher is None and pair.scored_teachers == []
    desk.build()
    data = SimpleNamespace(tokens=SimpleNamespace(digest=desk.tokens), batches=desk.batches())
    run: Any = SimpleNamespace(config=desk.config, pair=pair, data=data, objective=desk.objective(), ranks=SINGLE)
    teacher = FrozenTeachers(run).open()
    assert isinstance(teacher, CachedTeacher)
    batch = desk.batches().window(0)[0]
    assert torch.equal(entries(teacher, desk, batch).ids, entries(desk.built(), desk, batch).ids)


CHANGES: dict[str, Callable[[Desk], object]] = {
    "seed": lambda desk: setattr(desk, "seed", 1),
    "rows": lambda desk: setattr(desk, "rows", make_rows(40, shortest=5, seed=4)),
    "teacher": lambda desk: setattr(desk, "teacher", make_model("bert", 4, seed=9)),
    "top_k": lambda desk: desk.set("teacher.cache.top_k", 9),
    "temperature": lambda desk: setattr(desk, "temperature", 3.0),
    "soft rows": lambda desk: setattr(desk, "soft_positions", "masked"),
    "smoothing": lambda desk: setattr(desk, "masking", desk.masking.changed(smoothing=0.1)),
}


@pytest.mark.parametrize("changes", CHANGES)
def test_what_changes_its_content_makes_another(desk: Desk, changes: str) -> None:
    before = desk.find()
    CHANGES[changes](desk)
    assert desk.find().folder != before.folder


def test_what_does_not_change_its_content_does_not(desk: Desk) -> None:
    before = desk.find()
    desk.mlm = 3.0
    desk.set("teacher.cache.gigabytes", 1.0)
    desk.set("precision.teacher", "bf16")  # as a GPU would choose
    assert desk.find().folder == before.folder


PART = "part-00000.bin"


def spoil(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if at + 1 else data[:-1] + b"x"


SEEN_AT_ONCE = {  # by the sizes of files and the checksum of the offsets
    "a changed offset": spoil("offsets.npy", flip(-16)),
    "no offsets": lambda folder: (folder / "offsets.npy").unlink(),
    "empty offsets": spoil("offsets.npy", lambda data: b""),
    "torn meta": spoil("meta.json", lambda data: data[:40]),
    "another meta": spoil("meta.json", lambda data: b"[1]"),
    "no part": lambda folder: (folder / PART).unlink(),
    "a part that is too short": spoil(PART, lambda data: data[:-2]),
}
SEEN_WHEN_READ = {
    "a changed byte": spoil(PART, flip(177)),
    "a changed checksum": spoil(PART, flip(0)),
    "a changed measurement": spoil(PART, flip(34)),
    "zeros": spoil(PART, lambda data: bytes(len(data))),
}


@pytest.mark.parametrize("damage", [*SEEN_AT_ONCE, *SEEN_WHEN_READ])
def test_damage_is_noticed_before_it_is_read_and_made_again(
    desk: Desk, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = desk.built().read(np.arange(40))
    folder = desk.find().folder
    if damage in SEEN_AT_ONCE:
        SEEN_AT_ONCE[damage](folder)
        assert not desk.build().ready and f"the cache {folder} is damaged: what is not as it was" in caplog.text
    else:
        SEEN_WHEN_READ[damage](folder)
        with pytest.raises(StorageFailed, match=rf"{PART} is damaged \(its SHA-256 differs\), and removed: the same"):
            desk.built().read_ahead(desk.batches().window(0)[0])
        assert not (folder / PART).exists() and not desk.find().ready
    assert np.array_equal(desk.built().read(np.arange(40)), before) and desk.find().ready


def test_what_is_written_to_under_a_run_is_noticed(desk: Desk) -> None:
    teacher, path = desk.built(), desk.find().path_of(0)
    before = teacher.read(np.arange(40))
    content = path.read_bytes()
    path.write_bytes(content)  # it is verified again
    assert np.array_equal(teacher.read(np.arange(40)), before)
    spoil(PART, flip(500))(path.parent)
    with pytest.raises(StorageFailed, match="is damaged"):
        teacher.read(np.arange(3))


def test_too_large_it_is_refused_before_the_teacher_runs(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "records", never)
    size = desk.find().num_bytes
    desk.set("teacher.cache.gigabytes", (size - 1) / 1e9)
    with pytest.raises(SettingError, match=r"^teacher.cache.gigabytes=.*top_k=8 at .* positions takes .* GB; allow"):
        desk.find()
    desk.set("teacher.cache.gigabytes", size / 1e9)
    assert desk.find().num_bytes == size


def counting(monkeypatch: pytest.MonkeyPatch, most: int = 10**9) -> list[int]:
    """Sequences of each question to the teacher; it fails after `most` of them."""
    questions: list[int] = []
    real = Recorder.records

    def ask(self: Any, numbers: np.ndarray) -> Any:
        if len(questions) == most:
            raise RuntimeError("the lights went out")
        questions.append(len(numbers))
        return real(self, numbers)

    monkeypatch.setattr(Recorder, "records", ask)
    return questions


def read_by_rank(folder: Path) -> tuple[bytes, list[int]]:
    """What a rank of two reads of a cache of 10 parts that is there, its own half first, and the parts it verified."""
    cache_module.FEWEST_SEQUENCES, tempfile.tempdir, verified = 4, str(folder), list[int]()
    real = CachedTeacher._verify

    def watched(self: CachedTeacher, part: int) -> None:
        verified.extend([] if self._states[part].any() else [part])
        real(self, part)

    CachedTeacher._verify = watched  # type: ignore[method-assign]
    with join_ranks(conf.BackendConfig(name="ddp", device="cpu")) as ranks:
        teacher = CachedTeacher(Desk(folder, make_tokenizer(), make_model("bert", 4)).find(), ranks)
        assert not [*folder.glob("distill-*")], "what the ranks share has no name any more"
        teacher.read(np.arange(20) + 20 * ranks.rank)
        ranks.barrier()
        return teacher.read(np.arange(40)).tobytes(), verified


def test_one_rank_of_a_machine_verifies_each_part(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_parts(monkeypatch)
    folder = Path(desk.config.data.cache)
    expected = desk.built().read(np.arange(40)).tobytes()
    found = run_ranks(2, tmp_path / "ranks", read_by_rank, folder)
    assert found == [(expected, [0, 1, 2, 3, 4]), (expected, [5, 6, 7, 8, 9])]


def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "FEWEST_SEQUENCES", 4)
    monkeypatch.setattr(build_cache, "FORWARD_TOKENS", 3 * LENGTH)  # a question of 3 sequences and one of 1 a part


def content(folder: Path) -> list[bytes]:
    """The records of all parts, and the offsets."""
    parts = [part.read_bytes()[cache_module.HEADER :] for part in sorted(folder.glob("part-*.bin"))]
    return [*parts, (folder / "offsets.npy").read_bytes()]


def test_interrupted_it_goes_on_with_what_is_missing(
    desk: Desk, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_parts(monkeypatch)
    whole = Desk(tmp_path / "whole", tokenizer, desk.teacher).build()
    with monkeypatch.context() as patch:
        questions = counting(patch, most=7)
        with pytest.raises(RuntimeError, match="lights"):
            desk.build()
        assert questions == [3, 1, 3, 1, 3, 1, 3]
    questions = counting(monkeypatch)
    resumed = desk.build()
    assert questions == [3, 1] * 7 and desk.find().ready
    assert content(whole.folder) == content(resumed.folder) and len(content(whole.folder)) == 11
    assert resumed.meta.kept_mass == pytest.approx(whole.meta.kept_mass)


def test_runs_that_make_it_at_the_same_time_do_not_disturb_each_other(
    desk: Desk, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_parts(monkeypatch)
    whole = Desk(tmp_path / "whole", tokenizer, desk.teacher).build()
    with ThreadPoolExecutor(3) as pool:
        caches = [each.result() for each in [pool.submit(desk.build, deepcopy(desk.teacher)) for _ in range(3)]]
    assert all(content(whole.folder) == content(cache.folder) for cache in caches)
    assert not [*whole.folder.glob(".*")]


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_share_the_work_of_a_disk(desk: Desk, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of one rank each: on a disk that they share the second makes what the first has left."""
    small_parts(monkeypatch)
    questions = counting(monkeypatch)
    ranks = [Mock(rank=rank, size=2, local_rank=0, local_size=1, in_lockstep=SINGLE.in_lockstep) for rank in (0, 1)]
    made = list[int]()
    for each in ranks:
        each.sum, each.agree = (lambda tensor: tensor), lambda work: work()
    if shared:  # the first pass of the other host comes first
        other = desk.find()
        recorder = Recorder(other, LanguageModel(desk.teacher), desk.batches(), desk.objective().positions, 2.0, CPU)
        other.folder.mkdir(parents=True)
        build_cache._make_parts(recorder, range(1, other.num_parts, 2), SINGLE)
        made.append(sum(questions))
    desk.build(ranks=ranks[0])
    assert made == ([20] if shared else []) and sum(questions) == len(ROWS) and desk.find().ready


STATIC = ["objective.masking.static=true", "objective.cosine.weight=0", "teacher.cache.top_k=16"]


def test_a_run_from_the_cache(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made in the first run; the others read it, ask no teacher in training, and resume bitwise."""
    first, second, resumed = (shelf.root / f"cache-{name}" for name in ("first", "second", "resumed"))
    assert shelf.run(first, *STATIC, "train.keep=9") == 0
    content = results(first)
    facts = content["teacher"]["cache"]
    assert facts["top_k"] == 16 and facts["bytes_per_token"] > 66 and 0 < facts["kept_mass"] < 1
    assert any("cache of the teacher's 16" in note for note in content["notes"])
    assert content["agreement"]["heldout"]["kl"] > 0 and metrics(first)[-1]["loss/soft"] > 0
    monkeypatch.setattr(Recorder, "records", never)
    monkeypatch.setattr(LiveTeacher, "outputs", never)
    assert shelf.run(second, *STATIC, "objective.kernel=auto", "teacher.cache.gigabytes=9") == 0
    assert_same(second, first)
    assert shelf.run(resumed, *STATIC, f"resume={first / 'checkpoints' / 'step-00000004'}") == 0
    assert_same(resumed, first)
    for folder in (shelf.root / "cache" / "teacher").iterdir():  # other tests of this process may have left some
        shutil.rmtree(folder)


def test_the_cache_is_kept_at_the_temperature_of_the_term(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Almost all entries kept: the loss of the first step is the live teacher's, at another temperature than usual.

    Once it is there, its teacher gets no second copy of its weights.
    """
    packed = list[Any]()
    monkeypatch.setattr(setup, "pack_teacher", lambda teacher, *rest: packed.append(1) or pack_teacher(teacher, *rest))
    settings = [*STATIC[:2], "objective.soft.temperature=4", "train.steps=1", f"data.cache={tmp_path}/cache"]
    losses = []
    for name, kept in (("live", "null"), ("cached", "217"), ("again", "217")):
        assert shelf.run(tmp_path / name, *settings, f"teacher.cache.top_k={kept}") == 0
        losses.append(metrics(tmp_path / name)[0]["loss/soft"])
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=2e-3) and len(packed) == 2
    other = "+objective.other={kind: soft, weight: 1, temperature: 3}"
    assert shelf.run(tmp_path / "two", *STATIC, other) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "objective.soft.temperature=2" in line and "objective.other.temperature=3" in line
