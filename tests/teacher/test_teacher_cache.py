"""The teacher cache: what it holds, when it is another one, when it is refused, and that training from it is right."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job import command
from naive import kl
from test_main_job import Shelf, assert_same, metrics, results, shelf  # noqa: F401 - the fixture
from tiny import LENGTH, PAD, VOCAB, make_masker, make_model, make_rows

from distill import config as conf
from distill.backends.single import Single
from distill.config import Rows
from distill.data.batches import Batch, Batches
from distill.data.tokens import Tokens
from distill.errors import SettingError
from distill.kernels import packed_linear as frozen
from distill.objective.objective import Objective
from distill.teacher import build_cache as teacher_pass
from distill.teacher import cache as teacher_cache
from distill.teacher.cache import Cache, find, taught_places

ROWS = make_rows(40, shortest=5)
KINDS = pytest.mark.parametrize("soft_rows", list(Rows))


class Desk:
    """Settings, rows, masks and a teacher, and the cache that they want."""

    def __init__(self, folder: Path, tokenizer: Any, teacher: Any, top_k: int = 8, rows: np.ndarray = ROWS) -> None:
        soft, masking = conf.Soft(1.0), conf.Masking(share=0.3, static=True)
        self.config = conf.Config(
            corpus=conf.Corpus(conf.Kind.text, cache=str(folder)),
            teacher=conf.Teacher("pretrained", cache=conf.TeacherCache(top_k)),
            objective=conf.Objective(soft=soft, mlm=conf.Term(2.0), cosine=conf.Term(0.0), masking=masking),
        )
        self.tokenizer, self.teacher, self.rows, self.seed, self.vocab = tokenizer, teacher, rows, 0, VOCAB

    def batches(self) -> Batches:
        masker = make_masker(self.tokenizer, self.rows, **vars(self.config.objective.masking))
        return Batches(self.rows, masker, PAD, 8, 2, self.seed)

    def find(self) -> Cache:
        digest = str(hash(self.rows.tobytes()))
        tokens = Tokens(self.rows, np.zeros(VOCAB, np.int64), digest, "rows", 1, self.rows.size, 0.0, 0.0, ())
        return find(self.config, self.teacher, tokens, self.batches(), self.vocab)

    def build(self) -> Cache:
        cache = self.find()
        teacher_pass.build(cache, self.config, self.teacher, self.batches(), Single(conf.Backend(device="cpu")))
        return cache

    def taught(self) -> Batches:
        return replace(self.batches(), taught=self.build().read)


@pytest.fixture
def desk(tmp_path: Path, tokenizer: Any, teacher: Any) -> Desk:
    return Desk(tmp_path, tokenizer, teacher)


def log_probs_of(teacher: Any, batch: Batch, places: torch.Tensor, temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = teacher(input_ids=batch.inputs, attention_mask=batch.attention).logits.flatten(0, 1)
    return (logits[places] / temperature).log_softmax(-1)


@KINDS
@pytest.mark.parametrize("full", [False, True])
def test_it_holds_what_the_teacher_says(desk: Desk, soft_rows: Rows, full: bool) -> None:
    desk.config.objective.soft.rows = soft_rows
    if full:
        desk.rows = make_rows(40)
    for epoch_step in (0, 2, 3):  # 3 steps an epoch
        for batch in desk.taught().window(epoch_step):
            assert batch.top_ids is not None and batch.top_log_probs is not None
            places = taught_places(batch, soft_rows)
            assert len(places) == (batch.num_targets if soft_rows is Rows.masked else batch.num_positions)
            want = log_probs_of(desk.teacher, batch, places, 2.0)
            values, ids = want.topk(8)
            assert (batch.top_ids == ids).float().mean() > 0.99  # but for near ties
            torch.testing.assert_close(batch.top_log_probs[:, :8].float(), values, rtol=1e-3, atol=1e-4)
            rest = 1 - values.exp().sum(-1)
            torch.testing.assert_close(batch.top_log_probs[:, 8].float().exp(), rest, rtol=1e-2, atol=1e-5)


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="int8 needs AVX-512 VNNI")
def test_an_int8_teacher_fills_a_cache_of_its_own(desk: Desk) -> None:
    plain, desk.config.precision = desk.build(), conf.Precision(teacher="int8")
    cache, in_training = desk.find(), frozen.for_training(desk.teacher, desk.config.precision, torch.device("cpu"))
    assert cache.folder != plain.folder
    backend = Single(conf.Backend(device="cpu"))
    teacher_pass.build(cache, desk.config, in_training, desk.batches(), backend)
    (ours, *_), (theirs, *_) = (replace(desk.batches(), taught=found.read).window(0) for found in (cache, plain))
    assert ours.top_log_probs is not None and theirs.top_log_probs is not None
    assert not torch.equal(ours.top_log_probs, theirs.top_log_probs)
    # Of the 8 likeliest, largest first; the ids may differ where two are alike.
    torch.testing.assert_close(ours.top_log_probs.float(), theirs.top_log_probs.float(), rtol=0.1, atol=0.1)


def gradient(settings: conf.Objective, batches: Batches, teacher: Any | None) -> tuple[float, torch.Tensor]:
    """Loss and whole gradient of a step."""
    objective, student = Objective(settings, conf.Precision(), VOCAB), make_model("distilbert", 1, seed=2)
    window, total = batches.window(1), 0.0
    for batch in window:
        loss, _ = objective(student, teacher, batch, objective.counts(window))
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])


@KINDS
@pytest.mark.parametrize("kernel", ["plain", "fused"])
def test_with_all_but_one_entry_training_is_that_of_the_live_teacher(desk: Desk, soft_rows: Rows, kernel: str) -> None:
    desk.config.teacher.cache.top_k = VOCAB - 1
    desk.config.objective.soft.rows, desk.config.objective.kernel = soft_rows, kernel
    live, live_gradient = gradient(desk.config.objective, desk.batches(), desk.teacher)
    ours, our_gradient = gradient(desk.config.objective, desk.taught(), None)
    assert ours == pytest.approx(live, rel=1e-3) and ours != live
    assert float((our_gradient - live_gradient).norm()) < 1e-3 * float(live_gradient.norm())


@KINDS
@pytest.mark.parametrize("kernel", ["plain", "fused"])
def test_with_few_entries_the_loss_is_that_of_the_definition(desk: Desk, soft_rows: Rows, kernel: str) -> None:
    desk.config.teacher.cache.top_k = 3
    settings = replace(desk.config.objective, mlm=conf.Term(0.0), kernel=kernel)
    settings.soft.rows = desk.config.objective.soft.rows = soft_rows
    student, values = make_model("distilbert", 1, seed=2).double(), []
    for batch in desk.batches().window(1):
        places = taught_places(batch, soft_rows)
        ours = student(input_ids=batch.inputs, attention_mask=batch.attention).logits.flatten(0, 1)[places]
        theirs = log_probs_of(desk.teacher, batch, places, 1.0).double()
        for mine, taught in zip(ours, theirs, strict=True):
            third = float((taught / 2).softmax(0).topk(3).values[-1])
            values.append(kl(taught, mine, 2.0, third * (1 - 1e-9)))
    want = torch.stack(values).mean()
    want.backward()
    expected = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None]).float()
    loss, ours_gradient = gradient(settings, desk.taught(), None)
    assert loss == pytest.approx(want.item(), rel=1e-3)
    assert float((ours_gradient - expected).norm()) < 2e-3 * float(expected.norm())


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("the teacher was asked")


def test_it_is_made_once(desk: Desk, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = desk.build()
    assert not first.ready
    monkeypatch.setattr(teacher_pass, "hidden_states", never)
    again = Desk(Path(desk.config.corpus.cache), tokenizer, make_model("bert", 4)).build()  # another copy of the model
    assert again.ready and again.folder == first.folder and again.facts() == first.facts()
    numbers = np.array([7, 0, 39])
    assert all(np.array_equal(a, b) for a, b in zip(first.read(numbers), again.read(numbers), strict=True))
    facts = again.facts()
    assert facts["positions"] == int((ROWS != PAD).sum()) and 0 < facts["kept_mass"] < 1
    files = sum((again.folder / name).stat().st_size for name in ("ids", "log_probs", "offsets.npy"))
    assert facts["bytes"] == pytest.approx(files, abs=200)
    assert facts["bytes_per_token"] == pytest.approx(2 * 8 + 2 * 9 + 8 * 41 / facts["positions"])


CHANGES: dict[str, Callable[[Desk], object]] = {
    "seed": lambda desk: setattr(desk, "seed", 1),
    "rows": lambda desk: setattr(desk, "rows", make_rows(40, shortest=5, seed=4)),
    "fewer rows": lambda desk: setattr(desk, "rows", ROWS[:30]),
    "teacher": lambda desk: setattr(desk, "teacher", make_model("bert", 4, seed=9)),
    "activation": lambda desk: setattr(desk, "teacher", make_model("bert", 4, hidden_act="relu")),
    "top_k": lambda desk: setattr(desk.config.teacher.cache, "top_k", 9),
    "temperature": lambda desk: setattr(desk.config.objective, "temperature", 3.0),
    "soft rows": lambda desk: setattr(desk.config.objective.soft, "rows", Rows.masked),
    "share": lambda desk: setattr(desk.config.objective.masking, "share", 0.2),
    "smoothing": lambda desk: setattr(desk.config.objective.masking, "smoothing", 0.1),
    "precision": lambda desk: setattr(desk.config.precision, "teacher", "bf16"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_its_content_makes_another(desk: Desk, change: str) -> None:
    before = desk.find()
    CHANGES[change](desk)
    assert desk.find().folder != before.folder


def test_what_does_not_change_its_content_does_not(desk: Desk) -> None:
    before = desk.find()
    desk.config.objective.soft.weight, desk.config.teacher.cache.gigabytes = 3.0, 1.0
    desk.config.objective.kernel = "plain"
    assert desk.find().folder == before.folder


def spoil(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


def other_origin(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    meta["origin"]["seed"] = 5
    (folder / "meta.json").write_text(json.dumps(meta))


DAMAGE = {
    "a changed byte of ids": spoil("ids", lambda data: data[:77] + bytes([data[77] ^ 1]) + data[78:]),
    "a changed byte of log_probs": spoil("log_probs", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
    "a changed offset": spoil("offsets.npy", lambda data: data[:-16] + bytes([data[-16] ^ 1]) + data[-15:]),
    "ids too short": spoil("ids", lambda data: data[:-2]),
    "log_probs too long": spoil("log_probs", lambda data: data + b"more"),
    "no offsets": lambda folder: (folder / "offsets.npy").unlink(),
    "short offsets": lambda folder: np.save(folder / "offsets.npy", np.zeros(7, np.int64)),
    "torn offsets": spoil("offsets.npy", lambda data: data[:30]),
    "no ids": lambda folder: (folder / "ids").unlink(),
    "torn meta": spoil("meta.json", lambda data: data[:40]),
    "another meta": spoil("meta.json", lambda data: b"[1]"),
    "made from something else": other_origin,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_wrong_or_damaged_it_is_refused(desk: Desk, damage: str) -> None:
    cache = desk.build()
    DAMAGE[damage](cache.folder)
    with pytest.raises(SettingError) as refusal:
        desk.find()
    text = str(refusal.value)
    assert "teacher.cache.top_k=8" in text and str(cache.folder) in text and "delete" in text and "\n" not in text
    shutil.rmtree(cache.folder)
    assert not desk.build().ready and desk.find().ready


def test_too_large_it_is_refused_before_the_teacher_is_asked(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_pass, "hidden_states", never)
    size = desk.find().num_bytes
    desk.config.teacher.cache.gigabytes = (size - 1) / 1e9
    with pytest.raises(SettingError, match=r"^teacher.cache.gigabytes=.*top_k=8 at .* positions takes .* GB; allow"):
        desk.find()
    desk.config.teacher.cache.gigabytes = size / 1e9
    assert desk.find().num_bytes == size


def test_no_room_on_the_disk(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(desk.config.corpus.cache)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(SettingError, match=r"corpus.cache=.*there is room for"):
        desk.build()


def test_more_entries_than_the_vocabulary_has(desk: Desk) -> None:
    desk.config.teacher.cache.top_k = VOCAB
    with pytest.raises(SettingError, match=f"top_k={VOCAB}: the vocabulary has {VOCAB} tokens"):
        desk.find()


def test_large_vocabularies_have_wider_ids(desk: Desk) -> None:
    narrow, desk.vocab = desk.find(), 70_000
    assert desk.find().num_bytes - narrow.num_bytes == narrow.num_positions * 8 * 2


def counting(monkeypatch: pytest.MonkeyPatch, most: int = 10**9) -> list[int]:
    """Rows of each question to the teacher; it fails after `most` of them."""
    asked: list[int] = []
    real = teacher_pass.hidden_states

    def ask(model: Any, ids: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor:
        if len(asked) == most:
            raise RuntimeError("the lights went out")
        asked.append(len(ids))
        return real(model, ids, attention)

    monkeypatch.setattr(teacher_pass, "hidden_states", ask)
    return asked


def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_cache, "FEWEST_ROWS", 4)
    monkeypatch.setattr(teacher_pass, "FORWARD_TOKENS", 3 * LENGTH)  # a question of 3 rows and one of 1 for each part


def same_files(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in ("ids", "log_probs", "offsets.npy"))


def test_interrupted_it_goes_on_with_what_is_missing(
    desk: Desk, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_parts(monkeypatch)
    whole = Desk(tmp_path / "whole", tokenizer, desk.teacher).build()
    with monkeypatch.context() as patch:
        asked = counting(patch, most=7)
        with pytest.raises(RuntimeError, match="lights"):
            desk.build()
        assert asked == [3, 1, 3, 1, 3, 1, 3]
    asked = counting(monkeypatch)
    resumed = desk.build()
    assert asked == [3, 1] * 7 and desk.find().ready
    assert same_files(whole.folder, resumed.folder)
    assert resumed.facts()["kept_mass"] == pytest.approx(whole.facts()["kept_mass"])


def test_several_processes_share_the_work(
    desk: Desk, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here as threads: a lock is a file descriptor's, not a process's."""
    small_parts(monkeypatch)
    whole = Desk(tmp_path / "whole", tokenizer, desk.teacher).build()
    asked = counting(monkeypatch)
    with ThreadPoolExecutor(3) as pool:
        caches = [each.result() for each in [pool.submit(desk.build) for _ in range(3)]]
    assert sum(asked) == len(ROWS)
    assert all(same_files(whole.folder, cache.folder) for cache in caches)


STATIC = ["objective.masking.static=true", "objective.cosine.weight=0", "teacher.cache.top_k=16"]


def test_a_run_from_the_cache(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Made in the first run; the others read it, ask no teacher in training, resume bitwise, and refuse damage."""
    import distill.objective.objective

    first, second, resumed = (shelf.root / f"cache-{name}" for name in ("first", "second", "resumed"))
    assert shelf.run(first, *STATIC, "train.keep=9") == 0
    content = results(first)
    facts = content["teacher"]["cache"]
    assert facts["top_k"] == 16 and facts["bytes_per_token"] > 66 and 0 < facts["kept_mass"] < 1
    assert any("cache of the teacher's 16" in note for note in content["notes"])
    assert content["agreement"]["heldout"]["kl"] > 0 and metrics(first)[-1]["loss/soft"] > 0

    real = distill.objective.objective.hidden_states
    monkeypatch.setattr(teacher_pass, "hidden_states", never)
    monkeypatch.setattr(
        distill.objective.objective,
        "hidden_states",
        lambda model, *rest: real(model, *rest) if model.training else never(),
    )
    assert shelf.run(second, *STATIC, "objective.kernel=auto", "teacher.cache.gigabytes=9") == 0
    assert_same(second, first)
    assert shelf.run(resumed, *STATIC, f"resume={first / 'checkpoints' / 'step-00000004'}") == 0
    assert_same(resumed, first)
    folder = next((shelf.root / "cache" / "teacher").iterdir())
    DAMAGE["ids too short"](folder)
    assert shelf.run(shelf.root / "cache-damaged", *STATIC) == 2
    shutil.rmtree(folder)


@pytest.mark.slow
def test_two_ranks_make_one_cache_and_the_same_student(shelf: Shelf) -> None:  # noqa: F811
    one, two = shelf.root / "cache-one", shelf.root / "cache-two"
    assert shelf.run(one, *STATIC, "seed=3") == 0
    ranks = ["backend=ddp", "backend.processes=2", "train.accumulate=1", f"corpus.cache={shelf.root / 'ranks'}"]
    started = command(*shelf.arguments(two, *STATIC, "seed=3", *ranks))  # the ranks repeat this very command line
    _, errors = started.communicate(timeout=200)
    assert started.returncode == 0, errors
    ours, theirs = (metrics(folder)[-1]["loss/total"] for folder in (one, two))
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert results(two)["teacher"]["cache"]["bytes"] == results(one)["teacher"]["cache"]["bytes"]
