"""The facts that a record keeps of each part of a run: its corpus, models, objective, ranks and machine."""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from distill.config import HERE
from distill.config.component import Component
from distill.config.objective import WeightSchedule
from distill.config.rules import looks_local
from distill.config.settings import Config, CorpusConfig, FrozenModelConfig, SourceConfig
from distill.data.batches import Batches
from distill.data.mixture import Mixture
from distill.data.sources._in_memory import settings_in_memory
from distill.data.sources.chat import chat_template
from distill.data.tables import glue, squad
from distill.data.tokens import Tokens
from distill.distributed import Ranks
from distill.distributed.shard import plain_class
from distill.evaluation.measures import Measure
from distill.models.converted import origin_of as converted_from
from distill.models.export_folder import tokenizer_class
from distill.models.language_model import OutputSpec
from distill.models.layers import AUTO, choose_layers
from distill.models.load import bundled_folder, model_folder
from distill.models.weights import size
from distill.objective.objective import Objective
from distill.objective.terms.pooled import Pooled
from distill.optim.updates import peak_lr
from distill.runs import facts
from distill.runs.banner import cache_note, fraction_used
from distill.runs.pair import Pair
from distill.runs.record import Record
from distill.runs.run import Run
from distill.runs.state import State
from distill.runtime.hub import is_hub_reached
from distill.runtime.jsonl import LogLine
from distill.runtime.redaction import FROM_ENVIRONMENT
from distill.runtime.version import __version__
from distill.tasks import Prepared
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
        identity=run.identity,
        corpus=corpus_facts(config.corpus, data, pair),
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
    parameters, num_bytes = (0, 0) if model is None else size(model)
    return kind(name=name, parameters=parameters, bytes=num_bytes)


def teacher_facts(config: Config, pair: Pair, caches: dict[str, Cache]) -> facts.Teacher:
    """The only teacher, or the mean of several with its members; `caches` by the name of the member, `ONLY` for one."""
    settings = settings_by_member(config)

    def described(name: str, title: str, model: Any) -> facts.Teacher:
        return model_facts(facts.Teacher, title, model).changed(
            cache=cache_facts(caches[name]) if name in caches else None,
            published=_published(settings[name].model) if name in settings else facts.Published(),
        )

    members = {one.name: described(one.name, one.title, one.model) for one in pair.teachers if one.name}
    return described(ONLY, title_of(pair.teachers), pair.teacher).changed(members=members)


def _published(settings: FrozenModelConfig) -> facts.Published:
    """How a teacher is published; one of a class of the user's is nowhere."""
    if settings.bundled and settings.path is not None:
        return published(bundled_folder(settings.path))
    return published(settings.path, settings.revision) if settings.saved else facts.Published()


def published(path: str | None, revision: str | None = None) -> facts.Published:
    """The name on the Hub of the model with that name, or in this folder, and the licence that its card states."""
    from huggingface_hub import hf_hub_download, metadata_load

    if path is None:
        return facts.Published()
    folder, card = Path(model_folder(path)), "README.md"
    is_here, stated = folder.exists(), None
    with suppress(Exception):  # of the file system, of YAML and of the Hub's client, which have no class in common
        if not is_here:
            folder = Path(hf_hub_download(path, card, revision=revision, local_files_only=not is_hub_reached())).parent
        stated = (metadata_load(folder / card) or {}).get("license")
    name = getattr(converted_from(folder), "published", None) if is_here else path
    license = stated.strip().lower() if isinstance(stated, str) else ""
    return facts.Published(hub=name, license=license if license not in ("", "other") else None)


def student_facts(config: Config, pair: Pair, objective: Objective) -> facts.Student:
    model, make, call = pair.student, config.student.custom, None
    if make is not None and not make.in_memory:
        call = call_of(make, config.corpus.sequence_length, config.written["student"])
    origin = origin_of(model, None if make is None else _maker(make, model), pair.kind.causal, call).changed(
        encodes=None if pair.trained_head else encoded_by(objective),
        normalizes=any(isinstance(term, Pooled) and term.normalizes for term in objective.terms.values()) or None,
        tokenizer=tokenizer_class(pair.tokenizer, model) if make is None else None,  # else the card names it anyway
    )
    student = model_facts(facts.Student, plain_class(model).__name__, model)
    return student.changed(origin=origin, start=_start(config, pair))


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
    return facts.Origin(
        model_class=f"{kind.__module__}.{kind.__qualname__}",
        made_by=made_by,
        causal=causal,
        has_config=hasattr(model, "save_pretrained"),
        call=call,
    )


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
    first_teacher, search = pair.teachers[0], pair.layers or {}
    layers: list[Any] = []
    if settings.layers != AUTO:  # else they were not recorded
        layers = choose_layers(settings.layers, settings.num_layers, first_teacher.model.config.num_hidden_layers)
    return facts.Start(
        init=settings.init,
        source=first_teacher.title,
        published=_published(next(iter(settings_by_member(config).values())).model),
        layers=layers,
        search=facts.LayerSearch.model_validate(search) if "teacher" in search else None,  # else nothing was searched
    )


def corpus_facts(corpus: CorpusConfig, data: Prepared, pair: Pair) -> facts.Corpus:
    tokens, batches = data.tokens, data.batches
    chats = [settings_in_memory(source) for source in corpus.parts]
    return facts.Corpus(
        name=tokens.name,
        documents=tokens.documents,
        tokens=tokens.tokens,
        sequences=len(batches.sequences),
        sequence_length=batches.sequences.shape[1],
        held_out=tokens.held_out or None,
        fraction_used=fraction_used(tokens, len(batches.order)),
        left_out=tokens.left_out,
        duplicates=tokens.duplicates or {},
        sources=_sources(tokens, batches.order) if isinstance(batches.order, Mixture) else {},
        hub=hub_datasets(corpus),
        chat_template=chat_template(chats, pair.tokenizer) if pair.kind.causal else None,
        preparation=facts.Preparation(
            seconds=tokens.seconds, tokens_per_second=tokens.tokens / tokens.seconds if tokens.seconds else None
        ),
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


def _sources(tokens: Tokens, order: Mixture) -> dict[str, facts.Source]:
    """The sources of a mixture: the size of each, and its fraction of the sequences that are fed."""
    counts = zip(tokens.sources.items(), order.quotas, order.sizes, strict=True)
    return {
        name: facts.Source(
            name=source.name,
            weight=float(quota / len(order)),
            documents=source.documents,
            tokens=source.tokens,
            sequences=int(sequences),
        )
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
        sources={name: facts.Fed(**fed._asdict()) for name, fed in batches.sources_fed(state.step).items()},
    )


def data_wait(metrics: list[LogLine]) -> float | None:
    """Fraction of the training time spent waiting for batches: the mean of `data_wait`, weighted by seconds.

    Args:
        metrics: the lines of metrics.jsonl.
    """
    ends = [0.0, *(line["seconds"] for line in metrics)]
    waits = [line["data_wait"] * (end - begin) for line, (begin, end) in zip(metrics, pairwise(ends), strict=True)]
    return float(sum(waits) / ends[-1]) if ends[-1] > 0 else None


def objective_facts(objective: Objective) -> facts.Objective:
    """The loss terms by name, as the report calls them."""
    return facts.Objective(
        kernel="fused, compiled" if objective.compiled else "fused",
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
    return facts.Scheduled(**dict(value)) if isinstance(value, WeightSchedule) else value


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
    return {each.name: facts.Measure.model_validate(each, from_attributes=True) for each in measures}


def backend_facts(ranks: Ranks, config: Config, batches: Batches) -> facts.Backend:
    return facts.Backend(
        name=ranks.name,
        ranks=ranks.size,
        collective=config.backend.collective,
        rings=facts.Rings(asked=config.backend.rings, in_force=ranks.rings, engine=ranks.engine),
        accumulate=batches.step_shape.micro_batches,
        batch_size=batches.step_shape.batch_size,
        sequences_per_step=batches.sequences_per_step,
    )


def cache_facts(cache: Cache) -> facts.TeacherCache:
    draws = {name: cache.identity[name] for name in ("sampled", "sample_seed") if cache.layout.sampled}
    return facts.TeacherCache(
        key=cache.key,
        top_k=cache.layout.top_k,
        positions=cache.num_positions,
        bytes=cache.num_bytes,
        bytes_per_token=cache.num_bytes / cache.num_positions,
        kept_mass=cache.meta.kept_mass,
        seconds=cache.meta.seconds,
        precision=cache.meta.precision,
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
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def _git_revision() -> str | None:
    """The revision of the project's own checkout; None in an installed package."""
    command = ["git", "-C", str(HERE.parent), "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError, subprocess.TimeoutExpired):
        if (HERE.parent / ".git").exists():
            return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or None
    return None
