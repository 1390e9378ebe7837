"""A made-up run that is under way, for tests of its page."""

from pathlib import Path

from sample import sample_metrics, sample_results

from distill.report.live import Status
from distill.runs.record import Record

COMMAND = (
    "python -m distill +recipe=distilbert_gutenberg 'evaluate.sets=[books,wikitext2,imdb]' corpus.path=" + 9 * "books/"
)
LOGS = {0: ["epoch 1, step 41: loss total 8.1", 40 * "long_"], 1: ["Warning: <b>bold</b> & more"], 2: []}


def under_way() -> Status:
    """After 100 of 123 steps on three ranks, all of whose numbers are made up."""
    count = 40
    samples = {"seconds": [60.0 * number for number in range(count)], "process_cpu": [1.9] * count}
    samples |= {"machine_cpu": [0.9] * count, "process_memory": [2e9] * count, "memory_free": [14e9] * count}
    results = sample_results() | {"command": COMMAND, "baseline": None, "finished": False}
    return Status(
        folder=Path("/home/someone/runs/distilbert_gutenberg"),
        every=60.0,
        record=Record.from_json({**results, "history": results["history"][:2]}),
        metrics=sample_metrics()[:100],
        steps=123,
        left=754.0,
        fraction=100 / 123,
        exchange_wait=0.123,
        activities=["training 81% 100/123 steps, 0.57 steps/s", "student on heldout 40%"],
        samples=samples,
        logs=LOGS,
    )
