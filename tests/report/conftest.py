"""The made-up run and its report."""

from pathlib import Path
from typing import Any

import pytest
from sample import CONFIG, sample_metrics, sample_results

from distill.report import report
from distill.runs.record import Record


@pytest.fixture
def results() -> dict[str, Any]:
    return sample_results()


@pytest.fixture
def metrics() -> list[dict[str, Any]]:
    return sample_metrics()


@pytest.fixture(scope="module")
def written(tmp_path_factory: Any) -> Path:
    """The run folder with the report of the results above."""
    folder = tmp_path_factory.mktemp("run")
    report.write(folder, Record.from_json(sample_results()), sample_metrics(), CONFIG)
    return folder
