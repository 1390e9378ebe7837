"""How far the gradient of a cached teacher is from that of the live one: bias, and noise against a step's own.

    python benchmarks/teacher_cache/noise.py --pair masked [--steps 32] [--draws 2] [corpus.max_sequences=2000 ...]
    python benchmarks/teacher_cache/noise.py --pair causal --teacher runs/gpt2_pretrain

The gradient of all parameters of the student, as it starts, for the whole loss (soft targets and words), in fp32.
g(b) is that of step b with the live teacher and G its mean over the steps; h(b) is that with a cache. The table
gives, of a cache,

    difference   |mean of h(b) - g(b)| / |G|: what no number of steps averages away; for draws it ends at `chance`
    chance       what `difference` would be without any bias, from the scatter of h(b) - g(b) and the number of steps
    noise        the mean of |h(b) - g(b)|^2 beside the difference, divided by that of |g(b) - G|^2: so much larger
                 does the cache make the variance of a step's gradient (its trace), which is there with the live
                 teacher, too, since a step has a few rows only

A cache serves training as well as the live teacher where its difference is chance and its noise is small against 1:
then it is as if a step had fewer rows by that share.
"""

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import save, table, title
from benchmarks.teacher_cache.runs import CACHES, pair_settings
from distill import job
from distill.config.compose import composed
from distill.data.batch import Batch
from distill.data.batches import Batches
from distill.distributed import Ranks, gradient_sync
from distill.models.language_model import NO_OUTPUTS, LanguageModel
from distill.objective.build import make_terms
from distill.objective.objective import Objective
from distill.objective.trainable import Trainable
from distill.runs.check import check
from distill.runs.pair import load_models, new_student
from distill.runs.setup import setup_student
from distill.runs.teachers import setup_teachers
from distill.teacher.distributions import TopK
from distill.teacher.layout import Layout
from distill.teacher.output import TeacherOutput
from distill.teacher.sampling import as_samples, kept_entries, offsets_of, stored

HEAD = ("teacher", "bytes a token", "difference", "chance", "noise")


class Steps:
    """A pair before its first step, and the gradients of its steps."""

    def __init__(self, arguments: list[str], held: ExitStack) -> None:
        """`held`: keeps the backend until it is closed."""
        config = composed(["evaluate.sets=[heldout]", "precision=fp32", *arguments])
        check(config)
        self.ranks: Ranks = job.enter_ranks(config, held)
        terms = make_terms(config.objective)
        task = job.choose_task(config, terms)
        models = load_models(config, terms, task, self.ranks)
        text = task.prepare(config, models.tokenizer, self.ranks)
        self.batches: Batches = text.batches
        vocabulary = len(models.tokenizer)
        student = new_student(config, models.teachers[0].model, models.tokenizer, task, self.ranks)
        self.vocabulary = vocabulary
        self.objective: Objective = job.make_objective(config, models.terms, self.batches, 1, vocabulary, self.ranks)
        self.trainable: Trainable = setup_student(student, self.objective, config.precision, self.ranks)
        gradient_sync(self.ranks, self.trainable)  # its gradients exist from here on
        (self.teacher,) = setup_teachers(config, models.teachers, {}, self.ranks).values()

    def output(self, batch: Batch, layout: Layout | None, seed: int) -> TeacherOutput:
        """What the teacher gives for a batch: all logits, or what a cache of this layout would give."""
        teacher: LanguageModel = self.teacher
        with torch.no_grad():
            rows = teacher(batch.inputs, batch.documents, self.objective.teacher_spec(batch)).head_rows
            assert rows is not None
            if layout is None:
                return TeacherOutput(teacher.head(rows), NO_OUTPUTS)
            positions = self.objective.positions(batch)
            counts = _counts(batch, positions)
            offsets = torch.from_numpy(offsets_of(batch.row_ids, counts, f"noise {seed}")).to(rows.device)
            temperature = self.objective.top_k_temperature
            assert temperature is not None
            entries = kept_entries(teacher.logits(rows, self.vocabulary), layout, temperature, offsets)
        columns = {name: torch.from_numpy(values).to(rows.device) for name, values in stored(entries, layout).items()}
        if layout.sampled:
            return TeacherOutput(as_samples(columns, layout), NO_OUTPUTS)
        return TeacherOutput(TopK(columns["ids"], columns["log_probs"]), NO_OUTPUTS)

    def gradient(self, step: int, layout: Layout | None = None, seed: int = 0) -> torch.Tensor:
        """Of all parameters, flat, in a step of the run."""
        window = self.batches.window(step)
        scales = self.objective.scales(self.objective.count(window), self.ranks.device)
        self.trainable.zero_grad(set_to_none=False)
        for batch in (each.to(self.ranks.device) for each in window):
            loss, _ = self.objective(self.trainable, self.output(batch, layout, seed), batch, scales)
            loss.backward()
        return torch.cat([p.grad.flatten() for p in self.trainable.parameters() if p.grad is not None]).clone()


def _counts(batch: Batch, positions: torch.Tensor | None) -> np.ndarray:
    """How many positions of each row carry soft targets."""
    rows, length = batch.ids.shape
    if positions is None:
        return np.full(rows, length)
    return np.bincount(positions.cpu().numpy() // length, minlength=rows)


class Scatter:
    """Mean and variance of vectors that come one by one."""

    def __init__(self) -> None:
        self.sum: torch.Tensor | float = 0.0
        self.squares, self.count = 0.0, 0

    def add(self, vector: torch.Tensor) -> None:
        self.sum = self.sum + vector.double()
        self.squares += float(vector.double().square().sum())
        self.count += 1

    @property
    def mean(self) -> torch.Tensor:
        assert isinstance(self.sum, torch.Tensor)
        return self.sum / self.count

    @property
    def trace(self) -> float:
        """The sum of the variances of all entries."""
        return (self.squares - self.count * float(self.mean.square().sum())) / max(self.count - 1, 1)


def measure(steps: Steps, layouts: dict[str, Layout], count: int, draws: int) -> list[dict[str, Any]]:
    """A line for each layout, over `count` steps and so many draws in each."""
    live = Scatter()
    apart = {name: Scatter() for name in layouts}
    for step in range(count):
        exact = steps.gradient(step)
        live.add(exact)
        for name, layout in layouts.items():
            for seed in range(draws if layout.sampled else 1):
                apart[name].add(steps.gradient(step, layout, seed) - exact)
    size, own = float(live.mean.norm()), live.trace
    return [
        {
            "teacher": name,
            "bytes_per_token": layouts[name].position_bytes,
            "difference": float(found.mean.norm()) / size,
            "chance": (found.trace / found.count) ** 0.5 / size,
            "noise": found.trace / own,
        }
        for name, found in apart.items()
    ]


def noise_table(lines: list[dict[str, Any]]) -> str:
    """The lines as Markdown."""
    return table(
        HEAD,
        [
            [
                line["teacher"],
                f"{line['bytes_per_token']}",
                f"{line['difference']:.1%}",
                f"{line['chance']:.1%}",
                f"{line['noise']:.3f}",
            ]
            for line in lines
        ],
    )


def compare(
    pair: str, teacher: str | None, names: list[str], count: int, draws: int, settings: list[str]
) -> list[dict[str, Any]]:
    """The table of these caches of a pair, printed; gives its lines."""
    with ExitStack() as held:
        steps = Steps([*pair_settings(pair, teacher), *settings], held)
        layouts = {name: CACHES[name].layout(steps.vocabulary) for name in names if CACHES[name].wanted}
        lines = measure(steps, layouts, count, draws)
    print(f"\n{pair}: gradients of {count} steps beside those of the live teacher\n\n{noise_table(lines)}", flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=("masked", "causal"), default="masked")
    parser.add_argument("--teacher", help="run folder of the causal pair's teacher")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--draws", type=int, default=2, help="of the same step")
    parser.add_argument("--only", nargs="+", choices=CACHES, help="of the caches; all by default")
    parser.add_argument("--json", type=Path)
    options, arguments = parser.parse_known_args()
    if options.pair == "causal" and options.teacher is None:
        parser.error("--pair causal needs --teacher FOLDER, a run of gpt2_pretrain")
    print(title())
    names = options.only or list(CACHES)
    lines = compare(options.pair, options.teacher, names, options.steps, options.draws, arguments)
    save(options.json, {"pair": options.pair, "steps": options.steps, "settings": arguments, "caches": lines})


if __name__ == "__main__":
    main()
