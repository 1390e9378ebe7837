"""Describes a run that is about to train: its record, the notes of its report, and the banner of its log."""

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers

from distill.config import HERE
from distill.config.base import flatten
from distill.config.component import PREFIX, Component
from distill.config.rules import looks_local
from distill.config.settings import Config, CorpusConfig, FrozenModelConfig, OptimizerConfig, SourceConfig
from distill.data.batches import Batches
from distill.data.duplicates import describe_duplicates
from distill.data.order import Mixture
from distill.data.sources._in_memory import settings_in_memory
from distill.data.sources.chat import chat_template
from distill.data.tables import glue, squad
from distill.data.tokens import Tokens
from distill.distributed.shard import plain_class
from distill.evaluation.measures import Measure
from distill.models.converted import origin_of as converted_from
from distill.models.export_folder import tokenizer_class
from distill.models.language_model import OutputSpec
from distill.models.layers import AUTO, choose_layers
from distill.models.load import model_folder
from distill.models.weights import size
from distill.objective.objective import Objective
from distill.objective.terms.pooled import Pooled
from distill.optim.schedule import ENDLESS
from distill.optim.updates import peak_lr
from distill.runs import facts
from distill.runs.pair import Pair
from distill.runs.record import Record
from distill.runs.run import Run
from distill.runs.state import State
from distill.runtime.hub import is_hub_reached
from distill.runtime.jsonl import LogLine
from distill.runtime.progress import counted
from distill.runtime.redaction import FROM_ENVIRONMENT
from distill.runtime.version import __version__
from distill.teacher.cache import Cache
from distill.teacher.members import ONLY, settings_by_member, title_of, with_models

OTHER_TOKENIZER = "The teacher has another tokenizer than the student, so it has no scores on the student's tokens."
UNTRAINED_HEAD = (
    "No loss trains the head that predicts tokens, so student and teacher have no perplexity: the losses are scored."
)
WITHOUT_HEAD = "The teacher is an encoder without a head that predicts tokens, so it has no scores."

logger = logging.getLogger(__name__)


def describe(
    run: Run, caches: dict[str, Cache], measures: list[Measure], recipe: str, command: str, notes: list[str]
) -> Record:
    """The record of a run that is about to train, on rank 0: all but what it does from now on, and its scores.

    Args:
        notes: for the report, beside those on caches.
    """
    config, pair, objective, batches = run.config, run.pair, run.objective, run.data.batches
    optimizer, shape = config.optimizer, batches.step_shape
    return Record(
        recipe=recipe,
        command=command,
        started_in=os.getcwd(),
        notes=notes + [cache_note(cache_facts(cache), name) for name, cache in caches.items()],
        identity=run.identity,
        corpus=_corpus(config.corpus, run.data.tokens, batches, pair),
        teacher=_teacher(config, pair, caches) if objective.needs_teacher and pair.teachers else None,
        student=_student(config, pair, objective),
        objective=_objective(objective),
        optimizer=facts.Optimizer.model_validate(optimizer).changed(
            name=optimizer.make.path.rpartition(".")[2],
            peak_lr=peak_lr(optimizer, batches.sequences_per_step),
            sequences_per_step=batches.sequences_per_step,
        ),
        measures=measure_facts(measures),
        precision=dict(config.precision),
        backend=facts.Backend(
            name=run.ranks.name,
            ranks=run.ranks.size,
            collective=config.backend.collective,
            rings=facts.Rings(asked=config.backend.rings, in_force=run.ranks.rings, engine=run.ranks.engine),
            accumulate=shape.micro_batches,
            batch_size=shape.batch_size,
            sequences_per_step=batches.sequences_per_step,
        ),
        environment=environment(run.ranks.device),
        history_by="epoch" if config.evaluate.every_steps is None else "step",
    )


def size_of(model: Any) -> dict[str, int]:
    """Parameters and bytes of a model, as its part of the record calls them; empty without one."""
    return {} if model is None else dict(zip(("parameters", "bytes"), size(model), strict=True))


def _teacher(config: Config, pair: Pair, caches: dict[str, Cache]) -> facts.Teacher:
    """The only teacher, or the mean of several with its members."""
    settings = settings_by_member(config)

    def described(name: str, title: str, model: Any, members: dict[str, facts.Teacher]) -> facts.Teacher:
        return facts.Teacher(
            name=title,
            cache=cache_facts(caches[name]) if name in caches else None,
            published=_published_teacher(settings[name].model) if name in settings else facts.Published(),
            members=members,
            **size_of(model),
        )

    members = {one.name: described(one.name, one.title, one.model, {}) for one in pair.teachers if one.name}
    return described(ONLY, title_of(pair.teachers), pair.teacher, members)


def _published_teacher(settings: FrozenModelConfig) -> facts.Published:
    """How a teacher is published; one of a class of the user's is nowhere."""
    return published(settings.path if settings.target is None else None, settings.revision)


def published(path: str | None, revision: str | None = None) -> facts.Published:
    """The name on the Hub of the model with that name, or in this folder, and the licence that its card states."""
    from huggingface_hub import hf_hub_download, metadata_load

    if path is None:
        return facts.Published()
    folder, stated = Path(model_folder(path)), None
    name = getattr(converted_from(folder), "published", None) if folder.exists() else path
    with suppress(Exception):  # of the file system, of YAML and of the Hub's client, which have no class in common
        card = folder / "README.md"
        if not folder.exists():
            card = Path(hf_hub_download(path, card.name, revision=revision, local_files_only=not is_hub_reached()))
        stated = (metadata_load(card) or {}).get("license")
    license = stated.strip().lower() if isinstance(stated, str) else ""
    return facts.Published(hub=name, license=None if license in ("", "other") else license)


def _student(config: Config, pair: Pair, objective: Objective) -> facts.Student:
    model, make, call, made_by = pair.student, config.student.custom, None, None
    kind = plain_class(model)
    if make is not None and not make.in_memory:
        call, made_by = call_of(make, config.corpus.sequence_length, config.written["student"]), make.path
    elif make is not None and not kind.__module__.startswith("transformers."):
        made_by = f"{kind.__module__}.{kind.__qualname__}"  # makes one in memory again
    origin = origin_of(model, made_by, pair.kind.causal, call).changed(
        encodes=None if pair.trained_head else encoded_by(objective),
        normalizes=any(isinstance(term, Pooled) and term.normalizes for term in objective.terms.values()) or None,
        tokenizer=tokenizer_class(pair.tokenizer, model) if make is None else None,  # else the card names it anyway
    )
    return facts.Student(name=kind.__name__, origin=origin, start=_start(config, pair), **size_of(model))


def origin_of(model: Any, made_by: str | None, causal: bool, call: str | None = None) -> facts.Origin:
    """The facts that are needed to load a student again.

    Args:
        made_by: the import path of the callable that made it; None: transformers.
    """
    kind = plain_class(model)
    model_class, has_config = f"{kind.__module__}.{kind.__qualname__}", hasattr(model, "save_pretrained")
    return facts.Origin(model_class=model_class, made_by=made_by, causal=causal, has_config=has_config, call=call)


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
    given = {name: written[name] for name in arguments if FROM_ENVIRONMENT.search(str(written.get(name)))}
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
        published=_published_teacher(next(iter(settings_by_member(config).values())).model),
        layers=layers,
        new_head=None if pair.kind.vocabulary or first_teacher.has_head else True,
        search=facts.LayerSearch.model_validate(search) if "teacher" in search else None,  # else nothing was searched
        neurons=facts.Neurons.model_validate(search["neurons"]) if search.get("neurons") else None,
        refit=facts.Refit.model_validate(search["refit"]) if search.get("refit") else None,
    )


def _corpus(corpus: CorpusConfig, tokens: Tokens, batches: Batches, pair: Pair) -> facts.Corpus:
    sources, order = dict[str, facts.Source](), batches.order
    if isinstance(order, Mixture):
        for (name, source), quota, count in zip(tokens.sources.items(), order.quotas, order.sizes, strict=True):
            found = facts.Source(name=source.name, documents=source.documents, tokens=source.tokens)
            sources[name] = found.changed(weight=float(quota / len(order)), sequences=int(count))
    chats = [settings_in_memory(source) for source in corpus.parts]
    speed = tokens.tokens / tokens.seconds if tokens.seconds else None
    return facts.Corpus(
        name=tokens.name,
        documents=tokens.documents,
        tokens=tokens.tokens,
        sequences=len(batches.sequences),
        sequence_length=batches.sequences.shape[1],
        held_out=tokens.held_out or None,
        fraction_used=fraction_used(tokens, len(order)),
        left_out=tokens.left_out,
        duplicates=tokens.duplicates or {},
        sources=sources,
        hub=hub_datasets(corpus),
        chat_template=chat_template(chats, pair.tokenizer) if pair.kind.causal else None,
        preparation=facts.Preparation(seconds=tokens.seconds, tokens_per_second=speed),
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
        sources={name: facts.Fed.model_validate(fed) for name, fed in batches.sources_fed(state.step).items()},
    )


def data_wait(metrics: list[LogLine]) -> float | None:
    """Fraction of the training time spent waiting for batches: the mean of `data_wait`, weighted by seconds.

    Args:
        metrics: the lines of metrics.jsonl.
    """
    ends = [0.0, *(line["seconds"] for line in metrics)]
    waits = [line["data_wait"] * (end - begin) for line, (begin, end) in zip(metrics, pairwise(ends), strict=True)]
    return float(sum(waits) / ends[-1]) if ends[-1] > 0 else None


def _objective(objective: Objective) -> facts.Objective:
    """The loss terms by name, as the report calls them."""
    weights, temperatures = objective.scheduled_weights, objective.temperatures
    return facts.Objective(
        kernel="fused, compiled" if objective.compiled else "fused",
        terms={
            name: facts.Term(title=term.title or name, weight=weights[name], temperature=temperatures.get(name))
            for name, term in objective.terms.items()
        },
    )


def measure_facts(measures: list[Measure]) -> dict[str, facts.Measure]:
    """The measures by name, as the report calls them."""
    return {each.name: facts.Measure.model_validate(each) for each in measures}


def cache_facts(cache: Cache) -> facts.TeacherCache:
    return facts.TeacherCache(
        key=cache.key,
        hidden_states=cache.layout.states or None,
        top_k=cache.layout.top_k,
        sampled=cache.layout.sampled or None,
        sample_seed=cache.identity["sample_seed"] if cache.layout.sampled else None,
        positions=cache.num_positions,
        bytes=cache.num_bytes,
        bytes_per_token=cache.num_bytes / cache.num_positions,
        kept_mass=cache.meta.kept_mass,
        seconds=cache.meta.seconds,
        precision=cache.meta.precision,
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
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git_revision() -> str | None:
    """The revision of the project's own checkout; None in an installed package."""
    command = ["git", "-C", str(HERE.parent), "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError, subprocess.TimeoutExpired):
        if (HERE.parent / ".git").exists():
            return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or None
    return None


def notes_of(run: Run) -> list[str]:
    """Notes for the report besides corpus and teacher, which it names itself."""
    config, pair, tokens, needs_teacher = run.config, run.pair, run.data.tokens, run.objective.needs_teacher
    notes = list[str]()
    in_memory = {name: str(value) for name, value in flatten(config.written).items() if str(value).startswith(PREFIX)}
    if in_memory:
        parts = (f"{name.removesuffix('._target_')}: {text.removeprefix(PREFIX)}" for name, text in in_memory.items())
        notes.append(
            f"Objects of a Python program were part of this run ({'; '.join(parts)}). No command line can repeat the "
            "run; distill.distill() with the same objects can."
        )
    for name, member in settings_by_member(config).items():
        path = None if member.model.bundled else member.model.path
        origin = None if path is None else converted_from(Path(model_folder(path)))
        if origin is not None and origin.rounding is not None:
            notes.append(
                f"In {origin.file}, from which {_whose(name)} weights come, they are rounded to {origin.rounding}: all "
                "scores of this teacher are those of the rounded model."
            )
    left_out = tokens.left_out.items()
    notes += [f"Left out of the corpus: {counted(count, 'record')}: {reason}." for reason, count in left_out]
    if tokens.duplicates and (tokens.duplicates["exact"] or tokens.duplicates.get("near")):
        notes.append(f"Duplicates: {describe_duplicates(tokens.duplicates)}.")
    notes += run.data.left_out
    if (few := run.scored_on_the_way) is not None:
        notes.append(f"Scores during training are those of the first {counted(few, 'sequence')} of each set.")
    if needs_teacher and not pair.trained_head:
        notes.append(UNTRAINED_HEAD)
    elif needs_teacher and not pair.comparable:
        notes.append(WITHOUT_HEAD if pair.teacher_tokenizer is None else OTHER_TOKENIZER)
    return notes + (run.baseline.remarks if run.baseline else [])


def _whose(name: str) -> str:
    """The genitive of a teacher by its name among several, or of the only one."""
    return f"the teacher {name}'s" if name else "the teacher's"


def cache_note(cache: facts.TeacherCache, name: str) -> str:
    """A note for the report on what was read from a cache of the teacher with this name."""
    size = f"({cache.bytes_per_token:.1f} bytes a token, {cache.bytes / 1e6:,.1f} MB)"
    if cache.hidden_states is not None:
        return f"A cache gave {_whose(name)} last hidden states in bf16 {size}, and its head the logits in each step."
    kept = list[str]()
    if cache.top_k:
        most = (
            f"{cache.top_k} most probable tokens at each position, which hold {cache.kept_mass:.1%} of its probability"
        )
        kept.append(f"{_whose(name)} {most} at the temperature")
    if cache.sampled is not None:
        rest = "all others" if cache.top_k else f"{_whose(name)} distribution at each position, at the temperature"
        kept.append(f"{cache.sampled} draws from {rest}")
    unbiased = " (by probability), which estimate that distribution without bias"
    others = "; all others share one entry" if cache.sampled is None else unbiased
    return f"Soft targets were read from a cache of {', and of '.join(kept)}{others} {size}."


def announce(run: Run, recipe: str, notes: list[str], state: State) -> None:
    """Log what is about to be trained, on what, and from where."""
    config, pair, tokens, objective, batches = run.config, run.pair, run.data.tokens, run.objective, run.data.batches
    models = {" ".join(filter(None, ["teacher", member.name])): member.model for member in with_models(pair.teachers)}
    models |= {"student": pair.student} if pair.student is not None else {}
    teacher = title_of(pair.teachers) or "none"
    if pair.teachers and not objective.needs_teacher:
        teacher += " (the student does not learn from it)"
    shape, length, sequences = batches.step_shape, batches.sequences.shape[1], batches.sequences_per_step
    most = min(shape.batch_size, -(-sequences // shape.size))  # of uneven ones
    where = f" on each of {shape.size} ranks" if shape.size > 1 else ""
    step = f"{counted(sequences, 'sequence')} ({counted(shape.micro_batches, 'micro-batch')} of at most {most}{where})"
    end = counted(run.steps, "step") if run.steps < ENDLESS else f"{config.train.minutes:g} min"
    without = [f"{counted(tokens.held_out, 'sequence')} held out (corpus.heldout={config.corpus.heldout:g})"]
    without *= bool(tokens.held_out)
    if (used := fraction_used(tokens, len(batches.order))) is not None:
        without.append(
            f"about {100 * used:.2g} % of the rest is taken (corpus.max_sequences={config.corpus.max_sequences})"
        )
    lines = {
        "corpus": tokens.name,
        "teacher": teacher,
        "models": ", ".join(f"{name} {size(model)[0]:,} parameters" for name, model in models.items()),
        "data": f"{counted(len(batches.order), 'sequence')} of {length} tokens from "
        f"{counted(tokens.documents, tokens.unit)}",
        "without": "; ".join(without),
        "steps": f"{step} = {counted(sequences * length, 'token')} a step; "
        f"{counted(batches.steps_per_epoch, 'step')} an epoch; {end}",
        "rate": _rate(config.optimizer, sequences),
    }
    shown = [f"distill {__version__}: {recipe}", *(f"  {name:<8} {text}" for name, text in lines.items() if text)]
    shown += [f"  {note}" for note in notes]
    if state.step:
        shown.append(f"  resuming after step {state.step:,}")
    if compiled := ["the objective"] * objective.compiled + ["both models"] * config.precision.compile:
        shown.append(f"  the first step compiles {' and '.join(compiled)}, which can take a minute")
    logger.info("\n".join(shown))


def fraction_used(tokens: Tokens, taken: int) -> float | None:
    """About what fraction of the text that is not held out is in so many sequences; None: all of it, or not known."""
    if tokens.sources or tokens.unit != "document":
        return None
    used = tokens.used * taken / len(tokens.sequences)
    return used if used < 1 else None


def _rate(settings: OptimizerConfig, sequences: int) -> str:
    """How the learning rate comes from the sequences of a step; empty where it does not."""
    if settings.scale_lr == "none":
        return ""
    ratio, root = f"{sequences:,} / {settings.base_batch:,} sequences", settings.scale_lr == "sqrt"
    return f"{settings.lr:g} x {f'sqrt({ratio})' if root else ratio} = {peak_lr(settings, sequences):g}"
