"""Writes which packages an installation of Distill runs, as a software bill of materials in CycloneDX 1.6 JSON.

    python benchmarks/tools/bill_of_materials.py > bill.json     # of the environment that it runs in
    python benchmarks/tools/bill_of_materials.py --sizes         # what each package weighs, as a table
    pip-audit --requirement constraints.txt                # their known vulnerabilities, where its database is in reach

Listed is what `pip` has installed of the package's requirements and of what these require, with versions, licences and
the digests of their lists of files; optional groups of the package are listed where they are installed.
"""

import hashlib
import importlib.metadata
import json
import re
import sys
from pathlib import Path
from typing import Any

from distill.runtime.version import DISTRIBUTION


def main() -> int:
    found = installed(DISTRIBUTION)
    if sys.argv[1:] == ["--sizes"]:
        print(sizes(found))
        return 0
    root = found.pop(DISTRIBUTION)
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(root) | {"type": "application"}},
        "components": [component(each) for _, each in sorted(found.items())],
    }
    print(json.dumps(bill, indent=1))
    return 0


def installed(name: str) -> dict[str, importlib.metadata.Distribution]:
    """A distribution and all that it needs, directly or not, as far as that is installed; by normalized name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [name]
    while waiting:
        key = normalized(waiting.pop())
        if key in found:
            continue
        try:
            found[key] = importlib.metadata.distribution(key)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system, or of an optional group
        waiting += [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in found[key].requires or []]
    return found


def sizes(found: dict[str, importlib.metadata.Distribution]) -> str:
    """A table of the packages by the megabytes of their files, the largest first, and of all that is below ten."""
    weights = {
        name: sum(
            path.stat().st_size for file in each.files or [] if (path := Path(str(each.locate_file(file)))).is_file()
        )
        for name, each in found.items()
    }
    large = {name: weight for name, weight in weights.items() if weight >= 10e6}
    rest = sum(weights.values()) - sum(large.values())
    ordered = sorted(large.items(), key=lambda item: -item[1])
    ordered += [(f"{len(weights) - len(large)} others", rest), (f"{len(weights)} packages", sum(weights.values()))]
    lines = [f"| {name} | {weight / 1e6:,.0f} |" for name, weight in ordered]
    return "\n".join(["| package | MB |", "| --- | ---: |", *lines])


def component(distribution: importlib.metadata.Distribution) -> dict[str, Any]:
    about = distribution.metadata
    name, version = normalized(about["Name"]), distribution.version
    known = about.get("License-Expression") or about.get("License") or ""
    classified = [
        each.rpartition(" :: ")[2] for each in about.get_all("Classifier") or [] if each.startswith("License ::")
    ]
    names = [known.splitlines()[0]] if 0 < len(known) < 200 else classified
    record = distribution.read_text("RECORD") or ""
    return {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "licenses": [{"license": {"name": each}} for each in names],
        "properties": [{"name": "sha256 of RECORD", "value": hashlib.sha256(record.encode()).hexdigest()}],
    }


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
