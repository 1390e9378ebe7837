"""A student as ONNX files, with the size, latency and perplexity of each format."""

import json
from pathlib import Path
from typing import Any, TypedDict

import torch
import transformers

from distill.commands.onnx import convert, measure
from distill.models.check import check_vocabulary, max_positions
from distill.models.kind import CAUSAL, CLASSES, MASKED, SPANS
from distill.models.load import load_pretrained, load_tokenizer, model_folder, size
from distill.models.loaded import SETTING, kind_of
from distill.runtime.errors import SettingError
from distill.runtime.files import atomic, refuse_overwriting

FP32, INT8, REPORT = "model.onnx", "model_int8.onnx", "report.json"
LENGTH = 128  # tokens, or as many as the model takes


def load(path: str) -> tuple[Any, bool]:
    """The student of a run folder, or the model of a model folder, in fp32; whether it is causal.

    Raises:
        SettingError: there is no language model that loads.
    """
    if not (Path(model_folder(path)) / "config.json").is_file():
        raise SettingError(f"{path} is neither a run folder with a student nor a model folder: config.json is missing")
    kind = kind_of(SETTING, path)
    if kind in (SPANS, CLASSES):
        raise SettingError(
            f"{SETTING}={path} is a {kind.noun}, and only language models become ONNX here: give the model that it was "
            "fine-tuned from"
        )
    return load_pretrained(SETTING, path, kind).eval(), kind.causal


class Format(TypedDict):
    """What a model costs in one engine and format, and what it keeps there."""

    megabytes: float
    milliseconds: float  # for a row, on one thread
    perplexity: float | None  # None: no text was named


class Report(TypedDict):
    """The content of report.json."""

    model: str  # its class
    formats: dict[str, Format]
    row: int  # tokens
    threads: int
    text: str | None
    scored_positions: int
    task: str
    largest_difference: float  # between the logits of torch and of the fp32 file
    versions: dict[str, str]


def write(path: str, text: Path | None, max_sequences: int, overwrite: bool = False) -> tuple[Path, Report]:
    """Write FOLDER/onnx/ with both files and report.json; gives that folder, and what report.json holds.

    Args:
        overwrite: whether it may replace a folder of that name that another program wrote.

    Raises:
        SettingError: a package, a model or a text that is missing or does not load, or a folder in the way.
    """
    convert.need_packages()
    target = Path(model_folder(path)) / "onnx"
    is_export = target.is_dir() and {file.name for file in target.iterdir()} == {FP32, INT8, REPORT}
    refuse_overwriting(target, f"model={path}", [] if text is None else [text], overwrite or is_export)
    model, causal = load(path)
    length = min(LENGTH, max_positions(model) or LENGTH)
    scored_text = None
    if text is not None:
        tokenizer = load_tokenizer(SETTING, path, CAUSAL if causal else MASKED)
        check_vocabulary(model, f"{SETTING}={path}", tokenizer)
        scored_text = measure.inputs_and_targets(
            measure.sequences_of(text, tokenizer, length, max_sequences), tokenizer, causal
        )
    with atomic(target) as new:
        new.mkdir()
        convert.to_onnx(model, new / FP32)
        difference = convert.largest_difference(model, convert.session(new / FP32))
        convert.quantise(new / FP32, new / INT8)
        formats = {"torch fp32": convert.in_torch(model)}
        formats |= {"ONNX fp32": convert.session(new / FP32), "ONNX int8": convert.session(new / INT8)}
        seconds = measure.latencies(formats, model.get_output_embeddings().weight.shape[0], length)
        bytes_of = [size(model)[1], *((new / name).stat().st_size for name in (FP32, INT8))]
        scores = {
            name: None if scored_text is None else measure.perplexity(run, *scored_text)
            for name, run in formats.items()
        }
        content = Report(
            model=type(model).__name__,
            formats={
                name: Format(megabytes=number / 1e6, milliseconds=1e3 * seconds[name], perplexity=scores[name])
                for name, number in zip(formats, bytes_of, strict=True)
            },
            row=length,
            threads=1,
            text=None if text is None else text.name,
            scored_positions=0 if scored_text is None else int((scored_text[1] != measure.IGNORE).sum()),
            task="next token" if causal else "masked tokens",
            largest_difference=difference,
            versions={module.__name__: module.__version__ for module in (torch, transformers)},
        )
        (new / REPORT).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return target, content


def table(folder: Path, content: Report) -> str:
    """The results as a table of text."""
    lines = [f"{'':<12}{'MB':>9}{'ms':>11}{'perplexity':>13}{'change':>9}"]
    plain = next(iter(content["formats"].values()))["perplexity"]
    for name, measured in content["formats"].items():
        score = measured["perplexity"]
        perplexity = "-" if score is None else f"{score:,.2f}"
        change = "" if score is None or plain is None else f"{100 * (score / plain - 1):+.2f}%"
        lines.append(
            f"{name:<12}{measured['megabytes']:>9.2f}{measured['milliseconds']:>11.2f}{perplexity:>13}{change:>9}"
        )
    scored = (
        f"{content['task']}, {content['scored_positions']:,} positions of {content['text']}"
        if content["text"]
        else "not computed; input=FILE names a text"
    )
    return "\n".join(
        [
            f"{content['model']} in {folder}",
            *lines,
            f"Latency: one sequence of {content['row']} tokens, on one thread. Perplexity: {scored}.",
            f"The fp32 file's logits differ from torch's by at most {content['largest_difference']:.1g}.",
        ]
    )
