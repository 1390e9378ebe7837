"""Attacks whole commands in all ways that the subjects list, and prints what came of them.

    python benchmarks/attacks                                 # all subjects
    python benchmarks/attacks shards disks --cases 50            # at most 50 cases of each of two subjects
    python benchmarks/attacks shards --part 2/5               # a fifth of its cases
    python benchmarks/attacks tables --name 'csv, a NUL'      # one case

The cases of a subject follow from the seed. Commands run as processes that are forked from one that has imported what
they need. At the end there is a table of subjects and outcomes, and each problem with the command that shows it again.

Needs the extra `dev`.
"""

import argparse
import random
import shlex
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0:1] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.attacks.case import GOOD, Case, Kind, Outcome  # noqa: E402
from benchmarks.attacks.ground import Shared, new_ground  # noqa: E402
from benchmarks.common import save, table, title  # noqa: E402

# Each is a module of this folder with a function `cases` that gives the cases of its subject for a random generator.
SUBJECTS = ("tables", "prepare", "shards", "disks")
EVERY = 5.0  # seconds between two lines of progress


def cases_of(subject: str, seed: int, most: int | None, name: str | None) -> list[Case]:
    """The cases of a subject, at most so many of them, a seeded choice; or the one of this name."""
    draw = random.Random(f"{subject} {seed}")
    cases: list[Case] = list(import_module(f"benchmarks.attacks.{subject}").cases(draw))
    names = [case.name for case in cases]
    assert len({*names}) == len(names), [each for each, times in Counter(names).items() if times > 1]
    if name is not None:
        return [case for case in cases if case.name == name]
    if most is None or most >= len(cases):
        return cases
    chosen = {*random.Random(seed).sample(range(len(cases)), most)}
    return [case for number, case in enumerate(cases) if number in chosen]


def attack(case: Case, shared: Shared) -> Outcome:
    """What comes of a case; an error of the attack itself is a problem too."""
    ground = new_ground(shared)
    try:
        return case.attack(ground)
    except Exception:
        return Outcome(Kind.TRACEBACK, f"in the attack itself: {traceback.format_exc()}")
    finally:
        ground.close()


def attacked(cases: list[Case], shared: Shared, jobs: int) -> Iterator[tuple[Case, Outcome]]:
    """The outcomes in the order of the cases, with progress on standard error."""
    begun = shown = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = pool.map(partial(attack, shared=shared), cases)
        for done, (case, outcome) in enumerate(zip(cases, outcomes, strict=True), 1):
            if outcome.kind not in GOOD:
                print(f"{case.subject}: {case.name}: {outcome.kind}", file=sys.stderr, flush=True)
            if (now := time.monotonic()) - shown >= EVERY or done == len(cases):
                rate, shown = done / (now - begun), now
                left = (len(cases) - done) / rate
                line = f"{done}/{len(cases)} cases, {rate:.2f} a second, {left:.0f} s left ({case.subject})"
                print(line, file=sys.stderr, flush=True)
            yield case, outcome


def counts(results: list[tuple[Case, Outcome]]) -> str:
    """The table of subjects and outcomes."""
    subjects = list(dict.fromkeys(case.subject for case, _ in results))
    by_subject = Counter((case.subject, outcome.kind) for case, outcome in results)
    rows = [
        [subject, str(sum(case.subject == subject for case, _ in results))]
        + [str(by_subject[subject, kind] or "") for kind in Kind]
        for subject in subjects
    ]
    total = ["all", str(len(results)), *(str(sum(by_subject[each, kind] for each in subjects)) for kind in Kind)]
    return table(["subject", "cases", *Kind], [*rows, total])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"of {', '.join(SUBJECTS)}; without any, all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="at most, of each subject")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--part", default="1/1", help="K/N: every N-th case, from the K-th on")
    parser.add_argument("--name", help="the case of this name alone")
    parser.add_argument("--json", type=Path, help="write the outcomes there")
    options = parser.parse_args()
    if unknown := {*options.subjects} - {*SUBJECTS}:
        parser.error(f"there is no subject {', '.join(sorted(unknown))}: choose of {', '.join(SUBJECTS)}")
    subjects = options.subjects or SUBJECTS
    part, parts = map(int, options.part.split("/"))
    cases = [case for name in subjects for case in cases_of(name, options.seed, options.cases, options.name)]
    cases = cases[part - 1 :: parts]
    with tempfile.TemporaryDirectory(prefix="attacks-") as folder, ExitStack() as stack:
        results = list(attacked(cases, Shared(Path(folder), stack), options.jobs))
    problems = [(case, outcome) for case, outcome in results if outcome.kind not in GOOD]
    for case, outcome in problems:
        print(f"\n{case.subject}: {case.name}: {outcome.kind}\n{outcome.detail}")
        command = ["python", "benchmarks/attacks", case.subject, "--seed", str(options.seed), "--name", case.name]
        print(f"again: {shlex.join(command)}")
    print(f"\n{title()}\n\n{counts(results)}\n\nproblems: {len(problems)}")
    rows = [[case.subject, case.name, outcome.kind, outcome.detail] for case, outcome in results]
    save(options.json, {"seed": options.seed, "cases": rows})
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
