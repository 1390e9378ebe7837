"""The command `distill prepare` as `python -m distill.prepare`."""

from distill.commands.cli import door

door(__name__, "prepare")
