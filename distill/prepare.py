"""The command `distill prepare` as `python -m distill.prepare`."""

from distill.__main__ import door

door(__name__, "prepare")
