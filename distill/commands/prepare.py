"""The command `distill prepare`: the sequences of a recipe's corpus and evaluation sets, without training."""

import logging
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from distill.commands.arguments import Arguments, help_of, split
from distill.runtime.errors import SettingError

if TYPE_CHECKING:
    from distill.config.settings import Config
    from distill.data.tokens import Tokens
    from distill.tasks import Task

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
        le=1000,
        title="N",
        description="print the first sequences of training too, with what the student is to predict in [[ ]]; also of "
        "labelled examples, which need no preparation",
    )


HELP = help_of(PrepareArguments, "prepare")


def run(arguments: list[str]) -> None:
    """Prepare the corpus and the sets of a command line; with `show=N`, print the first sequences of training."""
    from distill.config.compose import composed

    request, settings = split(PrepareArguments, arguments, "prepare")
    prepare(composed(settings), request.show)


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
    from distill.data.shards import Shards
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
    tokens_by_name: dict[str, Tokens] = {}
    if isinstance(task, TextTask):
        tokenizer, corpus, data = tokenizer_of_run(config, task), config.corpus, config.data
        for text in corpus_texts(corpus, data).values():
            tokens_by_name[text.setting] = prepare_text(text, tokenizer, corpus, data, "train", task.sequence_format)
        for name, tokens in tokens_of_sets(config, tokenizer, task.sequence_format):
            if tokens is not None:
                tokens_by_name[name] = tokens
            elif config.evaluate.missing is Missing.stop:
                raise SettingError(f"evaluate.sets: {name} is not available; give evaluate.sources.{name}.path")
    elif not show:
        problem = "reads labelled examples, which need no preparation"
        raise SettingError(problem, setting="objective.task", value=config.objective.task)
    for name, tokens in tokens_by_name.items():
        shards = tokens.sequences
        assert isinstance(shards, Shards)
        parts = f"{counted(len(shards.files), 'shard')}, {counted(len(shards), 'sequence')} of {shards.shape[1]:,}"
        place = f"{size(shards.num_bytes)} in {shards.folder.place}"
        logger.info(f"{name}: {parts}, {tokens.tokens:,} tokens, {place}")
    if show:
        print_shown(config, task, show)
    return tokens_by_name


def print_shown(config: "Config", task: "Task", count: int) -> None:
    """Prints so many of the sequences that training begins with as text, their targets in [[ ]]."""
    from distill.config.settings import BackendConfig
    from distill.data.shown import LEGEND, shown
    from distill.distributed.single import Single
    from distill.runs.tokenizers import tokenizer_of_run
    from distill.tasks._table import TableTask

    task = task.read(config)
    tokenizer = tokenizer_of_run(config, task)
    batches = task.prepare(config, tokenizer, Single(BackendConfig(device="cpu"))).batches
    classes = getattr(task.data.examples, "classes", ()) if isinstance(task, TableTask) else ()
    print(LEGEND)
    for batch in batches.first(count):
        for number, text in zip(batch.row_ids, shown(batch, tokenizer, classes), strict=True):
            print(f"--- sequence {number}\n{text}")
