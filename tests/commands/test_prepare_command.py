"""`python -m distill.prepare` makes the rows that a run of the same recipe finds, and refuses what it cannot make."""

from pathlib import Path

import pytest
from job import Shelf, command

from distill.commands.cli import main
from distill.config.settings import Config


def run(*arguments: str) -> int:
    """The command in this process; gives the exit status."""
    return main(["prepare", *arguments])


def test_a_run_finds_what_was_prepared(shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = [f"data.tokens={tmp_path / 'tokens'}", f"data.cache={tmp_path / 'cache'}", "train.steps=1"]
    arguments = shelf.arguments(tmp_path / "run", *settings)
    assert run(*arguments) == 0
    said = capfd.readouterr().err
    assert "preparing tokens of 6 Gutenberg files" in said and "tokens 100%" in said and "MB/s" in said
    (place,) = (tmp_path / "tokens").iterdir()
    lines = [line for line in said.splitlines() if line.startswith(("corpus: ", "heldout: "))]
    assert len(lines) == 2 and all("1 shard, " in line and line.endswith(f" in {place}") for line in lines)
    assert not (tmp_path / "run").exists() and not list((tmp_path / "cache").glob("tokens/*.build"))
    assert shelf.run(tmp_path / "run", *settings) == 0
    assert "preparing tokens" not in capfd.readouterr().err


def test_as_a_command_it_says_what_is_there(shelf: Shelf, tmp_path: Path) -> None:
    arguments = shelf.arguments(tmp_path / "run", f"data.cache={tmp_path / 'cache'}")
    process = command("prepare", *arguments)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0 and any(line.startswith("corpus: 1 shard, ") for line in said.splitlines()), said


def test_compression_and_shards_are_said_and_change_no_run(
    shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.data.sources._files.SHARD_BYTES", 1)
    settings = [f"data.cache={tmp_path / 'cache'}", "data.shard_bytes=2000", "data.compression=zstd"]
    assert run(*shelf.arguments(tmp_path / "run", *settings)) == 0
    (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("corpus: "))
    assert "6 shards, " in line and "; zstd made it " in line and line.endswith(" a second")
    # The rows lie under the same key however they are stored.
    (place,) = (tmp_path / "cache" / "tokens").glob("*/meta.json")
    assert run(*shelf.arguments(tmp_path / "run", settings[0])) == 0
    assert "preparing tokens" not in capfd.readouterr().err and place.exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["data.compression=gzip"], "data.compression=gzip: not known; choose one of zstd"),
        (["data.shard_bytes=0"], "data.shard_bytes=0: too small"),
        (["data.tokens="], "data.tokens=: empty"),
        (["data.tokens=nowhere://a"], "data.tokens=nowhere://a"),
        (["corpus.shard_byte=1"], "corpus.shard_byte"),
        (["corpus.heldout=0.1,0.2"], "corpus.heldout=0.1,0.2: several values; give one value"),
        (["corpus.heldout"], "corpus.heldout is not understood; write NAME=VALUE"),
        (["--multirun"], "this command is about one run"),
    ],
)
def test_bad_settings_are_one_line(
    shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert run(*shelf.arguments(tmp_path / "run", f"data.cache={tmp_path}", *arguments)) == 2
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith(f"distill: {line}")


@pytest.mark.parametrize(
    ("recipe", "line"), [("albert_chain", "this recipe is a chain"), ("glue", "objective.task=classes reads labelled")]
)
def test_what_has_no_text_to_prepare_is_refused(
    recipe: str, line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [f"student.path={tmp_path}"] if recipe == "glue" else []
    assert run(f"+recipe={recipe}", *given) == 2
    assert capfd.readouterr().err.startswith(f"distill: {line}")


def test_a_recipe_of_a_sweep_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Wherever it says that it is one: here in a file that another folder's recipe starts from."""
    for name, text in (("mine/recipe/sub/base", "hydra: {mode: MULTIRUN}\n"), ("mine/recipe/own", "")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        defaults = "defaults: [sub/base, _self_]\n" if not text else "defaults: [/recipe/smoke, _self_]\n"
        (tmp_path / f"{name}.yaml").write_text(f"# @package _global_\n{defaults}{text}")
    assert run("--config-dir", str(tmp_path / "mine"), "+recipe=own") == 2
    assert capfd.readouterr().err.startswith("distill: this command is about one run")
    assert run("+recipe=smoke", "hydra.mode=MULTIRUN") == 2
    assert capfd.readouterr().err.startswith("distill: this command is about one run")


def test_help_says_what_it_does(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "distill prepare +recipe=" in capfd.readouterr().out


def test_shards_are_of_a_gibibyte_unless_said() -> None:
    assert Config().data.shard_bytes == 1 << 30 and Config().data.compression is None
