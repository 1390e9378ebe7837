"""Refuses settings of the teachers and of their caches that do not go together."""

from distill.config.settings import Config, TeacherCacheConfig
from distill.config.teacher import EMBEDDED
from distill.objective.build import make_terms
from distill.objective.terms import VocabularyTerm
from distill.objective.terms.logit_mse import LogitMse
from distill.objective.terms.soft import Soft
from distill.objective.vocabulary import mixing_temperature
from distill.runtime.errors import SettingError
from distill.runtime.nearest import choose
from distill.tasks import find_task
from distill.teacher.members import ONLY, errors_of, settings_by_member


def check_teachers(config: Config) -> None:
    """Refuse members that are not read, and losses that several teachers together cannot give what they want."""
    settings = config.teacher
    choose("teacher.kind", settings.kind, (*EMBEDDED, "pretrained", "several", "none", "custom"))
    if (settings.kind == "several") != bool(settings.members):
        raise SettingError(
            f"teacher.kind={settings.kind} with teacher.members={list(settings.members)}: take teacher=several and "
            "name each as teacher.members.NAME.path=FOLDER"
        )
    for name, member in settings.members.items():
        own = f"teacher.members.{name}"
        choose(f"{own}.kind", member.kind, (*EMBEDDED, "pretrained", "custom"))
        if member.kind != "custom" and (member.path is None) != (member.kind in EMBEDDED):
            raise SettingError(f"{own}.path={member.path} with kind={member.kind}: give a path, or kind=embedded alone")
        if member.precision is not None:
            choose(f"{own}.precision", member.precision, ("fp32", "bf16", "fp16", "int8"))
    for number, (name, alone) in enumerate((settings_by_member(config) or {ONLY: config}).items()):
        with errors_of(name):
            _check_teacher_cache(alone, first=number == 0)
    if len(settings.members) > 1:
        terms = make_terms(config.objective)
        task = find_task(config.objective.task, terms.values())
        for name, term in terms.items():
            if term.teacher_reads.extra or not task.kind.vocabulary:
                raise SettingError(
                    f"teacher.kind=several averages probabilities of words, but objective.{name} is not about words: "
                    "choose one teacher"
                )
        on_logits = {name: term for name, term in terms.items() if isinstance(term, VocabularyTerm)}
        mixing_temperature(on_logits, {name: config.objective.terms[name].temperature for name in on_logits})
        for name, term in terms.items():
            if isinstance(term, LogitMse) and not term.center:
                raise SettingError(
                    f"objective.{name}.center=false, but the mean of several teachers' probabilities has logits only "
                    f"up to a constant: set objective.{name}.center=true"
                )


def _check_draws(settings: TeacherCacheConfig) -> None:
    """Refuse settings of draws where nothing is drawn."""
    if settings.sampled is not None:
        return
    for name, value, default in (("exponent", settings.exponent, 1.0), ("seed", settings.seed, 0)):
        if value != default:
            raise SettingError(
                f"teacher.cache.{name}={value} is about tokens that are drawn, and none are: set teacher.cache.sampled "
                f"to their number, or teacher.cache.{name} back to {default}"
            )


def _kept(settings: TeacherCacheConfig) -> str:
    """The settings that make a cache, to be set to null."""
    found = {"top_k": settings.top_k, "sampled": settings.sampled}
    return " and ".join(name for name, value in found.items() if value is not None)


def _check_teacher_cache(config: Config, first: bool) -> None:
    """`first`: whether this teacher is the one that losses on hidden states read."""
    settings = config.teacher.cache
    _check_draws(settings)
    if not settings.wanted:
        return
    where = settings.setting
    terms = {name: term for name, term in make_terms(config.objective).items() if term.needs_teacher}
    on_logits = {name: term for name, term in terms.items() if isinstance(term, VocabularyTerm)}
    readers = {name: term for name, term in on_logits.items() if term.top_k_temperature is not None}
    if not readers:
        raise SettingError(f"{where}, but no term of the objective wants soft targets: set {_kept(settings)} to null")
    if not find_task(config.objective.task).kind.causal and not config.objective.masking.static:
        raise SettingError(f"{where} needs the same masks in every epoch: set objective.masking.static=true")
    for name, term in terms.items():
        if name not in readers and (first or name in on_logits):
            raise SettingError(
                f"{where}, but objective.{name} needs more of the teacher than a cache keeps: set "
                f"objective.{name}.weight=0"
            )
        if settings.sampled is not None and name in readers and not readers[name].reads_samples:
            raise SettingError(
                f"{where}, but objective.{name} reads the most probable tokens alone and no draws: set "
                f"teacher.cache.sampled to null, or reads_samples=True in its class where it takes `Samples`"
            )
        if isinstance(term, Soft) and term.cutoff > 0:
            why = " already cuts the teacher off" if settings.sampled is None else ": draws know no cut-off"
            raise SettingError(f"{where}{why}: set objective.{name}.cutoff={term.cutoff} to 0")
        if (ramp := config.objective.terms[name].temperature) is not None:
            raise SettingError(
                f"{where} is kept at one temperature, but objective.{name}.temperature goes from {ramp.start} to "
                f"{ramp.end}: give it one number, or set {_kept(settings)} to null for a live teacher"
            )
    temperatures = {name: term.top_k_temperature for name, term in readers.items()}
    if len(set(temperatures.values())) > 1:
        found = ", ".join(f"objective.{name}.temperature={value}" for name, value in temperatures.items())
        raise SettingError(f"{where} is kept at one temperature, but there are {found}: give them the same")
