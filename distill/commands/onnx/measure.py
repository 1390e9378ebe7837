"""Measures the formats of a model: latency of one sequence, and perplexity on a text.

Shapes: R sequences, S positions, V vocabulary.
"""

import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from distill.commands.onnx.convert import Logits
from distill.data import readers
from distill.data.collate.mlm import IGNORE, masked_lm
from distill.data.readers import InvalidFile
from distill.evaluation.sets import MASKING, SEED
from distill.runtime.errors import SettingError
from distill.runtime.seed import key

ROUNDS, WARM_UP = 25, 3
BATCH = 4  # sequences at once: the logits of one take 60 MB with a large vocabulary


def latencies(formats: dict[str, Logits], inputs: tuple[np.ndarray, ...]) -> dict[str, float]:
    """Median seconds of these inputs; the formats take turns, so that other load slows all alike."""
    times: dict[str, list[float]] = {name: [] for name in formats}
    for _ in range(WARM_UP + ROUNDS):
        for name, run in formats.items():
            start = time.perf_counter()
            run(*inputs)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds[WARM_UP:]) for name, seconds in times.items()}


def sequences_of(path: Path, tokenizer: Any, length: int, max_sequences: int) -> np.ndarray:
    """A text file (.txt or .txt.gz) as full sequences [R, S] of token ids with their special tokens.

    Of more than `max_sequences` it takes so many, evenly spread.

    Raises:
        SettingError: no such file, or a text that does not fill a sequence.
    """
    if not path.is_file():
        raise SettingError(f"input={path} is not a file: give a plain text")
    try:
        text = "".join(readers.lines(path))
    except InvalidFile as error:
        reason = str(error).removeprefix(path.name).lstrip(":, ")  # the setting has the name
        raise SettingError(reason, setting="input", value=path) from error
    encoded = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True, verbose=False)
    rows = [row for row in encoded["input_ids"] if len(row) == length]
    if not rows:
        raise SettingError(f"input={path} has fewer than {length} tokens, one sequence: give a longer text")
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(max_sequences, len(rows))).round().astype(int))
    return np.array(rows, np.int64)[chosen]


def inputs_and_targets(rows: np.ndarray, tokenizer: Any, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [R, S], and the targets of each position [R, S], IGNORE where there is none.

    A causal model predicts every next token, a masked one those 15 % that the evaluation of runs masks too.
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
        ids, labels = inputs[start : start + BATCH], targets[start : start + BATCH]
        scored = labels != IGNORE
        logits = torch.from_numpy(run(ids, np.ones_like(ids))[scored]).double()
        total += cross_entropy(logits, torch.from_numpy(labels[scored]), reduction="sum").item()
        count += int(scored.sum())
    return math.exp(min(total / count, 700.0))
