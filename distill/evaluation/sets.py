"""Evaluation sets: rows of token ids under the name by which the report calls them."""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from distill.component import Component
from distill.config import Config, MaskingConfig, Missing
from distill.data.batches import subsample_rows
from distill.data.tokens import Tokens, corpus_text, prepare, set_text
from distill.errors import SettingError

# The mask of an evaluation set never changes, whatever the seed of the run: runs stay comparable.
SEED = 0
MASKING = MaskingConfig(share=0.15, mask=0.8, keep=0.1, smoothing=0.0)
HELDOUT = "heldout"  # the kind of the set that is a part of the corpus


@dataclass(frozen=True)
class EvaluationSet:
    """Rows to score."""

    name: str
    description: str
    rows: np.ndarray  # [num_rows, S]
    documents: int

    @property
    def num_rows(self) -> int:
        return len(self.rows)


def load_sets(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[list[EvaluationSet], list[str]]:
    """The sets that `evaluate.sets` names, and a line for each that is not available and may be left out.

    Raises:
        SettingError: a name without a source, or a set that is not available while `evaluate.missing=stop`.
    """
    sets, left_out = [], []
    for name in config.evaluate.sets:
        if (tokens := _tokens(name, config, tokenizer)) is not None:
            rows = subsample_rows(tokens.rows, config.evaluate.rows, f"evaluated rows of {name}")
            sets.append(EvaluationSet(name, tokens.name, rows, tokens.documents))
        elif config.evaluate.missing is Missing.skip:
            left_out.append(
                f"The evaluation set {name} is left out: it lies neither in evaluate.sources.{name}.path nor "
                "under $DISTILL_DATA."
            )
        else:
            raise SettingError(
                f"evaluate.sets: {name} is not available; give evaluate.sources.{name}.path, set DISTILL_DATA, or set "
                "evaluate.missing=skip"
            )
    return sets, left_out


def _tokens(name: str, config: Config, tokenizer: PreTrainedTokenizerBase) -> Tokens | None:
    """The rows of a set; None where its text is not available."""
    source, corpus = config.evaluate.sources.get(name), config.corpus
    if source is None:
        known = ", ".join(sorted(config.evaluate.sources))
        raise SettingError(f"evaluate.sets: {name} has no source; choose from {known} or add evaluate.sources.{name}")
    if not isinstance(source, Component) and source.kind == HELDOUT:
        return prepare(corpus_text(corpus), tokenizer, corpus.tokens, corpus.cache, HELDOUT)
    text = set_text(source, f"evaluate.sources.{name}", corpus.cache)
    return None if text is None else prepare(text, tokenizer, corpus.tokens, corpus.cache, "all")
