"""The command `distill export` as `python -m distill.export`."""

from distill.__main__ import door

door(__name__, "export")
