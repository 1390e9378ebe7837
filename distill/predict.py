"""The command `distill predict` as `python -m distill.predict`."""

from distill.__main__ import door

door(__name__, "predict")
