"""What the scripts share: runs that are not repeated, Markdown tables, results as JSON with the machine beside them."""

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, GPU, versions."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "horovod", "minicons")},
    }


def title() -> str:
    """The machine in a line."""
    about = machine()
    threads = f"{about['processor']}, {torch.get_num_threads()} threads"
    return f"{about['gpu'] or threads}, torch {about['torch']}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column to the left and numbers to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def save(path: Path | None, results: Any) -> None:
    """Write machine and results as JSON, where a path was given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")
        print(f"\nwritten to {path}")


def execute(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """The record of `distill ARGUMENTS` in `folder`; a finished run is not repeated, an interrupted one resumes.

    Its output goes to a file beside the folder. Raises `subprocess.CalledProcessError` where the run fails.
    """
    if not (folder / "results.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "distill", *arguments, f"hydra.run.dir={folder}"]
        with (folder.parent / f"{folder.name}.log").open("w") as log:
            print(f"{folder} ...", file=sys.stderr, flush=True)
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
    content: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return content


def digest_of(arguments: list[str]) -> str:
    """For names of folders: runs of other settings have others, so that each is run."""
    return hashlib.sha256("\0".join(arguments).encode()).hexdigest()[:8]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
