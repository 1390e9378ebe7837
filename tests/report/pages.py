"""A made-up run that is under way, for tests of its page."""

import random

from sample import sample_metrics, sample_results

from distill.report.live_logs import Series
from distill.report.live_sections import RunView
from distill.runs.record import Record

COMMAND = (
    "python -m distill +recipe=distilbert_gutenberg 'evaluate.sets=[books,wikitext2,imdb]' corpus.path=" + 9 * "books/"
)
LOGS = {0: ["epoch 1, step 41: loss total 8.1", 40 * "long_"], 1: ["Warning: <b>bold</b> & more"], 2: []}


def under_way() -> RunView:
    """After 100 of 123 steps on three ranks, all of whose numbers are made up."""
    draw, series = random.Random(0), Series()
    for line in sample_metrics()[:100]:
        series.add(line | {"exchange_wait": 0.1 + 0.05 * draw.random()})
    count = 40
    machine = {"seconds": [15.0 * number for number in range(count)], "process_cpu": [1.9] * count}
    machine |= {"machine_cpu": [0.9] * count, "process_memory": [2e9] * count, "memory_free": [14e9] * count}
    results = sample_results()
    return RunView(
        folder="/home/someone/runs/distilbert_gutenberg",
        written="2026-01-02 03:04:05 UTC",
        every=15.0,
        record=Record.from_json({**results, "command": COMMAND, "baseline": None, "history": results["history"][:2]}),
        step=100,
        steps=123,
        left=754.0,
        fraction=100 / 123,
        activities=["training 81% 100/123 steps, 0.57 steps/s", "student on heldout 40%"],
        latest=sample_metrics()[99] | {"exchange_wait": 0.123},
        points=series.points(),
        machine=machine,
        logs=LOGS,
        num_logs=3,
    )
