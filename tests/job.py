"""Runs the main job in this process or as a command, on a small library of made-up books."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families import depth_fields, make_family
from forked import Forked
from hydra import initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AlbertConfig, AlbertForPreTraining
from vocabularies import special_ids, vocabulary_of

# Some of these are handed on: no other test imports from these modules (ruff keeps it so, by pyproject.toml).
from distill import job as whole_run  # noqa: F401
from distill.commands.cli import main
from distill.config import compose as composition  # noqa: F401
from distill.config.command_line import CommandLine, check_one_run, check_overrides, run_dir  # noqa: F401
from distill.config.compose import (  # noqa: F401
    ComposedRun,
    Composition,
    build,
    chain_config,
    compose,
    compose_overrides,
    composed_run,
    default_settings,
    register,
    run_of,
)
from distill.config.override_text import as_value, parse_override  # noqa: F401
from distill.config.settings import CONF, ChainConfig, Config
from distill.runtime.files import locked

ROOT = Path(__file__).resolve().parent.parent
NOUNS = [
    "river", "house", "letter", "winter", "captain", "garden", "mother", "soldier", "morning", "road", "window",
    "horse", "king", "ship", "story",
]  # fmt: skip
VERBS = [
    "found", "left", "carried", "watched", "remembered", "followed", "lost", "painted", "kept", "opened", "crossed",
    "wrote", "heard",
]  # fmt: skip
ADJECTIVES = ["old", "quiet", "golden", "broken", "distant", "little", "heavy", "strange", "bright", "narrow"]
WHERE = ["by the sea", "in the valley", "at the gate", "over the hill", "near the church", "under the stars"]
TINY = "student.config={hidden_size:32,num_hidden_layers:4,num_attention_heads:2,intermediate_size:64}"


def book(number: int, paragraphs: int = 40) -> str:
    """A Project Gutenberg file as published, with sentences whose words depend on each other."""
    draw, lines = random.Random(number), list[str]()
    for _ in range(paragraphs):
        for _ in range(6):
            noun = draw.randrange(len(NOUNS))
            # The verb follows from the noun: something that a masked language model can learn.
            words = f"{draw.choice(ADJECTIVES)} {NOUNS[noun]} {VERBS[noun % len(VERBS)]}"
            lines.append(f"The {words} the {draw.choice(NOUNS)} {draw.choice(WHERE)}.")
        lines.append("")
    return (
        f"The Project Gutenberg eBook of Book {number}\n\n"
        f"*** START OF THE PROJECT GUTENBERG EBOOK BOOK {number} ***\n\n"
        + "\n".join(lines)
        + f"\n*** END OF THE PROJECT GUTENBERG EBOOK BOOK {number} ***\nLicence.\n"
    )


def library(folder: Path, books: int = 6) -> Path:
    folder.mkdir(parents=True)
    for number in range(books):
        (folder / f"book{number}.txt").write_text(book(number), encoding="utf-8")
    return folder


def distill(*arguments: str) -> int:
    """`python -m distill ARGUMENTS` in this process; gives the exit status."""
    before = sys.argv
    sys.argv = ["distill", *arguments]
    try:
        return main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before


def refused_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command is refused; no override is shown in it at length."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    line = capsys.readouterr().err
    assert line.startswith("distill: ") and line.count("\n") == 1 and len(line) < 1000, line[:2000]
    return line


def environment(path: Path | None = None) -> dict[str, str]:
    """That of a process of its own; `path` is a folder to import from besides."""
    folders = os.pathsep.join(str(folder) for folder in (ROOT, path) if folder)
    return {**os.environ, "PYTHONPATH": folders, "DISTILL_DATA": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def command(*arguments: str, path: Path | None = None) -> Forked:
    """The same as a process of its own, which can import from `path` too; see `forked`."""
    return Forked(list(arguments), environment(path))


def program(*arguments: str, path: Path | None = None) -> subprocess.Popen[str]:
    """The same in an interpreter of its own, as a user starts it: four seconds more, for each of the ranks as well."""
    words, pipes = [sys.executable, "-m", "distill", *arguments], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, env=environment(path), text=True, **pipes)


# A run of several ranks is forked, and among the slow tests it starts interpreters of its own.
STARTS = [pytest.param(command, id="forked"), pytest.param(program, id="program", marks=pytest.mark.slow)]


def save_model(folder: Path, family: str = "gpt2", layers: int = 4, **fields: Any) -> Path:
    """A folder with an untrained model of any family, with a tokenizer as its published ones have."""
    tokenizer = vocabulary_of(family)
    make_family(family, **{**depth_fields(family, layers), **special_ids(tokenizer), **fields}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_ordered(folder: Path) -> Path:
    """A folder with an untrained ALBERT that has a head for the order of segments, with a tokenizer."""
    tokenizer = vocabulary_of("bert")
    sizes = {"embedding_size": 16, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = AlbertConfig(
        vocab_size=len(tokenizer), num_hidden_layers=4, max_position_embeddings=512, pad_token_id=0, **sizes
    )
    AlbertForPreTraining(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Shelf:
    """Books, a teacher trained on them, and the arguments of a distillation from it.

    Attributes:
        root: where runs of this worker go, in folders of their own.
        shared: what all workers of a session read, each thing made by the first that asks for it.
    """

    def __init__(self, root: Path, shared: Path) -> None:
        self.root, self.shared = root, shared
        with locked(shared / "books.lock"):
            self.books = shared / "books" if (shared / "books").exists() else library(shared / "books")
        self.corpus = [f"corpus.path={self.books}", f"data.cache={root / 'cache'}", "data.workers=1"]
        self.corpus += ["corpus.sequence_length=32", "corpus.heldout=0.1"]
        self.corpus += ["evaluate.sets=[heldout]", "evaluate.max_sequences=8"]
        self.teacher = self.once("teacher", self.pretrain)

    def once(self, name: str, work: Callable[[Path], int]) -> Path:
        """The folder of a run that all workers read and none changes, which `work` makes where there is none."""
        folder = self.shared / name
        with locked(self.shared / f"{name}.lock"):
            if not (folder / "results.json").exists():
                assert work(folder) == 0
        return folder

    def pretrain(self, folder: Path, recipe: str = "bert_pretrain", size: str = TINY) -> int:
        train = ["train.batch_size=16", "train.accumulate=1", "train.epochs=null", "train.steps=60", "precision=fp32"]
        more = [size, "corpus.vocab_size=400", "optimizer.lr=5e-3", f"hydra.run.dir={folder}"]
        return distill(f"+recipe={recipe}", *self.corpus, *train, *more)

    def settings(self, *more: str) -> list[str]:
        train = ["train.batch_size=8", "train.accumulate=2", "train.epochs=2", "train.save_every=2"]
        train += ["corpus.max_sequences=60", "teacher=pretrained", f"teacher.path={self.teacher}"]
        # The same format on every machine that the tests run on, whatever pays there.
        fixed = [*self.corpus, *train, "evaluate.pseudo_perplexity.fraction=0.1", "precision=fp32"]
        # tests/runs/test_layer_search.py finds layers by scores; DistilBERT's weights show each term in the loss.
        fixed += ["student.layers=[0,1]", "objective=masked"]
        if not any(setting.startswith("evaluate.every_steps=") for setting in more):
            fixed.append("evaluate.every_steps=null")  # by epoch
        return ["+recipe=distilbert_gutenberg", *fixed, *more]

    def arguments(self, folder: Path, *more: str) -> list[str]:
        return [*self.settings(*more), f"hydra.run.dir={folder}"]

    def run(self, folder: Path, *more: str) -> int:
        return distill(*self.arguments(folder, *more))

    def run_alone(self, folder: Path, *more: str, start: Callable[..., Any] = command, status: int = 0) -> str:
        """The same as a process of its own, with its ranks where it has several; gives what it has logged."""
        return finish(start(*self.arguments(folder, *more), path=ROOT / "tests"), status)


def finish(process: Any, status: int = 0) -> str:
    """What a process has logged, once it has ended with this status."""
    _, errors = process.communicate(timeout=500)
    assert process.returncode == status, errors
    return errors


def interrupted(finished: Path, folder: Path, leave: int = -1) -> Path:
    """A copy of a finished run as a kill after its last checkpoints but one would have left it.

    `leave`: where the checkpoints end that stay.
    """
    shutil.copytree(finished, folder)
    (folder / "results.json").unlink()
    for path in sorted((folder / "checkpoints").glob("step-*"))[leave:]:
        shutil.rmtree(path)
    return folder


def lines_of(capfd: Any) -> list[str]:
    """The lines of `distill: ...` that were logged since they were last read."""
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("distill: ")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "student" / "model.safetensors")


def assert_same(one: Path, other: Path) -> None:
    """The same student, bitwise."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def assert_alike(one: Path, other: Path, atol: float = 2e-4) -> None:
    """The same student, but for rounding."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def wait_for(condition: Any, *processes: Any) -> None:
    """Wait until something is so, however slow the machine is; none of these processes may end before."""
    deadline = time.monotonic() + 300
    while not condition():
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether this process is there, and is not only waiting to be collected by its parent."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def is_handled(number: signal.Signals, pid: int) -> bool:
    """Whether this signal has a handler in that process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


@contextmanager
def hydra_set_up() -> Iterator[None]:
    """Hydra set up for several calls of `built`: that takes longer than to compose."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def built(*overrides: str) -> Config:
    """As `composed`, where Hydra has been set up."""
    line = CommandLine.of(list(overrides))
    alone = [] if any(text.startswith("recipe=") for text in line.overrides) else ["~recipe"]  # not the main job
    return build(compose_overrides([*alone, *line.overrides]).settings, line.overrides)


def composed(*overrides: str) -> Config:
    """The settings that a command line with these overrides gives; with no recipe, no main job."""
    with hydra_set_up():
        return built(*overrides)


def composed_chain(*overrides: str, search: Path | None = None) -> ChainConfig | None:
    """The chain of a recipe; `search`: a folder with more recipes."""
    path = [f"hydra.searchpath=[file://{search}]"] if search else []  # what --config-dir does
    line = CommandLine.of([*overrides, *path])
    with hydra_set_up():
        return chain_config(compose_overrides(line.overrides).settings, list(overrides))


def composition_of(*arguments: str) -> Composition:
    """What a whole command line composes, its options included."""
    return compose(CommandLine.of(list(arguments)))


def composed_line(*arguments: str) -> ComposedRun:
    """The run that a whole command line describes."""
    return composed_run(list(arguments))


def check_words(*overrides: str) -> None:
    """Refuse what is wrong with overrides before anything is composed."""
    check_overrides(CommandLine.of(list(overrides)))


def check_line(*arguments: str) -> None:
    """Refuse a command line as one is before it begins; settings that are still open, such as a path, are given."""
    check_words(*arguments)
    found = composition_of(*arguments)
    if chain_config(found.settings, found.overrides) is None:
        for name in OmegaConf.missing_keys(found.settings):
            value = "sst2" if name.endswith("task") else "SOMEWHERE"
            OmegaConf.update(found.settings, name, value, force_add=True)
        build(found.settings, found.overrides)
