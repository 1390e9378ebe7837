"""The facts that a record keeps of each part of a run: its corpus, models, objective, ranks and machine."""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from distill.config import HERE
from distill.config.component import Component
from distill.config.objective import WeightSchedule
from distill.config.rules import looks_local
from distill.config.settings import (
    Config,
    CorpusConfig,
    FrozenModelConfig,
    SourceConfig,
)
from distill.data.batches import Batches
from distill.data.mixture import Mixture
from distill.data.sources._in_memory import settings_in_memory
from distill.data.sources.chat import chat_template
from distill.data.tables import glue, squad
from distill.data.tokens import Tokens
from distill.distributed import Ranks
from distill.distributed.shard import plain_class
from distill.evaluation.measures import Measure
from distill.models.export_folder import tokenizer_class
from distill.models.language_model import OutputSpec
from distill.models.layer_choice import AUTO, choose_layers
from distill.models.load import bundled_folder, size
from distill.objective.objective import Objective
from distill.objective.terms.pooled import Pooled
from distill.optim.updates import peak_lr
from distill.runs import facts
from distill.runs.banner import cache_note, fraction_used
from distill.runs.checkpoint import State
from distill.runs.pair import Pair
from distill.runs.parts import from_json
from distill.runs.published import published
from distill.runs.record import Record
from distill.runs.run import Run
from distill.runtime.jsonl import LogLine
from distill.runtime.redaction import FROM_ENVIRONMENT
from distill.runtime.version import __version__
from distill.teacher.cache import Cache
from distill.teacher.members import ONLY, settings_by_member, title_of

AnyModel = TypeVar("AnyModel", bound=facts.Model)


def describe(
    run: Run, caches: dict[str, Cache], measures: list[Measure], recipe: str, command: str, notes: list[str]
) -> Record:
    """The record of a run that is about to train: all but what it does from now on, and its scores.

    Args:
        notes: for the report, beside those on caches.
    """
    config, pair, data, objective = run.config, run.pair, run.data, run.objective
    return Record(
        recipe=recipe,
        command=command,
        started_in=os.getcwd(),
        notes=notes + [cache_note(cache_facts(cache), name) for name, cache in caches.items()],
        identity=run.folder.identity,
        corpus=replace(
            corpus_facts(data.tokens, data.batches),
            hub=hub_datasets(config.corpus),
            chat_template=template_of_chats(config.corpus, pair.tokenizer) if pair.kind.causal else None,
        ),
        teacher=teacher_facts(config, pair, caches) if objective.needs_teacher and pair.teachers else None,
        student=student_facts(config, pair, objective),
        objective=objective_facts(objective),
        optimizer=optimizer_facts(config, data.batches),
        measures=measure_facts(measures),
        precision=dict(config.precision),
        backend=backend_facts(run.ranks, config, data.batches),
        environment=environment(run.ranks.device),
        history_by="epoch" if config.evaluate.every_steps is None else "step",
    )


def model_facts(kind: type[AnyModel], name: str, model: Any) -> AnyModel:
    """A model without scores."""
    parameters, num_bytes = size(model)
    return kind(name=name, parameters=parameters, bytes=num_bytes)


def teacher_facts(config: Config, pair: Pair, caches: dict[str, Cache]) -> facts.Teacher:
    """The only teacher, or the mean of several with its members; `caches` by the name of the member, `ONLY` for one."""
    facts_by_name = {name: cache_facts(cache) for name, cache in caches.items()}
    settings = settings_by_member(config)
    members = {
        member.name: replace(
            model_facts(facts.Teacher, member.title, member.model),
            cache=facts_by_name.get(member.name),
            published=_published(settings[member.name].model),
        )
        for member in pair.teachers
        if member.name
    }
    together = model_facts(facts.Teacher, title_of(pair.teachers), pair.teacher)
    alone = _published(settings[ONLY].model) if ONLY in settings else facts.Published()
    return replace(together, members=members, cache=facts_by_name.get(ONLY), published=alone)


def _published(settings: FrozenModelConfig) -> facts.Published:
    """How a teacher is published; one of a class of the user's is nowhere."""
    if settings.bundled and settings.path is not None:
        return published(bundled_folder(settings.path))
    return published(settings.path, settings.revision) if settings.saved else facts.Published()


def student_facts(config: Config, pair: Pair, objective: Objective) -> facts.Student:
    student = model_facts(facts.Student, plain_class(pair.student).__name__, pair.student)
    make = config.student.custom
    call = (
        None
        if make is None or make.in_memory
        else call_of(make, config.corpus.sequence_length, config.written["student"])
    )
    origin = origin_of(pair.student, None if make is None else _maker(make, pair.student), pair.kind.causal, call)
    encodes, tokenizer = None if pair.trained_head else encoded_by(objective), None
    if make is None:  # else the card names the tokenizer's own class anyway
        tokenizer = tokenizer_class(pair.tokenizer, pair.student)
    normalizes = any(isinstance(term, Pooled) and term.normalizes for term in objective.terms.values()) or None
    origin = replace(origin, encodes=encodes, normalizes=normalizes, tokenizer=tokenizer)
    return replace(student, origin=origin, start=_start(config, pair))


def _maker(make: Component, student: Any) -> str | None:
    """The import path of what makes a student again: of a model in memory that of its class; None: transformers."""
    if make.in_memory is None:
        return make.path
    kind = plain_class(student)
    return None if kind.__module__.startswith("transformers.") else f"{kind.__module__}.{kind.__qualname__}"


def origin_of(model: Any, made_by: str | None, causal: bool, call: str | None = None) -> facts.Origin:
    """The facts that are needed to load a student again.

    Args:
        made_by: the import path of the callable that made it; None: transformers.
    """
    kind = plain_class(model)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return facts.Origin(name, made_by, causal, hasattr(model, "save_pretrained"), call)


def encoded_by(objective: Objective) -> str:
    """What of a text the terms read of the student: a kind of pooling, where that is all of them, else `states`."""
    ways = {term.student_reads for term in objective.terms.values()}
    pooled = {way.pooled for way in ways if way == OutputSpec(pooled=way.pooled)}
    return next(iter(pooled))[0] if len(ways) == len(pooled) == 1 else "states"


def call_of(make: Component, length: int, written: Mapping[str, Any]) -> str:
    """The arguments of the callable that made a student, as its model card writes them behind a line with `tokenizer`.

    Args:
        length: tokens of a sequence. A teacher is written as `...`.
        written: its settings as config.yaml has them: a secret of the environment stands nowhere but there.
    """
    context = {"teacher": "...", "tokenizer": "tokenizer", "sequence_length": str(length)}
    _, arguments = make.bind(**context)
    given = {name: written[name] for name in arguments if FROM_ENVIRONMENT in str(written.get(name))}
    shown = {name: repr(value) for name, value in (arguments | given).items()} | context
    return ", ".join(f"{name}={shown[name]}" for name in arguments)


def _start(config: Config, pair: Pair) -> facts.Start:
    """The weights that the student starts from: layers of a teacher, a saved model, or new ones."""
    settings = config.student
    if not settings.from_layers:
        source = None if settings.is_new else settings.path
        init = settings.init if settings.custom is None else "custom"
        return facts.Start(init=init, source=source, published=published(source))
    first_teacher, layers, search = pair.teachers[0], list[Any](), None
    if settings.layers != AUTO:  # else they were not recorded
        layers = choose_layers(settings.layers, settings.num_layers, first_teacher.model.config.num_hidden_layers)
    if pair.built.search:
        search = from_json(facts.LayerSearch, pair.built.search)
    of_teacher = _published(next(iter(settings_by_member(config).values())).model)
    return facts.Start(settings.init, first_teacher.title, of_teacher, layers, search)


def corpus_facts(tokens: Tokens, batches: Batches) -> facts.Corpus:
    invalid, order = tokens.invalid, batches.order
    return facts.Corpus(
        name=tokens.name,
        documents=tokens.documents,
        tokens=tokens.tokens,
        sequences=len(batches.sequences),
        sequence_length=batches.sequences.shape[1],
        held_out=tokens.held_out or None,
        fraction_used=fraction_used(tokens, len(batches.order)),
        skipped=invalid.skipped,
        records=invalid.records,
        invalid=invalid.bad,
        first_invalid=invalid.first_bad,
        left_out=dict(invalid.left_out),
        duplicates=tokens.duplicates or {},
        sources=_sources(tokens, order) if isinstance(order, Mixture) else {},
        preparation=facts.Preparation(tokens.seconds, tokens.tokens / tokens.seconds if tokens.seconds else None),
    )


def hub_datasets(corpus: CorpusConfig) -> list[str]:
    """The names of the data sets on the Hub that a corpus is read from, or from a copy of which."""
    names = [_hub_dataset(source) for source in corpus.parts]
    return [name for name in dict.fromkeys(names) if name is not None and not looks_local(name)]


def _hub_dataset(source: SourceConfig) -> str | None:
    """Without path and hub, GLUE and SQuAD are those of the Hub, or copies of them under $DISTILL_DATA."""
    if source.path is not None or source.hub:
        return None if source.path is not None else str(source.hub)
    squads = squad.HUB.get(str(source.arguments.get("version")))
    return None if source.target is not None else {"glue": glue.HUB, "squad": squads}.get(source.kind)


def template_of_chats(corpus: CorpusConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The chat template by which the student was trained; None without conversations, or with several ways of them."""
    return chat_template([settings_in_memory(source) for source in corpus.parts], tokenizer)


def _sources(tokens: Tokens, order: Mixture) -> dict[str, facts.Source]:
    """The sources of a mixture: the size of each, and its fraction of the sequences that are fed."""
    counts = zip(tokens.sources.items(), order.quotas, order.sizes, strict=True)
    return {
        name: facts.Source(source.name, float(quota / len(order)), source.documents, source.tokens, int(sequences))
        for (name, source), quota, sequences in counts
    }


def training_facts(state: State, batches: Batches, history: list[LogLine]) -> facts.Training:
    """The training so far: steps, tokens, seconds and losses.

    Args:
        history: the lines of history.jsonl.
    """
    return facts.Training(
        steps=state.step,
        epochs=state.step / batches.steps_per_epoch,
        tokens=state.tokens,
        seconds=state.seconds,
        tokens_per_second=state.tokens / max(state.seconds, 1e-9),
        threads=batches.threads,
        final_loss=history[-1]["loss"] if history else {},
        skipped_steps=state.skipped,
        overflow_steps=state.overflows,
        sources={
            name: facts.Fed(fed.sequences, fed.tokens, fed.passes)
            for name, fed in batches.sources_fed(state.step).items()
        },
    )


def data_wait(metrics: list[LogLine]) -> float | None:
    """Fraction of the training time spent waiting for batches: the mean of `data_wait`, weighted by seconds.

    Args:
        metrics: the lines of metrics.jsonl.
    """
    ends = [0.0, *(line["seconds"] for line in metrics)]
    if ends[-1] <= 0:
        return None
    wait_seconds = [
        line["data_wait"] * (end - begin) for line, (begin, end) in zip(metrics, pairwise(ends), strict=True)
    ]
    return float(sum(wait_seconds) / ends[-1])


def objective_facts(objective: Objective) -> facts.Objective:
    """The loss terms by name, as the report calls them."""
    return facts.Objective(
        kernel="plain" if objective.plain else "fused, compiled" if objective.compiled else "fused",
        terms={
            name: facts.Term(
                title=term.title or name,
                weight=_scheduled(objective.scheduled_weights[name]),
                temperature=_scheduled(objective.temperatures.get(name)),
            )
            for name, term in objective.terms.items()
        },
    )


def _scheduled(value: float | WeightSchedule | None) -> facts.Scheduled | float | None:
    return facts.Scheduled(value.start, value.end, value.shape) if isinstance(value, WeightSchedule) else value


def optimizer_facts(config: Config, batches: Batches) -> facts.Optimizer:
    settings = config.optimizer
    return facts.Optimizer(
        name=settings.make.path.rpartition(".")[2],
        peak_lr=peak_lr(settings, batches.sequences_per_step),
        lr=settings.lr,
        scale_lr=settings.scale_lr,
        base_batch=settings.base_batch,
        sequences_per_step=batches.sequences_per_step,
    )


def measure_facts(measures: list[Measure]) -> dict[str, facts.Measure]:
    """The measures by name, as the report calls them."""
    return {
        measure.name: facts.Measure(measure.title, measure.explanation, measure.lower_is_better) for measure in measures
    }


def backend_facts(ranks: Ranks, config: Config, batches: Batches, syncs: int | None = None) -> facts.Backend:
    return facts.Backend(
        name=ranks.name,
        ranks=ranks.size,
        collective=config.backend.collective,
        rings=facts.Rings(config.backend.rings, ranks.rings, ranks.engine),
        accumulate=batches.step_shape.micro_batches,
        batch_size=batches.step_shape.batch_size,
        sequences_per_step=batches.sequences_per_step,
        syncs=syncs,
        collectives=ranks.traffic.num_collectives,
        bytes_sent=ranks.traffic.bytes_sent,
    )


def cache_facts(cache: Cache) -> facts.TeacherCache:
    names = ("sampled", "sample_seed") if cache.layout.sampled else ()
    draws = {name: cache.identity[name] for name in names}
    return facts.TeacherCache(
        key=cache.key,
        top_k=cache.layout.top_k,
        positions=cache.num_positions,
        bytes=cache.num_bytes,
        bytes_per_token=cache.num_bytes / cache.num_positions,
        kept_mass=cache.meta["kept_mass"],
        seconds=cache.meta["seconds"],
        precision=cache.meta["precision"],
        **draws,
    )


def environment(device: torch.device) -> facts.Environment:
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return facts.Environment(
        python=sys.version.split()[0],
        torch=torch.__version__,
        transformers=transformers.__version__,
        distill=__version__,
        device=f"{device.type} ({processor})",
        cpu_count=len(os.sched_getaffinity(0)),
        platform=platform.platform(),
        git_revision=_git_revision(),
    )


def _processor() -> str:
    """The model of the processor, which Linux has in a file alone; else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def _git_revision() -> str | None:
    """The revision of the project's own checkout; None in an installed package."""
    if not (HERE.parent / ".git").exists():
        return None
    try:
        completed = subprocess.run(
            ["git", "-C", str(HERE.parent), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() or None
