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
from distill.config.data import Duplicates as Duplicates
from distill.config.data import Missing as Missing
from distill.config.data import NearConfig as NearConfig
from distill.config.data import SourceConfig as SourceConfig
from distill.config.evaluation import CurveConfig as CurveConfig
from distill.config.evaluation import EvaluateConfig as EvaluateConfig
from distill.config.evaluation import PseudoPerplexityConfig as PseudoPerplexityConfig
from distill.config.evaluation import SetConfig as SetConfig
from distill.config.evaluation import SetFraction as SetFraction
from distill.config.models import FrozenModelConfig as FrozenModelConfig
from distill.config.models import LayersStudentConfig as LayersStudentConfig
from distill.config.models import MemberConfig as MemberConfig
from distill.config.models import NewStudentConfig as NewStudentConfig
from distill.config.models import SavedStudentConfig as SavedStudentConfig
from distill.config.models import StudentConfig as StudentConfig
from distill.config.models import TeacherCacheConfig as TeacherCacheConfig
from distill.config.models import TeacherConfig as TeacherConfig
from distill.config.objective import MaskingConfig as MaskingConfig
from distill.config.objective import ObjectiveConfig as ObjectiveConfig
from distill.config.objective import OptimizerConfig as OptimizerConfig
from distill.config.objective import ScheduleConfig as ScheduleConfig
from distill.config.objective import TermConfig as TermConfig
from distill.config.training import BackendConfig as BackendConfig
from distill.config.training import OnUsr1 as OnUsr1
from distill.config.training import PrecisionConfig as PrecisionConfig
from distill.config.training import ProfileConfig as ProfileConfig
from distill.config.training import ReportConfig as ReportConfig
from distill.config.training import TrackerConfig as TrackerConfig
from distill.config.training import TrainConfig as TrainConfig


class Config(Settings):
    """The settings of a run."""

    corpus: CorpusConfig = setting(None, "What the student is trained on.", factory=CorpusConfig)
    data: DataConfig = setting(
        None, "Where prepared sequences are kept, and how they are made and read.", factory=DataConfig
    )
    teacher: TeacherConfig = setting(None, "The frozen model to learn from.", factory=TeacherConfig)
    student: StudentConfig = setting(None, "The model to train.", factory=StudentConfig)
    objective: ObjectiveConfig = setting(None, "The loss.", factory=ObjectiveConfig)
    optimizer: OptimizerConfig = setting(None, "What moves the weights.", factory=OptimizerConfig)
    schedule: ScheduleConfig = setting(None, "The learning rate over the run.", factory=ScheduleConfig)
    train: TrainConfig = setting(None, "The training loop.", factory=TrainConfig)
    evaluate: EvaluateConfig = setting(None, "What models are scored on, and when.", factory=EvaluateConfig)
    observers: Annotated[dict[str, Named], BeforeValidator(in_group("observers"))] = setting(
        None, "Observers of your own by name, called while the run trains: `_target_` and its arguments.", factory=dict
    )
    backend: BackendConfig = setting(None, "The ranks of the run.", factory=BackendConfig)
    precision: PrecisionConfig = setting(None, "Number formats.", factory=PrecisionConfig)
    tracker: TrackerConfig = setting(None, "Where metrics go besides metrics.jsonl.", factory=TrackerConfig)
    profile: ProfileConfig = setting(None, "What is recorded about where the time goes.", factory=ProfileConfig)
    report: ReportConfig = setting(None, "How the report is written.", factory=ReportConfig)
    seed: int = setting(0, "Seed of everything that is drawn.", ge=0, le=SEEDS)
    resume: LocalPath = setting(
        "auto",
        "auto resumes, strict stops at damage, never refuses a run that began; or a checkpoint folder to begin from.",
    )
    # A name, or that name with the direction of a search, `distill.report.comparison.goal.Goal`.
    optimize: Any = setting(
        None, "Of a sweep: the number of a run's results that matters, such as perplexity or heldout.perplexity."
    )
    # The same settings as dicts.
    written: dict[str, Any] = setting(None, "As they are written down, by the names of variables.", factory=dict)
    compared: dict[str, Any] = setting(None, "As a resumed run compares them, by digests of those.", factory=dict)

    @property
    def own_observers(self) -> dict[str, Component]:
        """What makes each observer, by its name."""
        return {name: observer.make for name, observer in self.observers.items()}


class StageConfig(Settings):
    """One job, or one for each of several seeds."""

    recipe: str = Field(description="Recipe of the stage.")
    settings: list[str] = setting(
        None, "Settings as on the command line; {NAME} is the folder of stage NAME.", factory=list
    )
    seeds: list[Annotated[int, Strict(), Field(ge=0, le=SEEDS)]] = setting(
        None, "Run the stage once with each of these seeds; none is the seed of the recipe.", factory=list
    )


class ChainConfig(Settings):
    """Stages by name, in their order, and which of them score which model of the table."""

    stages: dict[str, StageConfig] = setting(None, "Stages by name, in their order.", factory=dict)
    table: dict[str, list[str]] = setting(None, "Stages by the name of the model that they score.", factory=dict)
    anchors: list[str] = setting(None, "Lines below the table, such as published scores.", factory=list)
