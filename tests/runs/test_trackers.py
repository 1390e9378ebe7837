"""wandb and TensorBoard really write, offline and without a question."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from job import Shelf, results

from distill.config.settings import TrackerConfig
from distill.runs import trackers
from distill.runtime.errors import SettingError


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_package_that_is_not_there_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # what Python does for a package that is not there
    with pytest.raises(SettingError, match=f"tracker.kind={name}: .*pip install {name}"):
        trackers.check(TrackerConfig(kind=name))


def events_of(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard_events_read_back_across_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for first, last, loss in ((1, 4, 10.0), (3, 5, 20.0)):  # killed after 4, resumed from the checkpoint of 2
        tracker = trackers.build(TrackerConfig(kind="tensorboard"), tmp_path, {"seed": 7}, "run")
        for step in range(first, last + 1):
            tracker.log_metrics({"loss/total": loss / step, "lr": None, "step": step}, step)
        tracker.close()
    events = events_of(tmp_path)
    assert "loss/total" in events.Tags()["scalars"] and "lr" not in events.Tags()["scalars"]
    assert [event.step for event in events.Scalars("loss/total")] == [1, 2, 3, 4, 5]
    assert [event.value for event in events.Scalars("loss/total")] == pytest.approx([10, 5, 20 / 3, 5, 4])
    assert '"seed": 7' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


def test_a_run_sends_its_losses_and_the_scores_of_all_models(shelf: Shelf) -> None:
    pytest.importorskip("tensorboard")
    folder = shelf.root / "tracked"
    more = ("train.steps=4", "train.epochs=null", "evaluate.every_steps=2", "evaluate.on_the_way.sequences=2")
    assert shelf.run(folder, "tracker=tensorboard", *more) == 0
    events, record = events_of(folder), results(folder)
    last = {tag: events.Scalars(tag)[-1] for tag in events.Tags()["scalars"]}
    for model in ("student", "teacher"):  # of all sequences
        assert last[f"{model}/perplexity/heldout"].value == pytest.approx(record[model]["perplexity"]["heldout"])
    of_few = record["history"][-1]["perplexity"]["heldout"]
    assert last["perplexity/heldout"].value == pytest.approx(of_few) != record["student"]["perplexity"]["heldout"]
    assert last["teacher/perplexity/heldout"].step == last["loss/total"].step == 4
    assert [event.step for event in events.Scalars("perplexity/heldout")] == [2, 4]


SECRET = "sk-77Kd01Zq95"
WANDB = """
import sys
from pathlib import Path
from distill.runs import trackers
from distill.config.settings import TrackerConfig
from distill.runtime.errors import SettingError
try:
    settings = TrackerConfig(kind="wandb", mode=sys.argv[2], name="mine", tags=["books", "3-layers"])
    trackers.check(settings)
    tracker = trackers.build(settings, Path(sys.argv[1]), {"train": {"epochs": 3}}, "run")
except SettingError as error:
    print(f"SettingError: {error}")
    sys.exit(2)
tracker.log_metrics({"loss/total": 1.5, "lr": None}, 1)
tracker.close()
"""


def wandb_run(folder: Path, home: Path, mode: str) -> subprocess.CompletedProcess[str]:
    """A run of its own, as on a machine where wandb was never set up."""
    home.mkdir(exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "XDG", "NETRC"))}
    environment = {**kept, "HOME": str(home)}
    command = [sys.executable, "-c", WANDB, str(folder), mode, f"+student.api_key={SECRET}"]
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=500
    )


def test_wandb_runs_offline_quietly_and_keeps_its_id(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for _ in range(2):
        done = wandb_run(folder, tmp_path / "home", "offline")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    identity = (folder / "wandb" / "id").read_text().strip()
    records = list((folder / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))
    assert records and all(record.stat().st_size > 0 for record in records)
    for written in (b"loss/total", b"mine", b"3-layers"):
        assert any(written in record.read_bytes() for record in records)
    # The command line, which wandb would keep as metadata, is in none of its files.
    assert not [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert [entry.name for entry in folder.iterdir()] == ["wandb"]
    assert not (tmp_path / "home" / ".netrc").exists()


def test_wandb_online_without_a_key_says_so_and_does_not_ask(tmp_path: Path) -> None:
    done = wandb_run(tmp_path / "run", tmp_path / "home", "online")
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert "SettingError: tracker.mode=online: no wandb key on this machine; run `wandb login`" in done.stdout


def test_a_run_of_wandb_that_the_program_has_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def init(**arguments: Any) -> Any:
        given.update(arguments)
        return SimpleNamespace(define_metric=lambda *_, **__: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    trackers.build(TrackerConfig(kind="wandb"), tmp_path, {}, "run")
    assert given["reinit"] == "create_new"
