"""The command `distill export`: a student in the format of another engine, with its size, latency and perplexity."""

from dataclasses import dataclass
from pathlib import Path

from distill.commands.arguments import parse
from distill.runtime.errors import SettingError, choose

HELP = """
usage: distill export model=MODEL [format=onnx] [input=FILE] [max_sequences=N] [overwrite=true]

Write a student as onnx/model.onnx (fp32) and onnx/model_int8.onnx, with its configuration and tokenizer, and compare
their size, latency and, of a language model, perplexity with torch's. It needs pip install 'distill-kd[onnx]'.

  model=MODEL      a run folder, or a folder with a model in the format of transformers
  format=onnx      the only one so far
  input=FILE       a plain text to compute perplexity on, of a language model
  max_sequences=N  sequences of that text, at most (default: 200)
  overwrite=true   replace a folder onnx/ that another program wrote

  distill export model=runs/distilbert_gutenberg input=BOOK.txt
"""


@dataclass(frozen=True)
class ExportArguments:
    """What the command takes."""

    model: str
    format: str = "onnx"
    input: Path | None = None
    max_sequences: int = 200
    overwrite: bool = False


def run(arguments: list[str]) -> None:
    """Write the files into the folder of the model, and print the table."""
    options = parse(ExportArguments, arguments, "export")
    choose("format", options.format, ["onnx"])
    if options.max_sequences < 1:
        raise SettingError(f"max_sequences={options.max_sequences}: give at least 1")
    import torch
    from transformers.utils import logging as transformers_logging

    from distill.commands.onnx import write

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    print(write.table(*write.write(options.model, options.input, options.max_sequences, options.overwrite)))
