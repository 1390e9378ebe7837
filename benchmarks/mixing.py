"""How well an order in windows mixes, against a full shuffle and the order of the files, on real text.

The text is cut into rows of 128 words in the order of its files, and rows into blocks of 128 rows,
which are as small a part of it as blocks of 16 MiB are of 10 GB. Of the steps that each order gives:

echo       how alike the words of neighbouring steps are, beyond those of any two steps (cosine of their counts)
drift      autocorrelation, from one step to the next, of the loss under a fixed model of single words
spread     standard deviation of that loss over the steps, by that of the full shuffle
held out   loss of a small model of word pairs, trained once through the order, on text that it has not seen: the mean
           of the last fifth of the training, as an order that mixes badly makes it forget
"""

import argparse
import gzip
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import save, table, title

from distill.data.order import FullShuffle, Order, WindowedShuffle

LENGTH, VOCAB = 128, 2048  # words of a row; hashes of words
STEP = 64  # rows
BLOCK = 128  # rows
HELD_OUT = 512  # rows
WIDTH = 32  # of the model of word pairs
WORD = re.compile(rb"[a-z']+|[.,;:!?]")


def rows_of(folder: Path, most_bytes: int) -> np.ndarray:
    """The text of all files [N, LENGTH], one file after the other."""
    ids: list[int] = []
    for path in sorted(each for each in folder.rglob("*") if each.suffixes[-2:] in ([".txt"], [".txt", ".gz"])):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = content[:most_bytes].lower()
        ids += [zlib.crc32(word) % VOCAB for word in WORD.findall(text)]
    return np.array(ids[: len(ids) // LENGTH * LENGTH]).reshape(-1, LENGTH)


class InOrder(FullShuffle):
    """The rows as they lie in the files."""

    def numbers(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return positions


def steps_of(order: Order, epoch: int = 1) -> np.ndarray:
    """The rows of each step [steps, STEP]; a short last step is left out."""
    count = len(order) // STEP
    return order.numbers(epoch, np.arange(count * STEP)).reshape(count, STEP)


def statistics(rows: np.ndarray, steps: np.ndarray) -> dict[str, float]:
    counts = np.stack([np.bincount(rows[step].reshape(-1), minlength=VOCAB) for step in steps]).astype(np.float64)
    rare = counts * np.log(counts.sum() / counts.sum(0).clip(1))  # common words are alike in any text
    rare -= rare.mean(0)
    unit = rare / np.linalg.norm(rare, axis=1, keepdims=True)
    losses = (counts @ -np.log((counts.sum(0) + 1) / (counts.sum() + VOCAB))) / (STEP * LENGTH)
    centred = losses - losses.mean()
    return {
        "echo": float((unit[1:] * unit[:-1]).sum(1).mean()),
        "drift": float((centred[1:] * centred[:-1]).mean() / max(centred.var(), 1e-12)),
        "spread": float(losses.std()),
    }


def held_out_loss(rows: np.ndarray, steps: np.ndarray, unseen: np.ndarray) -> float:
    """Of a model that predicts a word from the one before, after the last fifth of one pass over the steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Linear(WIDTH, VOCAB))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    data, other, found = torch.from_numpy(rows), torch.from_numpy(unseen), []
    scored = {len(steps) - 1 - number * (len(steps) // 50) for number in range(10)}
    for number, step in enumerate(torch.from_numpy(steps)):
        _loss(model, data[step]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number in scored:
            with torch.no_grad():
                found.append(float(_loss(model, other)))
    return float(np.mean(found))


def _loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Of every eighth word."""
    predicted = model(rows[:, :-1:8]).reshape(-1, VOCAB)
    return torch.nn.functional.cross_entropy(predicted, rows[:, 1::8].reshape(-1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="folder of .txt files")
    parser.add_argument("--most", type=int, default=2_000_000, help="bytes of a file that are read")
    parser.add_argument("--windows", type=int, nargs="+", default=[256, 64, 16, 4, 1], help="blocks of a window")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--no-training", action="store_true", help="leave the held-out losses out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = rows_of(options.text, options.most)
    chosen = np.random.default_rng(0).permutation(len(rows))[:HELD_OUT]
    unseen, rows = rows[chosen], np.delete(rows, chosen, 0)
    starts = np.array([*range(0, len(rows), BLOCK), len(rows)])
    print(f"{title()}; {len(rows):,} rows in {len(starts) - 1} blocks, {len(rows) // STEP} steps of {STEP} rows\n")
    results: dict[str, Any] = {}
    for seed in range(options.seeds):
        orders: dict[str, Order] = {"full shuffle": FullShuffle(len(rows), seed)}
        orders |= {f"windows of {count}": WindowedShuffle(starts, count, seed) for count in options.windows}
        for name, order in (orders | {"the files'": InOrder(len(rows), seed)}).items():
            steps = steps_of(order)
            found = statistics(rows, steps)
            if not options.no_training:
                found["held out"] = held_out_loss(rows, steps, unseen)
            print(name, found, flush=True)
            results.setdefault(name, []).append(found)
    print_table(results)
    save(options.json, {"rows": len(rows), "block": BLOCK, "step": STEP, "orders": results})


def print_table(results: dict[str, Any]) -> None:
    means = {
        name: {each: np.mean([one[each] for one in found]) for each in found[0]} for name, found in results.items()
    }
    full = means["full shuffle"]
    lines = [
        [name, f"{found['echo']:.3f}", f"{found['drift']:.3f}", f"{found['spread'] / full['spread']:.2f}",
         f"{found.get('held out', np.nan):.4f}"] for name, found in means.items()
    ]  # fmt: skip
    print(table(["order", "echo", "drift", "spread", "held out"], lines))


if __name__ == "__main__":
    main()
