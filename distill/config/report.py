"""The settings of the report."""

from dataclasses import dataclass


@dataclass
class ReportConfig:
    """How the report is written while the run goes on."""

    every: float | None = 15.0  # seconds between two pages of a run that is under way; null or 0: only at its end
