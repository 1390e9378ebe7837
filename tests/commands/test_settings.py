"""What `distill settings` prints: values, units, meanings, and who set them, beside what was read and found right.

With DISTILL_RENEW=1 in the environment the text is written anew; read what `git diff` shows of it.
"""

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from job import distill, refused_line

from distill.commands.arguments import split
from distill.commands.small import ProfileArguments

GOLDEN = Path(__file__).parent / "golden" / "settings.txt"
MINE = {
    "optimizer/mine.yaml": "kind: adamw\nweight_decay: 0.5\n",
    "recipe/mine.yaml": "# @package _global_\ndefaults: [smoke, _self_]\ntrain: {keep: 9}\nseed: 17\n",
    "recipe/other.yaml": "# @package _global_\ndefaults: [smoke, _self_]\n"
    "student: {search_seconds: 5}\nteacher: {revision: main, micro_batches: 2}\n",
}
LINES = [
    "settings optimizer train.steps schedule seed teacher.path +recipe=albert_aws optimizer=lamb seed=3"
    " optimizer.clip=2",
    "settings train.keep train.epochs optimizer.weight_decay teacher.path --config-dir my +recipe=mine optimizer=mine"
    " teacher.path=./my",
    "settings student teacher --config-dir my +recipe=other student=bert teacher=bundled_small"
    " student.search_seconds=null teacher.revision=null",
    "settings objective objective.jsd.weight=0.5 'objective.mine={kind: soft, cutoff: 0.1}'",
    "settings teacher.path +recipe=distil_chat corpus.path=.",
    "settings teacher.path +recipe=distil_chat corpus.path=. teacher=none teacher.path=bundled_small",
    "settings evaluate.sources tracker.project +recipe=smoke 'tracker.project=${oc.env:MY_SECRET}'"
    " \"+evaluate.sources.secret={kind: text, path: 'https://me:literal-secret@host/books.txt'}\"",
    "--config-dir my settings +recipe=mine seed",  # the folder may stand before the command
    "--config-dir=my settings +recipe=mine seed",
]


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: Any) -> None:
    for name, text in MINE.items():
        (tmp_path / "my" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "my" / name).write_text(text)
    monkeypatch.setenv("MY_SECRET", "hunter2hunter2")


def test_values_and_who_set_them(capsys: Any) -> None:
    """Options, nested recipes, the command line, files of the user's; of a secret nothing."""
    shown = ""
    for line in LINES:
        assert distill(*shlex.split(line)) == 0
        shown += f"$ distill {line}\n{capsys.readouterr().out}\n"
    if os.environ.get("DISTILL_RENEW"):
        GOLDEN.write_text(shown)
    assert shown == GOLDEN.read_text()
    assert "hunter2" not in shown and "literal-secret@" not in shown.replace("me:literal-secret@host/books.txt'}", "")


def test_all_settings_of_the_main_job(capsys: Any) -> None:
    assert distill("settings") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Settings of the recipe distilbert_gutenberg" and max(map(len, lines)) <= 100
    sections = [lines[number + 1] for number, line in enumerate(lines[:-1]) if not line]
    assert len(sections) == len(set(sections)) and {"run", "corpus", "train", "report"} <= set(sections)


def test_what_no_run_reads_is_refused(capsys: Any) -> None:
    """Settings of a recipe for another student and teacher than those of the command line."""
    line = refused_line(
        capsys, "settings", "--config-dir", "my", "+recipe=other", "student=bert", "teacher=bundled_small"
    )
    assert "teacher.revision=main: not read" in line and "student.search_seconds=5.0: not read" in line


def test_a_folder_of_recipes_is_given_in_two_words_to_every_command() -> None:
    given = ["--config-dir", "my_configs", "+recipe=my_pair", "steps=3"]
    request, rest = split(ProfileArguments, given, "profile")
    assert rest == given[:3] and request.steps == 3
