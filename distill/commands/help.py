"""What `distill --help` prints: the commands, the recipes and the groups of settings, read from their files."""

import re
import textwrap
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from distill.config.folders import CONF, RECIPES

HELP = """
usage: distill [+recipe=NAME] [GROUP=OPTION ...] [SETTING=VALUE ...]     distil a teacher into a student and report
       distill COMMAND [NAME=VALUE ...]                                  another command; distill COMMAND --help

  distill corpus.path=BOOKS                         the main job on your books, in a minute or two, offline
  distill +recipe=NAME optimizer.lr=2e-3 seed=1     a recipe with other settings
  distill objective.temperature=1,2,4 --multirun    a sweep: one run for each value
  distill settings +recipe=NAME                     show all settings and who set them, and run nothing

A run is written to runs/RECIPE (or hydra.run.dir=FOLDER). The same command resumes it; once it has finished, that
command prints the path of the report.
python -m distill is the same as distill.
"""
OPTIONS = """
options:
  --config-dir FOLDER   recipes of your own, in FOLDER/recipe/NAME.yaml
  --multirun, -m        run every combination of the values that are given as A,B,C
  --cfg job             show the settings as YAML
  --schema              a JSON schema of all settings, by which editors complete recipes
  --help, -h            print this text
  --version             print the version
"""
WIDTH = 118
LONGEST = 88  # characters of the summary of a recipe


def main_help(commands: Mapping[str, str], config_dir: str | None = None) -> str:
    """The help of the command without a subcommand.

    Args:
        commands: what each of the others does, by name.
        config_dir: a folder of recipes and options of the user's.
    """
    folders = [RECIPES, *([] if config_dir is None else [Path(config_dir) / "recipe"])]
    recipes = {file.stem: _summary(file) for folder in folders for file in sorted(folder.glob("*.yaml"))}
    groups = {
        folder.name: ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
        for folder in sorted(CONF.iterdir())
        if folder.is_dir()
    }
    tables = {"commands:": commands, "recipes (+recipe=NAME):": recipes, "groups (GROUP=OPTION):": groups}
    return "\n\n".join([HELP.strip(), *(_table(title, rows) for title, rows in tables.items()), OPTIONS.strip()])


def _summary(recipe: Path) -> str:
    """The first sentence of the comment that a recipe begins with."""
    lines = recipe.read_text("utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("# "), (line for line in lines if not line.startswith("# @")))
    first = re.split(r"(?<=\w)[.:](?:\s|$)", " ".join(line[2:] for line in comment))[0]
    return textwrap.shorten(first, LONGEST, placeholder=" ...")


def _table(title: str, rows: Mapping[str, str]) -> str:
    column = max(map(len, rows)) + 4
    lines = [
        textwrap.fill(text, WIDTH, initial_indent=f"  {name}".ljust(column), subsequent_indent=" " * column)
        for name, text in rows.items()
    ]
    return "\n".join([title, *lines])
