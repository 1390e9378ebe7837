"""metrics.jsonl outlives kills and resumes."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from distill.runtime.errors import SettingError
from distill.runtime.jsonl import JsonLines, read_lines


def test_lines_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    file = JsonLines(path)
    lines = [{"step": 1, "loss/total": 2.5, "epoch": 0.1}, {"step": 2, "loss/total": 1.25, "note": "ü\nx"}]
    for line in lines:
        file.append(line)
        assert read_lines(path)[-1] == line  # flushed, before any close
    file.close()
    assert read_lines(path) == lines
    assert read_lines(tmp_path / "absent.jsonl") == []


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "metrics.jsonl")
    file.append({"step": 1, "a": math.nan, "b": -math.inf, "c": 0.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "a": None, "b": None, "c": 0.5}


def test_torn_last_line_is_passed_over_and_then_mended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for tail in ('{"step": 3, "lo', '{"step": 3}', "\x00\x00"):
        path.write_text('{"step": 1}\n{"step": 2}\n' + tail)
        assert [line["step"] for line in read_lines(path)] == [1, 2]
        file = JsonLines(path)
        file.append({"step": 3})
        file.close()
        assert [line["step"] for line in read_lines(path)] == [1, 2, 3]


def test_dropping_what_the_resumed_run_writes_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss/total": {step / 3}}}\n' for step in range(1, 8)) + '{"st')
    before = read_lines(path)
    file = JsonLines(path)
    file.drop_after(4)
    assert read_lines(path) == before[:4]
    file.append({"step": 5})
    file.close()
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 4, 5]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n[2]\n{"step": 3}\n')
    with pytest.raises(SettingError, match=r"line 2 is not a JSON object"):
        read_lines(path)


def test_metrics_survive_kill_nine(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from distill.runtime.jsonl import JsonLines\n"
        "file = JsonLines(Path(sys.argv[1]))\n"
        "for step in range(1, 6): file.append({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "metrics.jsonl")], check=False)
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
