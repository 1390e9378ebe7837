"""Pseudo-perplexity: positions a second of the plain loop, of minicons and of `distill.evaluation` on the same rows.

The plain loop runs one masked copy at a time through the model as it is; minicons runs in the best of three batch
sizes. All in fp32 have to give the same value; distill runs under bf16 autocast too, and its value is stated. Times are
medians of interleaved rounds after one that warms up and is left out.
"""

import argparse
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForMaskedLM, BatchEncoding

from benchmarks.common import Results
from benchmarks.step.objective import medians, timed
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


class Case(NamedTuple):
    """A model, how many rows it scores and which share of their positions."""

    name: str
    rows: int
    share: float


CASES = [Case("bert-base", 1, 0.1), Case("bundled-teacher", 16, 0.1), Case("bundled-student", 16, 0.1)]


class Problem:
    """The same positions of the same rows, scored in every way. Rows are random tokens: only the work matters."""

    def __init__(self, case: Case, length: int, device: torch.device) -> None:
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
        settings = EvaluateConfig(pseudo_perplexity=PseudoPerplexityConfig(fraction=self.share))
        scoring = Scoring(masks, self.tokenizer, settings, Single(BackendConfig(device=device.type)))
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
            packed = pack_for_evaluation(self.model, formats, self.device)
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

        return MaskedLMScorer(self.model, self.device.type, tokenizer=self.tokenizer)

    def minicons(self, batch_size: int) -> float:
        """Its `compute_stats` on so many of its prepared copies at a time."""
        scores: list[float] = []
        for batch in zip(*(part.split(batch_size) for part in self.minicons_copies), strict=True):
            scores += self.scorer.compute_stats([batch])[0]
        return float(np.exp(-np.mean(scores)))

    def paths(self, with_minicons: bool) -> tuple[dict[str, Callable[[], float]], int | None]:
        """Every way to score, and the batch size that suits minicons."""
        paths: dict[str, Callable[[], float]] = {"plain": self.plain}
        best = None
        if with_minicons:
            _ = self.minicons_copies  # which no time counts
            times = {size: timed(partial(self.minicons, size)) for size in MINICONS_BATCHES}
            best = min(times, key=times.__getitem__)
            paths["minicons"] = partial(self.minicons, best)
        return paths | {"distill": partial(self.distill, "fp32"), "distill bf16": partial(self.distill, "bf16")}, best


def random_model(family: str, **fields: Any) -> Any:
    """A model of the usual shape of its family, or with these fields, with weights that are not trained."""
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model(family, **fields), dtype=torch.float32)


def measure(paths: dict[str, Callable[[], float]], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds and values of each; refuses values in fp32 that differ."""
    values: dict[str, float] = {}

    def score(name: str) -> None:
        values[name] = paths[name]()

    seconds = medians({name: partial(score, name) for name in paths}, rounds)
    for name in paths.keys() - {"distill bf16"}:
        difference = abs(values[name] / values["plain"] - 1)
        assert difference <= TOLERANCE, f"{name} differs from the plain loop by {difference:.1e}"
    return seconds, values


def has_minicons() -> bool:
    try:
        import minicons.scorer  # noqa: F401
    except ImportError as error:
        print(f"Without minicons, which does not import ({error}); for the comparison: pip install minicons")
        return False
    return True


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--rows", type=int, help="of every case, instead of its own number")
    parser.add_argument("--length", type=int, default=128, help="positions of a row")


def run(options: argparse.Namespace, results: Results) -> None:
    device, with_minicons = torch.device("cuda" if torch.cuda.is_available() else "cpu"), has_minicons()
    for case in [case for case in CASES if not options.cases or case.name in options.cases]:
        case = case._replace(rows=options.rows or case.rows)
        problem = Problem(case, options.length, device)
        paths, batch = problem.paths(with_minicons)
        seconds, values = measure(paths, options.rounds)
        count = len(problem.positions)
        for name in paths:
            results.row(
                case=case.name,
                path=name,
                rows=case.rows,
                positions=count,
                positions_per_second=count / seconds[name],
                **{
                    f"as_fast_as_{peer}": seconds[peer] / seconds[name]
                    for peer in ("plain", "minicons")
                    if peer in paths
                },
                value=values[name],
                differs=values[name] / values["plain"] - 1,
                **({"batch": batch} if name == "minicons" else {}),
            )
