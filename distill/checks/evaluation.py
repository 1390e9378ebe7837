"""Refuses settings of the corpus and of the evaluation that no run can have."""

from pathlib import Path

from distill.config.component import Component
from distill.config.mixture_settings import EXAMPLE, MIXTURE
from distill.config.settings import Config
from distill.evaluation.measures.users import check_measures
from distill.objective.build import make_terms
from distill.runs.results_file import read_run
from distill.runtime.errors import SettingError
from distill.runtime.nearest import did_you_mean
from distill.tasks import find_task

COMPRESSIONS = (None, "zstd")  # of prepared rows


def check_evaluation(config: Config) -> None:
    """Raises SettingError for a set that has no source or is named twice, and for a bad measure."""
    settings = config.evaluate
    if settings.stride is not None and settings.stride >= config.corpus.tokens.sequence_length:
        raise SettingError(  # the first token of a window has nothing before it to be predicted from
            f"evaluate.stride={settings.stride} has to be less than a row of corpus.sequence_length="
            f"{config.corpus.tokens.sequence_length}: lower it"
        )
    for name in settings.sets:
        if settings.sets.count(name) > 1:
            raise SettingError(f"evaluate.sets={settings.sets} names {name} twice: name each set once")
        # Settings that are built in Python may have no sources yet.
        if settings.sources and name not in settings.sources and find_task(config.objective.task).kind.vocabulary:
            known = ", ".join(sorted(settings.sources))
            raise SettingError(
                f"evaluate.sets: {name} has no source{did_you_mean(name, settings.sources)}; choose from {known} or "
                f"add evaluate.sources.{name}"
            )
    _check_by_set(config)
    if "heldout" in settings.sets and config.corpus.tokens.heldout == 0:
        raise SettingError("corpus.heldout=0, but evaluate.sets names heldout: hold a share out, or name other sets")
    check_measures(settings.measures)
    _check_twin(config)


def _check_twin(config: Config) -> None:
    """Refuse a twin that is no finished run, or that stands beside a run which has no teacher either."""
    if (path := config.evaluate.twin) is None or not Path(path).expanduser().is_dir():
        return  # a path that leads nowhere is refused with all others
    if not any(term.needs_teacher for term in make_terms(config.objective).values()):
        raise SettingError(
            f"evaluate.twin={path} is to show what a teacher was worth, but no term of this objective learns from one: "
            "leave it out (`distill compare` lays any runs beside each other)"
        )
    read_run(Path(path), "evaluate.twin")


def _check_by_set(config: Config) -> None:
    """Refuse settings for a set that nobody knows: they would be read for none."""
    parts = [f"heldout_{name}" for name in config.corpus.sources]  # what a mixture holds out of each source
    known = [*config.evaluate.sources, *config.evaluate.sets, *parts]
    for name in config.evaluate.by_set:
        if name not in known:
            raise SettingError(
                f"evaluate.by_set.{name} is for a set that is not known{did_you_mean(name, known)}: name one of "
                f"{', '.join(dict.fromkeys(known))}"
            )


def check_corpus(config: Config) -> None:
    """Raises SettingError for a corpus that is an evaluation set, or one without a row."""
    settings = config.corpus
    if not isinstance(settings.source, Component) and settings.source.kind == "heldout":
        raise SettingError("corpus.kind=heldout is for evaluation sets: name where the corpus comes from")
    if not isinstance(settings.source, Component) and settings.source.kind == MIXTURE and len(settings.sources) < 2:
        raise SettingError(f"corpus=mixture needs two sources or more: give corpus.sources='{EXAMPLE}'")
    if settings.sources and settings.add_prose:
        raise SettingError(
            "corpus.add_prose=true has no share in a mixture: give the prose one as corpus.sources.NAME={kind: prose, "
            "weight: 0.1}, or set corpus.add_prose=false"
        )
    held_out = {f"heldout_{name}" for name in settings.sources} if "heldout" in config.evaluate.sets else set()
    if clash := sorted(held_out & set(config.evaluate.sets)):
        raise SettingError(
            f"evaluate.sets names {clash[0]}, what the mixture holds out of a source: give the set another name"
        )
    if settings.rows == 0 and settings.unlabelled is None:
        raise SettingError("corpus.rows=0 is too small: give 1 or more, or null for all")
    if settings.cache.local_bytes < 2 * settings.cache.shuffle_bytes:
        raise SettingError(
            f"corpus.local_bytes={settings.cache.local_bytes} has to be twice corpus.shuffle_bytes="
            f"{settings.cache.shuffle_bytes} at least, as the next rows are fetched while some are read: raise it, or "
            "lower corpus.shuffle_bytes"
        )
    if settings.cache.compression not in COMPRESSIONS:
        raise SettingError(f"corpus.compression={settings.cache.compression} is not known: give zstd, or null for none")
