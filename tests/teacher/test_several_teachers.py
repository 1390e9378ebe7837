"""A run with several teachers: trained, resumed, recorded and reported, and what cannot be is refused in one line."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from job import Shelf, assert_same, distill, metrics, results, weights
from transformers import AutoModelForMaskedLM, AutoTokenizer

STATIC = ("objective.masking.static=true", "objective.cosine.weight=0")


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


def arguments(shelf: Shelf, folder: Path, *more: str) -> list[str]:
    return [each for each in shelf.arguments(folder) if not each.startswith("teacher")] + ["teacher=several", *more]


def both(shelf: Shelf, second: Path, weight: float = 2.0, more: str = "") -> list[str]:
    return [
        f"+teacher.members.a.path={shelf.teacher}",
        f"+teacher.members.b={{path: {second}, weight: {weight}{more}}}",
    ]


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir() if file.is_file()}


@pytest.fixture(scope="module")
def trained(shelf: Shelf, second: Path) -> Path:
    before = [digests(folder) for folder in (shelf.teacher / "student", second)]
    folder = shelf.root / "several"
    assert distill(*arguments(shelf, folder, *both(shelf, second))) == 0
    assert before == [digests(folder) for folder in (shelf.teacher / "student", second)], "teachers are frozen"
    return folder


@pytest.mark.slow
def test_they_are_scored_together_and_each_by_its_name(trained: Path, shelf: Shelf, second: Path, done: Path) -> None:
    content = results(trained)
    teacher = content["teacher"]
    assert teacher["name"] == f"the mean of a ({shelf.teacher}, weight 0.333) and b ({second}, weight 0.667)"
    assert list(teacher["members"]) == ["a", "b"]
    parameters = [member["parameters"] for member in teacher["members"].values()]
    assert teacher["parameters"] == sum(parameters) and parameters[1] > parameters[0]
    alone = results(done)["teacher"]
    for measure in ("perplexity", "pseudo_perplexity"):
        scores = [each[measure]["heldout"] for each in (*teacher["members"].values(), teacher)]
        assert scores[0] == pytest.approx(alone[measure]["heldout"]) and len(set(scores)) == 3
        assert scores[2] < max(scores), "the mean's log-probability is no worse than the mean of the log-probabilities"
    assert content["agreement"]["heldout"]["kl"] > 0
    assert all(line["loss/soft"] > 0 for line in metrics(trained))
    text = (trained / "report.md").read_text()
    assert "| Teachers together | Teacher a | Teacher b | Student | Against teacher |" in text
    assert "the mean of a" in (trained / "report.html").read_text()


@pytest.mark.slow
def test_a_resumed_run_goes_on_bitwise(trained: Path, shelf: Shelf, second: Path) -> None:
    folder = shelf.root / "several-resumed"
    shutil.copytree(trained, folder)
    (folder / "results.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step-00000008")
    assert distill(*arguments(shelf, folder, *both(shelf, second))) == 0
    assert_same(folder, trained)


def test_the_run_is_known_by_all_teachers_and_their_shares(
    trained: Path, shelf: Shelf, second: Path, capfd: pytest.CaptureFixture
) -> None:
    given = [f"+teacher.members.a={{path: {shelf.teacher}, weight: 10}}"]
    same = [*given, f"+teacher.members.b={{path: {second}, weight: 20, precision: bf16, micro_batches: 2}}"]
    assert distill(*arguments(shelf, trained, *same)) == 0
    assert "finished and nothing was changed" in capfd.readouterr().err
    for change, words in (
        (both(shelf, second, weight=1.0), "teacher.members.b.weight was 0.66"),
        (both(shelf, shelf.teacher), "teacher.members.b has other weights"),
        (both(shelf, second)[:1], "teacher.members was ['a', 'b'] and is now ['a']"),
    ):
        assert distill(*arguments(shelf, trained, *change)) == 2
        assert words in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_members_may_be_read_from_caches_of_their_own(shelf: Shelf, second: Path, tmp_path: Path) -> None:
    """Both, in other formats, or one beside a live one; what is there is read again."""
    cached = [*STATIC, *both(shelf, second, more=", precision: bf16, cache: {top_k: 24}"), "train.steps=2"]
    cached += ["teacher.cache.top_k=16", f"data.cache={tmp_path / 'cache'}"]
    for name in ("first", "again"):
        assert distill(*arguments(shelf, tmp_path / name, *cached)) == 0
    assert_same(tmp_path / "first", tmp_path / "again")
    assert len(list((tmp_path / "cache" / "teacher").iterdir())) == 2
    content = results(tmp_path / "first")
    facts = [member["cache"]["top_k"] for member in content["teacher"]["members"].values()]
    assert facts == [16, 24]
    assert sum("cache of the teacher a's 16 most" in note for note in content["notes"]) == 1
    mixed = [*STATIC, *both(shelf, second, more=", cache: {top_k: 24}"), "train.steps=2", *cached[-1:]]
    assert distill(*arguments(shelf, tmp_path / "mixed", *mixed)) == 0
    members = results(tmp_path / "mixed")["teacher"]["members"]
    assert "cache" not in members["a"] and members["b"]["cache"]["top_k"] == 24
    one, other = (weights(tmp_path / name) for name in ("mixed", "first"))
    assert any(not torch.equal(one[name], other[name]) for name in one)


def own_teacher(folder: str) -> Any:
    """What a user's own callable gives."""
    return AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32)


def test_a_member_may_come_from_a_callable_of_the_users(
    trained: Path, shelf: Shelf, second: Path, tmp_path: Path
) -> None:
    own = f"+teacher.members.b={{_target_: {__name__}.own_teacher, folder: {second}, tokenizer: {second}, weight: 2}}"
    assert distill(*arguments(shelf, tmp_path, f"+teacher.members.a.path={shelf.teacher}", own)) == 0
    assert_same(tmp_path, trained)
    assert "own_teacher" in results(tmp_path)["teacher"]["name"]


BAD = {
    "two temperatures": (
        ["+objective.reverse_kl={weight: 1, temperature: 1}"],
        ["objective.soft.temperature=2.0", "objective.reverse_kl.temperature=1.0", "give them the same"],
    ),
    "logits without a constant": (["+objective.logit_mse.weight=1"], ["objective.logit_mse.center", "true"]),
    "a cache and a loss that needs logits": (
        [*STATIC, "++teacher.members.b.cache={top_k: 8}", "+objective.reverse_kl.weight=1"],
        ["teacher.members.b.cache.top_k=8", "objective.reverse_kl", "weight=0"],
    ),
    "a cache of too many": (
        [*STATIC, "++teacher.members.b.cache={top_k: 99999}"],
        ["teacher.members.b.cache.top_k=99999", "vocabulary"],
    ),
    "a folder without a model": (["++teacher.members.b.path=."], ["teacher.members.b.path=.", "config.json"]),
    "another tokenizer": (["++teacher.members.b.path=FOREIGN"], ["teacher.members.b", "is not that of", "members.a"]),
    "a path beside": (["teacher.path=x"], ["teacher.path=x", "beside teacher.members"]),
    "rows too long": (["corpus.sequence_length=512"], ["corpus.sequence_length=512", "32"]),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused(
    case: str, shelf: Shelf, second: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    more, words = BAD[case]
    if case == "another tokenizer":
        foreign = shutil.copytree(second, tmp_path / "foreign")
        text = [" ".join(f"unheard{number}" for number in range(200))] * 3
        AutoTokenizer.from_pretrained(second).train_new_from_iterator(text, 300).save_pretrained(foreign)
        more = [more[0].replace("FOREIGN", str(foreign))]
    members = [f"+teacher.members.a.path={shelf.teacher}", f"+teacher.members.b.path={second}"]
    assert distill(*arguments(shelf, tmp_path / "run", *members, *more)) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert len(lines) == 1 and all(word in lines[0] for word in words), lines
