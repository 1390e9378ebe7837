r"""Everything that wants a GPU, in at most nine minutes: what comes out is kept row by row, in one file of JSON.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --device cpu      # rehearsed without a GPU, in small

The parts run one after the other, the most important ones first, each in a process of its own with a limit of its own:
ceilings of the machine, the tests on a GPU, the objective alone, training steps beside plain ones, and whole runs. What
an earlier part leaves of its time is the next one's. A part that fails or takes too long leaves the rows that it has
written, and the next one begins. A `.log` beside the file of the results has what was printed.

The checkout is not installed: Python, torch and transformers of the machine are taken as they are. What else it lacks
for a run can be fetched elsewhere as wheels, and installed there without an index:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 \
        --platform manylinux_2_28_x86_64 -d wheels hydra-core==1.3.8 omegaconf==2.3.1 pydantic pydantic_core \
        annotated-types typing-inspection datasets dill multiprocess
    pip wheel --no-deps -w wheels antlr4-python3-runtime==4.9.3        # which has no wheel
    pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=$PWD/site

With trl or liger_kernel among them, these are measured too.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import ROOT, Results, parser_of

KILL_AFTER = 3.0  # seconds after SIGTERM


class Part(NamedTuple):
    """`seconds` is what it may take, its start included."""

    name: str
    seconds: float


PARTS = (Part("ceilings", 40), Part("tests", 80), Part("objective", 70), Part("steps", 160), Part("runs", 190))


def run_part(part: Part, options: argparse.Namespace, scratch: Path, limit: float) -> bool:
    """Run a part for at most `limit` seconds, and write how it ended; whether that was well."""
    command = [sys.executable, "-m", "benchmarks.gpu_parts", part.name, "--device", options.device]
    command += ["--out", str(options.out), "--scratch", str(scratch)]
    command += ["--seconds", f"{limit:.1f}", "--times", str(options.times)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("DISTILL_DATA", None)  # the books that ship with the package, on every machine
    log = options.out.with_suffix(".log")
    began, before = time.monotonic(), log.stat().st_size if log.exists() else 0
    with log.open("a") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = "took too long"
        finally:
            end_all(process)
    printed = log.read_bytes()[before:].decode(errors="replace")
    tail = {"tail": printed[-1500:]} if status != 0 else {}
    print("".join(line for line in printed.splitlines(keepends=True) if line.startswith(f"part {part.name}")), end="")
    results = Results(options.out, begun=True)
    results.row(part=part.name, what="ended", status=status, seconds=time.monotonic() - began, **tail)
    return status == 0


def end_all(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a part: its process, and those that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(KILL_AFTER)
        except subprocess.TimeoutExpired:
            continue


def main(arguments: list[str] | None = None, parts: tuple[Part, ...] = PARTS) -> int:
    """0 when all parts have ended well; a row that holds an error is no failure of its part."""
    parser = parser_of(__doc__, "gpu")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", default=",".join(part.name for part in parts), help="of the parts")
    parser.add_argument("--times", type=float, default=1.0, help="multiplies all limits, for a machine that is busy")
    options = parser.parse_args(arguments)
    names = options.only.split(",")
    if unknown := set(names) - {part.name for part in parts}:
        every = parser.get_default("only")
        parser.error(f"--only {','.join(sorted(unknown))}: there is no such part; choose from {every}")
    options.out = options.out.resolve()
    Results(options.out)
    began, due, well = time.monotonic(), 0.0, True
    with tempfile.TemporaryDirectory() as scratch:
        for part in parts:
            if part.name in names:
                due += options.times * part.seconds
                well &= run_part(part, options, Path(scratch), began + due - time.monotonic())
    Results(options.out, begun=True).where()
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
