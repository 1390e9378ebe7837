"""The facts of a run in words and numbers: the banner at its start, results.json at its end."""

import os
import platform
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers

from distill.config.folders import HERE
from distill.config.ramp import Ramp
from distill.config.settings import Config, OptimizerConfig
from distill.data.batches import Batches
from distill.data.duplicates import described
from distill.data.mixture import Mixture
from distill.data.tokens import Tokens
from distill.distributed import Backend
from distill.evaluation.measures import Measure
from distill.models.load import size
from distill.objective.objective import Objective
from distill.optim.schedule import ENDLESS, total_steps
from distill.optim.updates import peak_lr
from distill.runs.checkpoint import State
from distill.runtime.errors import SettingError
from distill.runtime.results_file import read_results
from distill.runtime.version import __version__
from distill.teacher.members import settings_by_member

PAPER = "The benchmark's own scale is scale=paper: bert-base, six layers, 512 tokens, 3 epochs of Project Gutenberg."
BENCHMARK = ("distilbert_gutenberg", "distilbert_gutenberg_twin")  # recipes of which that is true


def notes(config: Config, recipe: str, tokens: Tokens, needs_teacher: bool) -> list[str]:
    """Notes for the report besides corpus, teacher and scale, which it names itself.

    Args:
        needs_teacher: whether the student learns from the teacher, and does not only start from its layers.
    """
    lines = [PAPER] if config.scale == "embedded" and recipe in BENCHMARK else []
    for name, own in settings_by_member(config).items() if needs_teacher else ():
        if own.precision.teacher == "int8":
            lines.append(f"In training {whose(name)} encoder ran in int8; its scores are those of the teacher itself.")
    skipped = tokens.unread.skipped
    if skipped:
        lines.append(f"{len(skipped)} files could not be read and were skipped: {', '.join(skipped[:5])}.")
    if tokens.unread.bad:
        lines.append(f"The preparation of the corpus {tokens.unread.bad_line()}.")
    if tokens.duplicates and (tokens.duplicates["exact"] or tokens.duplicates.get("near")):
        lines.append(f"Duplicates: {described(tokens.duplicates)}.")
    return lines


def whose(name: str) -> str:
    """The genitive of a teacher by its name among several, or of the only one."""
    return f"the teacher {name}'s" if name else "the teacher's"


def cache_note(facts: dict[str, Any], name: str) -> str:
    """A note for the report on soft targets that were read from a cache of the teacher with this name."""
    size = f"({facts['bytes_per_token']:.1f} bytes a token, {facts['bytes'] / 1e6:,.1f} MB)"
    most = (
        f"{facts['top_k']} most probable tokens at each position, which hold {facts['kept_mass']:.1%} of its "
        "probability at the temperature"
    )
    if "sampled" not in facts:
        return f"Soft targets were read from a cache of {whose(name)} {most}; all others share one entry {size}."
    power = "" if facts["exponent"] == 1 else f" to the power {facts['exponent']:g}, and weighted"
    whom = f"{whose(name)} {most}, and of {facts['sampled']} draws from all others"
    if not facts["top_k"]:
        whom = f"{facts['sampled']} draws from {whose(name)} distribution at each position, at the temperature"
    return (
        f"Soft targets were read from a cache of {whom} (by probability{power}), which estimate that distribution "
        f"without bias {size}."
    )


def banner(
    config: Config,
    recipe: str,
    tokens: Tokens,
    batches: Batches,
    models: dict[str, Any],
    teacher_name: str,
    notes: list[str],
) -> str:
    """The lines shown before training starts."""
    steps = total_steps(config.train, batches.steps_per_epoch)
    length = batches.rows.shape[1]
    sizes = ", ".join(f"{name} {size(model)[0]:,} parameters" for name, model in models.items() if model is not None)
    end = f"{steps:,} steps" if steps < ENDLESS else f"{config.train.minutes} minutes"
    return "\n".join(
        [
            f"distill {__version__}: {recipe}",
            f"  corpus   {tokens.name}",
            f"  teacher  {teacher_name or 'none'}",
            f"  scale    {config.scale}",
            f"  models   {sizes}",
            f"  rows     {len(batches.order):,} of {length} tokens from {tokens.documents:,} documents",
            f"  steps    {_rows_of_a_step(batches)} = "
            f"{batches.rows_per_step * length:,} tokens a step; {batches.steps_per_epoch:,} steps an epoch; {end}",
            *_rate(config.optimizer, batches.rows_per_step),
            *(f"  {note}" for note in notes),
        ]
    )


def _rows_of_a_step(batches: Batches) -> str:
    """What a step consists of; with `train.rows_per_step` the micro-batches follow from the rows, and may be uneven."""
    if batches.step_rows is None:
        return f"{batches.batch_size} rows x {batches.accumulate} micro-batches x {batches.size} ranks"
    return (
        f"{batches.step_rows:,} rows (train.rows_per_step; train.accumulate is not read) in "
        f"{batches.micro_batches} micro-batches of at most {batches.batch_size} on each of {batches.size} ranks"
    )


def _rate(settings: OptimizerConfig, rows: int) -> list[str]:
    """How the learning rate comes from the rows of a step, where it does."""
    if settings.scale_lr == "none":
        return []
    share = f"{rows:,} / {settings.base_batch:,} rows"
    growth = f"sqrt({share})" if settings.scale_lr == "sqrt" else share
    return [f"  rate     {settings.lr:g} x {growth} = {peak_lr(settings, rows):g}"]


def history_line(line: dict[str, Any], measures: list[Measure]) -> str:
    """One line of history in words."""
    losses = ", ".join(f"{name} {value:.4f}" for name, value in line["loss"].items())
    scores = [
        f"{measure.title.lower()} {name} {value:.2f}"
        for measure in measures
        for name, value in line.get(measure.name, {}).items()
    ]
    return "; ".join([f"epoch {line['epoch']:g}, step {line['step']:,}: loss {losses}", *scores])


def read(folder: Path, setting: str) -> dict[str, Any]:
    """results.json of a finished run. Raises SettingError, naming `setting`, when there is none."""
    try:
        return read_results(folder.expanduser() / "results.json")
    except (OSError, SettingError) as error:
        raise SettingError(f"{setting}={folder} is no finished run: {error}") from None


def model_block(name: str, model: Any, scores: dict[str, Any], tokens_per_second: float | None) -> dict[str, Any]:
    parameters, num_bytes = size(model)
    return {
        "name": name,
        "parameters": parameters,
        "bytes": num_bytes,
        **scores,
        "tokens_per_second": tokens_per_second,
    }


def corpus_block(tokens: Tokens, batches: Batches) -> dict[str, Any]:
    return {
        "name": tokens.name,
        "documents": tokens.documents,
        "tokens": tokens.tokens,
        "rows": len(batches.rows),
        "sequence_length": batches.rows.shape[1],
        **tokens.unread.as_dict(),
        **({"duplicates": tokens.duplicates} if tokens.duplicates else {}),
        **({"sources": _sources_block(tokens, batches.order)} if isinstance(batches.order, Mixture) else {}),
        "preparation": {
            "seconds": tokens.seconds,
            "tokens_per_second": tokens.tokens / tokens.seconds if tokens.seconds else None,
        },
    }


def _sources_block(tokens: Tokens, order: Mixture) -> dict[str, dict[str, Any]]:
    """The sources of a mixture: what there is of each, and its share of the rows that are fed."""
    each = zip(tokens.sources.items(), order.quotas, order.sizes, strict=True)
    return {
        name: {
            "name": of.name,
            "weight": float(quota / len(order)),
            "documents": of.documents,
            "tokens": of.tokens,
            "rows": int(size),
        }
        for (name, of), quota, size in each
    }


def data_wait(metrics: list[dict[str, Any]]) -> float | None:
    """Share of the training time that went by waiting for batches: `data_wait` weighted by the time it stands for."""
    ends = [0.0, *(line["seconds"] for line in metrics)]
    if ends[-1] <= 0:
        return None
    waited = [line["data_wait"] * (end - begin) for line, (begin, end) in zip(metrics, pairwise(ends), strict=True)]
    return float(sum(waited) / ends[-1])


def training_block(
    state: State,
    batches: Batches,
    history: list[dict[str, Any]],
    metrics: list[dict[str, Any]],
) -> dict[str, Any]:
    fed = batches.sources_fed(state.step)
    return {
        "steps": state.step,
        "epochs": state.step / batches.steps_per_epoch,
        "tokens": state.tokens,
        "seconds": state.seconds,
        "tokens_per_second": state.tokens / max(state.seconds, 1e-9),
        "data_wait": data_wait(metrics),
        "threads": batches.threads,
        "final_loss": history[-1]["loss"] if history else {},
        "skipped_steps": state.skipped,
        "overflow_steps": state.overflows,
        **({"sources": {name: each._asdict() for name, each in fed.items()}} if fed else {}),
    }


def objective_block(objective: Objective) -> dict[str, Any]:
    """The loss terms by name, as the report calls them."""
    return {
        "kernel": "plain" if objective.plain else "fused, compiled" if objective.compiled else "fused",
        "terms": {
            name: {"title": term.title or name, "weight": _shown(objective.scheduled_weights[name])}
            | ({"temperature": _shown(objective.temperatures[name])} if name in objective.temperatures else {})
            for name, term in objective.terms.items()
        },
    }


def optimizer_block(config: Config, batches: Batches) -> dict[str, Any]:
    """The optimizer, and the learning rate of which the schedule took a share."""
    settings = config.optimizer
    return {
        "name": settings.make.path.rpartition(".")[2],
        "peak_lr": peak_lr(settings, batches.rows_per_step),
        "lr": settings.lr,
        "scale_lr": settings.scale_lr,
        "base_batch": settings.base_batch,
        "rows_per_step": batches.rows_per_step,
    }


def _shown(value: float | Ramp) -> Any:
    """A number, or what it goes from and to."""
    return {**vars(value), "shape": value.shape.value} if isinstance(value, Ramp) else value


def measures_block(measures: list[Measure]) -> dict[str, Any]:
    """What was measured, as the report calls it."""
    return {
        measure.name: {
            "title": measure.title,
            "explanation": measure.explanation,
            "lower_is_better": measure.lower_is_better,
        }
        for measure in measures
    }


def backend_block(backend: Backend, config: Config, state: State, batches: Batches) -> dict[str, Any]:
    """The ranks that the run ended with, and what each of them did in a step."""
    return {
        "name": backend.name,
        "ranks": backend.size,
        "collective": config.backend.collective,
        "rings": {"asked": config.backend.rings, "in_force": backend.rings, "engine": backend.engine},
        "accumulate": batches.micro_batches,
        "batch_size": batches.batch_size,
        "rows_per_step": batches.rows_per_step,
        "syncs": state.syncs,
        "collectives": backend.num_collectives,
        "bytes_sent": backend.bytes_sent,
    }


def device_name(device: torch.device) -> str:
    """What computes: the kind of device and, in parentheses, which one it is."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{device.type} ({name})"


def environment(device: torch.device) -> dict[str, Any]:
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "distill": __version__,
        "device": device_name(device),
        "cpu_count": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "git_revision": _git_revision(),
    }


def _git_revision() -> str | None:
    """Of the project's own checkout; None in an installed package."""
    if not (HERE.parent / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(HERE.parent), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
