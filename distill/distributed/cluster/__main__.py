"""The command `python -m distill.distributed.cluster NAME`: prints a file that runs Distill on a cluster."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
FILES = {"slurm": "slurm.sh", "mpijob": "mpijob.yml", "pytorchjob": "pytorchjob.yml", "dockerfile": "Dockerfile"}


def main(arguments: list[str]) -> int:
    """Print the file of this name; without a name, list the files. Exit status 2 for an unknown name."""
    if len(arguments) == 1 and arguments[0] in FILES:
        print((FOLDER / FILES[arguments[0]]).read_text(encoding="utf-8"), end="")
        return 0
    print("python -m distill.distributed.cluster NAME > FILE      with NAME one of:", file=sys.stderr)
    for name, file in FILES.items():
        summary = next(line for line in (FOLDER / file).read_text(encoding="utf-8").splitlines() if line[:2] == "# ")
        print(f"  {name:<12}{summary.removeprefix('# ')}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
