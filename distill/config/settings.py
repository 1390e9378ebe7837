"""All settings of a run, typed and frozen, in the shape of the command line.

`distill.config.compose` makes them from Hydra's configuration; tests and notebooks may build them directly.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, Strict

from distill.config import CONF as CONF
from distill.config import RECIPES as RECIPES
from distill.config.base import SEEDS, LocalPath, Settings, setting
from distill.config.component import Component, Named, in_group
from distill.config.data import CorpusConfig as CorpusConfig
from distill.config.data import DataConfig as DataConfig
from distill.config.data import DocumentUnit as DocumentUnit
from distill.config.data import Missing as Missing
from distill.config.data import SourceConfig as SourceConfig
from distill.config.evaluation import EvaluateConfig as EvaluateConfig
from distill.config.evaluation import PseudoPerplexityConfig as PseudoPerplexityConfig
from distill.config.evaluation import SetConfig as SetConfig
from distill.config.models import FrozenModelConfig as FrozenModelConfig
from distill.config.models import StudentConfig as StudentConfig
from distill.config.models import TeacherCacheConfig as TeacherCacheConfig
from distill.config.models import TeacherConfig as TeacherConfig
from distill.config.objective import MaskingConfig as MaskingConfig
from distill.config.objective import ObjectiveConfig as ObjectiveConfig
from distill.config.training import BackendConfig as BackendConfig
from distill.config.training import OnUsr1 as OnUsr1
from distill.config.training import OptimizerConfig as OptimizerConfig
from distill.config.training import PrecisionConfig as PrecisionConfig
from distill.config.training import ProfileConfig as ProfileConfig
from distill.config.training import ReportConfig as ReportConfig
from distill.config.training import ScheduleConfig as ScheduleConfig
from distill.config.training import TrackerConfig as TrackerConfig
from distill.config.training import TrainConfig as TrainConfig


class Config(Settings):
    """The settings of a run."""

    corpus: CorpusConfig = setting(CorpusConfig, "What the student is trained on.")
    data: DataConfig = setting(DataConfig, "Where prepared sequences are kept, and how they are made and read.")
    teacher: TeacherConfig = setting(TeacherConfig, "The frozen model to learn from.")
    student: StudentConfig = setting(StudentConfig, "The model to train.")
    objective: ObjectiveConfig = setting(ObjectiveConfig, "The loss.")
    optimizer: OptimizerConfig = setting(OptimizerConfig, "What moves the weights.")
    schedule: ScheduleConfig = setting(ScheduleConfig, "The learning rate over the run.")
    train: TrainConfig = setting(TrainConfig, "The training loop.")
    evaluate: EvaluateConfig = setting(EvaluateConfig, "What models are scored on, and when.")
    observers: Annotated[dict[str, Named], BeforeValidator(in_group("observers"))] = setting(
        dict, "Observers of your own by name, called while the run trains: `_target_` and its arguments."
    )
    backend: BackendConfig = setting(BackendConfig, "The ranks of the run.")
    precision: PrecisionConfig = setting(PrecisionConfig, "Number formats.")
    tracker: TrackerConfig = setting(TrackerConfig, "Where metrics go besides metrics.jsonl.")
    profile: ProfileConfig = setting(ProfileConfig, "What is recorded about where the time goes.")
    report: ReportConfig = setting(ReportConfig, "How the report is written.")
    seed: int = setting(0, "Seed of everything that is drawn.", ge=0, le=SEEDS)
    resume: LocalPath = setting(
        "auto", "auto resumes, strict stops at damage, never refuses a run that began; or a checkpoint to begin from."
    )
    # A name, or that name with the direction of a search, `distill.report.comparison.columns.Goal`.
    optimize: Any = setting(None, "Of a sweep: the number that matters, such as heldout.perplexity.")
    # The same settings as dicts.
    written: dict[str, Any] = setting(dict, "As they are written down, by the names of variables.")
    compared: dict[str, Any] = setting(dict, "As a resumed run compares them, by digests of those.")

    @property
    def own_observers(self) -> dict[str, Component]:
        """What makes each observer, by its name."""
        return {name: observer.make for name, observer in self.observers.items()}


class StageConfig(Settings):
    """One job, or one for each of several seeds."""

    recipe: str = Field(description="Recipe of the stage.")
    settings: list[str] = setting(list, "Settings as on the command line; {NAME} is the folder of stage NAME.")
    seeds: list[Annotated[int, Strict(), Field(ge=0, le=SEEDS)]] = setting(
        list, "Run the stage once with each of these seeds; none is the seed of the recipe."
    )


class ChainConfig(Settings):
    """Stages by name, in their order, and which of them score which model of the table."""

    stages: dict[str, StageConfig] = setting(dict, "Stages by name, in their order.")
    table: dict[str, list[str]] = setting(dict, "Stages by the name of the model that they score.")
    anchors: list[str] = setting(list, "Lines below the table, such as published scores.")
