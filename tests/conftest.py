"""Fixtures of the tests: quick, offline, one thread, so that sums are made in the same order everywhere."""

from distill.runtime.host import limit_spinning

limit_spinning()  # before torch is loaded

import gc  # noqa: E402
import logging  # noqa: E402
import signal  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402
import undrawn  # noqa: E402
from job import Shelf  # noqa: E402

torch.set_num_threads(1)
# What was started in the background of a shell, or by nohup, ignores these; the processes that tests start would, too.
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


# The files that took most of a processor when they were measured one by one.
LONGEST = ["test_launch.py", "test_bad_settings.py", "test_recipes.py", "test_ranks.py", "test_main_job.py"]
LONGEST += ["test_readme.py", "test_divided_job.py", "test_browser.py", "test_damaged_sequences.py", "test_docs.py"]
LONGEST += ["test_recipes_manual.py", "test_identity.py", "test_several_teachers.py", "test_refusals.py"]
LONGEST += ["test_layer_search.py", "test_fine_tuning.py", "test_causal_job.py"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test starts in an empty folder: what lies where pytest was started, such as `runs/`, changes nothing."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Runs within the tests' own process leave it the number of threads that they took."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny.make_tokenizer()


@pytest.fixture(scope="session")
def teacher() -> Any:
    """A frozen BERT of 4 layers x 32; no test may change it."""
    return tiny.make_model("bert", 4).requires_grad_(False)


@pytest.fixture(scope="session")
def rows() -> np.ndarray:
    """20 rows of 5 to 12 tokens, padded: with 8 rows a step the last step of an epoch has 4."""
    return tiny.make_rows(20, shortest=5)


@pytest.fixture(autouse=True)
def undrawn_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn in the runs that tests share, in those of `program`, and in tests of reports."""
    if "report" not in request.path.parts:
        monkeypatch.setattr(undrawn.DRAWING, undrawn.save_figure)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What the package says, as it is said."""
    said: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    caplog.set_level(logging.INFO, "distill")
    handler = Collect()
    logging.getLogger("distill").addHandler(handler)
    yield said
    logging.getLogger("distill").removeHandler(handler)


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """Books and a teacher trained on them; runs go to folders of their own below it."""
    made = Shelf(tmp_path_factory.mktemp("shelf"))
    assert made.pretrain() == 0
    return made


@pytest.fixture(scope="session")
def done(shelf: Shelf) -> Path:
    """The folder of an undisturbed run on that shelf; no test may change it."""
    assert shelf.run(shelf.root / "done") == 0
    return shelf.root / "done"


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file stays with one worker, so that what its tests share is made once; the longest files come first.

    Otherwise the last of them would be under way while the other workers have nothing left to do.
    """
    if config.getoption("dist") != "load":
        return None  # the user has chosen another order
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # it would put those with the most tests first
    return LoadFileScheduling(config, log)


def pytest_collection_finish() -> None:
    """What is loaded by now stays: to look through it for garbage again and again took 9 % of short tests."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first."""
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
