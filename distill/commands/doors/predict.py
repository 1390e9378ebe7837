"""The command `distill predict` as `python -m distill.predict`."""

from distill.commands.cli import door

door(__name__, "predict")
