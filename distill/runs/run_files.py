"""The names of what a run writes into its folder."""

import os
from pathlib import Path

HISTORY = "history.jsonl"  # a line for each evaluation
LOGS = ("metrics.jsonl", HISTORY)
LAYERS = "layers.json"
FOLDERS = ("student", "checkpoints", "snapshots", "plots", "profile", "tensorboard")
WRITTEN = ("config.yaml", LAYERS, "report.html", "report.md", *FOLDERS)  # over what stood there before


def file_of_another(path: Path) -> Path | None:
    """In a folder without a run, what stands where a run writes; None where nothing does."""
    begun = any(os.path.lexists(path / name) for name in (".lock", "results.json", "checkpoints", *LOGS))
    return None if begun else next((path / name for name in WRITTEN if os.path.lexists(path / name)), None)
