"""Describes a run in words before it trains: the banner at its start, and the notes of its report."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distill.config.base import flatten
from distill.config.component import PREFIX
from distill.config.settings import Config, CorpusConfig, OptimizerConfig
from distill.data.batches import Batches, StepShape
from distill.data.duplicates import describe_duplicates
from distill.data.tokens import Tokens
from distill.models.converted import origin_of
from distill.models.load import model_folder
from distill.models.weights import size
from distill.optim.schedule import ENDLESS, total_steps
from distill.optim.updates import peak_lr
from distill.runs.facts import TeacherCache
from distill.runs.run import Run
from distill.runs.state import State
from distill.runtime.progress import counted
from distill.runtime.version import __version__
from distill.teacher.members import settings_by_member, title_of, with_models

OTHER_TOKENIZER = "The teacher has another tokenizer than the student, so it has no scores on the student's tokens."
UNTRAINED_HEAD = (
    "No loss trains the head that predicts tokens, so student and teacher have no perplexity: the losses are scored."
)
WITHOUT_HEAD = "The teacher is an encoder without a head that predicts tokens, so it has no scores."

logger = logging.getLogger(__name__)


def notes_of(run: Run) -> list[str]:
    """Notes for the report besides corpus and teacher, which it names itself."""
    pair, needs_teacher = run.pair, run.objective.needs_teacher
    notes = [*_notes(run.config, run.data.tokens), *run.data.left_out]
    if (few := run.scored_on_the_way) is not None:
        notes.append(f"Scores during training are those of the first {counted(few, 'sequence')} of each set.")
    if needs_teacher and not pair.trained_head:
        notes.append(UNTRAINED_HEAD)
    elif needs_teacher and not pair.comparable:
        notes.append(WITHOUT_HEAD if pair.teacher_tokenizer is None else OTHER_TOKENIZER)
    return notes + (run.baseline.remarks if run.baseline else [])


def _notes(config: Config, tokens: Tokens) -> list[str]:
    """Those on the number format of the teacher's weights and on the corpus."""
    lines = list(_note_on_objects(config))
    for name, member in settings_by_member(config).items():
        path = None if member.model.bundled else member.model.path
        origin = None if path is None else origin_of(Path(model_folder(path)))
        if origin is not None and origin.rounding is not None:
            lines.append(
                f"In {origin.file}, from which {whose(name)} weights come, they are rounded to {origin.rounding}: all "
                "scores of this teacher are those of the rounded model."
            )
    left_out = tokens.left_out.items()
    lines += [f"Left out of the corpus: {counted(count, 'record')}: {reason}." for reason, count in left_out]
    if tokens.duplicates and (tokens.duplicates["exact"] or tokens.duplicates.get("near")):
        lines.append(f"Duplicates: {describe_duplicates(tokens.duplicates)}.")
    return lines


def _note_on_objects(config: Config) -> Iterator[str]:
    """That objects of a program were part of the run, if there were any."""
    objects = {name: str(value) for name, value in flatten(config.written).items() if str(value).startswith(PREFIX)}
    if objects:
        parts = {name.removesuffix("._target_"): text.removeprefix(PREFIX) for name, text in objects.items()}
        named = "; ".join(f"{name}: {text}" for name, text in parts.items())
        yield (
            f"Objects of a Python program were part of this run ({named}). No command line can repeat the run; "
            "distill.distill() with the same objects can."
        )


def whose(name: str) -> str:
    """The genitive of a teacher by its name among several, or of the only one."""
    return f"the teacher {name}'s" if name else "the teacher's"


def cache_note(cache: TeacherCache, name: str) -> str:
    """A note for the report on soft targets that were read from a cache of the teacher with this name."""
    size = f"({cache.bytes_per_token:.1f} bytes a token, {cache.bytes / 1e6:,.1f} MB)"
    most = (
        f"{cache.top_k} most probable tokens at each position, which hold {cache.kept_mass:.1%} of its "
        "probability at the temperature"
    )
    if cache.sampled is None:
        return f"Soft targets were read from a cache of {whose(name)} {most}; all others share one entry {size}."
    whom = f"{whose(name)} {most}, and of {cache.sampled} draws from all others"
    if not cache.top_k:
        whom = f"{cache.sampled} draws from {whose(name)} distribution at each position, at the temperature"
    return (
        f"Soft targets were read from a cache of {whom} (by probability), which estimate that distribution "
        f"without bias {size}."
    )


def announce(run: Run, recipe: str, notes: list[str], state: State) -> None:
    """Log what is about to be trained, on what, and from where."""
    config, pair, data, objective = run.config, run.pair, run.data, run.objective
    shown = {" ".join(filter(None, ["teacher", member.name])): member.model for member in with_models(pair.teachers)}
    shown["student"] = pair.student
    teacher = title_of(pair.teachers)
    if teacher and not objective.needs_teacher:
        teacher += " (the student does not learn from it)"
    logger.info(banner(config, recipe, data.tokens, data.batches, shown, teacher, notes))
    if state.step:
        logger.info(f"  resuming after step {state.step:,}")
    if compiled := ["the objective"] * objective.compiled + ["both models"] * config.precision.compile:
        logger.info(f"  the first step compiles {' and '.join(compiled)}, which can take a minute")


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
    length = batches.sequences.shape[1]
    sizes = ", ".join(f"{name} {size(model)[0]:,} parameters" for name, model in models.items() if model is not None)
    end = counted(steps, "step") if steps < ENDLESS else f"{config.train.minutes:g} min"
    return "\n".join(
        [
            f"distill {__version__}: {recipe}",
            f"  corpus   {tokens.name}",
            f"  teacher  {teacher_name or 'none'}",
            f"  models   {sizes}",
            f"  data     {counted(len(batches.order), 'sequence')} of {length} tokens from "
            f"{counted(tokens.documents, tokens.unit)}",
            *_left_out(config.corpus, tokens, len(batches.order)),
            f"  steps    {_sequences_of_a_step(batches.step_shape)} = "
            f"{counted(batches.sequences_per_step * length, 'token')} a step; "
            f"{counted(batches.steps_per_epoch, 'step')} an epoch; {end}",
            *_rate(config.optimizer, batches.sequences_per_step),
            *(f"  {note}" for note in notes),
        ]
    )


def _left_out(corpus: CorpusConfig, tokens: Tokens, taken: int) -> list[str]:
    """What of the text no step trains on, and by which settings, where some of it is left out."""
    parts = []
    if tokens.held_out:
        parts.append(
            f"{counted(tokens.held_out, 'sequence')} held out for `heldout` (corpus.heldout={corpus.heldout:g} of the "
            "text, chosen by its content)"
        )
    if (used := fraction_used(tokens, taken)) is not None:
        parts.append(f"about {100 * used:.2g} % of the rest is taken (corpus.max_sequences={corpus.max_sequences})")
    return [f"  without  {'; '.join(parts)}"] if parts else []


def fraction_used(tokens: Tokens, taken: int) -> float | None:
    """About what fraction of the text that is not held out is in so many sequences; None: all of it, or not known."""
    if tokens.sources or tokens.unit != "document":
        return None
    used = tokens.used * taken / len(tokens.sequences)
    return used if used < 1 else None


def _sequences_of_a_step(shape: StepShape) -> str:
    """What a step consists of; its micro-batches may be uneven."""
    most = min(shape.batch_size, -(-shape.sequences // shape.size))
    parts = f"{counted(shape.micro_batches, 'micro-batch')} of at most {most}"
    where = f" on each of {shape.size} ranks" if shape.size > 1 else ""
    return f"{counted(shape.sequences, 'sequence')} ({parts}{where})"


def _rate(settings: OptimizerConfig, sequences: int) -> list[str]:
    """How the learning rate comes from the sequences of a step, where it does."""
    if settings.scale_lr == "none":
        return []
    ratio = f"{sequences:,} / {settings.base_batch:,} sequences"
    growth = f"sqrt({ratio})" if settings.scale_lr == "sqrt" else ratio
    return [f"  rate     {settings.lr:g} x {growth} = {peak_lr(settings, sequences):g}"]
