"""All settings as Markdown, for reference/settings.md: default, range, unit and sentence."""

import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from markdown_text import comment_of, escaped, paragraphs
from setting_kinds import accepted, shown_default

from distill.config import CONF
from distill.config.base import Settings, flatten
from distill.config.component import OPTIMIZERS, SCHEDULES, SOURCES, TABLES, TERMS, class_name, kinds
from distill.config.data import CorpusConfig
from distill.config.errors import models_of
from distill.config.evaluation import EvaluateConfig, SetConfig
from distill.config.models import READ_BY, FrozenModelConfig, MemberConfig, StudentConfig, TeacherConfig
from distill.config.objective import ObjectiveConfig, WeightSchedule
from distill.config.schema import INTERNAL, arguments_of, settings_schema
from distill.config.settings import ChainConfig, Config, StageConfig
from distill.config.training import OptimizerConfig, ScheduleConfig

RUN = ("seed", "resume", "optimize", "observers")  # settings that are in no section
HYDRA = {
    "hydra.run.dir": ("The folder of the run.", "runs/RECIPE"),
    "hydra.sweep.dir": (
        "The folder of a sweep (`--multirun`); each of its runs has a folder in it.",
        "runs/RECIPE-sweep",
    ),
}
TASKS, BACKENDS = "distill.tasks", "distill.distributed"
# What is said of settings whose schema has no sentence, as they are groups with names of the user's.
OPEN = {
    "corpus.sources": "Sources of a mixture by name, each with the settings of its kind and `weight`.",
    "evaluate.sources": "Where the text of each set comes from, by its name, with the settings of its kind.",
    "evaluate.measures": "Further measures by name: a torchmetrics Metric of logits and targets, as `_target_`.",
    "chain.given": "Values that the stages refer to as `${chain.given.NAME}`.",
}
SCHEDULED = {"weight": "0 to 1,000,000", "temperature": "0.01 to 1,000"}  # ranges that a schedule has to keep, too


@dataclass(frozen=True)
class Entry:
    """One setting.

    Attributes:
        node: what the schema has of it.
        note: a sentence about when it is read.
        default: in place of that of the schema.
    """

    name: str
    node: dict[str, Any]
    note: str = ""
    default: str = ""


@dataclass
class SettingsPage:
    """The page, and the entries that it has after `text` has made it."""

    schema: dict[str, Any] = field(default_factory=settings_schema)
    entries: list[Entry] = field(default_factory=list)

    def text(self) -> str:
        """The page as Markdown."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield "## Of a run\n"
        for name in RUN:
            yield from self._entry(Entry(name, self.schema["properties"][name]))
        for name, (sentence, default) in HYDRA.items():
            yield f"### `{name}` {{ #{name} }}\n\n{sentence}\n\nDefault: `{default}`.\n{{ .facts }}\n"
        for name, of_group in Config.model_fields.items():
            if name in (*RUN, *INTERNAL):
                continue
            yield f"## {name}\n\n{escaped(of_group.description or '')}\n"
            yield from self._options(name)
            if (make := getattr(self, f"_{name}", None)) is not None:
                yield from make()
            else:
                (model,) = models_of(of_group.annotation)
                yield from self._fields(model, name)
        yield "## chain\n\nA chain of runs. Its recipe has no other settings than these.\n"
        yield from self._fields(StageConfig, "chain.stages.NAME")
        yield from self._fields(ChainConfig, "chain", skip=("stages",))
        yield from self._open("chain.given")

    def _entry(self, entry: Entry, level: int = 3) -> Iterator[str]:
        self.entries.append(entry)
        default = entry.default or shown_default(entry.node)
        takes = accepted(self.schema, entry.node, SCHEDULED.get(entry.name.rpartition(".")[2], ""))
        facts = [
            f"Default: {default if entry.default else f'`{default}`'}." if default is not None else "No default.",
            f"Takes {takes}.",
        ]
        yield f"{'#' * level} `{entry.name}` {{ #{entry.name} }}\n"
        yield " ".join(filter(None, [escaped(entry.node.get("description", "")), entry.note])) + "\n"
        yield f"{' '.join(filter(None, facts))}\n{{ .facts }}\n"

    def _open(self, name: str) -> Iterator[str]:
        """The entry of a group that has names of the user's."""
        yield from self._entry(Entry(name, {"type": "object", "default": {}, "description": OPEN[name]}))

    def _fields(self, model: type[Settings], prefix: str, skip: Collection[str] = ()) -> Iterator[str]:
        for name, of_field in model.model_fields.items():
            if name not in ("group", *INTERNAL, *skip):
                yield from self._field(model, name, of_field.alias or name, prefix)

    def _field(self, model: type[Settings], field: str, name: str, prefix: str) -> Iterator[str]:
        """An entry, or those of the section that the field is."""
        annotation = model.model_fields[field].annotation
        sections = [held for held in models_of(annotation) if held is not WeightSchedule]
        if len(sections) == 1 and issubclass(sections[0], Settings):
            yield from self._fields(sections[0], f"{prefix}.{name}")
        else:
            note = _read_by("student.init", list(READ_BY[name])) if prefix == "student" and name in READ_BY else ""
            definition = self.schema["$defs"][model.__name__]
            node = definition.get("anyOf", [definition])[0]["properties"][name]
            yield from self._entry(Entry(f"{prefix}.{name}", node, note))

    def _options(self, group: str) -> Iterator[str]:
        """The options of a group, by the comments of their files or else by what they set."""
        files = sorted((CONF / group).glob("*.yaml"))
        if files:
            yield f"Options of the group, each given as `{group}=OPTION`:\n"
        for file in files:
            values = flatten(yaml.safe_load(file.read_text("utf-8")) or {})
            sets = [f"`{group}.{name}={_yaml(value)}`" for name, value in values.items() if name != "defaults"]
            yield f"`{file.stem}`\n:   {comment_of(file) or f'Sets {_and(sets)}.'}\n"

    def _corpus(self) -> Iterator[str]:
        yield from self._fields(CorpusConfig, "corpus", skip=("sources",))
        yield from self._open("corpus.sources")
        yield "### Kinds of text { #corpus.kinds }\n"
        for kind in kinds(SOURCES):
            takes = [f"`{name}`" for name in getattr(_class(SOURCES, kind), "takes", ())]
            reads = f" Reads also {_and(takes)}." if takes else ""
            yield f"`{kind}`\n:   {_sentence_of(f'{SOURCES}.{kind}')}{reads}\n"
        yield "### Kinds of labelled examples { #corpus.tables }\n"
        for kind in kinds(TABLES):
            yield f"`{kind}`\n:   {_sentence_of(f'{TABLES}.{kind}')}\n"
        yield from self._arguments("corpus", TABLES, skip=("path", "hub", "subset", "split"))

    def _teacher(self) -> Iterator[str]:
        yield from self._fields(TeacherConfig, "teacher", skip=("members",))
        yield "### Several teachers { #teacher.members }\n"
        yield "With `teacher=several` each of `teacher.members` has `path` and the like as above, and:\n"
        yield from self._fields(MemberConfig, "teacher.members.NAME", skip=FrozenModelConfig.model_fields)

    def _student(self) -> Iterator[str]:
        yield from self._fields(StudentConfig, "student")

    def _objective(self) -> Iterator[str]:
        yield from self._fields(ObjectiveConfig, "objective")
        yield "### Tasks { #objective.tasks }\n\nThe values of `objective.task`:\n"
        for kind in kinds(TASKS):
            yield f"`{kind}`\n:   {_sentence_of(f'{TASKS}.{kind}')}\n"
        weight = self.schema["$defs"]["ObjectiveConfig"]["properties"]["soft"]["properties"]["weight"]
        note = "A term of weight 0 is left out. A term of your own has any name and `objective.NAME._target_`."
        yield from self._entry(Entry("objective.NAME.weight", weight, note))
        for kind in kinds(TERMS):
            cls = _class(TERMS, kind)
            yield f"### `objective.{kind}` {{ #objective.{kind} }}\n"
            yield from (f"{text}\n" for text in paragraphs(cls.__doc__))
            yield f"The class `{cls.__name__}` in `{_module(cls)}`.\n{{ .facts }}\n"
            for name, node in arguments_of(TERMS, kind).items():
                default = "that of `objective.temperature`" if name == "temperature" else ""
                entry = Entry(f"objective.{kind}.{name}", node, default=default)
                yield from self._entry(entry, level=4)

    def _optimizer(self) -> Iterator[str]:
        yield from self._fields(OptimizerConfig, "optimizer", skip=("kind",))
        yield from self._kinds_of_package("optimizer", OPTIMIZERS)

    def _schedule(self) -> Iterator[str]:
        yield from self._fields(ScheduleConfig, "schedule", skip=("kind",))
        yield from self._kinds_of_package("schedule", SCHEDULES)

    def _kinds_of_package(self, group: str, package: str) -> Iterator[str]:
        yield f"### `{group}.kind` {{ #{group}.kind }}\n"
        yield f"A class of this package; `{group}._target_` names one of yours.\n"
        for kind in kinds(package):
            yield f"`{kind}`\n:   {_sentence_of(f'{package}.{kind}')}\n"
        yield from self._arguments(group, package)

    def _arguments(self, group: str, package: str, skip: tuple[str, ...] = ()) -> Iterator[str]:
        """What the constructors of all kinds of a group take, each name once, with the kinds that take it."""
        by_name: dict[str, dict[str, dict[str, Any]]] = {}
        for kind in kinds(package):
            for name, node in arguments_of(package, kind).items():
                by_name.setdefault(name, {})[kind] = node
        for name, nodes in by_name.items():
            if name in skip:
                continue
            note = "" if len(nodes) == len(kinds(package)) else _read_by(f"{group}.kind", list(nodes))
            defaults = {kind: shown_default(node) for kind, node in nodes.items()}
            differ = len(set(defaults.values())) > 1
            default = ", ".join(f"`{value}` of `{kind}`" for kind, value in defaults.items()) if differ else ""
            described = next((node for node in nodes.values() if "description" in node), next(iter(nodes.values())))
            yield from self._entry(Entry(f"{group}.{name}", described, note, default))

    def _evaluate(self) -> Iterator[str]:
        yield from self._fields(EvaluateConfig, "evaluate", skip=("by_set", "sources", "measures"))
        for name in ("sources", "measures"):
            yield from self._open(f"evaluate.{name}")
        yield from self._fields(SetConfig, "evaluate.by_set.NAME")

    def _backend(self) -> Iterator[str]:
        (model,) = models_of(Config.model_fields["backend"].annotation)
        yield "### Engines { #backend.engines }\n\nThe values of `backend.name`:\n"
        for kind in ("single", "ddp", "fsdp", "horovod"):
            yield f"`{kind}`\n:   {_sentence_of(f'{BACKENDS}.{kind}')}\n"
        yield from self._fields(model, "backend")


@cache
def _class(package: str, kind: str) -> Any:
    return getattr(import_module(f"{package}.{kind}"), class_name(kind))


def _module(cls: type) -> str:
    file = Path(inspect.getfile(cls)).as_posix()
    return file[file.rindex("distill/") :]


def _sentence_of(module: str) -> str:
    """What the docstring of a module begins with."""
    return paragraphs(import_module(module).__doc__)[0]


def _read_by(setting: str, values: list[str]) -> str:
    return f"Read with {_and([f'`{setting}={value}`' for value in values], 'or')}."


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _and(names: list[str], word: str = "and") -> str:
    return f" {word} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
