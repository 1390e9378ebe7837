"""The rules between settings: what a run may not have together, and paths that lead nowhere."""

import glob
import os
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from distill.config import RECIPES
from distill.config.base import Refusal, refuse
from distill.config.data import HELDOUT
from distill.config.models import KEPT, MemberConfig, TeacherConfig
from distill.config.objective import is_zero, value_at
from distill.config.settings import Config, EvaluateConfig, MaskingConfig, Missing, SourceConfig, TeacherCacheConfig
from distill.runtime.errors import SettingError, did_you_mean

Terms = Mapping[str, Any]  # loss terms by name, each a `distill.objective.terms.Term`
LISTED = 1000  # entries of a folder among which the nearest name is looked for
RESUME = ("auto", "strict", "never")


def check_rules(config: Config, terms: Terms, task: Any) -> None:
    """Raises SettingError for the first setting that is at odds with another section.

    Args:
        terms: those of the objective that have a weight.
        task: the `distill.tasks.Task` that these terms are for.
    """
    of_kind = _of_causal if task.kind.causal else _of_others
    of_task = (_of_labels, _of_objective, _of_unlabelled, of_kind, _of_on_policy, _of_teachers)
    refuse(chain.from_iterable(rules(config, terms, task) for rules in of_task))
    refuse(_of_training(config))
    check_evaluation(config, task.kind.vocabulary)


def _of_objective(config: Config, terms: Terms, task: Any) -> Iterator[Refusal]:
    """Terms and masking that fit neither the task nor the teacher."""
    kind, of_task = task.kind, f"objective.task={config.objective.task}"
    if not terms:
        yield "objective", None, "all weights are 0 and there is nothing to learn", "give one of the terms a weight"
    for name, term in terms.items():
        if term.student_reads.last_rows and not kind.vocabulary:
            given = config.objective.terms[name].arguments.get("positions")
            yield f"objective.{name}.positions", given, f"{of_task} predicts no words", "set it to all"
        if config.teacher.is_none and term.needs_teacher:
            yield (
                "teacher.path",
                "null",
                f"objective.{name} needs a teacher",
                "give teacher.path=FOLDER, teacher=bundled_small, or objective=mlm",
            )
    if task.labels == ("mlm", "sop") and config.corpus.cross_documents:
        yield "corpus.cross_documents", True, f"a sequence of {of_task} has one document", "set it to false"
    if (kind.causal or not kind.vocabulary) and config.objective.masking != MaskingConfig():
        what = "predicts the next token" if kind.causal else "learns from labels"
        problem = f"{what} and masks no tokens, but the command line or recipe sets objective.masking"
        recipes = "distilgpt2_gutenberg" if kind.causal else "table, squad or glue"
        cure = f"leave it out, or choose a recipe for that task (+recipe={recipes})"
        yield "objective.task", config.objective.task, problem, cure


def _of_unlabelled(config: Config, terms: Terms, task: Any) -> Iterator[Refusal]:
    """Unlabelled examples from which no term learns, and a term on labels where no labelled ones are left."""
    setting, path, name = "corpus.unlabelled", config.corpus.unlabelled, config.objective.task
    if path is None:
        return
    if task.kind.vocabulary:
        yield setting, path, f"for fine-tuning, and objective.task={name} learns from text", "give it as corpus.path"
    if not any(term.needs_teacher for term in terms.values()):
        cure = f"set objective=distil_{name} teacher=pretrained teacher.path=RUN, or leave it out"
        yield setting, path, "has no labels, and no term of the objective learns from a teacher", cure
    for term in [term for term in terms if terms[term].task] if config.corpus.max_sequences == 0 else ():
        cure = f"set objective.{term}.weight=0"
        yield "corpus.max_sequences", "0", f"leaves objective.{term} without a label", cure


def _of_causal(config: Config, terms: Terms, task: Any) -> Iterator[Refusal]:
    """What a causal model cannot have."""
    for name in [name for name, term in terms.items() if term.reads_first_position]:
        problem = "reads the first position of a sequence, which in a causal model sees no other"
        yield f"objective.{name}", None, problem, f"set objective.{name}.weight=0"
    if config.student.is_new and config.student.init == "neighbours":
        problem = f"for masked words, not for objective.task={config.objective.task}"
        yield "student.init", "neighbours", problem, "set student.init=random"
    for name in [name for name, term in terms.items() if term.across_tokenizers and config.corpus.cross_documents]:
        problem = f"objective.{name} learns from one vector a sequence, which then holds several documents"
        yield "corpus.cross_documents", True, problem, "set it to false"


def _of_on_policy(config: Config, terms: Terms, task: Any) -> Iterator[Refusal]:
    """What cannot learn from text that the student writes while it trains."""
    fraction = config.objective.on_policy.fraction
    if is_zero(fraction):
        return
    setting, shown = "objective.on_policy.fraction", max(value_at(fraction, 0.0), value_at(fraction, 1.0))
    if not (task.kind.causal and task.kind.vocabulary):
        yield setting, shown, f"the student of objective.task={config.objective.task} writes no text", "set it to 0"
    for name, term in terms.items():
        if not term.needs_teacher:
            problem = f"objective.{name} would learn from the student's own words as if they were the text's"
            yield setting, shown, problem, f"set objective.{name}.weight=0, or this to 0"
        elif (positions := getattr(term, "positions", None)) != "targets":
            change = "weight=0" if positions is None else "positions=targets"
            yield setting, shown, f"objective.{name} reads prompts too", f"set objective.{name}.{change}"


def _of_others(config: Config, terms: Terms, task: Any) -> Iterator[Refusal]:
    """What causal models alone read. Prompts of a source of the user's are refused when its text is prepared."""
    for source in (config.corpus, *config.corpus.sources.values(), *_scored(config.evaluate)):
        if source.made_by is None and (source.kind == "chat" or source.prompt is not None):
            raise no_prompts(source.group)
    for name, value in config.evaluate.given("stride", "samples").items():
        if value:
            yield f"evaluate.{name}", value, "for causal models", "set it to null"


def no_prompts(setting: str) -> SettingError:
    """For a task that predicts words of prompts too; `setting` names the source."""
    return SettingError(
        "has prompts, which only causal models leave out of what they predict",
        setting=setting,
        cure=f"set objective.task=clm, or give {setting}.kind and {setting}.field of a text without prompts",
    )


def _of_labels(config: Config, terms: Terms, task: Any) -> Iterator[Refusal]:
    """Settings of text that labelled examples do not have."""
    problem = f"is for text, but objective.task={config.objective.task} learns from labelled examples"
    if task.kind.vocabulary:
        return
    if config.corpus.sources:
        yield "corpus", "mixture", problem, "name the corpus of these"
    for name, null in {"heldout": "0", "cross_documents": "false", "fallback": "false"}.items():
        if value := getattr(config.corpus, name):
            yield f"corpus.{name}", value, problem, f"set it to {null}"
    if (few := config.evaluate.on_the_way.sequences) is not None:
        yield "evaluate.on_the_way.sequences", few, problem, "use evaluate.max_sequences"


def _of_teachers(config: Config, terms: Terms, task: Any) -> Iterator[Refusal]:
    """Caches that keep too little, and losses that read more than several teachers give."""
    teacher = config.teacher
    caches = {f"teacher.members.{name}": one.cache or teacher.cache for name, one in teacher.members.items()}
    for number, (setting, cache) in enumerate((caches or {"teacher": teacher.cache}).items()):
        kept = cache.given(*KEPT)
        for problem, cure in _of_cache(config, terms, task, cache, number == 0) if kept else ():
            (size, value), *others = kept.items()
            beside = "".join(f"with {setting}.cache.{name}={value}, " for name, value in others)
            yield f"{setting}.cache.{size}", value, f"{beside}{problem}", cure
    frozen: dict[str, TeacherConfig | MemberConfig] = {
        f"teacher.members.{n}": one for n, one in teacher.members.items()
    }
    for number, (setting, one) in enumerate((frozen or {"teacher": teacher}).items()):
        count = one.micro_batches or teacher.micro_batches
        joins_sharded = config.backend.shards_teacher and count > 1
        if joins_sharded and not task.kind.vocabulary:
            problem = "labelled texts differ in length, so that ranks would run a sharded teacher in different batches"
            yield f"{setting}.micro_batches", count, problem, "set it to 1, or choose backend=ddp"
        if one.served:
            yield from _of_served(config, terms, task, setting, one.cache or teacher.cache, number == 0)
        if one.context is not None:
            yield from _of_context(task, f"{setting}.context", one.context, one.cache or teacher.cache)
            if joins_sharded:
                problem = "micro-batches differ in length, so that ranks would run a sharded teacher in other batches"
                yield f"{setting}.context", one.context, problem, "set micro_batches of the teacher to 1"
    yield from _of_sources(config, terms)
    for name, term in terms.items() if len(teacher.members) > 1 else ():
        if term.teacher_reads.extra or not task.kind.vocabulary:
            yield "teacher.members", None, f"of words, and objective.{name} is not about words", "choose one teacher"
        if not getattr(term, "center", True):
            problem = "the mean of several teachers' probabilities has logits only up to a constant"
            yield f"objective.{name}.center", False, problem, f"set objective.{name}.center=true"


def _of_sources(config: Config, terms: Terms) -> Iterator[Refusal]:
    """Teachers of some sources of a mixture: each source has one, and they run live and give predictions alone."""
    members, sources = config.teacher.members, [*config.corpus.sources]
    chosen = {f"teacher.members.{name}.sources": one for name, one in members.items() if one.sources is not None}
    choose = f"choose among {', '.join(sources)}" if sources else "choose corpus=mixture, or leave it out"
    for setting, one in chosen.items():
        for source in one.sources or [""]:
            if source not in sources:
                yield setting, one.sources, f"corpus.sources has no {source}" if source else "names none", choose
        if one.served or (one.cache or config.teacher.cache).wanted:
            yield setting, one.sources, "not read with a cache", "leave it out, or let the teachers run live"
    for setting, first in [*chosen.items()][:1]:
        for source in sources:
            if all(one.sources is not None and source not in one.sources for one in members.values()):
                yield setting, first.sources, f"no teacher is left for the source {source}", "name it in one of them"
        for name, term in terms.items():
            if term.needs_teacher and not hasattr(term, "top_k_temperature"):
                problem = f"objective.{name} reads more of a teacher than its predictions"
                yield setting, first.sources, problem, f"leave it out, or set objective.{name}.weight=0"
        if config.backend.shards_teacher:
            problem = "ranks would run a sharded teacher on other sequences"
            yield setting, first.sources, problem, "set backend.shard_teacher=false"


def _of_context(task: Any, setting: str, context: str, cache: TeacherCacheConfig) -> Iterator[Refusal]:
    """What a teacher cannot give that reads a context in front of each document."""
    if not (task.kind.causal and task.kind.vocabulary):
        yield setting, context, "for causal models", "leave it out"
    if cache.wanted:
        yield setting, context, "not read with a cache", "leave it out, or let the teacher run live"


def _of_served(
    config: Config, terms: Terms, task: Any, setting: str, cache: TeacherCacheConfig, first: bool
) -> Iterator[Refusal]:
    """What a teacher on a server does not give: it scores each next token of the corpus, and by that makes a cache.

    Args:
        first: whether this teacher is the one whose layers and sizes a student takes.
    """
    if not (task.kind.causal and task.kind.vocabulary):
        problem = f"a server scores the next token, and the teacher of objective.task={config.objective.task} does not"
        yield f"{setting}.url", None, problem, f"give {setting}.path"
    for name, value in cache.given("hidden_states", "sampled").items():
        yield (
            f"{setting}.cache.{name}",
            value,
            "a server gives the largest probabilities alone",
            "give top_k in its place",
        )
    if cache.top_k is None and any(term.needs_teacher for term in terms.values()):
        yield f"{setting}.cache.top_k", "null", "a served teacher is read from a cache", "set it, such as to 20"
    for name, term in terms.items():
        temperature = getattr(term, "top_k_temperature", None)
        if term.needs_teacher and temperature not in (None, 1.0):
            problem = "a server gives log-probabilities at temperature 1 alone"
            yield f"objective.{name}.temperature", temperature, problem, "set it to 1"
    if first and config.student.from_layers:
        problem = f"takes layers of a teacher, and that of {setting}.url is on a server"
        yield "student.init", "layers", problem, "choose student=pretrained, or a student with new weights"
    if first and config.student.is_new and config.student.architecture == "same":
        problem = f"as the teacher, and that of {setting}.url is on a server"
        yield "student.architecture", "same", problem, "name a model type of transformers"
    if (form := config.precision.quantize_teacher) is not None:
        yield "precision.quantize_teacher", form, "for a teacher that runs here", "leave it out"


def _of_cache(
    config: Config, terms: Terms, task: Any, cache: TeacherCacheConfig, first: bool
) -> Iterator[tuple[str, str]]:
    """Where a cache keeps less of a teacher than the losses read: what is wrong, and the cure.

    Args:
        first: whether this teacher is the one that losses on hidden states read.
    """
    live = "hidden_states to false" if cache.hidden_states else f"{' and '.join(cache.given(*KEPT))} to null"
    asking = {name: term for name, term in terms.items() if term.needs_teacher}
    on_logits = [name for name, term in asking.items() if hasattr(term, "top_k_temperature")]
    temperatures = {name: asking[name].top_k_temperature for name in on_logits}
    readers = [name for name, temperature in temperatures.items() if temperature is not None]
    if cache.hidden_states:
        reads = {name: term.teacher_reads for name, term in asking.items() if task.kind.vocabulary}
        readers = [
            name for name in reads if reads[name].is_of_last_states or (name in on_logits and reads[name].is_empty)
        ]
        if config.backend.shards_teacher:
            yield "its head is read by each rank, which has a part of it alone", "set backend.shard_teacher=false"
    if not readers:
        yield "no term of the objective reads soft targets", f"set {live}"
    if not is_zero(config.objective.on_policy.fraction):
        problem = "keeps the teacher's answers on the corpus, and none on text that the student writes"
        yield problem, f"set {live}, or objective.on_policy.fraction=0"
    if not task.kind.causal and not config.objective.masking.static:
        yield "needs the same masks in every epoch", "set objective.masking.static=true"
    for name, term in asking.items():
        if name not in readers and (first or name in on_logits):
            yield f"objective.{name} needs more of the teacher than a cache keeps", f"set objective.{name}.weight=0"
        if cache.hidden_states:  # from which probabilities are computed, at any temperature
            continue
        if cache.sampled is not None and name in readers and not term.reads_samples:
            cure = "set sampled to null, or reads_samples=True in its class where it takes `Samples`"
            yield f"objective.{name} reads the most probable tokens alone and no draws", cure
        if getattr(term, "cutoff", 0) > 0:
            problem = "already cuts the teacher off" if cache.sampled is None else "sampled targets cannot be cut off"
            yield problem, f"set objective.{name}.cutoff={term.cutoff} to 0"
        if (schedule := config.objective.schedule_of(name)) is not None:
            ends = f"goes from {schedule.start} to {schedule.end}"
            problem = f"kept at one temperature, but objective.{name}.temperature {ends}"
            yield problem, f"give it one number, keep hidden_states instead, or set {live} for a live teacher"
    if not cache.hidden_states and len({temperatures[name] for name in readers}) > 1:
        listed = ", ".join(f"objective.{name}.temperature={temperatures[name]}" for name in readers)
        yield f"kept at one temperature, but there are {listed}", "give them the same"


def _of_training(config: Config) -> Iterator[Refusal]:
    """An optimizer, ranks, number formats and evaluations that do not go together."""
    backend, precision = config.backend, config.precision
    if config.optimizer.clip_each_rank and backend.name == "fsdp":
        cure = "choose backend=ddp or horovod, or leave it out"
        yield "optimizer.clip_each_rank", True, "needs the gradient of each rank, which fsdp never has", cure
    if config.optimizer.clip_each_rank and backend.sync == "every":
        problem = "clips before the only exchange of a step, but backend.sync=every exchanges after each micro-batch"
        yield "optimizer.clip_each_rank", True, problem, "set backend.sync=window"
    if precision.student == "fp16" and backend.compression == "fp16":
        problem = "would scale gradients twice, as precision.student=fp16 does, and lose small ones"
        yield "backend.compression", "fp16", problem, "set backend.compression=bf16 or none"
    if precision.quantize_teacher is not None and config.teacher.is_none:
        problem, cure = "for a teacher, and there is none", "choose one, or leave it out"
        yield "precision.quantize_teacher", precision.quantize_teacher, problem, cure
    elif precision.quantize_teacher is not None and backend.shards_teacher:
        problem, cure = "for a teacher that each rank has whole", "set backend.shard_teacher=false, or leave it out"
        yield "precision.quantize_teacher", precision.quantize_teacher, problem, cure
    # What is sharded is exchanged by `fully_shard`, in fp32 and in one ring.
    for name, value in backend.given("compression", "rings").items() if backend.shards_student else ():
        cure = "leave it out, or choose backend=ddp or backend.shard_student=false"
        yield f"backend.{name}", value, "for whole gradients, which no rank has of a sharded student", cure
    if (best := config.train.keep_best) is not None and not config.evaluate.sets:
        cure = "name a set, or leave it out"
        yield "train.keep_best", best, "chooses among evaluations, and evaluate.sets=[] has none", cure


def check_evaluation(config: Config, reads_text: bool) -> None:
    """Raises SettingError for a set that has no source, and for settings of a set that is none.

    Args:
        reads_text: whether the sets of the task are text, each with a source.
    """
    refuse(_of_evaluation(config, reads_text))


def _of_evaluation(config: Config, reads_text: bool) -> Iterator[Refusal]:
    settings, corpus, sources = config.evaluate, config.corpus, config.evaluate.sources
    if settings.stride is not None and settings.stride >= (length := corpus.sequence_length):
        yield "evaluate.stride", settings.stride, f"not less than corpus.sequence_length={length}", "lower it"
    # Settings that are built in Python may have no sources yet.
    for name in [name for name in settings.sets if sources and name not in sources] if reads_text else ():
        cure = f"choose from {', '.join(sorted(sources))} or add evaluate.sources.{name}"
        yield "evaluate.sets", None, f"{name} has no source{did_you_mean(name, sources)}", cure
    kinds = {HELDOUT: HELDOUT} | {name: one.kind for name, one in sources.items()}
    of_corpus = [name for name, kind in kinds.items() if kind == HELDOUT]
    parts = [f"{name}_{source}" for name in of_corpus for source in corpus.sources]  # of each source of a mixture
    names = list(dict.fromkeys([*sources, *settings.sets, *parts]))
    for name in settings.by_set:
        if name not in names:
            problem = f"for a set that is not known{did_you_mean(name, names)}"
            yield f"evaluate.by_set.{name}", None, problem, f"name one of {', '.join(names)}"
        if parts and name in of_corpus:
            problem = "a mixture has a held-out set of each source"
            yield f"evaluate.by_set.{name}", None, problem, f"name {', '.join(parts)}"
    for name in [name for name in settings.sets if name in parts]:
        problem = f"names {name}, the held-out set of a source of the mixture"
        yield "evaluate.sets", None, problem, "give your set another name"
    has_books = corpus.made_by is None and corpus.kind == "bundled" and corpus.split == "train"
    for name in [name for name in settings.sets if name in of_corpus] if corpus.heldout == 0 and not has_books else ():
        yield "corpus.heldout", "0", f"evaluate.sets names {name}", "set corpus.heldout=0.02, or other sets"


def _scored(settings: EvaluateConfig) -> list[SourceConfig]:
    """The sources of the sets that models are scored on; none yet of settings that are built in Python."""
    return [settings.sources[name] for name in settings.sets if name in settings.sources]


def check_paths(config: Config, corpus: bool = True) -> None:
    """Raises SettingError for a file or folder that is not there; `corpus`: whether that is read, too.

    It comes before anyone waits for a model or for the Hub.
    """
    for teacher in (config.teacher, *config.teacher.members.values()):
        _refuse_local(f"{teacher.group}.path", teacher.path if teacher.saved else None)
        _refuse_local(f"{teacher.group}.tokenizer", teacher.tokenizer)
    _refuse_local("student.path", config.student.path if config.student.is_saved else None)
    _refuse_local("student.tokenizer", config.student.tokenizer)
    if (resume := config.resume) not in RESUME:
        if not looks_local(resume) and not Path(resume).exists():
            cure = "give auto, strict, never, or a checkpoint folder"
            refuse([("resume", resume, f"not known{did_you_mean(resume, RESUME)}", cure)])
        refuse_missing("resume", resume)
    sources: list[SourceConfig] = [config.corpus, *config.corpus.sources.values()] if corpus else []
    sources += _scored(config.evaluate) if config.evaluate.missing is Missing.stop else []
    # What a callable of the user's calls `path` is not known.
    texts = {f"{source.group}.path": source.path for source in sources if source.target is None}
    texts |= {"corpus.unlabelled": config.corpus.unlabelled} if corpus else {}
    for setting, path in (texts | {"evaluate.baseline": config.evaluate.baseline}).items():
        if path is not None and not glob.has_magic(path) and "://" not in path:
            refuse_missing(setting, path)


def _refuse_local(setting: str, path: str | None) -> None:
    if path is not None and looks_local(path):
        refuse_missing(setting, path)


def looks_local(path: str) -> bool:
    """Whether a value can be no name on the Hub, which is NAME or OWNER/NAME: it begins with . / or ~, or is deeper.

    What other folders lie beside it does not matter, so that a name means the same wherever a command is started.
    """
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def refuse_missing(setting: str, path: str) -> None:
    """Raises SettingError, with the nearest name of what is there, where there is no such file or folder."""
    wanted = Path(path).expanduser()
    try:
        if wanted.exists():
            return
        there = next(folder for folder in wanted.absolute().parents if folder.is_dir())
        part = wanted.absolute().relative_to(there).parts[0]
        entries = sorted(entry.name for entry, _ in zip(os.scandir(there), range(LISTED), strict=False))
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise SettingError(problem, setting=setting, value=path, cure="correct the path") from error
    is_of_recipe = wanted.parent.name == "runs" and (RECIPES / f"{wanted.name}.yaml").is_file()
    cure = f"correct the path, or run +recipe={wanted.name} first, which makes it" if is_of_recipe else ""
    problem = f"no such file or folder, {there} has no {part}{did_you_mean(part, entries)}"
    raise SettingError(problem, setting=setting, value=path, cure=cure or "correct the path")
