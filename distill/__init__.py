"""Distill: a frozen teacher, a small student, and a report that shows how close they came.

The names in `__all__` are what programs and notebooks may rely on; everything else in the package may change from one
release to the next. Each is imported when it is first used, so that `import distill` itself loads nothing heavy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from distill.runtime.signals import follow_parent
from distill.runtime.version import __version__

follow_parent()  # first of all, where a process of this package has started this one

if TYPE_CHECKING:
    from distill.commands.api.distill import RunSettings as RunSettings
    from distill.commands.api.distill import distill as distill
    from distill.commands.api.pair import Pair as Pair
    from distill.commands.api.pair import load_pair as load_pair
    from distill.commands.api.run import open_run as open_run
    from distill.commands.api.run import run as run
    from distill.commands.api.run_results import RunResults as RunResults
    from distill.commands.prediction import predict as predict
    from distill.commands.scoring.score import evaluate as evaluate
    from distill.config.settings import BackendConfig as BackendConfig
    from distill.config.settings import BundledTeacherConfig as BundledTeacherConfig
    from distill.config.settings import CurveConfig as CurveConfig
    from distill.config.settings import EvaluateConfig as EvaluateConfig
    from distill.config.settings import LayersStudentConfig as LayersStudentConfig
    from distill.config.settings import MaskingConfig as MaskingConfig
    from distill.config.settings import NewStudentConfig as NewStudentConfig
    from distill.config.settings import PrecisionConfig as PrecisionConfig
    from distill.config.settings import ProfileConfig as ProfileConfig
    from distill.config.settings import PseudoPerplexityConfig as PseudoPerplexityConfig
    from distill.config.settings import ReportConfig as ReportConfig
    from distill.config.settings import SavedStudentConfig as SavedStudentConfig
    from distill.config.settings import SavedTeacherConfig as SavedTeacherConfig
    from distill.config.settings import SetConfig as SetConfig
    from distill.config.settings import TeacherCacheConfig as TeacherCacheConfig
    from distill.config.settings import TrackerConfig as TrackerConfig
    from distill.config.settings import TrainConfig as TrainConfig
    from distill.data.batch import Batch as Batch
    from distill.data.sources import Document as Document
    from distill.data.sources import Part as Part
    from distill.data.sources import Shard as Shard
    from distill.data.sources import Source as Source
    from distill.evaluation.text_scores import TextScore as TextScore
    from distill.evaluation.text_scores import score as score
    from distill.models.language_model import Outputs as Outputs
    from distill.models.language_model import OutputSpec as OutputSpec
    from distill.models.loaded import LoadedModel as LoadedModel
    from distill.models.loaded import load_model as load_model
    from distill.models.recorded_attention import QKV as QKV
    from distill.objective.terms import Term as Term
    from distill.objective.terms import VocabularyTerm as VocabularyTerm
    from distill.report.comparison.from_python import ComparedRuns as ComparedRuns
    from distill.report.comparison.from_python import compare_runs
    from distill.report.scores import Scores as Scores
    from distill.runs.observers import ObservedCheckpoint as ObservedCheckpoint
    from distill.runs.observers import ObservedEvaluation as ObservedEvaluation
    from distill.runs.observers import ObservedStep as ObservedStep
    from distill.runs.observers import Observer as Observer
    from distill.runtime.errors import Diverged as Diverged
    from distill.runtime.errors import Interrupted as Interrupted
    from distill.runtime.errors import RankLost as RankLost
    from distill.runtime.errors import SettingError as SettingError
    from distill.runtime.errors import StageFailed as StageFailed
    from distill.runtime.errors import StorageFailed as StorageFailed
    from distill.teacher.output import TeacherOutput as TeacherOutput

    compare = compare_runs

# Where each public name is defined: a module, and `:NAME` where it has another name there. A line here, and one above
# for type checkers, is all that a further one needs.
_PUBLIC = {
    "BackendConfig": "distill.config.settings",
    "Batch": "distill.data.batch",
    "BundledTeacherConfig": "distill.config.settings",
    "ComparedRuns": "distill.report.comparison.from_python",
    "CurveConfig": "distill.config.settings",
    "Diverged": "distill.runtime.errors",
    "Document": "distill.data.sources",
    "EvaluateConfig": "distill.config.settings",
    "Interrupted": "distill.runtime.errors",
    "LayersStudentConfig": "distill.config.settings",
    "LoadedModel": "distill.models.loaded",
    "MaskingConfig": "distill.config.settings",
    "NewStudentConfig": "distill.config.settings",
    "ObservedCheckpoint": "distill.runs.observers",
    "ObservedEvaluation": "distill.runs.observers",
    "ObservedStep": "distill.runs.observers",
    "Observer": "distill.runs.observers",
    "OutputSpec": "distill.models.language_model",
    "Outputs": "distill.models.language_model",
    "Pair": "distill.commands.api.pair",
    "Part": "distill.data.sources",
    "PrecisionConfig": "distill.config.settings",
    "ProfileConfig": "distill.config.settings",
    "PseudoPerplexityConfig": "distill.config.settings",
    "QKV": "distill.models.recorded_attention",
    "RankLost": "distill.runtime.errors",
    "ReportConfig": "distill.config.settings",
    "RunResults": "distill.commands.api.run_results",
    "RunSettings": "distill.commands.api.distill",
    "SavedStudentConfig": "distill.config.settings",
    "SavedTeacherConfig": "distill.config.settings",
    "Scores": "distill.report.scores",
    "SetConfig": "distill.config.settings",
    "SettingError": "distill.runtime.errors",
    "Shard": "distill.data.sources",
    "Source": "distill.data.sources",
    "StageFailed": "distill.runtime.errors",
    "StorageFailed": "distill.runtime.errors",
    "TeacherCacheConfig": "distill.config.settings",
    "TeacherOutput": "distill.teacher.output",
    "Term": "distill.objective.terms",
    "TextScore": "distill.evaluation.text_scores",
    "TrackerConfig": "distill.config.settings",
    "TrainConfig": "distill.config.settings",
    "VocabularyTerm": "distill.objective.terms",
    "compare": "distill.report.comparison.from_python:compare_runs",
    "distill": "distill.commands.api.distill",
    "evaluate": "distill.commands.scoring.score",
    "load_model": "distill.models.loaded",
    "load_pair": "distill.commands.api.pair",
    "open_run": "distill.commands.api.run",
    "predict": "distill.commands.prediction",
    "run": "distill.commands.api.run",
    "score": "distill.evaluation.text_scores",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """A public name, imported at its first use."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, defined_as = _PUBLIC[name].partition(":")
    value = getattr(import_module(module), defined_as or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
