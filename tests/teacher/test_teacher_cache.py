"""The teacher cache: what it holds, when it is another one, how it is made; and several teachers as one."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
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
from job import Shelf, assert_same, distill, metrics, results
from naive import attention_of
from tiny import LENGTH, PAD, VOCAB, change, make_masks, make_model, make_objective, make_rows, make_tokenizer, step_of
from transformers import AutoModelForMaskedLM, AutoTokenizer

from distill.config import settings as conf
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.distributed import join_ranks
from distill.distributed.single import Single
from distill.models.kernels.packed_linear import pack_teacher
from distill.models.kind import MASKED
from distill.models.language_model import LanguageModel, OutputSpec
from distill.models.loaded import model_digest
from distill.objective.objective import Objective
from distill.runs import setup
from distill.runs.describe import cache_facts
from distill.runs.learning import FrozenTeachers
from distill.runs.pair import Pair
from distill.runtime.errors import SettingError
from distill.teacher import build_cache
from distill.teacher import cache as cache_module
from distill.teacher.build_cache import Recorder, build
from distill.teacher.cache import Cache, CachedTeacher, find
from distill.teacher.distributions import Mixture, Samples, TopK
from distill.teacher.live import LiveTeacher
from distill.teacher.members import ONLY, Member
from distill.teacher.output import MeanTeacher, Teacher, TeacherOutput, Wanted

SINGLE, CPU = Single(conf.BackendConfig(device="cpu")), torch.device("cpu")
ALL = np.arange(40)


class Desk:
    """Settings, sequences, masks and a teacher, and the cache that they want."""

    def __init__(
        self, folder: Path, tokenizer: Any, teacher: Any, top_k: int | None = 8, sampled: int = 0, states: bool = False
    ) -> None:
        self.config = change(conf.Config(teacher=conf.TeacherConfig(path="x")), "data.cache", str(folder))
        kept: dict[str, Any] = {"hidden_states": True} if states else {"top_k": top_k, "sampled": sampled or None}
        self.set("teacher.cache", conf.TeacherCacheConfig(**kept))
        self.soft_positions, self.temperature, self.mlm, self.seed = "all", 2.0, 2.0, 0
        self.masking = conf.MaskingConfig(mlm_probability=0.3, static=True)
        self.tokenizer, self.teacher, self.rows = tokenizer, teacher, make_rows(40, shortest=5)

    def set(self, name: str, value: Any) -> None:
        self.config = change(self.config, name, value)

    def objective(self) -> Objective:
        given = {"rows": self.soft_positions, "temperature": self.temperature}
        return make_objective(tiny.objective_config(1.0, self.mlm, 0.0, **given), self.teacher, self.teacher)

    def batches(self) -> Batches:
        masks = make_masks(self.tokenizer, self.rows, **dict(self.masking))
        return tiny.make_batches(self.rows, masks, 8, 2, self.seed, static=True)

    @property
    def tokens(self) -> str:
        return hashlib.sha256(self.rows.tobytes()).hexdigest()

    def find(self) -> Cache:
        batches = self.batches()
        origin = {"teacher": model_digest(self.teacher), "int8": False, "tokens": self.tokens, "seed": self.seed}
        origin |= {"masks": batches.collator.identity, "soft_positions": self.soft_positions}  # as the key has it
        origin |= {"temperature": self.temperature, "vocabulary": VOCAB}
        origin |= {"hidden_states": 32} if self.config.teacher.cache.hidden_states else {}
        folder = self.config.data.cache
        return find(self.config.teacher.cache, origin, batches, self.objective().positions, folder)

    def recorder(self, teacher: Any | None = None) -> Recorder:
        model = LanguageModel(teacher or self.teacher, self.config.precision.teacher)
        return Recorder(self.find(), model, self.batches(), self.objective().positions, self.temperature, CPU)

    def build(self, teacher: Any | None = None, ranks: Any = SINGLE) -> Cache:
        recorder = self.recorder(teacher)
        build(recorder, ranks)
        return recorder.cache

    def built(self) -> CachedTeacher:
        return CachedTeacher(self.build(), SINGLE)


@pytest.fixture
def desk(tmp_path: Path, tokenizer: Any, teacher: Any) -> Desk:
    return Desk(tmp_path, tokenizer, teacher)


# --- what it holds


@pytest.mark.parametrize("soft_positions", ["all", "masked"])
@pytest.mark.parametrize(("top_k", "sampled"), [(8, 0), (3, 5), (None, 5)])
@pytest.mark.parametrize("full", [False, True])
def test_it_holds_the_teachers_distribution(
    tmp_path: Path, tokenizer: Any, teacher: Any, top_k: int | None, sampled: int, soft_positions: str, full: bool
) -> None:
    desk, exact = Desk(tmp_path, tokenizer, teacher, top_k, sampled), top_k or 0
    desk.soft_positions = soft_positions
    if full:
        desk.rows = make_rows(40)
    reader = desk.built()
    for batch in (batch for step in (0, 2, 3) for batch in desk.batches().window(step)):  # 3 steps an epoch
        (output,) = reader.outputs([reader.read_ahead(batch)], desk.objective().teacher_spec)
        found, positions = output.distribution, desk.objective().positions(batch)
        positions = torch.arange(batch.ids.numel()) if positions is None else positions
        assert len(positions) == (batch.num_valid if soft_positions == "all" else len(batch.targets.positions))
        with torch.no_grad():
            logits = teacher(input_ids=batch.ids, attention_mask=attention_of(batch)).logits.flatten(0, 1)
        p = (logits[positions] / 2.0).softmax(-1)
        values, ids = p.topk(exact)
        assert exact == 0 or (found.ids[:, :exact] == ids).float().mean() > 0.99  # but for near ties
        if sampled:
            assert isinstance(found, Samples)
            torch.testing.assert_close(found.weights[:, :exact], values, rtol=3e-3, atol=0)
            torch.testing.assert_close(found.weights.sum(1), torch.ones(len(p)), rtol=2e-3, atol=0)
            torch.testing.assert_close(found.neg_entropy[:, 0], (p * p.log()).sum(1), rtol=1e-3, atol=1e-3)
            assert not (found.ids[:, exact:, None] == found.ids[:, None, :exact]).any()
        else:
            assert isinstance(found, TopK)
            wanted = torch.cat([values, 1 - values.sum(-1, keepdim=True)], 1)
            torch.testing.assert_close(found.log_probs.float().exp(), wanted, rtol=1e-2, atol=1e-4)
    facts, cache = cache_facts(reader.cache), reader.cache
    files = sum(file.stat().st_size for file in cache.folder.glob("*[ny]") if file.suffix != ".json")
    assert facts.bytes == pytest.approx(files, abs=200)
    position = (4 * exact + 2 if exact else 0) + (2 * sampled + 2 if sampled else 0)
    assert facts.bytes_per_token == pytest.approx(position + 8 * 41 / facts.positions)
    assert facts.kept_mass is not None and 0 <= facts.kept_mass < 1 and (facts.kept_mass > 0) == (exact > 0)


def gradient(desk: Desk, teacher: Teacher) -> tuple[float, torch.Tensor]:
    """Loss and whole gradient of a step."""
    return step_of(make_model("distilbert", 1, seed=2), desk.objective(), teacher, desk.batches().window(1))


@pytest.mark.parametrize("soft_positions", ["all", "masked"])
def test_with_all_but_one_entry_training_is_that_of_the_live_teacher(desk: Desk, soft_positions: str) -> None:
    desk.set("teacher.cache.top_k", VOCAB - 1)
    desk.soft_positions = soft_positions
    live, live_gradient = gradient(desk, LiveTeacher(LanguageModel(desk.teacher)))
    cached, cached_gradient = gradient(desk, desk.built())
    assert cached == pytest.approx(live, rel=1e-3) and cached != live
    assert float((cached_gradient - live_gradient).norm()) < 1e-3 * float(live_gradient.norm())


# --- when it is another one


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("the teacher was asked")


@pytest.mark.parametrize("sampled", [0, 5])
def test_it_is_made_once_and_a_copy_serves_another_machine(
    tmp_path: Path, tokenizer: Any, teacher: Any, monkeypatch: pytest.MonkeyPatch, sampled: int
) -> None:
    """Its own folder of caches, number format and copy of the teacher; and no model where none is loaded."""
    desk = Desk(tmp_path, tokenizer, teacher, sampled=sampled)
    made = desk.build()
    monkeypatch.setattr(Recorder, "records", never)
    shutil.copytree(made.folder, tmp_path / "there" / "teacher" / made.key)
    other = Desk(tmp_path / "there", tokenizer, make_model("bert", 4), sampled=sampled)
    other.set("precision.teacher", "bf16")
    found = other.build()
    assert found.ready and not made.ready and cache_facts(found) == cache_facts(made)
    assert cache_facts(found).precision == "fp32", "that of the machine that made it"
    assert np.array_equal(*(CachedTeacher(each, SINGLE).read(np.array([7, 0, 39, 7])) for each in (made, found)))
    assert cache_facts(found).positions == int((desk.rows != PAD).sum())
    meta = (found.folder / "meta.json").read_text()
    assert not any(word in meta for word in (str(tmp_path), "cuda", "cpu"))
    digests: dict[str, str | None] = {"teacher": model_digest(desk.teacher)}
    member = Member(ONLY, 1.0, None, "elsewhere")
    pair = Pair([member], Mock(), None, VOCAB, digests, student=Mock(), kind=MASKED, terms={})
    assert pair.teacher is None and pair.scored_teachers == []
    data = SimpleNamespace(tokens=SimpleNamespace(digest=desk.tokens), batches=desk.batches())
    run: Any = SimpleNamespace(config=desk.config, pair=pair, data=data, objective=desk.objective(), ranks=SINGLE)
    without = FrozenTeachers(run).open()
    assert isinstance(without, CachedTeacher) and without.cache.folder == made.folder


CHANGES: dict[str, Callable[[Desk], object]] = {
    "order": lambda desk: setattr(desk, "seed", 1),
    "rows": lambda desk: setattr(desk, "rows", make_rows(40, shortest=5, seed=4)),
    "teacher": lambda desk: setattr(desk, "teacher", make_model("bert", 4, seed=9)),
    "temperature": lambda desk: setattr(desk, "temperature", 3.0),
    "soft rows": lambda desk: setattr(desk, "soft_positions", "masked"),
    "smoothing": lambda desk: setattr(desk, "masking", desk.masking.changed(smoothing=0.1)),
    "top_k": lambda desk: desk.set("teacher.cache.top_k", 9),
    "no top_k": lambda desk: desk.set("teacher.cache.top_k", None),
    "sampled": lambda desk: desk.set("teacher.cache.sampled", 6),
    "no draws": lambda desk: desk.set("teacher.cache", conf.TeacherCacheConfig(top_k=8)),
    "seed": lambda desk: desk.set("teacher.cache.seed", 1),
}


def test_what_changes_its_content_makes_another_and_nothing_else(tmp_path: Path, tokenizer: Any, teacher: Any) -> None:
    found = set[Path]()
    for make in (lambda desk: None, *CHANGES.values()):
        desk = Desk(tmp_path, tokenizer, teacher, sampled=5)
        make(desk)
        found.add(desk.find().folder)
        desk.mlm = 3.0
        desk.set("teacher.cache.gigabytes", 1.0)
        desk.set("precision.teacher", "bf16")  # as a GPU would choose
        found.add(desk.find().folder)
    assert len(found) == 1 + len(CHANGES)


def test_too_large_it_is_refused_before_the_teacher_runs(desk: Desk) -> None:
    size = desk.find().num_bytes
    desk.set("teacher.cache.gigabytes", (size - 1) / 1e9)
    with pytest.raises(SettingError, match=r"^teacher.cache.gigabytes=.*top_k=8 at .* positions takes .* GB; allow"):
        desk.find()
    desk.set("teacher.cache.gigabytes", size / 1e9)
    assert desk.find().num_bytes == size


# --- how it is made and verified


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "FEWEST_SEQUENCES", 4)
    monkeypatch.setattr(build_cache, "FORWARD_TOKENS", 3 * LENGTH)  # a question of 3 sequences and one of 1 a part


def counting(monkeypatch: pytest.MonkeyPatch, most: int = 10**9) -> list[int]:
    """Sequences of each question to the teacher; it fails after `most` of them."""
    questions, real = list[int](), Recorder.records

    def ask(self: Any, numbers: np.ndarray) -> Any:
        if len(questions) == most:
            raise RuntimeError("the lights went out")
        questions.append(len(numbers))
        return real(self, numbers)

    monkeypatch.setattr(Recorder, "records", ask)
    return questions


def content(cache: Cache) -> bytes:
    """The records of all parts, and the offsets."""
    parts = [part.read_bytes()[cache_module.HEADER :] for part in sorted(cache.folder.glob("part-*.bin"))]
    return b"".join([*parts, (cache.folder / "offsets.npy").read_bytes()])


@pytest.mark.parametrize("kept", [{}, {"sampled": 5}, {"states": True}])
def test_interrupted_it_goes_on_with_what_is_missing_and_has_the_same_bytes(
    tmp_path: Path, tokenizer: Any, teacher: Any, monkeypatch: pytest.MonkeyPatch, small_parts: None, kept: Any
) -> None:
    desk, other = (Desk(tmp_path / name, tokenizer, teacher, **kept) for name in ("cut", "whole"))
    with monkeypatch.context() as patch:
        questions = counting(patch, most=7)
        with pytest.raises(RuntimeError, match="lights"):
            desk.build()
        assert questions == [3, 1, 3, 1, 3, 1, 3]
    questions = counting(monkeypatch)
    resumed = desk.build()
    assert questions == [3, 1] * 7 and desk.find().ready
    monkeypatch.setattr(cache_module, "FEWEST_SEQUENCES", 128)  # in other parts and forwards
    whole = other.build()
    assert content(whole) == content(resumed) and resumed.meta.kept_mass == pytest.approx(whole.meta.kept_mass)
    if "sampled" in kept:
        other.set("teacher.cache.seed", 1)
        before, seeded = (CachedTeacher(each, SINGLE).read(ALL) for each in (whole, other.build()))
        assert np.array_equal(seeded["ids"], before["ids"]) and not np.array_equal(seeded["draws"], before["draws"])


def test_runs_that_make_it_at_the_same_time_do_not_disturb_each_other(
    desk: Desk, tmp_path: Path, tokenizer: Any, small_parts: None
) -> None:
    whole = content(Desk(tmp_path / "whole", tokenizer, desk.teacher).build())
    with ThreadPoolExecutor(3) as pool:
        caches = [each.result() for each in [pool.submit(desk.build, deepcopy(desk.teacher)) for _ in range(3)]]
    assert all(content(cache) == whole for cache in caches) and not [*caches[0].folder.glob(".*")]


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_share_the_work_of_a_disk(
    desk: Desk, shared: bool, monkeypatch: pytest.MonkeyPatch, small_parts: None
) -> None:
    """Two hosts of one rank each: on a disk that they share the second makes what the first has left."""
    questions = counting(monkeypatch)
    rank = Mock(rank=0, size=2, local_rank=0, local_size=1, in_lockstep=SINGLE.in_lockstep)
    rank.sum, rank.agree = (lambda tensor: tensor), lambda work: work()
    if shared:  # the first pass of the other host comes first
        recorder = desk.recorder()
        recorder.cache.folder.mkdir(parents=True)
        build_cache._make_parts(recorder, range(1, recorder.cache.num_parts, 2), SINGLE)
        assert sum(questions) == 20
    desk.build(ranks=rank)
    assert sum(questions) == len(desk.rows) and desk.find().ready


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
        return teacher.read(ALL).tobytes(), verified


def test_one_rank_of_a_machine_verifies_each_part(desk: Desk, tmp_path: Path, small_parts: None) -> None:
    expected = desk.built().read(ALL).tobytes()
    found = run_ranks(2, tmp_path / "ranks", read_by_rank, Path(desk.config.data.cache))
    assert found == [(expected, [0, 1, 2, 3, 4]), (expected, [5, 6, 7, 8, 9])]


# --- whole runs

STATIC = ["objective.masking.static=true", "objective.cosine.weight=0"]


def test_runs_from_the_cache(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Made in the first run; others read a copy of it, ask no teacher in training, and resume bitwise."""
    first, second, resumed = (tmp_path / name for name in ("first", "second", "resumed"))
    given = [*STATIC, "teacher.cache.sampled=24", "teacher.cache.top_k=4", "train.keep=9"]
    assert shelf.run(first, *given, f"data.cache={tmp_path / 'here'}") == 0
    recorded = results(first)
    facts = recorded["teacher"]["cache"]
    assert (facts["top_k"], facts["sampled"]) == (4, 24) and 0 < facts["kept_mass"] < 1
    assert 4 * 4 + 2 + 2 * 24 + 2 < facts["bytes_per_token"] < 4 * 4 + 2 + 2 * 24 + 3
    assert any("4 most probable" in note and "24 draws" in note for note in recorded["notes"])
    assert recorded["agreement"]["heldout"]["kl"] > 0 and "sampled" in json.dumps(recorded["identity"])
    assert all(np.isfinite(line["loss/soft"]) for line in metrics(first))
    (made,) = (tmp_path / "here" / "teacher").iterdir()
    assert f"soft targets are read from the cache {made}" in capfd.readouterr().err and made.name == facts["key"]
    shutil.copytree(made, tmp_path / "there" / "teacher" / made.name)
    monkeypatch.setattr(Recorder, "records", never)
    monkeypatch.setattr(LiveTeacher, "outputs", never)
    there = [*given, f"data.cache={tmp_path / 'there'}"]
    assert shelf.run(second, *there, "objective.kernel=auto", "teacher.cache.gigabytes=9") == 0
    assert_same(second, first)
    assert shelf.run(resumed, *there, f"resume={first / 'checkpoints' / 'step-00000004'}") == 0
    assert_same(resumed, first)
    assert shelf.run(first, *there, "teacher.cache.seed=4") == 2
    assert "teacher.cache.seed was 0 and is now 4" in capfd.readouterr().err


def test_the_cache_is_kept_at_the_temperature_of_the_term(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Almost all entries kept: the loss of the first step is the live teacher's, at another temperature than usual.

    Once it is there, its teacher gets no second copy of its weights.
    """
    packed = list[Any]()
    monkeypatch.setattr(setup, "pack_teacher", lambda teacher, *rest: packed.append(1) or pack_teacher(teacher, *rest))
    settings = [*STATIC, "objective.soft.temperature=4", "train.steps=1", f"data.cache={tmp_path}/cache"]
    losses = []
    for name, kept in (("live", "null"), ("cached", "217"), ("again", "217")):
        assert shelf.run(tmp_path / name, *settings, f"teacher.cache.top_k={kept}") == 0
        losses.append(metrics(tmp_path / name)[0]["loss/soft"])
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=2e-3) and len(packed) == 2
    other = "+objective.other={kind: soft, weight: 1, temperature: 3}"
    assert shelf.run(tmp_path / "two", *STATIC, "teacher.cache.top_k=16", other) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "objective.soft.temperature=2" in line and "objective.other.temperature=3" in line


WEIGHTS = (1.0, 3.0)


@pytest.fixture
def desks(tmp_path: Path, tokenizer: Any) -> list[Desk]:
    """Two teachers of different families whose embeddings are padded to different sizes, with entries that would win.

    Their caches keep almost all entries.
    """
    models = [make_model("bert", 2, seed=11, vocab=VOCAB + 24), make_model("distilbert", 1, seed=12, vocab=VOCAB + 3)]
    with torch.no_grad():
        models[0].cls.predictions.bias[VOCAB:] = 50.0
        models[1].vocab_projector.bias[VOCAB:] = 50.0
    return [Desk(tmp_path, tokenizer, model.requires_grad_(False), VOCAB - 1) for model in models]


def live(desks: list[Desk]) -> list[Teacher]:
    return [LiveTeacher(LanguageModel(desk.teacher)) for desk in desks]


class Watched:
    """A teacher that notes what is wanted of it."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher, self.specs = teacher, list[OutputSpec]()

    def read_ahead(self, batch: Batch) -> Batch:
        return self.teacher.read_ahead(batch)

    def outputs(self, window: list[Batch], wanted: Wanted) -> Iterator[TeacherOutput]:
        self.specs += [wanted(batch) for batch in window]
        return self.teacher.outputs(window, wanted)


@pytest.mark.parametrize("head", [True, False])
def test_hidden_states_are_asked_of_the_first_alone(desks: list[Desk], head: bool) -> None:
    window, watched = desks[0].batches().window(0), [Watched(each) for each in live(desks)]
    outputs = MeanTeacher(watched, WEIGHTS).outputs(window, lambda batch: OutputSpec(head, layers=(0,)))
    found = [(isinstance(each.distribution, Mixture), bool(each.outputs.hidden)) for each in outputs]
    assert found == [(head, True)] * len(window)
    assert [(spec.head, bool(spec.layers)) for each in watched for spec in each.specs] == [
        *[(head, True)] * len(window), *[(head, False)] * len(window)
    ]  # fmt: skip


@pytest.mark.parametrize("which", ["both", "second"])
def test_cached_members_give_the_gradient_of_the_mean(desks: list[Desk], tmp_path: Path, which: str) -> None:
    """Each member has a cache and entries of its own."""
    want, wanted = gradient(desks[0], MeanTeacher(live(desks), WEIGHTS))
    members: list[Teacher] = [desk.built() for desk in desks]
    assert len(list((tmp_path / "teacher").iterdir())) == 2
    if which == "second":
        members[0] = live(desks)[0]
    loss, found = gradient(desks[0], MeanTeacher(members, WEIGHTS))
    assert loss > want + 0.1, "larger by how far the members are from each other"
    assert float((found - wanted).norm()) < 2e-3 * float(wanted.norm())


# --- whole runs


@pytest.fixture(scope="module")
def second(shelf: Shelf) -> Path:
    """Another teacher with the same tokenizer, whose embedding is padded."""
    model = AutoModelForMaskedLM.from_pretrained(shelf.teacher / "student")
    tokenizer = AutoTokenizer.from_pretrained(shelf.teacher / "student")
    model.resize_token_embeddings(len(tokenizer) + 7)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    folder = shelf.root / "second-teacher"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run(shelf: Shelf, folder: Path, *more: str) -> int:
    given = [each for each in shelf.arguments(folder) if not each.startswith("teacher")]
    return distill(*given, "teacher=several", *more)


def both(shelf: Shelf, second: Path, weight: float = 2.0, more: str = "") -> list[str]:
    other = f"+teacher.members.b={{path: {second}, weight: {weight}{more}}}"
    return [f"+teacher.members.a.path={shelf.teacher}", other]


@pytest.fixture(scope="module")
def trained(shelf: Shelf, second: Path) -> Path:
    files = [second / "model.safetensors", shelf.teacher / "student" / "model.safetensors"]
    before, folder = [file.read_bytes() for file in files], shelf.root / "several"
    assert run(shelf, folder, *both(shelf, second)) == 0
    assert before == [file.read_bytes() for file in files], "teachers are frozen"
    return folder


@pytest.mark.slow
def test_they_are_scored_together_and_each_by_its_name_and_resume(
    trained: Path, shelf: Shelf, second: Path, done: Path, tmp_path: Path
) -> None:
    content, alone = results(trained), results(done)["teacher"]
    teacher = content["teacher"]
    assert teacher["name"] == f"the mean of a ({shelf.teacher}, weight 0.333) and b ({second}, weight 0.667)"
    parameters = [member["parameters"] for member in teacher["members"].values()]
    assert list(teacher["members"]) == ["a", "b"] and teacher["parameters"] == sum(parameters)
    for measure in ("perplexity", "pseudo_perplexity"):
        scores = [each[measure]["heldout"] for each in (*teacher["members"].values(), teacher)]
        assert scores[0] == pytest.approx(alone[measure]["heldout"]) and len(set(scores)) == 3
        assert scores[2] < max(scores), "the mean's log-probability is no worse than the mean of the log-probabilities"
    assert content["agreement"]["heldout"]["kl"] > 0 and all(line["loss/soft"] > 0 for line in metrics(trained))
    assert "| Teachers together | Teacher a | Teacher b | Student |" in (trained / "report.md").read_text()
    resumed = shutil.copytree(trained, tmp_path / "resumed")
    (resumed / "results.json").unlink()
    shutil.rmtree(resumed / "checkpoints" / "step-00000008")
    assert run(shelf, resumed, *both(shelf, second)) == 0
    assert_same(resumed, trained)


def test_the_run_is_known_by_all_teachers_and_their_weights(
    trained: Path, shelf: Shelf, second: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    same = [f"+teacher.members.a={{path: {shelf.teacher}, weight: 10}}"]
    same.append(f"+teacher.members.b={{path: {second}, weight: 20, precision: bf16, micro_batches: 2}}")
    for given, status, words in (
        (same, 0, "finished and nothing was changed"),
        (both(shelf, second, weight=1.0), 2, "teacher.members.b.weight was 0.66"),
        (both(shelf, shelf.teacher), 2, "teacher.members.b has other weights"),
        (both(shelf, second)[:1], 2, "teacher.members was ['a', 'b'] and is now ['a']"),
    ):
        assert run(shelf, trained, *given) == status and words in capfd.readouterr().err


B = "++teacher.members.b"
BAD = {
    "two temperatures": (
        ["+objective.reverse_kl={weight: 1, temperature: 1}"],
        ["objective.soft.temperature=2.0", "objective.reverse_kl.temperature=1.0"],
    ),
    "logits without a constant": (["+objective.logit_mse.weight=1"], ["objective.logit_mse.center", "true"]),
    "a cache and a loss that needs logits": (
        [*STATIC, f"{B}.cache={{top_k: 8}}", "+objective.reverse_kl.weight=1"],
        ["teacher.members.b.cache.top_k=8", "objective.reverse_kl", "weight=0"],
    ),
    "a cache of too many": ([*STATIC, f"{B}.cache={{top_k: 99999}}"], ["members.b.cache.top_k=99999", "vocabulary"]),
    "a folder without a model": ([f"{B}.path=."], ["teacher.members.b.path=.", "config.json"]),
    "another tokenizer": ([f"{B}.path=FOREIGN"], ["teacher.members.b", "is not that of", "members.a"]),
    "a path beside": (["teacher.path=x"], ["teacher.path=x", "beside teacher.members"]),
    "rows too long": (["corpus.sequence_length=512"], ["corpus.sequence_length=512", "32"]),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused(
    case: str, shelf: Shelf, second: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more, words = BAD[case]
    if case == "another tokenizer":
        foreign = shutil.copytree(second, tmp_path / "foreign")
        text = [" ".join(f"unheard{number}" for number in range(200))] * 3
        AutoTokenizer.from_pretrained(second).train_new_from_iterator(text, 300).save_pretrained(foreign)
        more = [more[0].replace("FOREIGN", str(foreign))]
    members = [f"+teacher.members.{name}.path={path}" for name, path in (("a", shelf.teacher), ("b", second))]
    assert run(shelf, tmp_path / "run", *members, *more) == 2
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: "))
    assert all(word in line for word in words), line
