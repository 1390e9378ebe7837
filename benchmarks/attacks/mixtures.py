"""Mixtures: weights, empty and damaged sources, names, duplicates, what is held out, and runs that are killed."""

import gzip
import json
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tiny import WORDS

from benchmarks.attacks.case import Case, Kind, Outcome, either, finished, refused, resumed
from benchmarks.attacks.ground import Ground, student_of
from benchmarks.attacks.ingredients import DAMAGES, SHORT, bert, undisturbed
from benchmarks.reliability.chaos import send
from distill.data.mixture import quotas

NAMES = r"corpus[.:]|data\.|sources|\.jsonl|\.txt"


def lines(seed: int, count: int) -> bytes:
    """JSON Lines of made-up texts."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(20, 60))) for _ in range(count)]
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


STEPS, SEQUENCES = 3, 8  # of a run, and of a step
SOURCES = {"few": (lines(0, 12), 1.0), "many": (lines(1, 60), 3.0)}
BAD_LINES = b'{"text": 5}\n{"text": "half\nnot JSON\n{"other": "x"}\n\xff\xfe\n[1]\n'


def command(
    ground: Ground, sources: dict[str, tuple[bytes | None, str]], cache: Path, folder: Path, more: tuple[str, ...] = ()
) -> list[str]:
    """A distillation from these sources: content of the file (None: there is none) and weight by name."""
    settings = []
    for number, (name, (content, weight)) in enumerate(sources.items()):
        path = ground.folder / f"{number}.jsonl"
        if content is not None:
            path.write_bytes(content)
        settings.append(f"{name}: {{kind: jsonl, path: {path}{weight}}}")
    return [
        "corpus=mixture", "evaluate=heldout", f"corpus.sources={{{', '.join(settings)}}}", f"data.cache={cache}",
        "teacher=pretrained", f"teacher.path={bert(ground)}", "student.layers=[0]", "objective=masked", *SHORT,
        "corpus.max_invalid=1", f"hydra.run.dir={folder}", *more,
    ]  # fmt: skip


def weighted(**contents: bytes | None) -> dict[str, tuple[bytes | None, str]]:
    """The sound sources with other contents."""
    return {name: (contents.get(name, content), f", weight: {weight}") for name, (content, weight) in SOURCES.items()}


def mixed(ground: Ground, sources: dict[str, tuple[bytes | None, str]], *more: str) -> Outcome:
    """The run finishes, with as many sequences of each source as the weights demand, or is refused."""
    ended = ground.distill(*command(ground, sources, ground.folder / "cache", ground.run, more))
    return either(ended, NAMES, ground.run, lambda: has_fractions(ground.run))


def has_fractions(folder: Path) -> bool:
    """Whether the sources have their fractions of an epoch, and all steps were made."""
    record = json.loads((folder / "results.json").read_text())
    sources = record["corpus"]["sources"]
    count = record["corpus"]["sequences"]
    of_epoch = quotas([each["weight"] for each in sources.values()], count).tolist()
    fed = record["training"]["sources"]
    epochs, steps = divmod(STEPS, -(-count // SEQUENCES))  # the last step of an epoch takes what is left
    expected = epochs * count + min(steps * SEQUENCES, count)
    return all(of_epoch) and sum(each["sequences"] for each in fed.values()) == expected and bool(student_of(folder))


def must_be_refused(ground: Ground, sources: dict[str, tuple[bytes | None, str]], *more: str) -> Outcome:
    return refused(
        ground.distill(*command(ground, sources, ground.folder / "cache", ground.run, more)), NAMES, ground.run
    )


def sound(ground: Ground) -> str:
    """The student of the undisturbed mixture."""
    return undisturbed(ground, "mixture", lambda cache, folder: command(ground, weighted(), cache, folder))[0]


def same(ground: Ground, sources: dict[str, tuple[bytes | None, str]], *more: str) -> Outcome:
    """What is damaged is left out: the student has to be that of the sound mixture."""
    student = sound(ground)
    ended = ground.distill(*command(ground, sources, ground.folder / "cache", ground.run, more))
    return finished(ended, lambda: student_of(ground.run) == student)


def killed(ground: Ground, seconds: float, number: int) -> Outcome:
    """A signal to a run at this time; the same command then ends with the same student."""
    student = sound(ground)
    arguments = command(ground, weighted(), ground.folder / "cache", ground.run)
    process = ground.start(*arguments)
    try:
        process.wait(timeout=seconds)
    except Exception:
        send(process.pid, signal.Signals(number))
    outcome = resumed(
        ground.end(process),
        lambda: ground.distill(*arguments),
        (-number, 128 + number),
        lambda: student_of(ground.run) == student,
    )
    return outcome


def changed_afterwards(ground: Ground, content: bytes) -> Outcome:
    """A source is another one when the run begins again: it is refused, or the run was finished."""
    arguments = command(ground, weighted(), ground.folder / "cache", ground.run)
    first = finished(ground.distill(*arguments))
    if first.kind is not Kind.FINISHED:
        return first
    (ground.run / "results.json").unlink()
    (ground.folder / "0.jsonl").write_bytes(content)
    return refused(ground.distill(*arguments), NAMES)


WEIGHTS = {
    "none": "", "null": ", weight: null", "0": ", weight: 0", "negative": ", weight: -1", "NaN": ", weight: nan",
    "infinite": ", weight: inf",
    "a word": ", weight: heavy", "a list": ", weight: [1]", "true": ", weight: true", "subnormal": ", weight: 1e-320",
    "a number as text": ", weight: '2'",
    "beyond float64": ", weight: 1e999", "too small": ", weight: 1e-9", "huge": ", weight: 1e300",
    "a key twice": ", weight: 1, wieght: 2",
}  # fmt: skip
GOOD_WEIGHTS = ("1", "0.001", "1000", "1e18", "0.30000000000000004", "7e-3")
SOURCE_NAMES = {
    "a blank": "a b", "a dot": "a.b", "a number": "1", "another script": "本", "a class's": "__class__",
    "that of a setting": "path", "long": "n" * 300,
    "a quote": "a'b", "empty": "''", "true": "true", "null": "null", "a slash": "a/b", "a dash": "a-b",
    "in capitals": "FEW", "heldout": "heldout",
}  # fmt: skip
CONTENTS: dict[str, bytes | None] = {
    "gone": None, "empty": b"", "blank lines": b"\n" * 50, "one short text": b'{"text": "the"}\n',
    "blank texts": b'{"text": "  "}\n' * 50,
    "one long text": json.dumps({"text": "the cat of " * 5000}).encode(),
    "one text many times": b'{"text": "the cat of and the it was he his with in that to"}\n' * 60,
    "another field": b'{"body": "the cat"}\n' * 9, "bad lines alone": BAD_LINES,
    "the other source": SOURCES["many"][0], "gzip": gzip.compress(lines(0, 12)),
    "unknown characters": json.dumps({"text": "猫犬 " * 500}).encode(),
}  # fmt: skip
SETTINGS = {
    "nothing held out": ("corpus.heldout=0", "evaluate.sets=[]"), "half held out": ("corpus.heldout=0.5",),
    "nearly all held out": ("corpus.heldout=0.99",),
    "all held out": ("corpus.heldout=1",), "a set of no source": ("evaluate.sets=[heldout_nosuch]",),
    "one sequence": ("corpus.max_sequences=1",),
    "two sequences": ("corpus.max_sequences=2",), "no sequences": ("corpus.max_sequences=0",),
    "duplicates dropped": ("corpus.duplicates=drop",),
    "near duplicates dropped": ("corpus.duplicates=near",), "long sequences": ("corpus.sequence_length=64",),
    "a fallback": ("corpus.fallback=true",),
    "a path beside": ("corpus.path=/tmp",),
    "no invalid records": ("corpus.max_invalid=0",),
    "invalid files stop": ("corpus.invalid_files=stop",), "another seed": ("seed=7",),
    "documents apart": ("corpus.cross_documents=false",),
}  # fmt: skip


def cases(draw: random.Random) -> list[Case]:
    """Those of this subject."""
    attacks: dict[str, Callable[[Ground], Outcome]] = {}
    few, many = (content for content, _ in SOURCES.values())
    for name, weight in WEIGHTS.items():
        attacks[f"weight: {name}"] = partial(mixed, sources={"few": (few, weight), "many": (many, ", weight: 1")})
    for weight in GOOD_WEIGHTS:
        sources = {"few": (few, f", weight: {weight}"), "many": (many, ", weight: 1")}
        attacks[f"weight: {weight}"] = partial(mixed, sources=sources)
    for name, source in SOURCE_NAMES.items():
        sources = {source: (few, ", weight: 1"), "many": (many, ", weight: 1")}
        attacks[f"name: {name}"] = partial(mixed, sources=sources)
    for name, content in CONTENTS.items():
        attacks[f"content: {name}"] = partial(mixed, sources=weighted(few=content))
        attacks[f"content of all: {name}"] = partial(mixed, sources=weighted(few=content, many=content))
    for name, more in SETTINGS.items():
        attacks[f"setting: {name}"] = partial(lambda ground, more: mixed(ground, weighted(), *more), more=more)
    attacks["one source"] = partial(mixed, sources={"few": (few, ", weight: 1")})
    attacks["no source"] = partial(must_be_refused, sources={})
    attacks["bad lines at the end"] = partial(same, sources=weighted(few=few + BAD_LINES))
    attacks["bad lines in both"] = partial(same, sources=weighted(few=BAD_LINES + few, many=many + BAD_LINES))
    attacks["carriage returns"] = partial(same, sources=weighted(few=few.replace(b"\n", b"\r\n")))
    attacks["blank lines"] = partial(same, sources=weighted(few=few.replace(b"\n", b"\n\n")))
    attacks["a BOM"] = partial(same, sources=weighted(few=b"\xef\xbb\xbf" + few))
    for name in DAMAGES:
        if name != "gone":
            attacks[f"damage: {name}"] = partial(mixed, sources=weighted(many=DAMAGES[name](many, draw)))
    for number in range(8):
        sign = draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
        attack = partial(killed, seconds=draw.uniform(0.2, 2.5), number=sign)
        attacks[f"{sign.name} {number}"] = attack
    attacks["another source afterwards"] = partial(changed_afterwards, content=lines(9, 12))
    return [Case("mixtures", name, attack) for name, attack in attacks.items()]
