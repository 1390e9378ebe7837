"""Fixtures of the tests: quick, offline, one thread, so that sums are made in the same order everywhere."""

from distill.runtime.host import limit_spinning

limit_spinning()  # before torch is loaded

import gc  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402
import undrawn  # noqa: E402
from job import Shelf  # noqa: E402

from distill.config.settings import TrainConfig  # noqa: E402

torch.set_num_threads(1)
# What was started in the background of a shell, or by nohup, ignores these; the processes that tests start would, too.
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture
def fit(tmp_path: Path, tokenizer: Any, rows: np.ndarray) -> Callable[..., tiny.Fit]:
    """Makes trainings of those rows without a teacher, in folders of the test; `train`: the settings of their steps."""

    def make(folder: str = "", train: dict[str, Any] | None = None, **more: Any) -> tiny.Fit:
        settings = TrainConfig(**{"batch_size": 4, "accumulate": 2, **(train or {})})
        return tiny.Fit(tmp_path / folder, tokenizer, more.pop("rows", rows), settings=settings, **more)

    return make


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
    root = tmp_path_factory.mktemp("shelf")
    shared = (root.parents[1] if "PYTEST_XDIST_WORKER" in os.environ else root) / "shared"
    shared.mkdir(exist_ok=True)
    return Shelf(root, shared)


@pytest.fixture(scope="session")
def done(shelf: Shelf) -> Path:
    """The folder of an undisturbed run on that shelf; no test may change it."""
    return Path(shutil.copytree(shelf.once("done", shelf.run), shelf.root / "done"))


def pytest_collection_finish() -> None:
    """What is loaded by now stays: to look through it for garbage again and again took 9 % of short tests."""
    gc.collect()
    gc.freeze()
