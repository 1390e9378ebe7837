"""Scores models that exist on evaluation sets, without training: `distill evaluate`, or from Python.

`evaluate_models(["runs/a", "runs/b"], ["evaluate.sets=[books]"])` gives what the command writes, as an object. Programs
call it as `distill.evaluate`, which leaves the process as it was.
"""

from distill.commands.scoring.score import evaluate_models
from distill.commands.scoring.scores import Comparison, ModelScores, Scores

__all__ = ["Comparison", "ModelScores", "Scores", "evaluate_models"]
