"""What the benchmarks share: rows of results, printed as they come and kept in one JSON file, and runs not repeated."""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from distill.runtime.files import atomic

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "transformers", "tokenizers", "horovod", "minicons", "trl", "liger_kernel", "triton")


class Results:
    """The JSON file of a benchmark: its command, the machine with its versions, and the rows.

    A row is on the disk, and has been printed, when `row` returns.
    """

    def __init__(self, path: Path, begun: bool = False) -> None:
        """`begun`: the file is there, and rows are added to its own."""
        self.path, self._lock = path.resolve(), threading.Lock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if begun:
            self._content = json.loads(self.path.read_text())
        else:
            self._content = {"command": shlex.join(sys.orig_argv), "machine": machine(), "rows": []}
            print(title(), flush=True)
            self._write()

    def row(self, **values: Any) -> None:
        """Lists and dictionaries are kept, and not printed."""
        with self._lock:
            self._content["rows"].append(values)
            self._write()
            shown = {name: value for name, value in values.items() if not isinstance(value, list | dict | tuple)}
            print("  ".join(f"{name} {_short(value)}" for name, value in shown.items()), flush=True)

    def _write(self) -> None:
        with atomic(self.path, durable=True) as new:
            new.write_text(json.dumps(self._content, indent=1, default=str) + "\n", encoding="utf-8")

    def where(self) -> None:
        """Print where the rows are, at the end."""
        print(f"{len(self._content['rows'])} rows in {self.path}", flush=True)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("\n", " ")[:300]


def parser_of(description: str | None, name: str) -> argparse.ArgumentParser:
    """With the option that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_out(parser, name)
    return parser


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    default = Path("runs/benchmarks") / f"{name}.json"
    parser.add_argument("--out", type=Path, default=default, help=f"the file of the results, {default} if not given")


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, GPU, versions."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in PACKAGES},
    }


def title() -> str:
    """The machine in a line."""
    about = machine()
    threads = f"{about['processor']}, {torch.get_num_threads()} threads"
    return f"{about['gpu'] or threads}, torch {about['torch']}"


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
    """For names of folders: runs of other settings, or on other data, have others, so that each is run."""
    return hashlib.sha256("\0".join([*arguments, os.environ.get("DISTILL_DATA", "")]).encode()).hexdigest()[:8]


def version_of(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
