"""The command `distill compare` as `python -m distill.compare`."""

from distill.commands.cli import door

door(__name__, "compare")
