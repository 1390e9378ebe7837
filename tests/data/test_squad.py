"""Questions are read from every form of SQuAD, answers are found where they stand, and nothing is passed over."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import questions as sample

from distill.data.tables.squad import Questions, Squad, find
from distill.evaluation.questions import raw_scores
from distill.runtime.errors import SettingError

SETTING = "squad.train"


def load(path: str | Path, version: str = "2.0", training: bool = True, **more: Any) -> Questions:
    return Squad(path=str(path), version=version, **more).read(SETTING, training)


def one(tmp_path: Path, training: bool = True, version: str = "2.0", **changes: Any) -> Questions:
    """A good question and one with these changes."""
    content = sample.official(sample.made(1, "1.1"))
    paragraph = content["data"][0]["paragraphs"][0]
    item = paragraph["qas"][0]
    paragraph["qas"] += [item | {"id": "changed"} | changes]
    return load(sample.write(tmp_path / "x.json", content), version, training)


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_all_forms_give_the_same(tmp_path: Path, version: str) -> None:
    made = sample.made(50, version, words=[*sample.WORDS, *sample.ODD])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(sample.flat(made)), tmp_path / "flat.parquet")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/train.jsonl").write_bytes(
        Path(sample.write(tmp_path / "flat.jsonl", sample.flat(made))).read_bytes()
    )
    forms = [
        load(sample.write(tmp_path / "nested.json", sample.official(made)), version),
        load(sample.write(tmp_path / "data.json", {"data": sample.flat(made)}), version),
        load(tmp_path / "flat.jsonl", version),
        load(tmp_path / "flat.parquet", version),
        Squad(hub=str(tmp_path / "hub"), version=version).read(SETTING, True),
    ]
    for found in forms:
        assert found.questions == made.questions
        assert found.left_out == 0


def test_answers_are_placed_or_their_questions_left_out_in_training_alone(tmp_path: Path) -> None:
    context = "A cat and\na dog, a cat"
    assert find("cat", context, 19) == (19, 22)
    assert find("cat", context, 3) == find("cat", context, None) == find("cat", context, -7) == (2, 5)
    assert find("cat", context, 17) == (19, 22)  # nearest, where the place is somewhat off
    assert find("bird", context, 0) is None is find("Dog", context, 0) is find("", context, 0)
    lost = [{"text": "nowhere", "answer_start": 0}]
    found = one(tmp_path, answers=lost)
    assert len(found) == 1 and found.left_out == 1
    assert found.describe().endswith("1 question of x.json (v2.0); 1 left out, which cannot be used")
    found = one(tmp_path, training=False, answers=lost)
    assert len(found) == 2 and found.questions[1].answers[0].text == "nowhere"
    text, place = sample.made(1, "1.1").questions[0].answers[0]
    assert place is not None
    found = one(tmp_path, answers=[*lost, {"text": text, "answer_start": place[0]}])
    assert found.questions[1].place == place


def test_answers_that_are_none_are_not_learnt_and_are_scored_as_officially(tmp_path: Path) -> None:
    """Plausible answers to an impossible question, and an empty text in the place of no answer."""
    for changes in ({"is_impossible": True}, {"answers": [{"text": "", "answer_start": 0}]}):
        assert one(tmp_path, **changes).left_out == 1
        found = one(tmp_path, training=False, **changes)
        assert len(found) == 2 and len(found.questions[1].answers) == 1
    assert raw_scores(found, ["none", ""])[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"question": " "}, "no question"),
        ({"question": "\ud800?"}, "'utf-8' codec can't encode"),
        ({"id": None}, "no id"),
        ({"answers": "text"}, "its answers are no list of texts with their places"),
        ({"answers": [{"answer_start": 3}]}, "its answers are no list of texts with their places"),
    ],
)
def test_bad_questions_are_counted_in_training_and_refused_in_evaluation(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    assert one(tmp_path, **changes).left_out == 1
    with pytest.raises(SettingError, match=rf"^squad\.train: x\.json, question .*: {reason}.*; mend it [^\n]*$"):
        one(tmp_path, training=False, **changes)


def test_questions_without_answers_need_a_context_alone(tmp_path: Path) -> None:
    known = sample.made(20)
    bare = [{"context": each.context, "question": each.question} for each in known.questions]
    wrong = [each | {"id": "1", "answers": {"text": ["nowhere"], "answer_start": [7]}} for each in bare]
    for path in (
        sample.write(tmp_path / "train-v2.0.json", sample.official(known)),
        sample.write(tmp_path / "wrong.jsonl", wrong),
    ):
        found = Squad(version="1.1").read_unlabelled(path, "corpus.unlabelled")
        assert found.texts == known.texts and not any(each.answers for each in found.questions)
    found = Squad().read_unlabelled(sample.write(tmp_path / "d.jsonl", [*bare, bare[0] | {"question": None}]), "x")
    assert found.describe() == "20 questions of d.jsonl (v1.1); 1 left out, which cannot be used"


def test_versions_are_kept_apart(tmp_path: Path) -> None:
    for version in ("1.1", "2.0"):
        sample.write(tmp_path / f"train-v{version}.json", sample.official(sample.made(30, version)))
    assert load(tmp_path, "1.1").name == "train-v1.1.json"
    assert load(tmp_path, "2.0").name == "train-v2.0.json"
    plain = sample.write(tmp_path / "mine.json", sample.official(sample.made(30)))
    with pytest.raises(SettingError, match=r"^squad\.train: \d+ of 30 questions have no answer, .* to 2\.0"):
        load(plain, "1.1")
    with pytest.raises(SettingError, match=r"^squad\.train: version=3 is not known: choose 1\.1 or 2\.0"):
        load(plain, "3")
    with pytest.raises(SettingError, match=r"only files of another version than 1\.1"):
        load(tmp_path / "train-v2.0.json", "1.1")


def test_what_is_no_squad_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    sample.write(tmp_path / "other.json", {"rows": []})
    sample.write(tmp_path / "empty.json", {"data": []})
    sample.write(tmp_path / "short.jsonl", [{"id": "1", "context": "a", "question": "b"}])
    for name, line in {
        "broken.json": "broken.json: not JSON",
        "other.json": "not in SQuAD's form, data > paragraphs > qas",
        "empty.json": "has not one question to use: it is empty",
        "short.jsonl": r"answers=answers: short\.jsonl: no such field; it has id, context, question$",
        "none.json": "no such file or folder",
    }.items():
        with pytest.raises(SettingError, match=line) as caught:
            load(tmp_path / name)
        assert str(caught.value).startswith("squad.train") and "\n" not in str(caught.value)


@sample.REAL
def test_real_questions() -> None:
    for version, split, count in (
        *(("1.1", "train", 4371), ("1.1", "validation", 10570)),
        *(("2.0", "train", 4719), ("2.0", "validation", 6078)),
    ):
        found = Squad(split=split, version=version).read(SETTING, split == "train")
        assert (len(found), found.left_out) == (count, 0)
