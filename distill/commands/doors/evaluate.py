"""The command `distill evaluate` as `python -m distill.evaluate`."""

from distill.commands.cli import door

door(__name__, "evaluate")
