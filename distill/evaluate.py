"""The command `distill evaluate` as `python -m distill.evaluate`."""

from distill.__main__ import door

door(__name__, "evaluate")
