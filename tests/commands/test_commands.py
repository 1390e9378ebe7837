"""The commands and the public names: lazily imported, helped, ended by the right status, and repeatable as printed."""

import importlib
import inspect
import io
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from html import unescape
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from job import ROOT, Shelf, as_value, assert_same, command, composed_line, distill, environment, results, run_dir
from omegaconf.errors import ConfigKeyError
from transformers import AutoModelForMaskedLM

import distill as package
from distill.commands.api.run import RunResults, output_for_programs
from distill.commands.cli import COMMANDS, main
from distill.commands.ending import status_of
from distill.config import CONF, RECIPES
from distill.runtime.errors import SettingError, StorageFailed
from distill.runtime.progress import configure_logging
from distill.runtime.users_code import find_modules_here

LIGHT = "assert not {'torch', 'transformers', 'hydra', 'omegaconf', 'matplotlib', 'numpy'} & {*sys.modules}\n"
PROGRAM = f"import sys, distill\n{LIGHT}import distill.commands.predict\ndistill.run, distill.SettingError\n{LIGHT}"
RUN = "import sys, distill.job; print(*{'wandb', 'datasets', 'matplotlib', 'torchmetrics'} & {*sys.modules})"
HELP = "import sys; from distill.commands.cli import main; assert not main([*NAME, '--help'])\n"
HELP += "assert not {'torch', 'hydra', 'transformers'} & {*sys.modules}\n"


def printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", [PROGRAM, pytest.param(RUN, marks=pytest.mark.slow)], ids=["names", "run"])
def test_nothing_heavy_is_imported_before_it_is_used(code: str) -> None:
    """Nor does a run import a package that it may never use, not even through what it imports, such as transformers."""
    assert not printed(code).strip()


def test_every_public_name_is_there_described_and_typed() -> None:
    """A checker sees every one: `import X as Y` re-exports only where both names are the same."""
    for name in package.__all__:
        found = getattr(package, name)
        assert not isinstance(found, ModuleType) and name in dir(package)
        assert name == "__version__" or len(inspect.getdoc(found) or "") > 30, name
    lines = (ROOT / "distill" / "__init__.pyi").read_text().splitlines()[1:]
    typed = [re.fullmatch(r"from [\w.]+ import (\w+) as \1", line)[1] for line in lines]
    assert sorted(typed) == sorted(package.__all__) and (ROOT / "distill" / "py.typed").is_file()
    with pytest.raises(AttributeError, match="has no attribute 'distil'"):
        package.distil  # noqa: B018


def test_every_command_has_help_in_no_time(capsys: Any) -> None:
    words = set(printed(HELP.replace("*NAME, ", "")).split())
    assert {*COMMANDS, *(file.stem for file in RECIPES.glob("*.yaml"))} <= words
    assert {folder.name for folder in CONF.iterdir() if folder.is_dir()} <= words
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: distill {name} ") and max(map(len, text.splitlines())) <= 120
    printed("".join(HELP.replace("*NAME", repr(name)) for name in COMMANDS))


def test_an_error_of_the_caller_is_raised_at_his_line(monkeypatch: Any) -> None:
    """Without the frames of the package in between, unless they are asked for."""
    calls = [
        lambda: package.distill(recipe="smoke", settings={"train.stepz": 1}),
        lambda: package.run(["+recipe=smoke", "train.stepz=1"]),
        lambda: package.load_pair("./nowhere"),
        lambda: package.predict("./nowhere", "text"),
        lambda: package.open_run("nowhere"),
        lambda: package.load_model("./nowhere"),
    ]
    for call in calls:
        with pytest.raises(SettingError) as raised:
            call()
        files = [str(frame.path) for frame in raised.traceback]
        assert len(files) <= 4 and sum("/distill/" in file for file in files) <= 1, files
    monkeypatch.setenv("DISTILL_TRACEBACK", "1")
    with pytest.raises(SettingError) as raised:
        calls[-1]()
    assert len(raised.traceback) > 3


def failing(error: BaseException) -> None:
    raise error


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def stopped_in_a_library() -> None:
    """As in OmegaConf, whose objects are not whole yet when it cleans up, and which wraps the error."""
    try:
        try:
            stopped()
        finally:
            failing(AttributeError("half-made"))
    except AttributeError as error:
        raise ConfigKeyError("'NoneType' object has no attribute") from error


@pytest.mark.parametrize(
    ("command", "given", "status", "words"),
    [
        (failing, [SettingError("corpus.path=x: none")], 2, "corpus.path=x: none"),
        (failing, [StorageFailed("s3://a is gone")], 74, "s3://a is gone"),
        (failing, [OSError(28, "No space left on device", "/data/x")], 74, "/data/x: No space left"),
        (failing, [OSError(24, "Too many open files", "/data/x")], 2, "ulimit -n"),
        (failing, [RuntimeError("can't start new thread")], 2, "ulimit -u"),
        (failing, [RuntimeError("could not create a primitive")], 2, "not enough memory"),
        (stopped, [], 143, "stopped by SIGTERM"),
        (stopped_in_a_library, [], 143, "stopped by SIGTERM"),
    ],
)
def test_what_is_expected_is_one_line_and_a_bug_has_a_traceback(
    command: Any, given: list[Any], status: int, words: str, capsys: Any
) -> None:
    assert status_of(command, *given) == status and status_of(lambda: None) == 0
    said = capsys.readouterr().err
    assert said.startswith("distill: ") and said.count("\n") == 1 and words in said
    with pytest.raises(ZeroDivisionError):
        status_of(failing, ZeroDivisionError())


def test_a_reader_that_ends_early_is_no_fault() -> None:
    command = [sys.executable, "-m", "distill", "--schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "{\n"
        writer.stdout.close()
        assert writer.stderr.read() == ""
    assert writer.returncode == 141


def state() -> list[Any]:
    """What a run could leave changed in its process."""
    logger = logging.getLogger("distill")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    hydra = [GlobalHydra.instance().hydra, HydraConfig.instance().cfg]
    return [logger.propagate, list(logger.handlers), handlers, hydra]


NAME = "my runs/it's $one"  # which a shell would cut


@pytest.fixture(scope="module")
def ran(shelf: Shelf, tmp_path_factory: Any) -> RunResults:
    """A run with relative paths in a program that uses Hydra itself; nothing but its folder is left."""
    before, home = state(), tmp_path_factory.mktemp("home")
    (home / "books").symlink_to(shelf.books)
    (home / "conf" / "recipe").mkdir(parents=True)
    (home / "conf" / "recipe" / "mine.yaml").write_text("# @package _global_\ndefaults: [distilbert_gutenberg]\n")
    relative = {f"corpus.path={shelf.books}": "corpus.path=books", "+recipe=distilbert_gutenberg": "+recipe=mine"}
    arguments = [relative.get(text, text) for text in shelf.arguments(home)[:-1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        with initialize_config_dir(str(home / "conf"), version_base="1.3"):
            own = GlobalHydra.instance().hydra
            found = package.run(["--config-dir", "conf", *arguments, "evaluate.by_set={}", run_dir(Path(NAME))])
            limited = ["evaluate.max_sequences=2", "evaluate.pseudo_perplexity.fraction=0"]
            scores = package.evaluate([found.folder], limited)
            assert GlobalHydra.instance().hydra is own
        assert state() == before and {path.name for path in home.iterdir()} == {"books", "conf", "my runs"}
    assert scores[str(found.folder)].scores["perplexity"]["heldout"] > 1 and "Perplexity, heldout" in repr(scores)
    return RunResults(home / found.folder, found.record)


@pytest.mark.parametrize("name", ["seed=0", "été", "it's, a=b", "(1) {b} [c]", "end\\", "${seed}", "a:b%", "plain"])
def test_the_folder_of_a_run_is_one_that_a_command_takes(name: str) -> None:
    folder = Path("runs") / name
    words = [run_dir(folder)] + [f"hydra.run.dir={as_value(str(folder))}"] * (name != "${seed}")
    for word in words:
        assert composed_line("+recipe=smoke", word).folder == folder


def test_the_console_script_finds_modules_of_the_working_folder(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "module_of_a_user.py").write_text("")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    before = list(sys.path)
    assert main(["--version"]) == 0 and sys.path == before, "not where no setting names one: it may be a stranger's"
    find_modules_here("distill.objective.terms.soft.Soft")
    assert sys.path == before
    for _ in range(2):
        find_modules_here("module_of_a_user.Loss")
        assert importlib.import_module("module_of_a_user") and sys.path == [*before, str(tmp_path)]


def test_what_the_results_hold_and_show(ran: RunResults, done: Path, shelf: Shelf) -> None:
    assert_same(ran.folder, done)
    content = results(ran.folder)
    assert ran.scores["student"]["perplexity"] == content["student"]["perplexity"]
    assert set(ran.scores) == {"teacher", "student"}
    assert set(ran.scores["teacher"]) == {"perplexity", "pseudo_perplexity"}
    assert ran.teacher == str(shelf.teacher) and ran.settings["train"]["batch_size"] == 8
    assert [line["step"] for line in ran.metrics] == list(range(1, content["training"]["steps"] + 1))
    assert ran.history == content["history"] and ran.report.is_file()
    AutoModelForMaskedLM.from_pretrained(ran.student)
    first, head, *lines, last = repr(ran).splitlines()
    assert first.startswith(f"mine in {ran.folder} after ") and str(ran.report) in last
    assert head.split()[:2] == ["Teacher", "Student"] and any(line.startswith("Perplexity") for line in lines)
    page = ran._repr_html_()
    assert page.count("<tr>") == page.count("</tr>") > 4 and "<th>Student</th>" in page and "<b>" in page
    shown = ran.plot()
    assert shown._repr_png_().startswith(b"\x89PNG")
    losses, scores = shown.axes
    assert losses.lines[0].get_label() == "Total" and len(losses.lines) == 4
    (student, teacher) = scores.lines
    assert list(student.get_ydata()) == [line["perplexity"]["heldout"] for line in ran.history]
    assert set(teacher.get_ydata()) == {ran.scores["teacher"]["perplexity"]["heldout"]}


def test_a_finished_run_is_given_again_and_opened(ran: RunResults, monkeypatch: Any) -> None:
    monkeypatch.chdir(ran.folder.parents[1])
    written = (ran.folder / "results.json").stat().st_mtime_ns
    again = package.run(shlex.split(ran.content["command"])[3:])
    assert again.scores == ran.scores and (ran.folder / "results.json").stat().st_mtime_ns == written
    opened = package.open_run(ran.folder)
    assert opened.content == ran.content and opened.teacher == ran.teacher
    with pytest.raises(SettingError, match=r"^folder=.*nothing is no finished run"):
        package.open_run(ran.folder / "nothing")


ERRORS = [
    (["+recipe=smok"], "smok"),
    (["+recipe=smoke", "seed=1,2"], r"^seed=1,2: several values; give one value, or write a list"),
    (["--multirun", "+recipe=smoke"], r"^this command is about one run; leave --multirun"),
    (["+recipe=smoke", "hydra.job.chdir=true"], r"^hydra\.job\.chdir: of Hydra's own settings one run reads"),
    (["+recipe=albert_chain"], "chain"),
    (["+recipe=smoke", "backend=ddp", "backend.processes=2"], r"^backend\.processes=2: .*nproc-per-node 2 PROGRAM"),
    (["+recipe=smoke", "backend=horovod", "backend.processes=3"], r"^backend\.processes=3: .*`horovodrun -np 3 P"),
]


def test_errors_are_raised(done: Path, tmp_path: Path) -> None:
    before = state()
    for overrides, line in ERRORS:
        with pytest.raises(SettingError, match=line):
            package.run(overrides)
    for call, *given in (
        (package.run, "+recipe=smoke"),
        (package.evaluate, str(done), []),
        (package.evaluate, {"mine": done}, []),
        (package.evaluate, [done, Path], []),
        (package.evaluate, [done], "evaluate.max_sequences=1"),
    ):
        with pytest.raises(SettingError, match="give a list") as error:
            call(*given)
        assert "\n" not in str(error.value)
    assert state() == before and not list(tmp_path.iterdir())


def test_messages_appear_once_and_in_a_notebook_as_its_output(monkeypatch: Any) -> None:
    """A cell's standard error is a red block."""
    of_program, package = logging.StreamHandler(io.StringIO()), logging.getLogger("distill")
    logging.getLogger().addHandler(of_program)
    of_notebook, cell = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"}), io.StringIO()
    monkeypatch.setattr("sys.stderr", of_notebook())
    monkeypatch.setattr("sys.stdout", cell)
    try:
        with output_for_programs():
            configure_logging(0)
            package.info("a message")
    finally:
        logging.getLogger().removeHandler(of_program)
    assert cell.getvalue().count("a message") == 1 and not of_program.stream.getvalue()
    assert package.propagate


def test_each_module_of_a_model_in_memory_keeps_its_mode(shelf: Shelf) -> None:
    held = package.load_model(shelf.teacher, "cpu")
    model = held.model.train()
    model.base_model.embeddings.eval()
    before = [module.training for module in model.modules()]
    package.predict((model, held.tokenizer), "A dark [MASK].")
    package.score(["A dark night."], (model, held.tokenizer))
    assert [module.training for module in model.modules()] == before and len(set(before)) == 2


def test_a_run_finds_what_was_prepared(shelf: Shelf, tmp_path: Path, capfd: Any, monkeypatch: Any) -> None:
    """In shards, and however many: the same sequences lie under the same key."""
    monkeypatch.setattr("distill.data.sources._files.SHARD_BYTES", 1)
    settings = [f"data.tokens={tmp_path / 'tokens'}", f"data.cache={tmp_path / 'cache'}", "train.steps=1"]
    assert main(["prepare", *shelf.arguments(tmp_path / "run", *settings, "data.shard_bytes=2000")]) == 0
    said = capfd.readouterr().err
    assert "preparing tokens of 6 Gutenberg files" in said and "tokens: 100%" in said and "MB/s" in said
    (place,) = (tmp_path / "tokens").iterdir()
    (corpus, heldout) = [line for line in said.splitlines() if line.startswith(("corpus: ", "heldout: "))]
    assert corpus.startswith("corpus: 6 shards, 456 sequences of 32, 14,592 tokens, ") and corpus.endswith(f" {place}")
    assert heldout.startswith("heldout: 1 shard, 24 sequences of 32, 768 tokens, ") and heldout.endswith(f" {place}")
    assert not (tmp_path / "run").exists() and not list((tmp_path / "cache").glob("tokens/*.build"))
    several = ("backend=ddp", "backend.processes=2")  # of the run to come; this command is one process
    assert main(["prepare", "show=1", *shelf.arguments(tmp_path / "run", *settings, *several)]) == 0
    assert capfd.readouterr().out.count("--- sequence ") == 1
    assert shelf.run(tmp_path / "run", *settings) == 0
    assert "preparing tokens" not in capfd.readouterr().err
    process = command("prepare", *shelf.arguments(tmp_path / "run", f"data.cache={tmp_path / 'other'}"))
    said = process.communicate(timeout=500)[1]
    assert process.returncode == 0 and any(line.startswith("corpus: 1 shard, ") for line in said.splitlines()), said


def as_printed(command: str, monkeypatch: Any) -> int:
    """The exit status of a command that begins in the folder that it names, as a shell runs it."""
    change, folder, then, *words = shlex.split(unescape(command))
    assert (change, then) == ("cd", "&&")
    monkeypatch.chdir(folder)
    return distill(*words[words.index("distill") + 1 :])


def test_the_command_of_a_report_is_that_of_its_run(
    ran: RunResults, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """From whatever folder it is given in; and that of scores gives them again."""
    run, before = ran.folder, results(ran.folder)
    for name in ("report.md", "report.html"):
        command = re.search(r"cd [^\n<]* -m distill [^\n<]*", (run / name).read_text())[0]
        assert as_printed(command, monkeypatch) == 0
        assert "This run is finished and nothing was changed" in capsys.readouterr().err
    assert results(run) == before and not list(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", f"model={run}", "output=scored"]) == 0
    scores = json.loads((tmp_path / "scored" / "scores.json").read_text())
    monkeypatch.chdir("/")
    assert as_printed(scores["command"], monkeypatch) == 0
    assert (tmp_path / "scored" / "earlier-scores.json").is_file()
    for name in ("results.json", "student"):
        (run / name).rename(tmp_path / name)
    assert as_printed(command, monkeypatch) == 0
    assert_same(tmp_path, run)
