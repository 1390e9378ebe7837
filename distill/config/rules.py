"""The rules between settings: what a run may not have together, and paths that lead nowhere."""

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distill.config import RECIPES
from distill.config.data import EXAMPLE, HELDOUT, MIXTURE
from distill.config.settings import (
    Config,
    EvaluateConfig,
    FrozenModelConfig,
    MaskingConfig,
    Missing,
    SourceConfig,
    TeacherCacheConfig,
)
from distill.runtime.errors import SettingError, did_you_mean

Terms = Mapping[str, Any]  # loss terms by name, each a `distill.objective.terms.Term`


def check_rules(config: Config, terms: Terms, task: Any) -> None:
    """Raises SettingError for the first setting that is at odds with another.

    Args:
        terms: those of the objective that have a weight.
        task: the `distill.tasks.Task` that these terms are for.
    """
    check_task(config, terms, task)
    check_members(config, terms, task)
    check_training(config)
    check_evaluation(config, task.kind.vocabulary)
    check_corpus(config)


def check_task(config: Config, terms: Terms, task: Any) -> None:
    """Raises SettingError for an objective without terms, terms of another task, and settings that no task reads."""
    objective = config.objective
    if not terms:
        raise SettingError(
            "all weights are 0 and there is nothing to learn",
            setting="objective",
            cure="give one of the terms a weight",
        )
    for name, term in terms.items():
        if term.student_reads.last_rows and not task.kind.vocabulary:
            raise SettingError(
                f"chooses the positions of words that are predicted, and objective.task={objective.task} predicts none",
                setting=f"objective.{name}.positions",
                cure="set it to all",
            )
        if config.teacher.is_none and term.needs_teacher:
            raise SettingError(
                f"objective.{name} needs a teacher",
                setting="teacher.path",
                value="null",
                cure="choose a teacher, or objective=mlm",
            )
    if task.kind.causal:
        _check_causal(config, terms)
    if task.labels == ("mlm", "sop") and config.corpus.cross_documents:
        raise SettingError(
            f"a sequence of objective.task={objective.task} has one document",
            setting="corpus.cross_documents",
            value="true",
            cure="set it to false",
        )
    _check_unlabelled(config, terms, task)
    if not task.kind.vocabulary:
        _refuse_text_settings(config)
    if (task.kind.causal or not task.kind.vocabulary) and objective.masking != MaskingConfig():
        what = "predicts the next token" if task.kind.causal else "learns from labels"
        recipes = "distilgpt2_gutenberg" if task.kind.causal else "table, squad or glue"
        raise SettingError(
            f"{what} and masks no tokens, but the command line or recipe sets objective.masking",
            setting="objective.task",
            value=objective.task,
            cure=f"leave it out, or choose a recipe for that task (+recipe={recipes})",
        )
    if not task.kind.causal:
        _refuse_causal_settings(config)


def _check_causal(config: Config, terms: Terms) -> None:
    """What a causal model cannot have."""
    refuse_first_position(terms)
    of_sequences = [name for name, term in terms.items() if term.across_tokenizers]
    if config.corpus.cross_documents and of_sequences:
        raise SettingError(
            f"objective.{of_sequences[0]} learns from one vector a sequence, which then holds several documents",
            setting="corpus.cross_documents",
            value="true",
            cure="set it to false",
        )
    if config.student.is_new and config.student.init == "neighbours":
        raise SettingError(
            f"for masked words, not for objective.task={config.objective.task}",
            setting="student.init",
            value="neighbours",
            cure="set student.init=random",
        )


def _refuse_causal_settings(config: Config) -> None:
    """What causal models alone read."""
    _refuse_prompts(config)
    if config.evaluate.stride is not None:
        raise SettingError(
            "for causal models", setting="evaluate.stride", value=config.evaluate.stride, cure="set it to null"
        )
    if config.evaluate.samples:
        raise SettingError(
            "for causal models, which continue a text",
            setting="evaluate.samples",
            value=config.evaluate.samples,
            cure="set it to null",
        )


def refuse_first_position(terms: Terms) -> None:
    """Raises SettingError for terms that no causal model can have, as they read the first position of a sequence."""
    for name, term in terms.items():
        if term.reads_first_position:
            raise SettingError(
                "reads the first position of a sequence, which in a causal model sees no other",
                setting=f"objective.{name}",
                cure=f"set objective.{name}.weight=0, or objective.pooled.pooling=mean",
            )


def _check_unlabelled(config: Config, terms: Terms, task: Any) -> None:
    """Refuse unlabelled examples from which no term learns, and a term on labels where no labelled ones are left."""
    corpus = config.corpus
    if corpus.unlabelled is None:
        return
    if task.kind.vocabulary:
        raise SettingError(
            f"for fine-tuning, and objective.task={config.objective.task} learns from text as it is",
            setting="corpus.unlabelled",
            value=corpus.unlabelled,
            cure="give it as corpus.path",
        )
    if not any(term.needs_teacher for term in terms.values()):
        raise SettingError(
            "has no labels, and no term of the objective learns from a teacher",
            setting="corpus.unlabelled",
            value=corpus.unlabelled,
            cure=f"set objective=distil_{config.objective.task} teacher=pretrained teacher.path=RUN, or leave it out",
        )
    on_labels = [name for name, term in terms.items() if term.task]
    if corpus.max_sequences == 0 and on_labels:
        raise SettingError(
            f"leaves objective.{on_labels[0]} without a label",
            setting="corpus.max_sequences",
            value="0",
            cure=f"set objective.{on_labels[0]}.weight=0",
        )


def _refuse_text_settings(config: Config) -> None:
    """Settings of text that labelled examples do not have."""
    corpus, task = config.corpus, config.objective.task
    if corpus.sources:
        raise SettingError(
            f"is for text, but objective.task={task} learns from labelled examples",
            setting="corpus",
            value="mixture",
            cure="name the corpus of these",
        )
    for name, value in (
        ("heldout", corpus.heldout),
        ("cross_documents", corpus.cross_documents),
        ("fallback", corpus.fallback),
    ):
        if value:
            raise SettingError(
                f"is for text, but objective.task={task} learns from labelled examples",
                setting=f"corpus.{name}",
                value=value,
                cure=f"set it to {'0' if name == 'heldout' else 'false'}",
            )


def _refuse_prompts(config: Config) -> None:
    """Those of built-in sources; a user's own is refused when its text is prepared."""
    of_sets = [config.evaluate.sources[name] for name in config.evaluate.sets if name in config.evaluate.sources]
    for source in (config.corpus, *config.corpus.sources.values(), *of_sets):
        if source.made_by is None and (source.kind == "chat" or source.prompt is not None):
            raise no_prompts(source.group)


def no_prompts(setting: str) -> SettingError:
    """For a task that predicts words of prompts too; `setting` names the source."""
    return SettingError(
        "has prompts, which only causal models leave out of what they predict",
        setting=setting,
        cure=f"set objective.task=clm, or give {setting}.kind and {setting}.field of a text without prompts",
    )


def check_members(config: Config, terms: Terms, task: Any) -> None:
    """Raises SettingError for caches that keep too little, and for losses that read more than several teachers give."""
    settings = config.teacher
    if settings.is_none:
        return
    if not settings.members:
        if config.backend.shards_teacher and settings.micro_batches > 1 and not task.kind.vocabulary:
            raise SettingError(
                "labelled texts differ in length, so that ranks would run a sharded teacher in different batches",
                setting="teacher.micro_batches",
                value=settings.micro_batches,
                cure="set it to 1, or choose backend=ddp",
            )
        return _check_cache(config, terms, task, settings.cache, "teacher", first=True)
    for number, (name, member) in enumerate(settings.members.items()):
        setting = f"teacher.members.{name}"
        _check_cache(config, terms, task, member.cache or settings.cache, setting, first=number == 0)
    for name, term in terms.items() if len(settings.members) > 1 else ():
        if term.teacher_reads.extra or not task.kind.vocabulary:
            raise SettingError(
                f"averages probabilities of words, but objective.{name} is not about words",
                setting="teacher.members",
                cure="choose one teacher",
            )
        if not getattr(term, "center", True):
            raise SettingError(
                "the mean of several teachers' probabilities has logits only up to a constant",
                setting=f"objective.{name}.center",
                value="false",
                cure=f"set objective.{name}.center=true",
            )


def _check_cache(config: Config, terms: Terms, task: Any, cache: TeacherCacheConfig, setting: str, first: bool) -> None:
    """Refuse a cache that keeps less of a teacher than the losses read.

    Args:
        setting: of the teacher.
        first: whether this teacher is the one that losses on hidden states read.
    """
    objective = config.objective
    sizes = {name: size for name in ("top_k", "sampled") if (size := getattr(cache, name)) is not None}
    if not sizes:
        return
    to_null = " and ".join(sizes)

    def refusal(problem: str, cure: str) -> SettingError:
        (size, value), *others = sizes.items()
        beside = "".join(f"with {setting}.cache.{name}={value}, " for name, value in others)
        return SettingError(f"{beside}{problem}", setting=f"{setting}.cache.{size}", value=value, cure=cure)

    asking = {name: term for name, term in terms.items() if term.needs_teacher}
    on_logits = [name for name, term in asking.items() if hasattr(term, "top_k_temperature")]
    readers = {name: asking[name] for name in on_logits if asking[name].top_k_temperature is not None}
    if not readers:
        raise refusal("no term of the objective reads soft targets", f"set {to_null} to null")
    if not task.kind.causal and not objective.masking.static:
        raise refusal("needs the same masks in every epoch", "set objective.masking.static=true")
    for name, term in asking.items():
        if name not in readers and (first or name in on_logits):
            problem = f"objective.{name} needs more of the teacher than a cache keeps"
            raise refusal(problem, f"set objective.{name}.weight=0")
        if cache.sampled is not None and name in readers and not readers[name].reads_samples:
            raise refusal(
                f"objective.{name} reads the most probable tokens alone and no draws",
                f"set {setting}.cache.sampled to null, or reads_samples=True in its class where it takes `Samples`",
            )
        if getattr(term, "cutoff", 0) > 0:
            problem = "already cuts the teacher off" if cache.sampled is None else "sampled targets cannot be cut off"
            raise refusal(problem, f"set objective.{name}.cutoff={term.cutoff} to 0")
        if (schedule := objective.schedule_of(name)) is not None:
            ends = f"goes from {schedule.start} to {schedule.end}"
            raise refusal(
                f"kept at one temperature, but objective.{name}.temperature {ends}",
                f"give it one number, or set {to_null} to null for a live teacher",
            )
    temperatures = {name: term.top_k_temperature for name, term in readers.items()}
    if len(set(temperatures.values())) > 1:
        listed = ", ".join(f"objective.{name}.temperature={value}" for name, value in temperatures.items())
        raise refusal(f"kept at one temperature, but there are {listed}", "give them the same")


def check_training(config: Config) -> None:
    """Raises SettingError for a run without an end, and for an optimizer, ranks and formats that do not go together."""
    train, optimizer, backend = config.train, config.optimizer, config.backend
    if train.epochs is None and train.steps is None and train.minutes is None:
        raise SettingError(
            "train.steps and train.minutes are null too",
            setting="train.epochs",
            value="null",
            cure="give the run an end",
        )
    if (optimizer.scale_lr == "none") != (optimizer.base_batch is None):
        raise SettingError(
            f"does not go with optimizer.base_batch={optimizer.base_batch}",
            setting="optimizer.scale_lr",
            value=optimizer.scale_lr,
            cure="set linear or sqrt and the sequences per step that optimizer.lr was tuned for, or none and null",
        )
    if optimizer.clip_each_rank:
        _check_clipping(config)
    if config.precision.student == "fp16" and backend.compression == "fp16":
        raise SettingError(
            "would scale gradients twice, as precision.student=fp16 does, and lose small ones",
            setting="backend.compression",
            value="fp16",
            cure="set backend.compression=bf16 or none",
        )
    _check_sharded(config)
    if train.patience is not None and train.keep_best is None:
        raise SettingError(
            "needs a measure by which evaluations are compared",
            setting="train.patience",
            value=train.patience,
            cure="set train.keep_best=perplexity, or another measure",
        )
    if train.keep_best is not None and not config.evaluate.sets:
        raise SettingError(
            "chooses among evaluations, and evaluate.sets=[] has none",
            setting="train.keep_best",
            value=train.keep_best,
            cure="name a set, or leave it out",
        )


def _check_clipping(config: Config) -> None:
    if config.optimizer.clip is None:
        raise SettingError(
            "optimizer.clip=null", setting="optimizer.clip_each_rank", value="true", cure="give clip a norm"
        )
    if config.backend.name == "fsdp":
        raise SettingError(
            "needs the gradient of each rank, which fsdp never has",
            setting="optimizer.clip_each_rank",
            value="true",
            cure="choose backend=ddp or horovod, or leave it out",
        )
    if config.backend.sync == "every":
        raise SettingError(
            "clips once, before the only exchange of a step, but backend.sync=every exchanges after each micro-batch",
            setting="optimizer.clip_each_rank",
            value="true",
            cure="set backend.sync=window",
        )


def _check_sharded(config: Config) -> None:
    """Raises SettingError for what models that are sharded over ranks do not have."""
    backend = config.backend
    # What is sharded is exchanged by `fully_shard`, in fp32 and in one ring.
    for name, value, usual in (("compression", backend.compression, "none"), ("rings", backend.rings, "1")):
        if backend.shards_student and value != usual:
            raise SettingError(
                "for gradients that each rank has whole, which a sharded student never has",
                setting=f"backend.{name}",
                value=value,
                cure="leave it out, or choose backend=ddp or backend.shard_student=false",
            )
    formats: dict[str, str | None] = {}
    if not config.teacher.is_none:
        formats["precision.teacher"] = config.precision.teacher
    members = config.teacher.members
    formats |= {f"teacher.members.{name}.precision": member.precision for name, member in members.items()}
    for setting, number_format in formats.items():
        if backend.shards_teacher and number_format == "int8":
            raise SettingError(
                "rounds whole weights, which no rank has of a sharded teacher",
                setting=setting,
                value="int8",
                cure="choose bf16 or fp32, or backend.shard_teacher=false",
            )


def check_evaluation(config: Config, reads_text: bool) -> None:
    """Raises SettingError for a set that has no source, and for settings of a set that is none.

    Args:
        reads_text: whether the sets of the task are text, each with a source.
    """
    settings, length = config.evaluate, config.corpus.sequence_length
    if settings.stride is not None and settings.stride >= length:
        raise SettingError(
            f"has to be less than corpus.sequence_length={length}",
            setting="evaluate.stride",
            value=settings.stride,
            cure="lower it",
        )
    for name in settings.sets:
        # Settings that are built in Python may have no sources yet.
        if settings.sources and name not in settings.sources and reads_text:
            raise SettingError(
                f"{name} has no source{did_you_mean(name, settings.sources)}",
                setting="evaluate.sets",
                cure=f"choose from {', '.join(sorted(settings.sources))} or add evaluate.sources.{name}",
            )
    held_out = held_out_sets(settings, settings.sets)
    # What a mixture holds out of each source.
    of_mixture = held_out_sets(settings, [HELDOUT, *settings.sets])
    parts = [f"{name}_{source}" for name in of_mixture for source in config.corpus.sources]
    set_names = [*settings.sources, *settings.sets, *parts]
    for name in settings.by_set:
        if name not in set_names:
            raise SettingError(
                f"for a set that is not known{did_you_mean(name, set_names)}",
                setting=f"evaluate.by_set.{name}",
                cure=f"name one of {', '.join(dict.fromkeys(set_names))}",
            )
        if parts and name in of_mixture:
            raise SettingError(
                "a mixture has a held-out set of each source",
                setting=f"evaluate.by_set.{name}",
                cure=f"name {', '.join(parts)}",
            )
    source = config.corpus
    has_books = source.made_by is None and source.kind == "bundled" and source.split == "train"
    if held_out and config.corpus.heldout == 0 and not has_books:
        raise SettingError(
            f"evaluate.sets names {held_out[0]}",
            setting="corpus.heldout",
            value="0",
            cure="set corpus.heldout=0.02, or other sets",
        )


def held_out_sets(settings: EvaluateConfig, names: Sequence[str]) -> list[str]:
    """Those of these sets that are a part of the corpus."""
    sources = {name: settings.sources.get(name) for name in names}  # none yet of settings built in Python
    return [name for name, source in sources.items() if getattr(source, "kind", "" if source else name) == HELDOUT]


def check_corpus(config: Config) -> None:
    """Raises SettingError for a corpus that is an evaluation set, and for a mixture that is none."""
    settings = config.corpus
    kind = settings.kind if settings.target is None else None
    if kind == HELDOUT:
        raise SettingError(
            "for evaluation sets", setting="corpus.kind", value="heldout", cure="name where the corpus comes from"
        )
    if kind == MIXTURE and len(settings.sources) < 2:
        raise SettingError(
            "needs two sources or more", setting="corpus", value="mixture", cure=f"give corpus.sources='{EXAMPLE}'"
        )
    parts = {
        f"{name}_{source}"
        for name in held_out_sets(config.evaluate, config.evaluate.sets)
        for source in settings.sources
    }
    if clash := sorted(parts & set(config.evaluate.sets)):
        raise SettingError(
            f"names {clash[0]}, the held-out set of a source of the mixture",
            setting="evaluate.sets",
            cure="give your set another name",
        )


LISTED = 1000  # entries of a folder among which the nearest name is looked for


def check_paths(config: Config, corpus: bool = True) -> None:
    """Raises SettingError for a file or folder that is not there; `corpus`: whether that is read, too."""
    for setting, path in _models(config):
        if path is not None and looks_local(path):
            refuse_missing(setting, path)
    if config.resume not in ("auto", "strict", "never"):
        _check_resume(config.resume)
    for setting, path in _texts_to_read(config, corpus):
        if path is not None and not glob.has_magic(path) and "://" not in path:
            refuse_missing(setting, path)


def _check_resume(resume: str) -> None:
    """Refuse a value of `resume` that is neither one of its words nor a folder."""
    if not looks_local(resume) and not Path(resume).exists():
        nearest = did_you_mean(resume, ("auto", "strict", "never"))
        raise SettingError(
            f"not known{nearest}",
            setting="resume",
            value=resume,
            cure="give auto, strict, never, or a checkpoint folder",
        )
    refuse_missing("resume", resume)


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
        raise SettingError(
            f"cannot be read: {error.strerror}", setting=setting, value=path, cure="correct the path"
        ) from error
    recipe = wanted.name if wanted.parent.name == "runs" and (RECIPES / f"{wanted.name}.yaml").is_file() else None
    first = "" if recipe is None else f", or run +recipe={recipe} first, which makes it"
    raise SettingError(
        f"no such file or folder, {there} has no {part}{did_you_mean(part, entries)}",
        setting=setting,
        value=path,
        cure=f"correct the path{first}",
    )


def _models(config: Config) -> Iterator[tuple[str, str | None]]:
    """The settings that name a model or a tokenizer, with their values; a callable of the user's reads its path."""
    teachers: list[FrozenModelConfig] = [config.teacher, *config.teacher.members.values()]
    for teacher in teachers:
        if teacher.saved:
            yield f"{teacher.group}.path", teacher.path
        yield f"{teacher.group}.tokenizer", teacher.tokenizer
    if config.student.is_saved:
        yield "student.path", config.student.path
    yield "student.tokenizer", config.student.tokenizer


def _texts_to_read(config: Config, corpus: bool) -> Iterator[tuple[str, str | None]]:
    """The settings that name files or folders of text or of an earlier run."""
    if corpus:
        yield "corpus.path", _path_of(config.corpus)
        for name, source in config.corpus.sources.items():
            yield f"corpus.sources.{name}.path", _path_of(source)
        yield "corpus.unlabelled", config.corpus.unlabelled
    yield "evaluate.baseline", config.evaluate.baseline
    if config.evaluate.missing is Missing.stop:
        for name in config.evaluate.sets:
            yield f"evaluate.sources.{name}.path", _path_of(config.evaluate.sources.get(name))


def _path_of(source: SourceConfig | None) -> str | None:
    """What a callable of the user's calls `path` is not known."""
    return None if source is None or source.target is not None else source.path
