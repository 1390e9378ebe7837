"""The command `distill prepare`: the sequences of a recipe's corpus and evaluation sets, without training."""

import logging
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from distill.commands.arguments import Arguments, help_of, parse
from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from distill.config.settings import Config
    from distill.data.tokens import Tokens
    from distill.tasks import Task

MOST_SHOWN = 1000  # sequences

logger = logging.getLogger(__name__)


class PrepareArguments(Arguments):
    """Tokenize and pack a recipe's corpus and evaluation sets, without training.

    Hosts that srun or torchrun numbers each make a part; after a kill the same command makes what is missing. A run of
    the recipe with the same settings then reads the sequences from data.tokens.

      distill prepare +recipe=distilbert_gutenberg corpus.path=s3://BUCKET/books data.tokens=s3://BUCKET/tokens
    """

    settings: ClassVar[str] = "as of a run; it reads corpus, data, evaluate and the tokenizer of the teacher"
    show: int = Field(
        0,
        ge=0,
        le=MOST_SHOWN,
        title="N",
        description="print the first sequences of training too, with what the student is to predict in [[ ]]; also of "
        "labelled examples, which need no preparation",
    )


HELP = help_of(PrepareArguments, "prepare")


def run(arguments: list[str]) -> None:
    """Prepare the corpus and the sets of a command line; with `show=N`, print the first sequences of training."""
    from distill.config.compose import composed

    shows = [argument for argument in arguments if argument.startswith("show=")]
    request = parse(PrepareArguments, shows, "prepare")
    prepare(composed([argument for argument in arguments if argument not in shows]), request.show)


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
    from distill.runtime.host import size
    from distill.runtime.progress import configure_logging, counted
    from distill.tasks import find_task
    from distill.tasks._text import TextTask

    configure_logging(0)
    check(config)
    task = find_task(config.objective.task, make_terms(config.objective).values())
    if not isinstance(task, TextTask):
        if not show:
            problem = "reads labelled examples, which need no preparation"
            raise SettingError(f"objective.task={config.objective.task} {problem}")
        print_shown(config, task.read(config), show)
        return {}
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
        stored, (count, length) = tokens.stored, tokens.sequences.shape
        assert stored is not None
        parts = f"{counted(stored.shards, 'shard')}, {counted(count, 'sequence')} of {length:,}"
        logger.info(f"{name}: {parts}, {tokens.tokens:,} tokens, {size(stored.bytes)} in {stored.place}")
    if show:
        print_shown(config, task, show)
    return tokens_by_name


def print_shown(config: "Config", task: "Task", count: int) -> None:
    """Prints so many of the sequences that training begins with as text, their targets in [[ ]]."""
    from distill.data.shown import LEGEND, shown
    from distill.distributed.single import Single
    from distill.runs.tokenizers import tokenizer_of_run

    tokenizer = tokenizer_of_run(config, task)
    batches = task.prepare(config, tokenizer, Single(config.backend)).batches
    examples = getattr(getattr(task, "data", None), "examples", None)
    print(LEGEND)
    for batch in batches.first(count):
        for number, text in zip(batch.row_ids, shown(batch, tokenizer, getattr(examples, "classes", ())), strict=True):
            print(f"--- sequence {number}\n{text}")
