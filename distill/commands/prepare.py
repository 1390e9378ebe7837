"""The command `distill prepare`: the sequences of a recipe's corpus and evaluation sets, without training."""

import logging
from typing import TYPE_CHECKING

from pydantic import Field

from distill.commands.arguments import Arguments, parse
from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill.config.settings import Config
    from distill.data.tokens import Tokens
    from distill.tasks import Task

MOST_SHOWN = 1000  # sequences

HELP = """
usage: distill prepare [+recipe=NAME] [show=N] [SETTING=VALUE ...] [--config-dir FOLDER]

Tokenize and pack a recipe's corpus and evaluation sets, without training. Any number of hosts may run the same command
at the same time: each takes a part of the rest, and one that was killed resumes. A run of the recipe with the same
settings then reads the sequences from data.tokens.

  show=3           print the first sequences of training too, with what the student is to predict in [[ ]]; also of
                   labelled examples, which need no preparation
  SETTING=VALUE    as of a run; it reads corpus, data, evaluate and the tokenizer of the teacher

  distill prepare +recipe=distilbert_gutenberg corpus.path=s3://BUCKET/books data.tokens=s3://BUCKET/tokens
"""

logger = logging.getLogger(__name__)


class Request(Arguments):
    """What the command takes besides the settings of a run."""

    show: int = Field(0, ge=0, le=MOST_SHOWN)  # sequences to print


def run(arguments: list[str]) -> None:
    """Prepare the corpus and the sets of a command line; with `show=N`, print the first sequences of training."""
    from distill.config.compose import composed

    request = parse(Request, [argument for argument in arguments if argument.startswith("show=")], "prepare")
    prepare(composed([argument for argument in arguments if not argument.startswith("show=")]), request.show)


def prepare(config: "Config", show: int = 0) -> "dict[str, Tokens]":
    """Prepares the corpus and the evaluation sets of a run, and logs their sizes.

    Args:
        show: print so many of the sequences that training begins with, their targets marked.

    Returns:
        The sequences by `corpus`, or by each source of a mixture, and by the names of the sets; a set that is not
        available is left out, where `evaluate.missing` allows that.

    Raises:
        SettingError: bad input, or a task that reads no running text.
    """
    from distill.config.settings import Missing
    from distill.data.tokens import corpus_texts
    from distill.data.tokens import prepare as prepare_text
    from distill.evaluation.sets import tokens_of_sets
    from distill.objective.build import make_terms
    from distill.runs.check import check
    from distill.runs.tokenizers import tokenizer_of_run
    from distill.runtime.progress import configure_logging
    from distill.tasks import find_task
    from distill.tasks._text import TextTask

    configure_logging(0)
    check(config)
    task = find_task(config.objective.task, make_terms(config.objective).values())
    if show and not isinstance(task, TextTask):
        task = task.read(config)
        print_shown(config, task, tokenizer_of_run(config, task), show)
        return {}
    if not isinstance(task, TextTask):
        raise SettingError(f"objective.task={config.objective.task} reads labelled examples, which need no preparation")
    tokenizer, corpus, data = tokenizer_of_run(config, task), config.corpus, config.data
    tokens_by_name = {
        text.setting: prepare_text(text, tokenizer, corpus, data, "train", task.sequence_format)
        for text in corpus_texts(corpus, data).values()
    }
    for name, tokens in tokens_of_sets(config, tokenizer, task.sequence_format):
        if tokens is not None:
            tokens_by_name[name] = tokens
        elif config.evaluate.missing is Missing.stop:
            raise SettingError(f"evaluate.sets: {name} is not available; give evaluate.sources.{name}.path")
    for name, tokens in tokens_by_name.items():
        logger.info(f"{name}: {describe(tokens)}")
    if show:
        print_shown(config, task, tokenizer, show)
    return tokens_by_name


def print_shown(config: "Config", task: "Task", tokenizer: "PreTrainedTokenizerBase", count: int) -> None:
    """Prints so many of the sequences that training begins with as text, their targets in [[ ]]."""
    from distill.data.shown import LEGEND, shown
    from distill.distributed.single import Single

    batches = task.prepare(config, tokenizer, Single(config.backend)).batches
    examples = getattr(getattr(task, "data", None), "examples", None)
    print(LEGEND)
    for batch in batches.first(count):
        for number, text in zip(batch.row_ids, shown(batch, tokenizer, getattr(examples, "classes", ())), strict=True):
            print(f"--- sequence {number}\n{text}")


def describe(tokens: "Tokens") -> str:
    """Its shards, sequences, tokens and bytes, in a line."""
    from distill.runtime.host import size
    from distill.runtime.progress import counted

    stored = tokens.stored
    assert stored is not None
    count, length = tokens.sequences.shape
    line = (
        f"{counted(stored.shards, 'shard')}, {counted(count, 'sequence')} of {length:,}, "
        f"{tokens.tokens:,} tokens, {size(stored.bytes)} in {stored.place}"
    )
    if stored.compression is None or not stored.bytes:
        return line
    ratio, rate = stored.plain_bytes / stored.bytes, size(stored.plain_bytes / max(stored.compress_seconds, 1e-9))
    return f"{line}; {stored.compression} made it {ratio:.2f} times smaller, {rate} a second"
