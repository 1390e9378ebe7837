"""The command `distill evaluate`: scores models on evaluation sets without training."""

from pathlib import Path

from distill.commands.arguments import Arguments, LocalFile, split
from distill.config.model import LocalPath

HELP = """
usage: distill evaluate model=MODEL [model=MODEL ...] [output=FOLDER] [+recipe=NAME] [SETTING=VALUE ...]

Score models on evaluation sets without training, and compare them in a table.

  model=MODEL      a run folder, its student/, a snapshot, any folder of transformers, a name on the Hub,
                   a GGUF file, bundled_small or bundled_deep; given again for each further one, or as model=[A,B]
  output=FOLDER    gets scores.json and scores.md (default: runs/evaluate)
  SETTING=VALUE    a setting of a run, of corpus, data, evaluate, precision, teacher and backend; what is not given
                   is as in the run that made the first model
  teacher=MODEL    adds a column for a teacher, and each model's top-1 agreement with it

  distill evaluate model=runs/distilbert_gutenberg model=runs/distilbert_gutenberg_baseline
  distill evaluate model=RUN 'evaluate.sets=[wikitext2,imdb]' evaluate.max_sequences=1000 teacher=bundled_deep
  distill evaluate model=MODEL 'evaluate.sets=[mine]' 'evaluate.sources.mine={kind: text, path: FILE}'
"""


class EvaluateArguments(Arguments):
    """What the command takes besides settings of a run."""

    model: list[LocalPath]
    output: LocalFile = Path("runs/evaluate")


def run(arguments: list[str]) -> None:
    """Score what the command line names, and print the table."""
    from distill.commands.scoring.score import evaluate_models

    options, settings = split(EvaluateArguments, arguments, "evaluate")
    print(evaluate_models(options.model, settings, options.output))
    print(f"\nWritten: {options.output}/scores.json and scores.md")
