"""What `distill settings` prints: values, units, meanings, and who set them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from job import distill, refused_line

from distill.commands.arguments import split
from distill.commands.small import ProfileArguments

Capture = pytest.CaptureFixture[str]


def printed(capsys: Capture, *arguments: str) -> list[str]:
    assert distill("settings", *arguments) == 0
    return capsys.readouterr().out.splitlines()


def origin(lines: list[str], setting: str) -> tuple[str, str]:
    """Value and origin of a setting without its section."""
    (line,) = [line for line in lines if line.startswith(f"  {setting} = ")]
    value, who = re.fullmatch(rf"  {re.escape(setting)} = (.*?)  +(\S.*)", line).groups()  # type: ignore[union-attr]
    return value, who


def test_all_settings_of_the_main_job(capsys: Capture) -> None:
    lines = printed(capsys)
    assert lines[0] == "Settings of the recipe distilbert_gutenberg"
    assert max(map(len, lines)) <= 100
    sections = [lines[number + 1] for number, line in enumerate(lines[:-1]) if not line]
    assert len(sections) == len(set(sections)) and {"run", "corpus", "train", "report"} <= set(sections)
    assert origin(lines, "sequences_per_step") == ("8 sequences", "recipe distilbert_gutenberg")
    assert origin(lines, "save_every") == ("100 steps", "default")
    assert origin(lines, "temperature") == ("1.0", "objective=masked_t1")
    assert origin(lines, "soft.temperature")[0] == "${objective.temperature}"
    where = lines.index(next(line for line in lines if line.startswith("  save_every")))
    assert lines[where + 1].startswith("      Steps between two checkpoints;")


def test_a_part_and_who_of_nested_recipes_and_the_command_line_set_it(capsys: Capture) -> None:
    arguments = ["optimizer", "train.steps", "schedule", "seed", "teacher.path", "+recipe=albert_aws", "optimizer=lamb"]
    lines = printed(capsys, *arguments, "seed=3", "optimizer.clip=2")
    assert lines[0] == "Settings of the recipe albert_aws" and "backend" not in lines
    assert origin(lines, "lr") == ("0.00176", "optimizer=lamb")
    assert origin(lines, "bias_correction") == ("false", "optimizer=lamb")
    assert origin(lines, "clip") == ("2", "command line") and origin(lines, "seed") == ("3", "command line")
    assert origin(lines, "clip_each_rank") == ("true", "recipe albert_aws")
    assert origin(lines, "warmup_steps") == ("3125", "recipe albert_aws")
    assert origin(lines, "end_lr") == ("3e-05", "recipe albert_aws")
    assert origin(lines, "steps") == ("125000 steps", "recipe albert_aws")


def test_files_of_the_users_are_named_and_what_a_path_means_is_the_command_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "my/optimizer/mine.yaml": "kind: adamw\nweight_decay: 0.5\n",
        "my/recipe/mine.yaml": "# @package _global_\ndefaults: [smoke, _self_]\ntrain: {keep: 9}\n",
    }.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    Path("x").mkdir()
    lines = printed(capsys, "--config-dir", "my", "+recipe=mine", "optimizer=mine", "teacher.path=./x")
    assert origin(lines, "keep") == ("9", "recipe mine")
    assert origin(lines, "epochs") == ("2", "recipe mine")
    assert origin(lines, "weight_decay")[1] == "optimizer=mine"
    assert any(re.fullmatch(r"  path = ./x +command line", line) for line in lines)


def test_no_secret_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2hunter2")
    url = "+evaluate.sources.secret={kind: text, path: 'https://me:literal-secret@host/books.txt'}"
    lines = printed(capsys, "+recipe=smoke", url, "tracker.project=${oc.env:MY_SECRET}")
    assert origin(lines, "project") == ("${oc.env:MY_SECRET}", "command line")
    assert any(line.startswith("  sources.secret.path = https://***@host/books.txt") for line in lines)
    assert not any("hunter2" in line or "literal-secret" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["optimizr"], "optimizr is no setting or section (did you mean optimizer"),
        (["optimizer.lr=1e-3,2e-3"], "optimizer.lr=1e-3,2e-3: several values; add --multirun"),
        (["+recipe=albert_chain"], "this recipe is a chain"),
        (["--cfg", "job"], "--cfg: `distill settings` takes --config-dir alone"),
        (["objective.beta=0.3"], "(did you mean objective.jsd.beta?)"),
        (["teacher.path", "+recipe=distil_chat", "corpus.path=.", "teacher=none"], "its values win over options"),
    ],
)
def test_bad_input_ends_in_one_line(arguments: list[str], words: str, capsys: Capture) -> None:
    assert words in refused_line(capsys, "settings", *arguments)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("train.steps=abc", "train.steps=abc: should be a valid integer"),
        ("train.batch_size=64", "train.batch_size=64: more than a step has"),
        ("optimizer=custom", "optimizer._target_: missing"),
        ("+optimizer.betaz=1", "optimizer.betaz: no setting"),
        ("corpus.path=/no/such", "corpus.path=/no/such: no such file"),
        ("objective.soft_classes.weight=1", "objective.soft_classes: reads a head"),
        ("hydra.job.chdir=true", "hydra.job.chdir: "),
    ],
)
def test_what_a_run_refuses_is_refused(argument: str, words: str, capsys: Capture) -> None:
    for command in ([], ["settings"]):
        assert words in refused_line(capsys, *command, argument)


def test_what_no_run_reads_is_refused_and_what_it_does_not_use_is_left_out(tmp_path: Path, capsys: Capture) -> None:
    """Settings of a recipe for another student, teacher and schedule than those of the command line."""
    (tmp_path / "recipe").mkdir()
    head = "# @package _global_\ndefaults: [smoke, _self_]\n"
    own = "student: {search_seconds: 5}\nteacher: {revision: main, micro_batches: 2}\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(head + own)
    mine = ["--config-dir", str(tmp_path), "+recipe=mine", "student=bert", "teacher=bundled_small"]
    line = refused_line(capsys, "settings", *mine)
    assert "teacher.revision=main: not read" in line and "student.search_seconds=5.0: not read" in line
    lines = printed(capsys, *mine, "student.search_seconds=null", "teacher.revision=null")
    names = {line.split(" = ")[0].strip() for line in lines}
    assert (
        not names & {"power", "search_seconds", "num_layers"} and {"micro_batches", "warmup", "architecture"} <= names
    )


def test_what_a_loss_term_takes_besides_with_its_defaults(capsys: Capture) -> None:
    lines = printed(capsys, "objective", "objective.jsd.weight=0.5", "objective.mine={kind: soft, cutoff: 0.1}")
    assert origin(lines, "jsd.weight") == ("0.5", "command line")
    assert origin(lines, "jsd.positions") == ("all", "default")
    assert origin(lines, "jsd.beta") == ("0.5", "default")
    assert origin(lines, "jsd.temperature") == ("${objective.temperature}", "default")
    assert origin(lines, "mine.cutoff") == ("0.1", "command line") and origin(lines, "mine.positions")[1] == "default"
    assert lines[lines.index(next(line for line in lines if "jsd.beta" in line)) + 1].startswith(
        "      The teacher's w"
    )


def test_a_teacher_of_a_recipe_that_names_it_by_its_path(capsys: Capture) -> None:
    chat = ["teacher.path", "+recipe=distil_chat", "corpus.path=."]
    assert origin(printed(capsys, *chat), "path") == ("Qwen/Qwen2.5-1.5B-Instruct", "recipe distil_chat")
    lines = printed(capsys, *chat, "teacher=none", "teacher.path=bundled_small")
    assert origin(lines, "path") == ("bundled_small", "command line")


def test_a_folder_of_recipes_is_given_in_two_words_to_every_command() -> None:
    given = ["--config-dir", "my_configs", "+recipe=my_pair", "steps=3"]
    request, rest = split(ProfileArguments, given, "profile")
    assert rest == given[:3] and request.steps == 3


def test_a_folder_of_recipes_may_stand_before_the_command(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\n# Mine.\nseed: 17\n")
    for given in (["--config-dir", str(tmp_path)], [f"--config-dir={tmp_path}"]):
        assert distill(*given, "settings", "+recipe=mine", "seed") == 0
        assert origin(capsys.readouterr().out.splitlines(), "seed") == ("17", "recipe mine")


def test_a_reader_that_ends_early_is_no_fault() -> None:
    command = [sys.executable, "-m", "distill", "--schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "{\n"
        writer.stdout.close()
        assert writer.stderr is not None and writer.stderr.read() == ""
    assert writer.returncode == 141
