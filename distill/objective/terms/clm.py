"""Causal language modelling: the cross-entropy of the next token."""

from distill.objective.terms.mlm import Mlm


class Clm(Mlm):
    """Cross-entropy at temperature 1, at positions whose next token counts; see `losses.mlm`."""

    title = "Next token (CLM)"
    task = "clm"
