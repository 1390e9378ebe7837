"""Pseudo-perplexity: positions a second of the plain loop, of minicons and of `distill.evaluation` on the same rows.

The plain loop runs one masked copy at a time through the model as it is; minicons runs in the best of three batch
sizes. All in fp32 have to give the same value; distill runs under bf16 autocast too, and its value is stated. Times are
medians of interleaved rounds after one that warms up and is left out. Beside them stands what the matrix work allows:
`floor` is distill's operations divided by the rate measured in the same run, `operations` how many the plain loop has
for one of them.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForMaskedLM, BatchEncoding

from benchmarks.common import save, title
from benchmarks.step.objective import matrix_rate, peak_bytes, timed
from distill.config.settings import (
    BackendConfig,
    EvaluateConfig,
    PrecisionConfig,
    PseudoPerplexityConfig,
    TeacherConfig,
)
from distill.data.collate.mlm import masked_lm
from distill.distributed.single import Single
from distill.evaluation.measures import Scoring
from distill.evaluation.pseudo_perplexity import SinglePass
from distill.evaluation.sets import MASKING, EvaluationSet
from distill.models.kernels.packed_linear import pack_for_evaluation
from distill.models.language_model import LanguageModel
from distill.models.teacher import load_teacher

BUNDLED_STUDENT = {"dim": 256, "n_heads": 4, "hidden_dim": 1024, "n_layers": 2}
MINICONS_BATCHES = (4, 16, 64)  # at 64, its logits of rows of 128 take 1 GB where V is 30,522
NAME = "pseudo_perplexity"
TOLERANCE = 1e-5  # relative, of the pseudo-perplexity


@dataclass
class Case:
    """A model, how many rows it scores and which share of their positions."""

    name: str
    rows: int
    share: float


CASES = [Case("bert-base", 1, 0.1), Case("bundled-teacher", 16, 0.1), Case("bundled-student", 16, 0.1)]


@dataclass
class Result:
    """A case's table; everything by path."""

    case: str
    rows: int
    length: int
    positions: int
    operations: dict[str, float]
    floor_seconds: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    value: dict[str, float] = field(default_factory=dict)
    minicons_batch: int = 0


class Problem:
    """The same positions of the same rows, scored in every way. Rows are random tokens: only the work matters."""

    def __init__(self, case: Case, length: int, batch_size: int, device: str) -> None:
        torch.manual_seed(0)
        teacher, self.tokenizer, _ = load_teacher(TeacherConfig(path="bundled_small"))
        assert teacher is not None and self.tokenizer is not None
        self.model = {
            "bert-base": lambda: random_model("bert"),
            "bundled-teacher": lambda: teacher,
            "bundled-student": lambda: random_model("distilbert", vocab_size=len(self.tokenizer), **BUNDLED_STUDENT),
        }[case.name]().to(device)
        self.model.eval()
        self.device, self.share = device, case.share
        self.vocab = self.model.config.vocab_size
        # The measure reads as many logits as there are tokens.
        self.tokenizer.add_tokens([f"[further {number}]" for number in range(self.vocab - len(self.tokenizer))])
        masks = masked_lm(MASKING, self.tokenizer, np.ones(self.vocab, np.int64))
        settings = EvaluateConfig(pseudo_perplexity=PseudoPerplexityConfig(fraction=self.share, batch_size=batch_size))
        scoring = Scoring(masks, self.tokenizer, settings, Single(BackendConfig(device=self.device)))
        self.measure = SinglePass(scoring)
        random = np.random.default_rng(0)
        rows = random.choice(np.flatnonzero(masks.maskable), (case.rows, length)).astype(np.uint16)
        rows[:, 0], rows[:, -1] = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        self.data = EvaluationSet(case.name, "random tokens", rows, 1)
        self.positions = self.measure.positions(self.data)

    def plain(self) -> float:
        """One masked copy at a time, whole logits."""
        total = 0.0
        width = self.data.sequences.shape[1]
        rows = torch.from_numpy(self.data.sequences.astype(np.int64)).to(self.device)
        with torch.inference_mode():
            for row, column in zip(*divmod(self.positions, width), strict=True):
                ids = rows[row].clone()
                ids[column] = self.tokenizer.mask_token_id
                logits = self.model(input_ids=ids[None]).logits
                total -= logits[0, column].log_softmax(-1)[rows[row, column]].item()
        return float(np.exp(total / len(self.positions)))

    def distill(self, precision: str) -> float:
        """As a run scores: laid out in the kernels of evaluation, which is part of the time."""
        formats = PrecisionConfig(evaluate=precision)
        with torch.inference_mode():
            packed = pack_for_evaluation(self.model, formats, torch.device(self.device))
            return self.measure.score(LanguageModel(packed, precision), self.data, lambda _: None).values[NAME]

    @cached_property
    def minicons_copies(self) -> list[torch.Tensor]:
        """What its `prepare_text` makes of the rows: ids, attention, tokens and columns of the positions to score."""
        ids = torch.from_numpy(self.data.sequences.astype(np.int64))
        whole = self.scorer.prepare_text(BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)}))
        width = ids.shape[1]
        parts: list[list[torch.Tensor]] = []
        for number, (copies, attention, tokens, columns) in enumerate(whole):
            wanted = torch.isin(columns, torch.from_numpy(self.positions[self.positions // width == number] % width))
            parts.append([part[wanted] for part in (copies, attention, tokens, columns)])
        return [torch.cat(part) for part in zip(*parts, strict=True)]

    @cached_property
    def scorer(self) -> Any:
        from minicons.scorer import MaskedLMScorer

        return MaskedLMScorer(self.model, self.device, tokenizer=self.tokenizer)

    def minicons(self, batch_size: int) -> float:
        """Its `compute_stats` on so many of its prepared copies at a time."""
        scores: list[float] = []
        for batch in zip(*(part.split(batch_size) for part in self.minicons_copies), strict=True):
            scores += self.scorer.compute_stats([batch])[0]
        return float(np.exp(-np.mean(scores)))

    def paths(self, with_minicons: bool, result: Result) -> dict[str, Callable[[], float]]:
        paths: dict[str, Callable[[], float]] = {"plain": self.plain}
        if with_minicons:
            times = {size: timed(partial(self.minicons, size)) for size in MINICONS_BATCHES}
            result.minicons_batch = min(times, key=times.__getitem__)
            paths["minicons"] = partial(self.minicons, result.minicons_batch)
        return paths | {"distill": partial(self.distill, "fp32"), "distill bf16": partial(self.distill, "bf16")}

    def operations(self) -> dict[str, float]:
        """Operations of the matrix products: of the plain loop, and of distill."""
        config, length, count = self.model.config, self.data.sequences.shape[1], len(self.positions)
        width, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
        inner = config.hidden_dim if config.model_type == "distilbert" else config.intermediate_size
        head = width * (width + self.vocab)
        project, rest, attend = 3 * width**2, width**2 + 2 * width * inner, 2 * length * width
        plain = count * length * (layers * (project + rest + attend) + head)
        first = len(np.unique(self.positions // length)) * length * project + count * length * (rest + attend)
        middle = count * length * (layers - 2) * (project + rest + attend)
        last = count * (project + rest + 2 * length * heads * width)
        return {"plain": 2.0 * plain, "distill": 2.0 * (first + middle + last + count * head)}


def random_model(family: str, **fields: Any) -> Any:
    """A model of the usual shape of its family, or with these fields, with weights that are not trained."""
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model(family, **fields), dtype=torch.float32)


def measure(paths: dict[str, Callable[[], float]], result: Result, rounds: int) -> None:
    """Fill in times and values, and refuse values in fp32 that differ."""
    times: dict[str, list[float]] = {name: [] for name in paths}

    def score(name: str) -> None:
        result.value[name] = paths[name]()

    for _ in range(rounds + 1):
        for name, seconds in times.items():
            seconds.append(timed(partial(score, name)))
    result.seconds = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}
    for name in paths.keys() - {"distill bf16"}:
        difference = abs(result.value[name] / result.value["plain"] - 1)
        assert difference <= TOLERANCE, f"{result.case}: {name} differs from the plain loop by {difference:.1e}"


def show(result: Result) -> str:
    ratio = result.operations["plain"] / result.operations["distill"]
    lines = [
        f"{result.case}: {result.positions} positions of {result.rows} rows of {result.length}, operations {ratio:.2f}"
    ]
    for name, seconds in result.seconds.items():
        peers = [peer for peer in ("plain", "minicons") if peer in result.seconds]
        against = "  ".join(f"{result.seconds[peer] / seconds:6.2f}x {peer}" for peer in peers)
        floor = result.floor_seconds.get(name)
        lines.append(
            f"  {name:10s} {result.positions / seconds:8.1f} positions/s  {against}"
            f"  {result.peak_bytes[name] / 2**20:6.0f} MiB  value {result.value[name]:.6g}"
            f" ({result.value[name] / result.value['plain'] - 1:+.1e})"
            + (f"  floor {result.positions / floor:.1f} positions/s" if floor else "")
        )
    return "\n".join(lines)


def has_minicons() -> bool:
    try:
        import minicons.scorer  # noqa: F401
    except ImportError as error:
        print(f"Without minicons, which does not import ({error}); for the comparison: pip install minicons")
        return False
    return True


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--rows", type=int, help="of every case, instead of its own number")
    parser.add_argument("--share", type=float, help="of the positions that are scored, instead of a case's own")
    parser.add_argument("--length", type=int, default=128, help="positions of a row")
    parser.add_argument(
        "--batch-size", type=int, default=PseudoPerplexityConfig().batch_size, help="copies in one forward"
    )
    options = parser.parse_args()
    print(title())
    with_minicons = has_minicons()
    rates = {"distill": matrix_rate(torch.float32, device), "distill bf16": matrix_rate(torch.bfloat16, device)}
    print(", ".join(f"{name}: {rate / 1e9:.0f} GFLOP/s" for name, rate in rates.items()))
    results = []
    for case in CASES:
        if options.cases and case.name not in options.cases:
            continue
        case = Case(case.name, options.rows or case.rows, options.share or case.share)
        problem = Problem(case, options.length, options.batch_size, device)
        result = Result(case.name, case.rows, options.length, len(problem.positions), problem.operations())
        result.floor_seconds = {name: result.operations["distill"] / rate for name, rate in rates.items()}
        paths = problem.paths(with_minicons, result)
        measure(paths, result, options.rounds)
        results.append((paths, result))
    for paths, result in results:  # after all timing, since `peak_bytes` slows the allocator down
        for name, path in paths.items():
            result.peak_bytes[name] = peak_bytes(path, device)
        print(show(result), flush=True)
    save(options.json, [asdict(result) for _, result in results])


if __name__ == "__main__":
    main()
