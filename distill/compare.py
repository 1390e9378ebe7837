"""The command `distill compare` as `python -m distill.compare`."""

from distill.__main__ import door

door(__name__, "compare")
