"""The command `distill export` as `python -m distill.export`."""

from distill.commands.cli import door

door(__name__, "export")
