"""All settings of a run, typed and frozen, in the shape of the command line.

`distill.config.compose` makes them from Hydra's configuration; tests and notebooks may build them directly.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator

from distill.config.backend import BackendConfig as BackendConfig
from distill.config.backend import PrecisionConfig as PrecisionConfig
from distill.config.chain import ChainConfig as ChainConfig
from distill.config.chain import StageConfig as StageConfig
from distill.config.component import Component, Named, in_group
from distill.config.corpus import CorpusConfig as CorpusConfig
from distill.config.corpus import DataConfig as DataConfig
from distill.config.corpus import DocumentUnit as DocumentUnit
from distill.config.corpus import Duplicates as Duplicates
from distill.config.corpus import Missing as Missing
from distill.config.corpus import NearConfig as NearConfig
from distill.config.corpus import SourceConfig as SourceConfig
from distill.config.evaluate import CurveConfig as CurveConfig
from distill.config.evaluate import EvaluateConfig as EvaluateConfig
from distill.config.evaluate import PseudoPerplexityConfig as PseudoPerplexityConfig
from distill.config.evaluate import SetConfig as SetConfig
from distill.config.evaluate import SetFraction as SetFraction
from distill.config.folders import CONF as CONF
from distill.config.folders import RECIPES as RECIPES
from distill.config.model import SEEDS, LocalPath, Settings, setting
from distill.config.objective import MaskingConfig as MaskingConfig
from distill.config.objective import ObjectiveConfig as ObjectiveConfig
from distill.config.objective import TermConfig as TermConfig
from distill.config.optimizer import OptimizerConfig as OptimizerConfig
from distill.config.optimizer import ScheduleConfig as ScheduleConfig
from distill.config.student import LayersStudentConfig as LayersStudentConfig
from distill.config.student import NewStudentConfig as NewStudentConfig
from distill.config.student import SavedStudentConfig as SavedStudentConfig
from distill.config.student import StudentConfig as StudentConfig
from distill.config.teacher import FrozenModelConfig as FrozenModelConfig
from distill.config.teacher import MemberConfig as MemberConfig
from distill.config.teacher import TeacherCacheConfig as TeacherCacheConfig
from distill.config.teacher import TeacherConfig as TeacherConfig
from distill.config.train import OnUsr1 as OnUsr1
from distill.config.train import TrainConfig as TrainConfig
from distill.config.watch import ProfileConfig as ProfileConfig
from distill.config.watch import ReportConfig as ReportConfig
from distill.config.watch import TrackerConfig as TrackerConfig


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
