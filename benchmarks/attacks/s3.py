"""A real S3 server behind a proxy that fails, under training: the student is the same, or the run ends and resumes."""

import logging
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from distributed import FORKS, PRELOADED
from object_store import serving
from stored import FAULTS, Answer, Faulty, Source, forwarded

from benchmarks.attacks.case import Case, Ended, Outcome, either, finished, problem_of, resumed
from benchmarks.attacks.ground import Ground, student_of
from benchmarks.attacks.ingredients import DAMAGES, distilled
from benchmarks.attacks.prepare import many_units
from benchmarks.reliability.chaos import send

FORKS.set_forkserver_preload([*PRELOADED, "s3fs", "aiobotocore.session"])  # which takes a second in each process

NAMES = r"data\.tokens=s3://|s3://bucket"
STATUSES = (2, 74)


def small_files() -> None:
    """In a run: files of about 17 kB, of which it keeps two, and short pauses after a failure."""
    from distill.data import remote

    many_units()
    remote.FIRST_PAUSE, remote.LONGEST_PAUSE = 0.001, 0.01


class Bucket(NamedTuple):
    """A bucket with the prepared sequences, and the student of a run on them without faults."""

    url: str
    host: str
    port: int
    student: str

    @property
    def source(self) -> Source:
        return forwarded(self.host, self.port)

    def objects(self) -> dict[str, bytes]:
        """The objects by their keys, as the server has them."""
        client = self.client()
        keys = [each["Key"] for each in client.list_objects_v2(Bucket="bucket").get("Contents", [])]
        return {key: client.get_object(Bucket="bucket", Key=key)["Body"].read() for key in keys}

    def client(self) -> Any:
        import boto3

        return boto3.client("s3", endpoint_url=f"http://{self.host}:{self.port}")


def command(ground: Ground, url: str, folder: Path) -> list[str]:
    small = ["train.steps=16", "data.shard_bytes=3000", "data.shuffle_bytes=20000", "data.local_bytes=45000"]
    cache = ground.folder / "cache"
    return distilled(ground, cache, folder, f"data.tokens={url}/tokens", f"data.local={ground.folder / 'node'}", *small)


def bucket(ground: Ground) -> Bucket:
    """Made once, with the server."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # moto's server reports each request
    url = ground.shared.enter("server", serving)

    def make(folder: Path) -> Bucket:
        host, port = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://").split(":")
        ended = ground.distill(*command(ground, url, folder), change=small_files)
        assert ended.status == 0, ended.errors
        return Bucket(url, host, int(port), student_of(folder))

    return ground.shared.get("bucket", make)


class Faults(NamedTuple):
    """What the proxy does."""

    share: float = 0.0  # of the answers that are spoilt
    kinds: tuple[str, ...] = FAULTS
    rate: float | None = None  # bytes a second
    last: int | None = None  # answers to GET after which all are refused


def run(ground: Ground, stored: Bucket, server: Faulty) -> Callable[[], Ended]:
    """A call that makes the run through the server, as long as it serves."""

    def call() -> Ended:
        with server.serving() as url:
            arguments = command(ground, stored.url, ground.run)
            return ground.distill(*arguments, change=small_files, AWS_ENDPOINT_URL=url)

    return call


def is_same(ground: Ground, stored: Bucket) -> Callable[[], bool]:
    return lambda: student_of(ground.run) == stored.student


def faulty(ground: Ground, faults: Faults, seed: int) -> Outcome:
    """Faults of these kinds: the student is the same, or the run ends as documented and finishes without faults."""
    stored = bucket(ground)
    server = Faulty(stored.source, faults.share, faults.rate, seed, faults.kinds)
    if faults.last is not None:
        server.last = faults.last
    ended = run(ground, stored, server)()
    return resumed(ended, run(ground, stored, Faulty(stored.source)), STATUSES, is_same(ground, stored))


def answered(ground: Ground, answer: Answer, share: float, seed: int) -> Outcome:
    """The server answers so, always or sometimes, then as it should."""
    stored, draw = bucket(ground), random.Random(seed)
    source = stored.source

    def odd(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        return answer if method == "GET" and draw.random() < share else source(method, path, headers, body)

    ended = run(ground, stored, Faulty(odd))()
    return resumed(ended, run(ground, stored, Faulty(source)), STATUSES, is_same(ground, stored))


def slow(ground: Ground, share: float, seconds: float, seed: int) -> Outcome:
    """Some answers take long."""
    stored, draw = bucket(ground), random.Random(seed)
    source = stored.source

    def late(*request: Any) -> Answer:
        if draw.random() < share:
            time.sleep(seconds)
        return source(*request)

    return finished(run(ground, stored, Faulty(late))(), is_same(ground, stored))


@contextmanager
def changed(stored: Bucket, key: str, content: bytes | None) -> Any:
    """Another object of this key, or none, in the bucket."""
    client, before = stored.client(), stored.objects()[key]
    if content is None:
        client.delete_object(Bucket="bucket", Key=key)
    else:
        client.put_object(Bucket="bucket", Key=key, Body=content)
    try:
        yield
    finally:
        client.put_object(Bucket="bucket", Key=key, Body=before)


def object_damaged(ground: Ground, ending: str, kind: str, seed: int) -> Outcome:
    """An object is gone or another one: the run makes the same student, or is refused; afterwards it finishes."""
    stored, draw = bucket(ground), random.Random(seed)
    objects = stored.objects()
    key = draw.choice(sorted(key for key in objects if key.endswith(ending)))
    server = Faulty(stored.source)
    with changed(stored, key, DAMAGES[kind](objects[key], draw)):
        ended = run(ground, stored, server)()
    if ended.status and (problem := problem_of(ended, STATUSES)):
        return problem
    if ended.status == 0:
        return either(ended, NAMES, None, is_same(ground, stored))
    return resumed(ended, run(ground, stored, server), STATUSES, is_same(ground, stored))


def changed_in_training(ground: Ground, kind: str, seed: int) -> Outcome:
    """An object becomes another one after the first step: stale reads, blocks of two versions."""
    stored, draw = bucket(ground), random.Random(seed)
    objects = stored.objects()
    key = draw.choice(sorted(key for key in objects if ".bin" in key and "train" in key))
    content = DAMAGES[kind](objects[key], draw)
    source = stored.source

    def replaced(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        answer = source(method, path, headers, body)
        if not (ground.run / "metrics.jsonl").exists() or method != "GET" or not path.partition("?")[0].endswith(key):
            return answer
        if content is None:
            return Answer(404, [], b"<Error><Code>NoSuchKey</Code></Error>")
        first, _, last = headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")
        return answer._replace(body=content[int(first) : int(last) + 1 if last else None])

    ended = run(ground, stored, Faulty(replaced))()
    return resumed(ended, run(ground, stored, Faulty(source)), STATUSES, is_same(ground, stored))


def killed(ground: Ground, number: int, seconds: float, share: float, seed: int) -> Outcome:
    """A signal while storage fails; afterwards the same command finishes."""
    stored = bucket(ground)
    server = Faulty(stored.source, share, seed=seed)
    with server.serving() as url:
        arguments = command(ground, stored.url, ground.run)
        process = ground.start(*arguments, change=small_files, AWS_ENDPOINT_URL=url)
        with suppress(Exception):
            process.wait(timeout=seconds)
        send(process.pid, signal.Signals(number))
        ended = ground.end(process)
    statuses = (-number, 128 + number)
    return resumed(ended, run(ground, stored, Faulty(stored.source)), statuses, is_same(ground, stored))


ANSWERS = {
    "403": Answer(403, [], b"<Error><Code>AccessDenied</Code></Error>"),
    "404": Answer(404, [], b"<Error><Code>NoSuchKey</Code></Error>"),
    "400": Answer(400, [], b"<Error><Code>ExpiredToken</Code></Error>"),
    "500": Answer(500, [], b"<Error><Code>InternalError</Code></Error>"),
    "500 in HTML": Answer(500, [("content-type", "text/html")], b"<html>Bad gateway</html>"),
    "429": Answer(429, [], b""), "408": Answer(408, [], b""),
    "200 in HTML": Answer(200, [("content-type", "text/html")], b"<html>Log in</html>"),
    "200 of nothing": Answer(200, [], b""), "204": Answer(204, [], b""),
    "416": Answer(416, [], b"<Error><Code>InvalidRange</Code></Error>"),
    "301": Answer(301, [("location", "http://127.0.0.1:9/x")], b""),
    "a clock that is wrong": Answer(403, [], b"<Error><Code>RequestTimeTooSkewed</Code></Error>"),
}  # fmt: skip


def cases(draw: random.Random) -> list[Case]:
    """Those of this subject."""
    attacks: dict[str, Callable[[Ground], Outcome]] = {}

    def add(name: str, attack: Callable[..., Outcome], **arguments: Any) -> None:
        attacks[name] = partial(attack, seed=draw.randrange(1 << 30), **arguments)

    for kind in FAULTS:
        for share in (0.1, 0.4, 1.0):
            add(f"{share:.0%} {kind}", faulty, faults=Faults(share, (kind,)))
    for share in (0.2, 0.5, 0.8):
        add(f"{share:.0%} of all kinds", faulty, faults=Faults(share))
    for rate in (30_000, 300_000):
        add(f"{rate:,} bytes a second", faulty, faults=Faults(rate=rate))
    for last in (0, 1, 3, 6, 10, 15, 22, 30):
        add(f"gone after {last} answers", faulty, faults=Faults(last=last))
    for name, answer in ANSWERS.items():
        for share in (0.3, 1.0):
            add(f"{share:.0%} answers of {name}", answered, answer=answer, share=share)
    for seconds in (0.5, 2.0):
        add(f"10% take {seconds} s", slow, share=0.1, seconds=seconds)
    for ending in ("index.json", "train.counts.npy", ".bin"):
        for kind in ("gone", "a flipped bit", "cut", "all zeros"):
            add(f"{ending}: {kind}", object_damaged, ending=ending, kind=kind)
    for kind in ("gone", "a flipped bit", "cut", "halves swapped", "empty"):
        add(f"in training: {kind}", changed_in_training, kind=kind)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        for share in (0.0, 0.9):
            add(
                f"{number.name} with {share:.0%} faults",
                killed,
                number=number,
                seconds=draw.uniform(0.5, 2),
                share=share,
            )
    return [Case("s3", name, attack) for name, attack in attacks.items()]
