"""metrics.jsonl outlives kills and resumes; wandb and TensorBoard really write, offline and without a question."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distill import trackers
from distill.config import Tracker
from distill.errors import SettingError


def test_lines_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    file = trackers.MetricsFile(path)
    lines = [{"step": 1, "loss/total": 2.5, "epoch": 0.1}, {"step": 2, "loss/total": 1.25, "note": "ü\nx"}]
    for line in lines:
        file.append(line)
        assert trackers.read(path)[-1] == line  # flushed, before any close
    file.close()
    assert trackers.read(path) == lines
    assert trackers.read(tmp_path / "absent.jsonl") == []


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    file = trackers.MetricsFile(tmp_path / "metrics.jsonl")
    file.append({"step": 1, "a": math.nan, "b": -math.inf, "c": 0.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "a": None, "b": None, "c": 0.5}


def test_torn_last_line_is_passed_over_and_then_mended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for tail in ('{"step": 3, "lo', '{"step": 3}', "\x00\x00"):
        path.write_text('{"step": 1}\n{"step": 2}\n' + tail)
        assert [line["step"] for line in trackers.read(path)] == [1, 2]
        file = trackers.MetricsFile(path)
        file.append({"step": 3})
        file.close()
        assert [line["step"] for line in trackers.read(path)] == [1, 2, 3]


def test_truncate_drops_what_the_resumed_run_writes_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss/total": {step / 3}}}\n' for step in range(1, 8)) + '{"st')
    before = trackers.read(path)
    file = trackers.MetricsFile(path)
    file.truncate(4)
    assert trackers.read(path) == before[:4]
    file.append({"step": 5})
    file.close()
    assert [line["step"] for line in trackers.read(path)] == [1, 2, 3, 4, 5]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n[2]\n{"step": 3}\n')
    with pytest.raises(SettingError, match=r"line 2 is not a JSON object"):
        trackers.read(path)


def test_metrics_survive_kill_nine(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from distill.trackers import MetricsFile\n"
        "file = MetricsFile(Path(sys.argv[1]))\n"
        "for step in range(1, 6): file.append({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "metrics.jsonl")], check=False)
    assert [line["step"] for line in trackers.read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_none_tracks_nothing(tmp_path: Path) -> None:
    tracker = trackers.build(Tracker(kind="none"), tmp_path, {}, "run")
    tracker.log({"a": 1.0}, step=1)
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_bad_settings_give_one_line_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        (Tracker(kind="mlflow"), "tracker.kind=mlflow: unknown; choose none, wandb or tensorboard"),
        (Tracker(kind="wandb", mode="cloud"), "tracker.mode=cloud: unknown; choose offline or online"),
    ]
    for settings, message in cases:
        with pytest.raises(SettingError) as raised:
            trackers.build(settings, tmp_path, {}, "run")
        assert str(raised.value) == message
    for name, module in (("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")):
        monkeypatch.setitem(sys.modules, module, None)  # what Python does for a package that is not there
        with pytest.raises(SettingError, match=f"tracker.kind={name}: .*pip install {name}"):
            trackers.build(Tracker(kind=name), tmp_path, {}, "run")
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_events_read_back_across_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = trackers.build(Tracker(kind="tensorboard"), tmp_path, {"seed": 7}, "run")
    for step in (1, 2, 3, 4):
        first.log({"loss/total": 10.0 / step, "lr": None, "step": step}, step)
    first.close()
    second = trackers.build(Tracker(kind="tensorboard"), tmp_path, {"seed": 7}, "run")
    for step in (3, 4, 5):  # killed after 4, resumed from the checkpoint of 2
        second.log({"loss/total": 20.0 / step}, step)
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss/total"]
    assert [event.step for event in events.Scalars("loss/total")] == [1, 2, 3, 4, 5]
    assert [event.value for event in events.Scalars("loss/total")] == pytest.approx([10, 5, 20 / 3, 5, 4])
    assert '"seed": 7' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


WANDB = """
import sys
from pathlib import Path
from distill import trackers
from distill.config import Tracker
from distill.errors import SettingError
try:
    settings = Tracker(kind="wandb", mode=sys.argv[2])
    tracker = trackers.build(settings, Path(sys.argv[1]), {"train": {"epochs": 3}}, "run")
except SettingError as error:
    print(f"SettingError: {error}")
    sys.exit(2)
tracker.log({"loss/total": 1.5, "lr": None}, 1)
tracker.close()
"""


def wandb_run(folder: Path, home: Path, mode: str) -> subprocess.CompletedProcess[str]:
    """A run of its own, as on a machine where wandb was never set up."""
    home.mkdir(exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "XDG", "NETRC"))}
    environment = {**kept, "HOME": str(home)}
    command = [sys.executable, "-c", WANDB, str(folder), mode]
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120
    )


def test_wandb_runs_offline_quietly_and_keeps_its_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    folder = tmp_path / "run"
    for _ in range(2):
        done = wandb_run(folder, tmp_path / "home", "offline")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    identity = (folder / "wandb" / "id").read_text().strip()
    records = list((folder / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))
    assert records and all(record.stat().st_size > 0 for record in records)
    assert any(b"loss/total" in record.read_bytes() for record in records)
    assert [entry.name for entry in folder.iterdir()] == ["wandb"]
    assert not (tmp_path / "home" / ".netrc").exists()


def test_wandb_online_without_a_key_says_so_and_does_not_ask(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    done = wandb_run(tmp_path / "run", tmp_path / "home", "online")
    assert done.returncode == 2
    assert "SettingError: tracker.mode=online: no wandb key on this machine; run `wandb login`" in done.stdout
