"""Settings that no run can have: each is refused with its name, value and cure, before anything is touched.

The table is refusals.yaml, whose rows are composed and checked in this process; test_refused_runs.py has what is run.
"""

import shlex
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from distill.commands.arguments import parse
from distill.commands.small import EvaluateArguments
from distill.config.command_line import CommandLine, check_one_run, check_overrides, read_list
from distill.config.compose import Composition, build, compose_overrides, register
from distill.config.errors import setting_error
from distill.config.override_text import in_shell
from distill.config.settings import CONF, Config
from distill.runs.check import check
from distill.runtime.errors import SettingError

TABLE = yaml.load((Path(__file__).parent / "refusals.yaml").read_text(), Loader=yaml.BaseLoader)  # texts alone
VALUES = [(setting, f"{setting}={value}") for setting, values in TABLE["values"].items() for value in values]


def rows(name: str) -> Any:
    """The rows of a section, whose first cell is a command line, for a test of so many arguments."""
    return [pytest.param(*row, id=" ".join(row[0])[:80]) for row in TABLE[name]]


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    """Hydra set up once for all: that takes longer than to compose."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


@cache
def defaults() -> Composition:
    return compose_overrides(["~recipe"])


def composed(arguments: list[str]) -> Config:
    """The settings of a command line, checked; where it names plain settings alone, upon one composition for all."""
    line = CommandLine.of(arguments)
    check_overrides(line)
    check_one_run(line)
    parsed = line.parsed()
    plain = len(parsed) == len(line.overrides) and all("." in each.key_or_group for each in parsed)
    if plain and not any(each.is_add() or each.is_delete() for each in parsed):
        settings = deepcopy(defaults().settings)
        for each in parsed:
            OmegaConf.update(settings, each.key_or_group, each.value(), merge=True)
    else:
        alone = [] if any("recipe=" in text.partition(".")[0] for text in line.overrides) else ["~recipe"]
        settings = compose_overrides([*alone, *line.overrides]).settings
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


@pytest.mark.parametrize(("setting", "override"), VALUES, ids=[override for _, override in VALUES])
def test_a_value_is_refused_by_name(setting: str, override: str) -> None:
    error = refusal([override])
    if error.setting:  # those of rooms below have the line alone yet
        assert error.setting.startswith(setting) and (error.cure or "should" in str(error))
    assert setting in str(error)


@pytest.mark.parametrize(("given", "setting", "words"), rows("together"))
def test_a_command_line_is_refused(given: list[str], setting: str, words: str) -> None:
    error = refusal(given)
    assert setting in (error.setting or str(error)) and words in str(error), str(error)


@pytest.mark.parametrize("given", TABLE["accepted"], ids=" ".join)
def test_what_is_at_the_edge_passes(given: list[str]) -> None:
    composed(given)


def test_refusals_of_several_settings_stand_in_one_line() -> None:
    bad = ["train.steps=0", "train.epochs=x", "optimizer.kind=adamm", "schedule.kind=wavy", "student.init=layer"]
    error = refusal(bad)
    assert {each.setting for each in error.refusals} == {override.partition("=")[0] for override in bad}
    assert error.setting == error.refusals[0].setting and error.cure == error.refusals[0].cure
    assert all(str(each) in str(error) for each in error.refusals)


@pytest.mark.parametrize("text", TABLE["texts"])
def test_a_text_is_taken_as_it_stands(text: str) -> None:
    """Any but one that would be several values, or a list; such a one as its refusal writes it."""
    is_plain = ("," not in text and text[0] != "[") or text == "[d] e"
    for name in ("corpus.path", "+evaluate.sources.e.path", "student.path", "data.cache", "hydra.run.dir"):
        (word,) = [f"{name}={text}"] if is_plain else shlex.split(in_shell(name, text))
        assert CommandLine.of([word]).parsed()[0].value() == text


def test_entries_of_lists_and_values_of_sweeps_are_taken_too() -> None:
    sets, source = "evaluate.sets=[a=b,ü,c d]", "+evaluate.sources.e={kind: text, path: übung (1).txt}"
    found = [each.value() for each in CommandLine.of([sets, source]).parsed()]
    assert found == [["a=b", "ü", "c d"], {"kind": "text", "path": "übung (1).txt"}]
    (swept,) = CommandLine.of(["corpus.path=year=1,year=2", "-m"]).parsed()
    assert swept.is_sweep_override() and [value.text for value in swept.value().list] == ["year=1", "year=2"]
    assert read_list("model", "[runs/s/seed=0,runs/s/seed=1]") == ["runs/s/seed=0", "runs/s/seed=1"]


def test_home_is_what_a_shell_makes_of_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").mkdir()
    names = ["corpus.path", "teacher.path", "student.path", "student.tokenizer", "data.cache", "resume"]
    given = [*(f"{name}=~/x" for name in names), "evaluate.sources.imdb={kind: text, path: ~/x}"]
    config = composed([*given, "corpus.unlabelled=null", "student=pretrained"])
    found = [config.corpus.path, config.teacher.path, config.student.path, config.student.tokenizer]
    found += [config.data.cache, config.resume, config.evaluate.sources["imdb"].path]
    assert set(found) == {str(tmp_path / "x")}
    assert config.written["corpus"]["path"] == "~/x", "as it was given, for another host"
    line = CommandLine.of(["hydra.run.dir=~/r", "hydra.searchpath=['file://~/x']"])
    assert [each.value() for each in line.parsed()] == [f"{tmp_path}/r", [f"file://{tmp_path}/x"]]
    assert CommandLine.of(["--config-dir=~/x"]).options["--config-dir"] == str(tmp_path / "x")
    arguments = parse(EvaluateArguments, ["model=~/x", "output=~/scores"], "evaluate")
    assert arguments.model == [f"{tmp_path}/x"] and arguments.output == tmp_path / "scores"


def test_a_student_takes_layers_of_the_first_teacher_where_a_further_one_is_on_a_server() -> None:
    served = "{url: 'http://h/v1', model: m, tokenizer: ., cache: {top_k: 20}}"
    line = ["+recipe=distilgpt2_gutenberg", "objective.cosine.weight=0", "objective.temperature=1", "teacher=several"]
    assert composed([*line, "+teacher.members.a.path=.", f"+teacher.members.b={served}"]).student.from_layers
    assert refusal([*line, f"+teacher.members.a={served}", "+teacher.members.b.path=."]).setting == "student.init"
