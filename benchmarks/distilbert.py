"""The DistilBERT distributed-training benchmark at the scale of one machine: its rows, and the quality of each.

    sudo python -m benchmarks.distilbert            # emulated hosts; about 20 minutes on 2 cores
    python -m benchmarks.distilbert --loopback      # without root: 1 and 2 processes of this machine

Every row is a run of `python -m distill +recipe=distilbert_gutenberg` with the same global batch, so that all rows
should end with the same student. A host stands for a node: one rank, a fixed share of a core, and a network where one
connection reaches a quarter of the link. A row has the seconds of training, and its file the training loss, perplexity
and pseudo-perplexity by epoch, for each evaluation set. `--figure FILE.png` draws the gain by hosts beside two lines of
linear scaling, one from the baseline and one from delayed sync: published scaling is super-linear against the first.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster import NETWORKS, Cluster
from benchmarks.common import Results, digest_of, parser_of

MEASURES = ("perplexity", "pseudo_perplexity")
MICRO_BATCHES = 48  # per step on all hosts, at the larger micro-batch: 12, 6, 3 are left for 4, 8, 16 hosts


@dataclass(frozen=True)
class Row:
    name: str
    hosts: int
    published: str
    backend: str = "horovod"
    batch_size: int = 4
    sync: str = "window"
    rings: str = "1"
    compression: str = "none"

    def settings(self) -> list[str]:
        accumulate = MICRO_BATCHES * 4 // (self.batch_size * self.hosts)
        return [
            f"backend={self.backend}",
            f"backend.sync={self.sync}",
            f"backend.rings={self.rings}",
            f"backend.compression={self.compression}",
            f"train.batch_size={self.batch_size}",
            f"train.accumulate={accumulate}",
        ]


EMULATED = [
    Row("baseline: exchange after every micro-batch", 2, "438", "ddp", 2, "every"),
    Row("larger micro-batch", 2, "402", "ddp", 4, "every"),
    Row("delayed sync", 2, "204", "ddp"),
    Row("2x hosts, Horovod", 4, "70 (4x)"),
    Row("2x hosts, Horovod, 4 rings", 4, "66 (4x)", rings="4"),
    Row("4x hosts, Horovod", 8, "37 (8x)"),
    Row("4x hosts, Horovod, 4 rings", 8, "32 (8x)", rings="4"),
    Row("the same, bfloat16 on the wire", 8, "-", rings="4", compression="bf16"),
]
LOOPBACK = [
    Row("1 worker", 1, "-", "ddp", 2),
    Row("baseline: exchange after every micro-batch", 2, "438", "ddp", 2, "every"),
    Row("larger micro-batch", 2, "402", "ddp", 4, "every"),
    Row("delayed sync", 2, "204", "ddp"),
    Row("Horovod", 2, "70 (4x)"),
    Row("Horovod, 4 rings", 2, "66 (4x)", rings="4"),
]


def run(row: Row, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One row's results.json; a finished run in `folder` is taken as it is, an interrupted one goes on."""
    command = [
        sys.executable, "-m", "distill", "+recipe=distilbert_gutenberg", *row.settings(),
        f"corpus.max_sequences={options.rows}", f"corpus.sequence_length={options.tokens}",
        f"train.epochs={options.epochs}",
        "backend.threads=1", "backend.device=cpu", "evaluate.max_sequences=128",
        "evaluate.pseudo_perplexity.fraction=0.02",
        f"evaluate.sets=[{options.sets}]", f"hydra.run.dir={folder}", *options.overrides,
    ]  # fmt: skip
    network, share = (None, None) if options.loopback else (NETWORKS[options.network], options.share)
    with Cluster(row.hosts, network, share, limit=3600) as cluster:
        cluster.run(command)
    return dict(json.loads((folder / "results.json").read_text()))


def by_epoch(history: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The training loss and each measure on each evaluation set, by epoch."""
    found = {"loss_by_epoch": [line["loss"]["total"] for line in history]}
    for measure in MEASURES:
        for data in history[0][measure]:
            found[f"{measure}_{data}_by_epoch"] = [line[measure][data] for line in history]
    return found


def draw(rows: list[Row], seconds: list[float], file: Path) -> None:
    """How many times as fast as the baseline each row is, by hosts, beside linear scaling from either start."""
    from matplotlib.figure import Figure

    gains = [seconds[0] / taken for taken in seconds]
    delayed = next(i for i, row in enumerate(rows) if row.name == "delayed sync")
    figure = Figure(figsize=(5.6, 3.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    hosts = [rows[0].hosts, max(row.hosts for row in rows)]
    for start, label, style in ((0, "linear from the baseline", "--"), (delayed, "linear from delayed sync", ":")):
        line = [gains[start] * count / rows[start].hosts for count in hosts]
        axes.plot(hosts, line, style, color="#66717d", label=label)
    for row, gain, marker in zip(rows, gains, "osD^v<>P", strict=False):
        axes.plot([row.hosts], [gain], marker, label=row.name)
    axes.set(xlabel="hosts", ylabel="times as fast as the baseline", xticks=sorted({row.hosts for row in rows}))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Software": None})
    print(f"\ndrawn in {file}")


def main() -> None:
    parser = parser_of(__doc__, "distilbert")
    parser.add_argument("--loopback", action="store_true", help="processes of this machine, no emulated hosts")
    parser.add_argument("--network", default="capped", choices=sorted(NETWORKS))
    parser.add_argument("--share", type=float, default=0.2, help="of a core, for each host")
    parser.add_argument("--rows", type=int, default=384, help="of the corpus")
    parser.add_argument("--tokens", type=int, default=64, help="of a row")
    parser.add_argument("--epochs", type=int, default=3)
    sets = "wikitext2,imdb" if os.environ.get("DISTILL_DATA") else "heldout"
    parser.add_argument("--sets", default=sets, help="evaluation sets; those of the benchmark lie under $DISTILL_DATA")
    parser.add_argument("--figure", type=Path, help="a PNG of the gain by hosts")
    parser.add_argument("--folder", type=Path, default=Path("runs/distilbert_benchmark"))
    parser.add_argument("overrides", nargs="*", help="further settings of every run, such as corpus.path=BOOKS")
    options = parser.parse_args()
    rows, results, seconds = LOOPBACK if options.loopback else EMULATED, Results(options.out), list[float]()
    for number, row in enumerate(rows):
        network = "loopback" if options.loopback else f"{options.network} {options.share}"
        folder = options.folder.resolve() / f"{number}-{digest_of([row.name, network])}"
        result = run(row, folder, options)
        seconds.append(result["training"]["seconds"])
        results.row(
            row=row.name,
            hosts=row.hosts,
            seconds=seconds[-1],
            as_fast_as_first=seconds[0] / seconds[-1],
            tokens_per_second=result["training"]["tokens_per_second"],
            published_minutes=row.published,
            loss=result["history"][-1]["loss"]["total"],
            **by_epoch(result["history"]),
        )
    if options.figure:
        draw(rows, seconds, options.figure)
    results.where()


if __name__ == "__main__":
    main()
