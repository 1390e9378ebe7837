"""The command `distill generate`: completions of prompts by a model, as a corpus for `objective=clm`."""

import sys
from typing import ClassVar

from pydantic import Field

from distill.commands.arguments import Arguments, LocalFile, help_of, split
from distill.config.base import LocalPath
from distill.runtime.errors import SettingError


class Request(Arguments):
    """Write completions of prompts by a model, here or on a server: JSON lines that objective=clm can learn from.

    A line has id, prompt, completion, finish_reason (stop or length), seed, logprob (the sum over its tokens) and
    tokens. After a kill the same command goes on; the result is the same for any number of ranks.

    Further arguments: max_new_tokens=256 temperature=1 (0: the likeliest) top_k=N top_p=1 seed=0; prompt_tokens=32, of
    a text of the corpus; group_size=16, prompts that are continued side by side (another number rounds otherwise).
    Filters: min_tokens=1; finished=true, none that max_new_tokens cut off; max_repeated=F, the fraction of repeated
    4-grams; max_perplexity=P, by the model; duplicates=true keeps what is equal, prompt and all.

      distill generate model=MODEL output=FILE.jsonl corpus=text corpus.path=FOLDER max_new_tokens=64
      distill generate model=MODEL output=FILE.jsonl input=PROMPTS.jsonl max_repeated=0.3 finished=true
      distill generate teacher=served teacher.url=URL teacher.model=NAME teacher.tokenizer=MODEL output=FILE.jsonl
    """

    settings: ClassVar[str] = "of corpus, data, backend and teacher, as of a run; teacher=served is read without model"
    model: LocalPath | None = Field(None, title="MODEL", description="a run, a model folder or a name on the Hub")
    output: LocalFile = Field(title="FILE.jsonl", description="gets the completions that pass the filters")
    input: LocalPath | None = Field(
        None,
        title="FILE",
        description="prompts: *.jsonl with text, prompt or messages (and id), *.csv, *.parquet, or *.txt (one a line); "
        "without it the beginnings of the texts of the corpus",
    )
    overwrite: bool = Field(False, description="replace an output that exists")


HELP = help_of(Request, "generate")


def run(arguments: list[str]) -> int | None:
    """Write completions of the prompts of a command line; gives the status of its ranks, where it starts them."""
    from distill.commands.generation import GenerateOptions, Writer, generate, prompts_of
    from distill.config.compose import composed
    from distill.distributed import join_ranks, launch
    from distill.runtime.files import refuse_overwriting
    from distill.runtime.progress import configure_logging

    request, rest = split(Request, arguments, "generate")
    options, settings = split(GenerateOptions, rest, "generate")
    config, output = composed(settings), request.output
    refuse_overwriting(output, f"output={output}", overwrite=request.overwrite)
    if output.suffix != ".jsonl" or not output.absolute().parent.is_dir():
        cure = "give FILE.jsonl in a folder"
        raise SettingError("no file that can be written", setting="output", value=output, cure=cure)
    if launch.should_launch(config.backend):
        return launch.launch(config.backend, [sys.executable, *sys.orig_argv[1:]])
    with join_ranks(config.backend) as ranks:
        configure_logging(ranks.rank)
        writer = Writer.of(request.model, options, config, ranks)
        generate(writer, prompts_of(request.input, writer, config), output, ranks)
    return None
