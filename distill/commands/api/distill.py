"""A run from objects that a program holds: models, texts, losses and metrics in, results out."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from torch import nn

from distill.commands.api.data import TRAIN, in_memory, splits_of
from distill.commands.api.objects import CALLED, FLAGS, CallSettings, digest_of, import_path, that_learns
from distill.commands.api.run import RunResults, errors_for_programs, run_here
from distill.config.command_line import options_of, run_dir
from distill.config.component import TARGET, InMemory
from distill.config.compose import ComposedRun, composed_run
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
from distill.models.kind import CAUSAL, CLASSES, MASKED, SPANS, ModelKind, kind_in_memory
from distill.models.load import saved_config
from distill.models.loaded import LoadedModel, kind_of, model_digest, refuse_unread, unwrapped
from distill.runtime.errors import SettingError, raising_at_the_call
from distill.runtime.users_code import source_digest

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

SQUAD = "squad"
# Of each kind of models: the recipe, and options of the objective with a teacher (None: the recipe's) and without one.
DEFAULTS: dict[ModelKind | None, tuple[str | None, str | None, str | None]] = {
    MASKED: ("distilbert_gutenberg", None, "mlm"),
    CAUSAL: ("distilgpt2_gutenberg", None, "clm"),
    CLASSES: ("table", "distil_classes", None),
    SPANS: (SQUAD, "distil_spans", None),
    None: (None, None, "mlm"),
}
LABELLED = ("table", "glue", SQUAD)  # recipes whose data has labels
NAMING_SETS = ("evaluate.sets", "evaluate.sources")
SCORED = (("validation", "dev"), ("test",))  # splits that are evaluated on: the first of these that there are
# Settings of an evaluation set that are those of the corpus: of tables, of questions, of texts and of conversations.
COLUMNS, ANSWERS = ("text", "second", "label", "regression", "quotes"), ("version", "stride", "max_query")
TEXT, CHAT = ("field", "prompt"), ("template",)
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
    command: the same call resumes where one stopped, and returns the results of a finished run; one with another
    model, other data or another loss in its folder is refused. The run works on copies of models in memory. Every rank
    of a launcher such as torchrun calls this.

    Args:
        teacher: a model in memory as (model, tokenizer) or as `distill.load_model` gives it; or the name that the
            command takes, such as a folder, a run or a name on the Hub; or settings. Left out: that of the recipe.
            None: there is none.
        student: the same of a student. None: a part of the teacher's layers, or that of the recipe.
        data: a data set of the Hugging Face library; an iterable of texts; a torch data set of token ids; a
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
        call = Call(recipe, objective, settings, Path(files))
        call.add_models(teacher, student)
        call.add_data(data)
        call.add_evaluation(evaluation)
        with errors_for_programs():
            job = call.composed(folder)
        return run_here(job)


class Call:
    """The settings of a run as they are put together from the arguments of `distill`."""

    def __init__(self, recipe: str | None, objective: Any, settings: RunSettings, files: Path) -> None:
        self.has_recipe, self.recipe, self.files = recipe is not None, recipe, files
        self.tokenizer = settings.get("tokenizer")
        self.own, self.made = CallSettings(), CallSettings()  # the caller's settings, and those that his objects make
        sections = {name: one for name, one in settings.items() if name not in ("tokenizer", "settings")}
        if not isinstance(named := settings.get("settings", {}), Mapping):
            cure = "give settings={'train.steps': 100}"
            raise SettingError("no mapping of names to values", setting="settings", value=named, cure=cure)
        for name, value in (sections | dict(named)).items():
            self.own.add(name, value)
        if callable(objective):
            name = str(getattr(objective, "__name__", ""))
            objective = {name if name.isidentifier() else "loss": objective}  # a lambda's is none
        # The names of all losses; None: those of the recipe.
        self.terms = {str(name) for name in objective} if isinstance(objective, Mapping) else None
        if objective is not None:
            self.own.add("objective", objective)

    def composed(self, folder: str | Path | None) -> ComposedRun:
        """The run of these settings. Raises SettingError where they make none."""
        names = {*self.made.values, *self.own.values}
        has_sets = "evaluate" in self.own.options or any(name.startswith(NAMING_SETS) for name in names)
        if self.recipe in LABELLED and f"corpus.{TARGET}" in names and not has_sets:
            cure = "give evaluation=DATA, or data with a validation or test split, such as data.train_test_split(0.1)"
            raise SettingError("nothing is held out of labelled data", setting="evaluation", value="None", cure=cure)
        options = [f"{name}={option}" for name, option in (self.made.options | self.own.options).items()]
        named = [] if self.recipe is None else [f"+recipe={self.recipe}"]
        return composed_run([*named, *options, *([] if folder is None else [run_dir(Path(folder))])], self._values)

    def _values(self, composed: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values of all other settings by dotted names, for the settings that those options make."""
        values = {**self.made.values, **self.own.values}
        for group in CALLED:
            if f"{group}.{TARGET}" in values:  # its arguments are not those of what the recipe has there
                names = [*type(getattr(Config(), group)).model_fields]
                flags = {name: composed[group][name] for name in names if name in composed[group] and name != "kind"}
                values = {group: flags} | values
        others = [] if self.terms is None else [name for name in composed["objective"] if name not in self.terms]
        return {f"objective.{name}.weight": 0.0 for name in others if name not in FLAGS} | values

    def _add_default(self, name: str, value: Any) -> None:
        """Add what holds where the caller names no recipe, before what is given in its place."""
        if not self.has_recipe:
            self.made.add(name, value)

    def add_models(self, teacher: Any, student: Any) -> None:
        """Take the models, and from them the kind of the job; `teacher` is `...` where it is the recipe's."""
        given = {"teacher": None if teacher is ... else teacher, "student": student}
        held = {name: self._held(name, model) for name, model in given.items()}
        of_teacher = held["teacher"]
        shared = None if of_teacher is None else of_teacher.tokenizer
        kinds = [_kind(name, model) if (one := held[name]) is None else one.kind for name, model in given.items()]
        recipe, with_teacher, alone = DEFAULTS[kinds[0] or kinds[1]]
        self.recipe = self.recipe or recipe
        if teacher is None:
            self.made.values |= {"teacher.path": None, f"teacher.{TARGET}": None, "teacher.members": {}}
        if objective := alone if teacher is None else with_teacher if given["teacher"] is not None else None:
            self._add_default("objective", objective)
        from_layers = student is None or (isinstance(student, StudentConfig) and student.from_layers)
        if given["teacher"] is not None and from_layers:
            if with_teacher:  # of recipes that have a saved student
                self._add_default("student", "layers")
                self._add_default("student.layers", None)
            elif kinds[0] is MASKED:
                config: Any = saved_config("teacher", str(teacher)) if of_teacher is None else of_teacher.model.config
                if config.model_type != "bert":  # from which alone the recipe's DistilBERT starts
                    self._add_default("student.architecture", "same")
        for name, model in given.items():
            if (inside := held[name]) is not None:
                self._add_object(name, inside.model, inside.tokenizer or shared)
            elif isinstance(model, str | Path) and str(model) not in options_of(name):
                if name == "student":
                    self.made.add(name, "pretrained")
                self.made.add(f"{name}.path", model)
            elif model is not None:
                self.made.add(name, model)

    def _held(self, name: str, value: Any) -> LoadedModel | None:
        """A model in memory, which may lack a tokenizer or be of no kind; None for what is named or set."""
        model, tokenizer = value, self.tokenizer
        if isinstance(value, LoadedModel):
            model, tokenizer = value.model, value.tokenizer
        elif isinstance(value, tuple) and len(value) == 2:
            model, tokenizer = value
        if not isinstance(model, nn.Module):
            return None
        if tokenizer is None and name == "teacher":
            problem = f"teacher is a {type(value).__name__} in memory, without its tokenizer"
            raise SettingError(f"{problem}: give (model, tokenizer), or tokenizer=")
        inside: Any = unwrapped(model, name, learns=name == "student")
        refuse_unread(inside, name)
        kind: Any = kind_in_memory(inside)
        return LoadedModel(inside, tokenizer, kind)  # type: ignore[arg-type]

    def _add_object(self, name: str, model: nn.Module, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        def copied() -> nn.Module:
            # Not on a GPU, where the user's own model may leave no room for a second one.
            on_gpu = [weight for weight in model.parameters() if weight.is_cuda]
            here = {id(weight): nn.Parameter(weight.detach().cpu(), weight.requires_grad) for weight in on_gpu}
            copy = deepcopy(model, here).to("cpu")
            return that_learns(copy) if name == "student" else copy

        code = source_digest(import_path(type(model)) or "")
        held = InMemory(type(model).__name__, model_digest(model, tokenizer), copied, tokenizer, code)
        self.made.options[name] = "custom"
        self.made.values |= {f"{name}.{TARGET}": held, f"{name}.path": None, f"{name}.tokenizer": None}

    def add_data(self, data: Any) -> None:
        """Take what is trained on; of several splits one of the others is evaluated on."""
        if data is None:
            return
        self._add_default("corpus.max_sequences", None)
        if self.recipe not in LABELLED:
            self._add_default("evaluate", "heldout")
        if isinstance(data, str | Path):
            if self.recipe not in LABELLED:
                self._add_default("corpus", _kind_of_files(data))
            self.made.add("corpus.path", data)
            return
        if self.recipe not in LABELLED:
            self.made.add("corpus", {"kind": "custom"})
            self.made.add("corpus", "custom")
        if isinstance(data, Source):
            held = InMemory(type(data).__name__, digest_of(data, "data"), lambda: data)
            self.made.values[f"corpus.{TARGET}"] = held
            return
        splits = splits_of(data, "data")
        if TRAIN not in splits:
            raise SettingError(f"data has the splits {', '.join(splits)} and no split {TRAIN}: give data=DATA[NAME]")
        self._add_rows("corpus", splits[TRAIN])
        found = ({name: splits[name] for name in splits if name.startswith(names)} for names in SCORED)
        self.add_evaluation(next(filter(None, found), None))

    def add_evaluation(self, evaluation: Any) -> None:
        """Take what models are scored on, in place of sets that `data` brought."""
        if evaluation is None:
            return
        sets = evaluation if isinstance(evaluation, Mapping) else {"evaluation": evaluation}
        self.made.values["evaluate.sets"] = [str(name) for name in sets]
        for name, data in sets.items():
            place = f"evaluate.sources.{name}"
            if not str(name).isidentifier():
                raise SettingError(f"evaluation: the name {name} of a set has to be letters, digits and underscores")
            if isinstance(data, str | Path):
                kind = "table" if self.recipe in LABELLED else _kind_of_files(data)
                self.made.add(place, {"path": data, "kind": kind, **self._of_corpus(kind)})
                continue
            rows, *others = splits_of(data, f"evaluation {name}").values()
            if others:
                raise SettingError(f"evaluation {name} has several splits: give the one to score, such as DATA['test']")
            self.made.add(place, {"split": name, **self._of_corpus("memory", rows.column_names)})
            self._add_rows(place, rows)

    def _of_corpus(self, kind: str, columns: Sequence[str] | None = None) -> Mapping[str, Any]:
        """The settings of a set of this kind that are as those of the corpus; `columns`: that a set in memory has."""
        if self.recipe == SQUAD:
            return {name: f"${{corpus.{name}}}" for name in ANSWERS} | {"kind": SQUAD, "split": "validation"}
        if self.recipe in LABELLED:
            return {name: f"${{corpus.{name}}}" for name in COLUMNS}
        own = {name: self.own.values.get(f"corpus.{name}") for name in (*TEXT, *CHAT)}
        of_text = {name: own[name] for name in TEXT if kind != "text" and (columns is None or own[name] in columns)}
        # A set of this name that ships with Distill may take a fraction.
        return {"fraction": 1.0, **of_text, **({} if columns is None else {name: own[name] for name in CHAT})}

    def _add_rows(self, place: str, rows: "datasets.Dataset") -> None:
        if self.recipe == SQUAD:
            problem = "questions with answers are read from files (SQuAD's JSON, JSONL or Parquet)"
            cure = "give their path, or name a data set of the Hub by corpus={'hub': NAME}"
            raise SettingError(problem, setting=place, cure=cure)
        self.made.values[f"{place}.{TARGET}"] = in_memory(rows, place, self.recipe in LABELLED, self.files)


def _kind(name: str, model: Any) -> ModelKind | None:
    """The kind of a model that is named; None where that is left to the run to find out."""
    if not isinstance(model, str | Path) or str(model) in options_of(name):
        return None
    try:
        return kind_of(name, str(model))
    except SettingError:  # such as an encoder without a head
        return None


def _kind_of_files(path: str | Path) -> str:
    """The kind of a source that reads these files, by their name."""
    suffixes = [part.lower() for part in Path(path).suffixes]
    return next((kind for suffix, kind in SUFFIXES.items() if suffix in suffixes), "text")
