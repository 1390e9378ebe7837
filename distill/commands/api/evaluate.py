"""Scores of models that exist, for a script or a notebook."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from distill.commands.api.process import process_as_before, raise_expected
from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from distill.commands.scoring.scores import Scores


def evaluate(models: Sequence[str | Path], settings: Sequence[str] = (), output: str | Path | None = None) -> "Scores":
    """Score models on evaluation sets, as `distill evaluate` does; the process is as before afterwards.

    Args:
        models: run folders, students, snapshots or other model folders, names on the Hub, `bundled` or
            `bundled_deep`.
        settings: as on the command line of a run, of the groups corpus, evaluate, precision, teacher and backend. What
            is not given is as in the run that made the first model; of a model from elsewhere the books, WikiText-2 and
            IMDB under $DISTILL_DATA are scored, or, with a corpus, what is held out of it.
        output: folder that gets scores.json and scores.md; None: nothing is written.

    Raises:
        SettingError: bad input: models that do not load or are of different tasks, settings or sets that cannot be.
        StorageFailed: a disk or a store has failed.
        Interrupted: a signal ended it, which is a KeyboardInterrupt.
    """
    from distill.commands.scoring import evaluate_models
    from distill.config.composition import hydra_as_before
    from distill.runtime.signals import handled

    for name, given, example in (("models", models, "runs/first"), ("settings", settings, "evaluate.sets=[books]")):
        if isinstance(given, str | Path):
            raise SettingError(f"{name}={given} is one string: give a list, such as ['{example}']")
    try:
        with ExitStack() as held:
            held.enter_context(handled(owns_process=False))
            held.enter_context(process_as_before())
            held.enter_context(hydra_as_before())
            return evaluate_models(models, settings, output)
    except Exception as error:
        raise_expected(error, "" if output is None else str(output))
