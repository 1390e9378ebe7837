"""What a format of a model costs and keeps: size, latency of one row, and perplexity on a text.

Shapes: R rows, S positions, V vocabulary.
"""

import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from distill.commands.export.convert import Logits
from distill.data import readers
from distill.data.collate.mlm import IGNORE, masked_lm
from distill.data.readers import InvalidFile
from distill.evaluation.sets import MASKING, SEED
from distill.runtime.errors import SettingError
from distill.runtime.seed import key

ROUNDS, WARM_UP = 25, 3
BATCH = 4  # rows at once: a large vocabulary makes 60 MB of each


def latencies(formats: dict[str, Logits], vocab: int, length: int) -> dict[str, float]:
    """Median seconds of one row of `length` tokens; the formats take turns, so that a busy machine is busy for all."""
    ids = np.random.default_rng(0).integers(0, vocab, (1, length))
    mask = np.ones_like(ids)
    times: dict[str, list[float]] = {name: [] for name in formats}
    for _ in range(WARM_UP + ROUNDS):
        for name, run in formats.items():
            start = time.perf_counter()
            run(ids, mask)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found[WARM_UP:]) for name, found in times.items()}


def rows_of(path: Path, tokenizer: Any, length: int, most: int) -> np.ndarray:
    """A text file (.txt or .txt.gz) as rows [R, S] of token ids with their special tokens, at most so many of them.

    Rows are full; more than `most` are thinned out evenly.

    Raises:
        SettingError: no such file, or a text that does not fill a row.
    """
    if not path.is_file():
        raise SettingError(f"--text {path} is no file: give a plain text")
    try:
        text = "".join(readers.lines(path))
    except InvalidFile as error:
        raise SettingError(f"--text {path} cannot be read: {error}") from error
    found = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True, verbose=False)
    rows = [row for row in found["input_ids"] if len(row) == length]
    if not rows:
        raise SettingError(f"--text {path} has fewer than {length} tokens, which is one row: give a longer text")
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(int))
    return np.array(rows, np.int64)[chosen]


def questions(rows: np.ndarray, tokenizer: Any, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """What the model sees [R, S], and what it should say at each position [R, S], IGNORE where nothing.

    A causal model predicts every next token, a masked one for the 15 % that the evaluation of runs masks too.
    """
    if causal:
        ends = np.full((len(rows), 1), IGNORE)
        return rows, np.concatenate([rows[:, 1:], ends], 1)
    counts = np.bincount(rows.reshape(-1), minlength=len(tokenizer))
    masks = masked_lm(MASKING, tokenizer, counts)
    return masks.mask(rows, key(SEED, "evaluation mask", np.arange(len(rows))))


def perplexity(run: Logits, inputs: np.ndarray, targets: np.ndarray) -> float:
    """exp of the mean negative log-likelihood of the targets, in float64."""
    total, count = 0.0, 0
    for start in range(0, len(inputs), BATCH):
        ids, wanted = inputs[start : start + BATCH], targets[start : start + BATCH]
        scored = wanted != IGNORE
        logits = torch.from_numpy(run(ids, np.ones_like(ids))[scored]).double()
        total += cross_entropy(logits, torch.from_numpy(wanted[scored]), reduction="sum").item()
        count += int(scored.sum())
    return math.exp(min(total / count, 700.0))
