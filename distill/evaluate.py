"""The command `python -m distill.evaluate model=FOLDER [model=...]`: scores models on evaluation sets without training.

    python -m distill.evaluate model=runs/distilbert_gutenberg model=runs/distilbert_gutenberg_twin
    python -m distill.evaluate model=RUN 'evaluate.sets=[wikitext2,imdb]' evaluate.rows=1000 teacher=embedded
    python -m distill.evaluate model=MODEL 'evaluate.sets=[mine]' 'evaluate.sources.mine={kind: text, path: FILE}'

A model is a run folder, a student, a milestone, any folder of transformers, a name on the Hub, or `embedded` or
`embedded_deep`. Settings are those of a run, of the groups corpus, evaluate, precision, teacher and backend; what is
not given is as in the run that made the first model. The table goes to the console, scores.json and scores.md to
runs/evaluate or output=FOLDER.
"""

import sys
from typing import TYPE_CHECKING

from distill.__main__ import expected, say, until_interrupted
from distill.runtime.threads import limit_spinning

if TYPE_CHECKING:
    from distill.runtime.signals import Signals

OUTPUT = "runs/evaluate"


def main() -> int:
    """Exit status: 0 done, 2 bad input, 74 storage, 128 + a signal; else a bug."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    limit_spinning()
    return until_interrupted(run_command)


def run_command(signals: "Signals") -> int:
    """Score what the command line names; gives the exit status."""
    from distill.commands.scoring import evaluate_models

    models, output, settings = parse(sys.argv[1:])
    try:
        scores = evaluate_models(models, settings, output)
    except Exception as error:
        if (failure := expected(error, output)) is None:
            raise
        say(failure)
        return int(failure.status)
    print(f"{scores}\n\nWritten: {output}/scores.json and scores.md")
    return 0


def parse(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    """The models, the folder for the scores, and the settings of a command line."""
    models, output, settings = [], OUTPUT, []
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if separator and name == "model":
            models.append(value)
        elif separator and name == "output":
            output = value
        else:
            settings.append(argument)
    return models, output, settings


if __name__ == "__main__":
    sys.exit(main())
