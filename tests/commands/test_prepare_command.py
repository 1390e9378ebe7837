"""`distill prepare` makes the sequences that a run of the same recipe finds, and refuses what it cannot make."""

from pathlib import Path

import pytest
from job import Shelf, command

from distill.commands.cli import main


def run(*arguments: str) -> int:
    """The command in this process; gives the exit status."""
    return main(["prepare", *arguments])


def test_a_run_finds_what_was_prepared(
    shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In shards, and however many: the same sequences lie under the same key."""
    monkeypatch.setattr("distill.data.sources._files.SHARD_BYTES", 1)
    settings = [f"data.tokens={tmp_path / 'tokens'}", f"data.cache={tmp_path / 'cache'}", "train.steps=1"]
    assert run(*shelf.arguments(tmp_path / "run", *settings, "data.shard_bytes=2000")) == 0
    said = capfd.readouterr().err
    assert "preparing tokens of 6 Gutenberg files" in said and "tokens: 100%" in said and "MB/s" in said
    (place,) = (tmp_path / "tokens").iterdir()
    (corpus, heldout) = [line for line in said.splitlines() if line.startswith(("corpus: ", "heldout: "))]
    assert corpus.startswith("corpus: 6 shards, 456 sequences of 32, 14,592 tokens, ") and corpus.endswith(f" {place}")
    assert heldout.startswith("heldout: 1 shard, 24 sequences of 32, 768 tokens, ") and heldout.endswith(f" {place}")
    assert not (tmp_path / "run").exists() and not list((tmp_path / "cache").glob("tokens/*.build"))
    assert shelf.run(tmp_path / "run", *settings) == 0
    assert "preparing tokens" not in capfd.readouterr().err


def test_as_a_command_it_says_what_is_there(shelf: Shelf, tmp_path: Path) -> None:
    process = command("prepare", *shelf.arguments(tmp_path / "run", f"data.cache={tmp_path / 'cache'}"))
    said = process.communicate(timeout=500)[1]
    assert process.returncode == 0 and any(line.startswith("corpus: 1 shard, ") for line in said.splitlines()), said


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["data.compression=zstd"], "data.compression"),
        (["data.shard_bytes=0"], "data.shard_bytes=0: "),
        (["data.tokens="], "data.tokens=: empty"),
        (["data.tokens=nowhere://a"], "data.tokens=nowhere://a"),
        (["corpus.shard_byte=1"], "corpus.shard_byte"),
        (["corpus.heldout=0.1,0.2"], "corpus.heldout=0.1,0.2: several values; give one value"),
        (["corpus.heldout"], "corpus.heldout: `distill prepare` takes NAME=VALUE"),
        (["show=5000"], "show=5000: "),
        (["--multirun"], "this command is about one run"),
        (["hydra.mode=MULTIRUN"], "this command is about one run"),
        (["+recipe=albert_chain"], "this recipe is a chain"),
        (["+recipe=glue", "student.path=."], "objective.task=classes: reads labelled"),
        (["--config-dir", "mine", "+recipe=own"], "this command is about one run"),  # by what it starts from
    ],
)
def test_bad_settings_are_one_line(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("sub/base", "hydra: {mode: MULTIRUN}\n"), ("own", "defaults: [sub/base, _self_]\n")):
        file = tmp_path / "mine" / "recipe" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        head = "defaults: [/recipe/smoke, _self_]\n" if name == "sub/base" else ""
        file.write_text(f"# @package _global_\n{head}{text}")
    recipe = [] if any(word.startswith("+recipe=") for word in arguments) else ["+recipe=smoke"]
    assert run(*recipe, *arguments) == 2
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith(f"distill: {line}")
