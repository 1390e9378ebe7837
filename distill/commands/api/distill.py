"""A run from objects that a program holds: models, texts, losses and metrics in, results out."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from torch import nn

from distill.commands.api.data import TRAIN, in_memory, splits_of
from distill.commands.api.objects import CALLED, FLAGS, CallSettings, digest_of, import_path
from distill.commands.api.run import RunResults, errors_for_programs, run_here
from distill.config.command_line import options_of, run_dir
from distill.config.component import TARGET, InMemory
from distill.config.compose import composed_run
from distill.config.settings import (
    BackendConfig,
    Config,
    EvaluateConfig,
    PrecisionConfig,
    ProfileConfig,
    ReportConfig,
    StudentConfig,
    TeacherConfig,
    TrackerConfig,
    TrainConfig,
)
from distill.data.sources import Source
from distill.models.identity import model_digest
from distill.models.kind import CAUSAL, CLASSES, MASKED, SPANS, ModelKind, kind_in_memory
from distill.models.load import saved_config
from distill.models.loaded import LoadedModel, kind_of
from distill.models.wrappers import refuse_unread, unwrapped
from distill.runtime.errors import SettingError, raising_at_the_call
from distill.runtime.users_code import source_digest

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase


RECIPES = {MASKED: "distilbert_gutenberg", CAUSAL: "distilgpt2_gutenberg", CLASSES: "table", SPANS: "squad"}
NAMING_SETS = ("evaluate.sets", "evaluate.sources")
LABELLED = ("table", "glue", "squad")  # recipes whose data has labels
OBJECTIVES = {CLASSES: "distil_classes", SPANS: "distil_spans"}  # with a teacher
SCORED = (("validation", "dev"), ("test",))  # splits that are evaluated on: the first of these that there are
COLUMNS = {name: f"${{corpus.{name}}}" for name in ("text", "second", "label", "regression", "quotes")}  # of tables
ANSWERS = {name: f"${{corpus.{name}}}" for name in ("version", "stride", "max_query")}  # of sets of questions
ANSWERS |= {"kind": "squad", "split": "validation"}
ELSEWHERE = {  # arguments that other trainers have: what to give in their place
    "args": "train=distill.TrainConfig(...), optimizer={...} and the other sections of the settings",
    "model": "student=",
    "teacher_model": "teacher=",
    "processing_class": "tokenizer=, or models as (model, tokenizer)",
    "train_dataset": "data=",
    "eval_dataset": "evaluation=",
    "callbacks": "observers={'mine': OBSERVER}",
    "compute_metrics": "evaluate={'measures': {'mine': METRIC}}",
    "output_dir": "folder=",
}
SUFFIXES = {".jsonl": "jsonl", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}  # kinds of files by their names

Model = str | Path | nn.Module | LoadedModel | tuple[nn.Module, "PreTrainedTokenizerBase"]
Group = str | Mapping[str, Any]  # an option of a group of settings, or some of its settings


class RunSettings(TypedDict, total=False):
    """Settings of a run by name: each as an option, as a mapping, or as the model of its section."""

    tokenizer: "PreTrainedTokenizerBase"  # of models in memory that are given without one
    corpus: Group
    optimizer: Group | type
    schedule: Group | type
    train: TrainConfig | Mapping[str, Any]
    evaluate: EvaluateConfig | Group
    observers: Mapping[str, Any]  # by name: objects, classes or functions of a step
    backend: BackendConfig | Group
    precision: PrecisionConfig | Group
    tracker: TrackerConfig | Group
    profile: ProfileConfig | Group
    report: ReportConfig | Mapping[str, Any]
    seed: int
    resume: str
    settings: Mapping[str, Any]  # any further ones, also by dotted names and of the group `data`


@raising_at_the_call
def distill(
    teacher: "Model | TeacherConfig | Mapping[str, Any] | EllipsisType | None" = ...,
    student: "Model | StudentConfig | Mapping[str, Any] | None" = None,
    data: "datasets.Dataset | datasets.DatasetDict | Source | Any | None" = None,
    *,
    evaluation: "Mapping[str, Any] | datasets.Dataset | list[str] | None" = None,
    objective: str | Mapping[str, Any] | None = None,
    recipe: str | None = None,
    folder: str | Path | None = None,
    **settings: Unpack[RunSettings],
) -> RunResults:
    """Distil a teacher into a student on data that are in memory or named, and return the results.

    Everything that is not given is as in the recipe. The run has the folder, the report and the checkpoints of the
    command: the same call resumes where one stopped, and returns the results of a finished run. A call with another
    model, other data or another loss in the same folder is refused. Models in memory stay as they are: the run
    works on copies. Where a launcher such as torchrun has started this program, every rank calls this.

    Args:
        teacher: a model in memory as (model, tokenizer) or as `distill.load_model` gives it; or the name that the
            command takes, such as a folder, a run or a name on the Hub; or settings. Left out: that of the recipe.
            None: no teacher, as for a baseline; the loss is then that of the labels or of the language model.
        student: the same; it is trained on. None: that of the recipe, mostly half of the teacher's layers.
        data: what to train on: a datasets.Dataset with a column `text`, `messages`, `input_ids`, or `text` and
            `label` (others are named as `corpus={"field": NAME}`, `{"text": NAME, "label": NAME}`); a DatasetDict,
            whose other splits are evaluated on; an iterable of texts; a torch data set of token ids; a
            `distill.Source`; or a path.
        evaluation: the same, by the name of the set. None: a part of the data that is held out.
        objective: the terms by name with their weight or settings, without others that the recipe has; or a function
            of logits of student and teacher [n, V] and targets [n] that gives a loss for each position; or an option
            such as "distilgpt2".
        recipe: None: that for the kind of model: distilbert_gutenberg, distilgpt2_gutenberg, table or squad, on all
            of the data.
        folder: of the run. None: runs/RECIPE.
        settings: further settings, by section (`train={"steps": 100}`, `train=distill.TrainConfig(steps=100)`), by
            option (`precision="bf16"`), or by their dotted names (`settings={"train.steps": 100}`).

    Raises:
        SettingError, Diverged, RankLost, StorageFailed, Interrupted: as `distill.run`.
    """
    with TemporaryDirectory(prefix="distill-rows-") as files:  # for rows that other processes read
        job = _Job(recipe, Path(files), settings)
        job.add_models(teacher, student)
        job.add_data(data)
        job.add_evaluation(evaluation)
        job.add_settings(objective)
        with errors_for_programs():
            composed = composed_run(job.arguments(folder), job.values)
        return run_here(composed)


class _Job:
    """The settings of a run as they are put together from the arguments of `distill`."""

    def __init__(self, recipe: str | None, files: Path, settings: RunSettings) -> None:
        for name in settings:
            if name in ELSEWHERE:
                raise SettingError(f"{name} is no argument of distill.distill: give {ELSEWHERE[name]}")
        self.recipe, self.files, self.tokenizer = recipe, files, settings.get("tokenizer")
        sections = {name: value for name, value in settings.items() if name not in ("tokenizer", "settings")}
        self.settings: Mapping[str, Any] = {**sections, **settings.get("settings", {})}
        self.given, self.defaults = CallSettings(), CallSettings()  # the latter hold where no recipe is named
        self.kind: ModelKind | None = None  # of the models, where one is given
        self.terms: set[str] | None = None  # the names of all losses; None: those of the recipe
        self.sets = list[str]()  # names of evaluation sets
        self.lacks_sets = False  # whether data was given of which nothing is held out

    @property
    def is_labelled(self) -> bool:
        return self.kind in OBJECTIVES if self.recipe is None else self.recipe in LABELLED

    @property
    def has_answers(self) -> bool:
        """Whether the examples are questions with answers, of which none is read from memory."""
        return self.kind is SPANS if self.recipe is None else self.recipe == RECIPES[SPANS]

    def arguments(self, folder: str | Path | None) -> list[str]:
        """What names files: the recipe, options of groups, and the run folder."""
        recipe = self.recipe or (None if self.kind is None else RECIPES[self.kind])
        options = (self.defaults.options if self.recipe is None else {}) | self.given.options
        named = [] if recipe is None else [f"+recipe={recipe}"]
        place = [] if folder is None else [run_dir(Path(folder))]
        return [*named, *(f"{name}={option}" for name, option in options.items()), *place]

    def values(self, composed: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values of all other settings by dotted names, for the settings that those options make."""
        defaults = self.defaults.values if self.recipe is None else {}
        others = [] if self.terms is None else [name for name in composed["objective"] if name not in self.terms]
        without = {f"objective.{name}.weight": 0.0 for name in others if name not in FLAGS}
        called = {name: _flags_of(name, composed) for name in CALLED if f"{name}.{TARGET}" in self.given.values}
        return {**defaults, **without, **called, **self.given.values}

    def add_settings(self, objective: Any) -> None:
        """Take those that the caller has set himself, which win over the others; and the loss.

        Of the loss the terms that are named alone hold, whatever terms the recipe has.
        """
        if self.sets:
            self.given.add("evaluate.sets", self.sets)
        elif self.lacks_sets and not any(name == "evaluate" or name.startswith(NAMING_SETS) for name in self.settings):
            raise SettingError(
                "evaluation=None, and nothing is held out of labelled data: give evaluation=DATA, or data with a "
                "validation or test split, such as data.train_test_split(0.1)"
            )
        for name, value in self.settings.items():
            self.given.add(name, value)
        if callable(objective):
            name = str(getattr(objective, "__name__", ""))
            objective = {name if name.isidentifier() else "loss": objective}  # a lambda's is none
        if isinstance(objective, Mapping):
            self.terms = {str(name) for name in objective}
        if objective is not None:
            self.given.add("objective", objective)

    def add_models(self, teacher: Any, student: Any) -> None:
        """Take the models, and from them the kind of the job; `teacher` is `...` where it is the recipe's."""
        trains_alone = teacher is None
        if trains_alone:
            self.given.values |= {"teacher.path": None, f"teacher.{TARGET}": None, "teacher.members": {}}
        teacher = None if teacher is ... else teacher
        held = {"teacher": self._held("teacher", teacher), "student": self._held("student", student)}
        if held["teacher"] is not None and held["student"] is not None and held["student"][1] is None:
            held["student"] = held["student"][0], held["teacher"][1]
        for name, value in (("teacher", teacher), ("student", student)):
            model = held[name]
            if model is not None:
                self._add_object(name, *model, loaded=isinstance(value, LoadedModel))
            elif isinstance(value, str | Path) and str(value) not in options_of(name):
                if name == "student":
                    self.given.add(name, "pretrained")
                self.given.add(f"{name}.path", value)
            elif value is not None:
                self.given.add(name, value)
            self.kind = self.kind or _kind(name, value if model is None else model[0])
        if trains_alone and self.kind not in OBJECTIVES:
            self.defaults.add("objective", "clm" if self.kind is CAUSAL else "mlm")
        if self.kind in OBJECTIVES and teacher is not None:
            self.defaults.add("objective", OBJECTIVES[self.kind])
        if teacher is not None and (student is None or (isinstance(student, StudentConfig) and student.from_layers)):
            self._add_layers(teacher if held["teacher"] is None else held["teacher"][0])

    def _add_layers(self, teacher: Any) -> None:
        """Let the student have the teacher's own architecture where the recipe has another one, or none."""
        if self.kind in OBJECTIVES:
            self.defaults.add("student", "layers")
            self.defaults.add("student.layers", None)
        elif self.kind is MASKED and _family(teacher) != "bert":
            self.defaults.add("student.architecture", "same")

    def _held(self, name: str, value: Any) -> "tuple[nn.Module, PreTrainedTokenizerBase | None] | None":
        """A model in memory and its tokenizer; None for what is named or set."""
        if isinstance(value, LoadedModel):
            return value.model, value.tokenizer
        has_tokenizer = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], nn.Module)
        model, tokenizer = value if has_tokenizer else (value, self.tokenizer)
        if not isinstance(model, nn.Module):
            return None
        if tokenizer is None and name == "teacher":
            raise SettingError(
                f"teacher is a {type(value).__name__} in memory, without its tokenizer: give (model, tokenizer), or "
                "tokenizer="
            )
        inside = unwrapped(model, name, learns=name == "student")
        refuse_unread(inside, name)
        return inside, tokenizer

    def _add_object(
        self, name: str, model: nn.Module, tokenizer: "PreTrainedTokenizerBase | None", loaded: bool
    ) -> None:
        """`loaded`: by `distill.load_model`, which freezes a model whatever it is for."""

        def copied() -> nn.Module:
            made = deepcopy(model)
            is_frozen = not any(parameter.requires_grad for parameter in made.parameters())
            return made.requires_grad_() if loaded and is_frozen and name == "student" else made

        code = source_digest(import_path(type(model)) or "")
        held = InMemory(type(model).__name__, model_digest(model, tokenizer), copied, tokenizer, code)
        self.given.add(name, "custom")
        self.given.add_object(name, held, path=None, tokenizer=None)

    def add_data(self, data: Any) -> None:
        """Take what is trained on; of several splits one of the others is evaluated on."""
        if data is None:
            return
        self.defaults.add("corpus.max_sequences", None)
        if not self.is_labelled and not isinstance(self.settings.get("evaluate"), str):
            self.defaults.add("evaluate", "heldout")
        if isinstance(data, str | Path):
            if self.recipe is None and not self.is_labelled and "corpus" not in self.settings:
                self.given.add("corpus", _kind_of_files(data))
            self.given.add("corpus.path", data)
            return
        self._refuse_answers_in_memory("data")
        if not self.is_labelled:
            self.given.add("corpus", {"kind": "custom"})
            self.given.add("corpus", "custom")
        if isinstance(data, Source):
            self.given.add_object("corpus", InMemory(type(data).__name__, digest_of(data, "data"), lambda: data))
            return
        splits = splits_of(data, "data")
        if TRAIN not in splits:
            raise SettingError(f"data has the splits {', '.join(splits)} and no split {TRAIN}: give data=DATA[NAME]")
        self.given.add_object("corpus", in_memory(splits[TRAIN], "corpus", self.is_labelled, self.files))
        for names in SCORED:
            if other := {name: splits[name] for name in splits if name.startswith(names)}:
                return self.add_evaluation(other)
        self.lacks_sets = self.is_labelled

    def add_evaluation(self, evaluation: Any) -> None:
        """Take what models are scored on, in place of sets that `data` brought."""
        if evaluation is None:
            return
        self.sets = []
        for name, data in (evaluation if isinstance(evaluation, Mapping) else {"evaluation": evaluation}).items():
            place = f"evaluate.sources.{name}"
            if not str(name).isidentifier():
                raise SettingError(f"evaluation: the name {name} of a set has to be letters, digits and underscores")
            self.sets.append(str(name))
            if isinstance(data, str | Path):
                kind = _kind_of_files(data)
                columns = self._text_settings() if kind != "text" else {}
                # A set of this name that ships with Distill may take a fraction.
                of_texts = {"kind": kind, "fraction": 1.0, **columns}
                of_examples = ANSWERS if self.has_answers else COLUMNS | {"kind": "table"}
                self.given.add(place, {"path": str(data), **(of_examples if self.is_labelled else of_texts)})
                continue
            self._refuse_answers_in_memory(f"evaluation {name}")
            rows, *others = splits_of(data, f"evaluation {name}").values()
            if others:
                raise SettingError(f"evaluation {name} has several splits: give the one to score, such as DATA['test']")
            columns = {"fraction": 1.0, **self._text_settings(rows.column_names, written=True)}
            beside = COLUMNS | {"split": name} if self.is_labelled else columns
            self.given.add_object(place, in_memory(rows, place, self.is_labelled, self.files), **beside)

    def _refuse_answers_in_memory(self, argument: str) -> None:
        if self.has_answers:
            raise SettingError(
                f"{argument}: questions with answers are read from files (SQuAD's JSON, JSONL or Parquet): give their "
                "path, or name a data set of the Hub by corpus={'hub': NAME}"
            )

    def _text_settings(self, columns: Sequence[str] | None = None, written: bool = False) -> Mapping[str, Any]:
        """How `corpus` reads its texts, for a set with these columns (None: of a file, whose columns are not known).

        `written`: with how it writes conversations.
        """
        corpus = self.settings.get("corpus")
        settings = dict(corpus) if isinstance(corpus, Mapping) else {}
        dotted = {name: value for name, value in self.settings.items() if name.startswith("corpus.")}
        settings |= {name.removeprefix("corpus."): value for name, value in dotted.items()}
        names = [name for name in ("field", "prompt") if columns is None or settings.get(name) in columns]
        names += ["template", "target_role"] if written else []
        return {name: settings[name] for name in names if name in settings}


def _flags_of(group: str, composed: Mapping[str, Any]) -> dict[str, Any]:
    """What of a group is no argument of the callable that the recipe has there."""
    section = Config.model_fields[group].get_default(call_default_factory=True)
    names = {*type(section).model_fields} - {"kind", "target", "group"}
    return {name: composed[group][name] for name in names if name in composed[group]}


def _kind(name: str, model: Any) -> ModelKind | None:
    """The kind of a model in memory, or of one that is named; None where that is left to the run to find out."""
    if isinstance(model, nn.Module):
        return kind_in_memory(model)
    if not isinstance(model, str | Path) or str(model) in options_of(name):
        return None
    try:
        return kind_of(name, str(model))
    except SettingError:  # such as an encoder without a head
        return None


def _family(model: Any) -> str:
    """transformers' model type of a model of known kind, in memory or named."""
    model = model[0] if isinstance(model, tuple) else getattr(model, "model", model)
    config: Any = model.config if isinstance(model, nn.Module) else saved_config("teacher", str(model))
    return str(config.model_type)


def _kind_of_files(path: str | Path) -> str:
    """The kind of a source that reads these files, by their name."""
    return next(
        (kind for suffix, kind in SUFFIXES.items() if suffix in [part.lower() for part in Path(path).suffixes]), "text"
    )
