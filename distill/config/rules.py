"""The rules between settings: what a run may not have together, on typed values. Each section refuses its own."""

from collections.abc import Mapping, Sequence
from typing import Any

from distill.config.component import Component
from distill.config.mixture_settings import EXAMPLE, HELDOUT, MIXTURE
from distill.config.settings import (
    Config,
    EvaluateConfig,
    MaskingConfig,
    NewStudentConfig,
    NoTeacherConfig,
    SavedMemberConfig,
    SeveralTeachersConfig,
    SourceConfig,
    TeacherCacheConfig,
)
from distill.runtime.errors import SettingError
from distill.runtime.nearest import did_you_mean

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
        raise SettingError("objective: all weights are 0 and there is nothing to learn; give one of the terms a weight")
    for name, term in terms.items():
        if term.student_reads.last_rows and not task.kind.vocabulary:
            raise SettingError(
                f"objective.{name}.positions chooses the positions of words that are predicted, and objective.task="
                f"{objective.task} predicts none: set it to all"
            )
        if isinstance(config.teacher, NoTeacherConfig) and term.needs_teacher:
            raise SettingError(
                f"teacher.kind=none, but objective.{name} needs a teacher: choose a teacher, or objective=mlm"
            )
    if task.kind.causal:
        refuse_first_position(terms)
        of_sequences = [name for name, term in terms.items() if term.across_tokenizers]
        if config.corpus.cross_documents and of_sequences:
            raise SettingError(
                f"corpus.cross_documents=true, but objective.{of_sequences[0]} learns from one vector for each "
                "sequence, which then holds several documents that do not see each other: set it to false"
            )
    if task.labels == ("mlm", "sop") and config.corpus.cross_documents:
        raise SettingError(
            f"corpus.cross_documents=true, but a sequence of objective.task={objective.task} has one document: "
            "set it to false"
        )
    _check_unlabelled(config, terms, task)
    if not task.kind.vocabulary:
        _refuse_text_settings(config)
    if (task.kind.causal or not task.kind.vocabulary) and objective.masking != MaskingConfig():
        what = "predicts the next token" if task.kind.causal else "learns from labels"
        recipes = "distilgpt2_gutenberg" if task.kind.causal else "table, squad or glue"
        raise SettingError(
            f"objective.task={objective.task} {what} and masks no tokens, but the command line or recipe sets "
            f"objective.masking: leave it out, or choose a recipe for that task (+recipe={recipes})"
        )
    if task.kind.causal:
        if isinstance(config.student, NewStudentConfig) and config.student.init == "neighbours":
            raise SettingError(
                f"student.init=neighbours is for masked words, not for objective.task={objective.task}: set "
                "student.init=random"
            )
        return
    _refuse_prompts(config)
    if config.evaluate.stride is not None:
        raise SettingError(f"evaluate.stride={config.evaluate.stride} is for causal models: set it to null")
    if config.evaluate.samples:
        raise SettingError(
            f"evaluate.samples={config.evaluate.samples} is for causal models, which continue a text: set it to null"
        )


def refuse_first_position(terms: Terms) -> None:
    """Raises SettingError for terms that no causal model can have, as they read the first position of a sequence."""
    for name, term in terms.items():
        if term.reads_first_position:
            raise SettingError(
                f"objective.{name} reads the first position of a sequence, which in a causal model sees no other: "
                f"set objective.{name}.weight=0, or objective.pooled.pooling=mean"
            )


def _check_unlabelled(config: Config, terms: Terms, task: Any) -> None:
    """Refuse unlabelled examples from which no term learns, and a term on labels where no labelled ones are left."""
    corpus, where = config.corpus, f"corpus.unlabelled={config.corpus.unlabelled}"
    if corpus.unlabelled is None:
        return
    if task.kind.vocabulary:
        raise SettingError(
            f"{where} is for fine-tuning, and objective.task={config.objective.task} learns from text as it is: give "
            "it as corpus.path"
        )
    if not any(term.needs_teacher for term in terms.values()):
        raise SettingError(
            f"{where} has no labels, and no term of the objective learns from a teacher: choose objective=distil_"
            f"{config.objective.task} teacher=pretrained teacher.path=RUN, or leave it out"
        )
    on_labels = [name for name, term in terms.items() if term.task]
    if corpus.max_sequences == 0 and on_labels:
        raise SettingError(
            f"corpus.max_sequences=0 leaves objective.{on_labels[0]} without a label: set "
            f"objective.{on_labels[0]}.weight=0"
        )


def _refuse_text_settings(config: Config) -> None:
    """Settings of text that labelled examples do not have."""
    corpus, task = config.corpus, config.objective.task
    if corpus.sources:
        raise SettingError(
            f"corpus=mixture is for text, and objective.task={task} learns from labelled examples: name the corpus of "
            "these"
        )
    for name, value in (
        ("heldout", corpus.heldout),
        ("cross_documents", corpus.cross_documents),
        ("fallback", corpus.fallback),
    ):
        if value:
            raise SettingError(
                f"corpus.{name}={value} is for text, and objective.task={task} learns from labelled examples: set it "
                f"to {'0' if name == 'heldout' else 'false'}"
            )


def _refuse_prompts(config: Config) -> None:
    """Those of built-in sources; a user's own is refused when its text is prepared."""
    sources: dict[str, Any] = {"corpus": config.corpus.source}
    sources |= {f"corpus.sources.{name}": source for name, source in config.corpus.sources.items()}
    sources |= {f"evaluate.sources.{name}": config.evaluate.sources.get(name) for name in config.evaluate.sets}
    for setting, source in sources.items():
        if isinstance(source, SourceConfig) and (source.kind == "chat" or source.prompt is not None):
            raise no_prompts(setting)


def no_prompts(setting: str) -> SettingError:
    """For a task that predicts words of prompts too; `setting` names the source."""
    return SettingError(
        f"{setting} has prompts, which only causal models leave out of what they predict: set objective.task=clm, or "
        f"give {setting}.kind and {setting}.field of a text without prompts"
    )


def check_members(config: Config, terms: Terms, task: Any) -> None:
    """Raises SettingError for caches that keep too little, and for losses that read more than several teachers give."""
    settings = config.teacher
    if isinstance(settings, NoTeacherConfig):
        return
    if not isinstance(settings, SeveralTeachersConfig):
        if config.backend.shards_teacher and settings.micro_batches > 1 and not task.kind.vocabulary:
            raise SettingError(
                f"teacher.micro_batches={settings.micro_batches}: labelled texts differ in length, so that ranks would "
                "run a sharded teacher in different batches: set it to 1, or choose backend=ddp"
            )
        return _check_cache(config, terms, task, settings.cache, "teacher", first=True)
    if not settings.members:
        raise SettingError(
            "teacher.kind=several with teacher.members={}: name each as teacher.members.NAME.path=FOLDER"
        )
    for number, (name, member) in enumerate(settings.members.items()):
        setting = f"teacher.members.{name}"
        if isinstance(member, SavedMemberConfig) and member.path is None:
            raise SettingError(f"{setting}.path=null: give a path, or kind=bundled_deep")
        _check_cache(config, terms, task, member.cache or settings.cache, setting, first=number == 0)
    for name, term in terms.items() if len(settings.members) > 1 else ():
        if term.teacher_reads.extra or not task.kind.vocabulary:
            raise SettingError(
                f"teacher.kind=several averages probabilities of words, but objective.{name} is not about words: "
                "choose one teacher"
            )
        if not getattr(term, "center", True):
            raise SettingError(
                f"objective.{name}.center=false, but the mean of several teachers' probabilities has logits only "
                f"up to a constant: set objective.{name}.center=true"
            )


def _check_cache(config: Config, terms: Terms, task: Any, cache: TeacherCacheConfig, setting: str, first: bool) -> None:
    """Refuse a cache that keeps less of a teacher than the losses read.

    Args:
        setting: of the teacher.
        first: whether this teacher is the one that losses on hidden states read.
    """
    where, objective = cache.described(setting), config.objective
    if not cache.wanted:
        return
    to_null = " and ".join(name for name in ("top_k", "sampled") if getattr(cache, name) is not None)
    asking = {name: term for name, term in terms.items() if term.needs_teacher}
    on_logits = [name for name, term in asking.items() if hasattr(term, "top_k_temperature")]
    readers = {name: asking[name] for name in on_logits if asking[name].top_k_temperature is not None}
    if not readers:
        raise SettingError(f"{where}, but no term of the objective reads soft targets: set {to_null} to null")
    if not task.kind.causal and not objective.masking.static:
        raise SettingError(f"{where} needs the same masks in every epoch: set objective.masking.static=true")
    for name, term in asking.items():
        if name not in readers and (first or name in on_logits):
            raise SettingError(
                f"{where}, but objective.{name} needs more of the teacher than a cache keeps: set "
                f"objective.{name}.weight=0"
            )
        if cache.sampled is not None and name in readers and not readers[name].reads_samples:
            raise SettingError(
                f"{where}, but objective.{name} reads the most probable tokens alone and no draws: set "
                f"{setting}.cache.sampled to null, or reads_samples=True in its class where it takes `Samples`"
            )
        if getattr(term, "cutoff", 0) > 0:
            why = " already cuts the teacher off" if cache.sampled is None else ": sampled targets cannot be cut off"
            raise SettingError(f"{where}{why}: set objective.{name}.cutoff={term.cutoff} to 0")
        if (schedule := objective.terms[name].temperature) is not None:
            raise SettingError(
                f"{where} is kept at one temperature, but objective.{name}.temperature goes from {schedule.start} to "
                f"{schedule.end}: give it one number, or set {to_null} to null for a live teacher"
            )
    temperatures = {name: term.top_k_temperature for name, term in readers.items()}
    if len(set(temperatures.values())) > 1:
        listed = ", ".join(f"objective.{name}.temperature={value}" for name, value in temperatures.items())
        raise SettingError(f"{where} is kept at one temperature, but there are {listed}: give them the same")


def check_training(config: Config) -> None:
    """Raises SettingError for a run without an end, and for an optimizer, ranks and formats that do not go together."""
    train, optimizer, backend = config.train, config.optimizer, config.backend
    if train.epochs is None and train.steps is None and train.minutes is None:
        raise SettingError("train.epochs, train.steps and train.minutes are all null: give the run an end")
    if (optimizer.scale_lr == "none") != (optimizer.base_batch is None):
        raise SettingError(
            f"optimizer.scale_lr={optimizer.scale_lr} with optimizer.base_batch={optimizer.base_batch}: set linear or "
            "sqrt and the number of sequences per step that optimizer.lr was tuned for, or set none and null"
        )
    if optimizer.clip_each_rank:
        _check_clipping(config)
    if config.precision.student == "fp16" and backend.compression == "fp16":
        raise SettingError(
            "backend.compression=fp16 with precision.student=fp16 would scale gradients twice, for the format and for "
            "the wire, and lose small ones: set backend.compression=bf16 or none"
        )
    _check_sharded(config)
    if train.patience is not None and train.keep_best is None:
        raise SettingError(
            f"train.patience={train.patience} needs a measure by which evaluations are compared: set "
            "train.keep_best=perplexity, or another measure"
        )
    if train.keep_best is not None and not config.evaluate.sets:
        raise SettingError(
            f"train.keep_best={train.keep_best} chooses among evaluations, and evaluate.sets=[] has none: name a set, "
            "or leave it out"
        )


def _check_clipping(config: Config) -> None:
    if config.optimizer.clip is None:
        raise SettingError("optimizer.clip_each_rank=true, but optimizer.clip=null: give clip a norm")
    if config.backend.name == "fsdp":
        raise SettingError(
            "optimizer.clip_each_rank=true needs the gradient of each rank, which fsdp never has: choose backend=ddp "
            "or horovod, or leave it out"
        )
    if config.backend.sync == "every":
        raise SettingError(
            "optimizer.clip_each_rank=true clips once, before the only exchange of a step, but backend.sync=every "
            "exchanges after each micro-batch: set backend.sync=window"
        )


def _check_sharded(config: Config) -> None:
    """Raises SettingError for what models that are sharded over ranks do not have."""
    backend = config.backend
    # What is sharded is exchanged by `fully_shard`, in fp32 and in one ring.
    for name, value, usual in (("compression", backend.compression, "none"), ("rings", backend.rings, "1")):
        if backend.shards_student and value != usual:
            raise SettingError(
                f"backend.{name}={value} is for gradients that each rank has whole, which a sharded student never has: "
                f"leave it out, or choose backend=ddp or backend.shard_student=false"
            )
    formats: dict[str, str | None] = {}
    if not isinstance(config.teacher, NoTeacherConfig):
        formats["precision.teacher"] = config.precision.teacher
    if isinstance(config.teacher, SeveralTeachersConfig):
        members = config.teacher.members
        formats |= {f"teacher.members.{name}.precision": member.precision for name, member in members.items()}
    for setting, number_format in formats.items():
        if backend.shards_teacher and number_format == "int8":
            raise SettingError(
                f"{setting}=int8 rounds whole weights, which no rank has of a sharded teacher: choose bf16 or fp32, or "
                "backend.shard_teacher=false"
            )


def check_evaluation(config: Config, reads_text: bool) -> None:
    """Raises SettingError for a set that has no source, and for settings of a set that is none.

    Args:
        reads_text: whether the sets of the task are text, each with a source.
    """
    settings, length = config.evaluate, config.corpus.sequence_length
    if settings.stride is not None and settings.stride >= length:
        raise SettingError(  # the first token of a window has nothing before it to be predicted from
            f"evaluate.stride={settings.stride} has to be less than corpus.sequence_length={length}: lower it"
        )
    for name in settings.sets:
        # Settings that are built in Python may have no sources yet.
        if settings.sources and name not in settings.sources and reads_text:
            raise SettingError(
                f"evaluate.sets: {name} has no source{did_you_mean(name, settings.sources)}; choose from "
                f"{', '.join(sorted(settings.sources))} or add evaluate.sources.{name}"
            )
    held_out = held_out_sets(settings, settings.sets)
    # What a mixture holds out of each source.
    of_mixture = held_out_sets(settings, [HELDOUT, *settings.sets])
    parts = [f"{name}_{source}" for name in of_mixture for source in config.corpus.sources]
    set_names = [*settings.sources, *settings.sets, *parts]
    for name in settings.by_set:
        if name not in set_names:
            raise SettingError(
                f"evaluate.by_set.{name} is for a set that is not known{did_you_mean(name, set_names)}: name one of "
                f"{', '.join(dict.fromkeys(set_names))}"
            )
        if parts and name in of_mixture:
            raise SettingError(
                f"evaluate.by_set.{name}: a mixture has a held-out set of each source: name {', '.join(parts)}"
            )
    source = config.corpus.source
    has_books = isinstance(source, SourceConfig) and source.kind == "bundled" and source.split == "train"
    if held_out and config.corpus.heldout == 0 and not has_books:
        raise SettingError(
            f"corpus.heldout=0, but evaluate.sets names {held_out[0]}: set corpus.heldout=0.02, or other sets"
        )


def held_out_sets(settings: EvaluateConfig, names: Sequence[str]) -> list[str]:
    """Those of these sets that are a part of the corpus."""
    sources = {name: settings.sources.get(name) for name in names}  # none yet of settings built in Python
    return [name for name, source in sources.items() if getattr(source, "kind", "" if source else name) == HELDOUT]


def check_corpus(config: Config) -> None:
    """Raises SettingError for a corpus that is an evaluation set, and for a mixture that is none."""
    settings = config.corpus
    kind = None if isinstance(settings.source, Component) else settings.source.kind
    if kind == HELDOUT:
        raise SettingError("corpus.kind=heldout is for evaluation sets: name where the corpus comes from")
    if kind == MIXTURE and len(settings.sources) < 2:
        raise SettingError(f"corpus=mixture needs two sources or more: give corpus.sources='{EXAMPLE}'")
    parts = {
        f"{name}_{source}"
        for name in held_out_sets(config.evaluate, config.evaluate.sets)
        for source in settings.sources
    }
    if clash := sorted(parts & set(config.evaluate.sets)):
        raise SettingError(
            f"evaluate.sets names {clash[0]}, the held-out set of a source of the mixture: give your set another name"
        )
