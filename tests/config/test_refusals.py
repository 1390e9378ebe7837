"""Settings that no run can have: each is refused with its name, value and cure, before anything is touched.

The table is refusals.yaml. Its rows are composed and checked in this process; a few are run.
"""

import json
import shlex
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import yaml
from hydra import initialize_config_dir
from job import Shelf, command, distill, library, metrics

from distill.commands.arguments import parse
from distill.commands.evaluate import EvaluateArguments
from distill.config.command_line import CommandLine, check_one_run, check_overrides, read_list
from distill.config.compose import build, register
from distill.config.composition import Composition, compose_overrides
from distill.config.layers import apply_overrides
from distill.config.override_text import in_shell
from distill.config.settings import CONF, Config
from distill.config.unknown import setting_error
from distill.runs.check import check
from distill.runtime.errors import SettingError

TABLE = yaml.load((Path(__file__).parent / "refusals.yaml").read_text(), Loader=yaml.BaseLoader)  # texts alone
VALUES = [(setting, f"{setting}={value}") for setting, values in TABLE["values"].items() for value in values]
TOGETHER = [tuple(row) for row in TABLE["together"]]


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    """Hydra set up once for all: that takes longer than to compose."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


@cache
def defaults() -> Composition:
    return compose_overrides("config", [])


def composed(arguments: list[str]) -> Config:
    """The settings of a command line, checked; where it names plain settings alone, upon one composition for all."""
    from omegaconf import OmegaConf

    line = CommandLine.of(arguments)
    check_overrides(line)
    check_one_run(line)
    parsed = line.parsed()
    plain = len(parsed) == len(line.overrides) and all("." in each.key_or_group for each in parsed)
    if plain and not any(each.is_add() or each.is_delete() for each in parsed):
        settings = deepcopy(defaults().settings)
        for each in parsed:
            OmegaConf.update(settings, each.key_or_group, each.value(), merge=True)
        apply_overrides(settings, line.overrides, defaults().hydra)
    else:
        settings = compose_overrides("config", line.overrides).settings
    config = build(settings, line.overrides)
    check(config)
    return config


def refusal(arguments: list[str]) -> SettingError:
    """That of a command line, with Hydra's errors as the command has them."""
    with pytest.raises(Exception) as raised:
        composed(arguments)
    error = raised.value if isinstance(raised.value, SettingError) else setting_error(raised.value)
    assert isinstance(error, SettingError), raised.value
    assert "\n" not in str(error) and error.status == 2
    return error


def test_the_table_is_long() -> None:
    rows = [*VALUES, *((setting, " ".join(given)) for given, setting, _ in TOGETHER)]
    assert len(rows) > 300 and len(VALUES) == len(set(VALUES))


@pytest.mark.parametrize(("setting", "override"), VALUES, ids=[override for _, override in VALUES])
def test_a_value_is_refused_by_name(setting: str, override: str) -> None:
    error = refusal([override])
    if error.setting:  # those of rooms below have the line alone yet
        assert error.setting.startswith(setting) and error.cure
    assert setting in str(error)


@pytest.mark.parametrize(("given", "setting", "words"), TOGETHER, ids=[" ".join(row[0]) for row in TOGETHER])
def test_a_command_line_is_refused(given: list[str], setting: str, words: str) -> None:
    error = refusal(given)
    assert setting in (error.setting or str(error)) and words in str(error), str(error)


@pytest.mark.parametrize("given", TABLE["accepted"], ids=[" ".join(given) for given in TABLE["accepted"]])
def test_what_is_at_the_edge_passes(given: list[str]) -> None:
    composed(given)


def test_refusals_of_several_settings_stand_in_one_line() -> None:
    bad = ["train.steps=0", "train.epochs=x", "optimizer.lr=fast", "backend.name=mpi", "student.init=layer"]
    error = refusal(bad)
    assert {each.setting for each in error.refusals} == {override.partition("=")[0] for override in bad}
    assert error.setting == error.refusals[0].setting and error.cure == error.refusals[0].cure
    assert all(str(each) in str(error) for each in error.refusals)


@pytest.mark.parametrize(
    "text",
    ["year=2024/a.txt", "books (1).txt", "übung.txt", "it's.txt", "'tis", "a#b;c&d!", "[d] e", "{a}", "1e5", "1_000",
     "true", "007", "https://host/a?b=c&d=e", "a~b", "中文", "a\\b(", "x, y=1"],
)  # fmt: skip
def test_a_text_is_taken_as_it_stands(text: str) -> None:
    """Any but one that would be several values, or a list."""
    for name in ("corpus.path", "+evaluate.sources.e.path", "student.path", "teacher.tokenizer", "data.cache"):
        (parsed,) = CommandLine.of([f"{name}={text}"]).parsed()
        assert parsed.value() == text
    assert CommandLine.of([f"hydra.run.dir={text}"]).parsed()[0].value() == text


@pytest.mark.parametrize("text", ["a,b.txt", "[d]", 'a,"b"', "$HOME,`x`", "it's, b", "a\\,b!"])
def test_the_cure_works_in_a_shell(text: str) -> None:
    (word,) = shlex.split(in_shell("corpus.path", text))
    assert CommandLine.of([word]).parsed()[0].value() == text


def test_entries_of_lists_and_values_of_sweeps_are_taken_too() -> None:
    sets, source = "evaluate.sets=[a=b,ü,c d]", "+evaluate.sources.e={kind: text, path: übung (1).txt}"
    found = [each.value() for each in CommandLine.of([sets, source]).parsed()]
    assert found == [["a=b", "ü", "c d"], {"kind": "text", "path": "übung (1).txt"}]
    (swept,) = CommandLine.of(["corpus.path=year=1,year=2", "-m"]).parsed()
    assert swept.is_sweep_override() and [value.text for value in swept.value().list] == ["year=1", "year=2"]
    assert read_list("model", "[runs/s/seed=0,runs/s/seed=1]") == ["runs/s/seed=0", "runs/s/seed=1"]


def test_home_is_what_a_shell_makes_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").mkdir()
    config = composed(
        ["corpus.path=~/x", "corpus.unlabelled=null", "teacher.path=~/x", "student.path=~/x", "student.tokenizer=~/x",
         "data.cache=~/x", "resume=~/x", "evaluate.sources.books.path=~/x",
         "evaluate.sources.imdb={kind: text, path: ~/x}"]
    )  # fmt: skip
    found = [config.corpus.source.path, config.teacher.path, config.student.path, config.student.tokenizer]
    found += [config.data.cache, config.resume, *(config.evaluate.sources[name].path for name in ("books", "imdb"))]
    assert set(found) == {str(tmp_path / "x")}
    assert config.written["corpus"]["path"] == "~/x", "as it was given, for another host"
    line = CommandLine.of(["hydra.run.dir=~/r", "hydra.searchpath=['file://~/x']", "--config-dir=~/x"])
    assert [each.value() for each in line.parsed()] == [f"{tmp_path}/r", [f"file://{tmp_path}/x"]]
    assert line.options["--config-dir"] == str(tmp_path / "x")
    arguments = parse(EvaluateArguments, ["model=~/x", "output=~/scores"], "evaluate")
    assert arguments.model == [f"{tmp_path}/x"] and arguments.output == tmp_path / "scores"


def refused(capfd: pytest.CaptureFixture, status: int, *words: str) -> None:
    """The last call wrote one line of its own, with these words, and no traceback."""
    assert status == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]
    assert len(lines) == 1, lines
    for word in words:
        assert word in lines[0], lines[0]


# Refused by the command: what Hydra or the arguments say alone, and what only a corpus, a model or a disk can tell.
RUN = {
    "smoke": ["give +recipe=smoke"],
    "+recipe=nope": ["recipe=nope", "distilbert_gutenberg"],
    "hydra.searchpath=null": ["hydra.searchpath=null", "hydra.searchpath=[file://FOLDER]"],
    "student.layers=[0,9]": ["student.layers=[0, 9]", "layers 0 to 3"],
    "corpus.sequence_length=512": ["corpus.sequence_length=512", "32"],
    "evaluate.sets=[books] evaluate.missing=stop": ["evaluate.sets", "evaluate.sources.books.path", "DISTILL_DATA"],
    "data.local=/proc/nowhere": ["data.local=/proc/nowhere", "give another"],
    "teacher.cache.top_k=99999 objective.masking.static=true objective.cosine.weight=0": ["top_k=99999", "vocabulary"],
    "teacher.cache={top_k:8,gigabytes:1e-6} objective.masking.static=true objective.cosine.weight=0": [
        "teacher.cache.gigabytes=1e-06", "top_k=8", "allow that much",
    ],
    "student.architecture=gpt2": ["student.architecture=gpt2"],
}  # fmt: skip


@pytest.mark.parametrize("given", RUN)
def test_a_run_is_refused(given: str, shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.delenv("DISTILL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    arguments = given.split(" ")
    alone = given in list(RUN)[:3]
    status = distill(*arguments) if alone else shelf.run(tmp_path / "run", *arguments)
    refused(capfd, status, *RUN[given])
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_name_means_the_same_whatever_folders_lie_beside_it(shelf: Shelf, tmp_path: Path) -> None:
    """`runs/model` is a name on the Hub, with a folder `runs/` and without; the message names both readings."""
    lines = []
    for number in range(2):
        process = command(*shelf.arguments(tmp_path / f"run{number}", "teacher.path=runs/model"))
        _, errors = process.communicate()
        lines.append([line for line in errors.splitlines() if line.startswith("distill: ")])
        assert process.returncode == 2 and len(lines[-1]) == 1, errors
        assert "teacher.path=runs/model" in lines[-1][0] and "looked up on the Hugging Face Hub" in lines[-1][0]
        assert f"no folder {tmp_path / 'runs/model'} exists" in lines[-1][0]
        (tmp_path / "runs").mkdir(exist_ok=True)
    assert lines[0] == lines[1]


def test_empty_folder_and_folder_without_text(shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    refused(capfd, shelf.run(tmp_path / "run", f"corpus.path={tmp_path / 'empty'}"), "corpus.path=")
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "a.txt").write_text("Hm.")
    refused(capfd, shelf.run(tmp_path / "run", f"corpus.path={tmp_path / 'few'}"), "corpus.path=")


def test_unreadable_book_is_skipped_and_counted_or_stops(
    shelf: Shelf,
    tmp_path: Path,
    capfd: pytest.CaptureFixture,
) -> None:
    books = library(tmp_path / "books")
    (books / "torn.txt.gz").write_bytes(b"\x1f\x8b no gzip at all")
    where = [f"corpus.path={books}", "train.steps=1"]
    refused(
        capfd, shelf.run(tmp_path / "stops", *where, "corpus.invalid_files=stop"), "torn.txt.gz", "corpus.invalid_files"
    )
    assert shelf.run(tmp_path / "skips", *where) == 0
    assert "torn.txt.gz" in capfd.readouterr().err
    skipped = json.loads((tmp_path / "skips" / "results.json").read_text())["corpus"]["skipped"]
    assert len(skipped) == 1 and "torn.txt.gz" in skipped[0]


def test_student_of_another_vocabulary(shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    other = tmp_path / "other"
    AutoModelForMaskedLM.from_pretrained(shelf.teacher / "student").save_pretrained(other)
    tokenizer = AutoTokenizer.from_pretrained(shelf.teacher / "student")
    text = [" ".join(f"unheard{n}" for n in range(200))] * 3
    tokenizer.train_new_from_iterator(text, 300).save_pretrained(other)
    arguments = ["student=pretrained", f"student.path={other}", "student.layers=null"]
    refused(capfd, shelf.run(tmp_path / "run", *arguments), f"student.path={other}", "vocabulary")


def test_full_folder_and_changed_settings_and_damage(
    shelf: Shelf,
    tmp_path: Path,
    capfd: pytest.CaptureFixture,
) -> None:
    folder = tmp_path / "run"
    assert shelf.run(folder, "train.steps=4") == 0
    capfd.readouterr()
    refused(capfd, shelf.run(folder, "train.steps=4", "resume=never"), "resume=never", "holds a run")
    refused(capfd, shelf.run(folder, "train.steps=4", "objective.temperature=3"), "objective.temperature was 2.0")
    (folder / "results.json").unlink()  # as if it had been killed before the report
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    whole = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(whole[:-4] + b"oops")
    before = metrics(folder)
    refused(capfd, shelf.run(folder, "train.steps=4", "resume=strict"), str(newest), "damaged", "resume=auto")
    assert metrics(folder) == before
    (newest / "model.safetensors").write_bytes(whole)
    assert shelf.run(folder, "train.steps=4") == 0
