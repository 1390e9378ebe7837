"""Refuses settings that no run can have, before anything heavy starts. Every message names setting, value and cure."""

from distill.checks.evaluation import check_corpus, check_evaluation
from distill.checks.objective import check_objective
from distill.checks.paths import check_paths
from distill.checks.student import check_student
from distill.checks.teachers import check_teachers
from distill.checks.training import check_training
from distill.checks.unread import check_unread
from distill.config.settings import Config


def check(config: Config) -> None:
    """Raises SettingError for the first setting that is out of range or at odds with another."""
    check_objective(config)
    check_teachers(config)
    check_training(config)
    check_evaluation(config)
    check_corpus(config)
    check_student(config.student)
    check_unread(config)
    check_paths(config)
