"""The wheel, installed elsewhere, run from another folder."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from job import ROOT, environment, library


@pytest.mark.slow
def test_the_wheel_carries_everything_and_runs_elsewhere(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    teachers = [f"teacher/{kind}/model.safetensors" for kind in ("bundled_small", "bundled_deep")]
    for name in ("conf/config.yaml", "recipes/smoke.yaml", *teachers, "report/templates/page.html", "py.typed"):
        assert (site / "distill" / name).is_file(), name
    elsewhere.mkdir()
    books = library(tmp_path / "books")
    corpus = [f"corpus.path={books}", f"data.cache={tmp_path / 'cache'}", "data.workers=1", "corpus.heldout=0.1"]
    command = [sys.executable, "-m", "distill", "+recipe=smoke", *corpus, "train.steps=2", "evaluate.max_sequences=4"]
    done = subprocess.run(
        command, cwd=elsewhere, env={**environment(), "PYTHONPATH": str(site)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (elsewhere / "runs" / "smoke" / "report.html").is_file()
