"""A student as ONNX files, with the size, latency and perplexity of each format."""

import json
import shutil
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
import transformers

from distill.commands.onnx import convert, measure
from distill.models.adapters import holds_adapters
from distill.models.check import check_vocabulary, max_positions, set_padding
from distill.models.kind import CLASSES, SPANS, ModelKind
from distill.models.load import load_pretrained, load_tokenizer, model_folder, size
from distill.models.loaded import SETTING, kind_of
from distill.runtime.errors import SettingError
from distill.runtime.files import atomic, refuse_overwriting

FP32, INT8, REPORT = "model.onnx", "model_int8.onnx", "report.json"
LENGTH = 128  # tokens, or as many as the model takes
TASKS = {CLASSES.noun: "classes or values", SPANS.noun: "answers"}  # of models that have no perplexity
# What a program needs beside the weights, as the folder of the model has it.
BESIDE = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model"),
)


def load(path: str) -> tuple[Any, ModelKind]:
    """The student of a run folder, or the model of a model folder, in fp32, and its kind.

    Raises:
        SettingError: there is no model that loads.
    """
    if not (Path(model_folder(path)) / "config.json").is_file():
        raise SettingError(f"{path} is neither a run folder with a student nor a model folder: config.json is missing")
    kind = kind_of(SETTING, path)
    model = load_pretrained(SETTING, path, kind).eval()
    if kind is CLASSES:
        set_padding(model, load_tokenizer(SETTING, path, kind))
    return model, kind


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
    """Write FOLDER/onnx/ with both files, configuration, tokenizer and report.json; gives that folder and the report.

    Args:
        text: to compute perplexity on; language models alone have one.
        overwrite: whether it may replace a folder of that name that another program wrote.

    Raises:
        SettingError: a package, a model or a text that is missing or does not load, or a folder in the way.
    """
    convert.need_packages()
    place = Path(model_folder(path))
    is_merged = place.is_dir() and holds_adapters(Path(path).expanduser())  # then the model lies in a cache
    target = (Path(path).expanduser() if is_merged else place) / "onnx"
    names = {file.name for file in target.iterdir()} if target.is_dir() else set()
    is_export = {FP32, INT8, REPORT} <= names <= {FP32, INT8, REPORT, *BESIDE}
    refuse_overwriting(target, f"model={path}", [] if text is None else [text], overwrite or is_export)
    model, kind = load(path)
    length = min(LENGTH, max_positions(model) or LENGTH)
    scored_text = None if text is None else _scored(model, kind, path, text, length, max_sequences)
    with atomic(target) as new:
        new.mkdir()
        convert.to_onnx(model, new / FP32)
        difference = convert.largest_difference(model, convert.session(new / FP32))
        convert.quantise(new / FP32, new / INT8)
        formats = {"torch fp32": convert.in_torch(model)}
        formats |= {"ONNX fp32": convert.session(new / FP32), "ONNX int8": convert.session(new / INT8)}
        seconds = measure.latencies(formats, convert.padded_inputs(model, 1, length))
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
            task=TASKS.get(kind.noun, "next token" if kind.causal else "masked tokens"),
            largest_difference=difference,
            versions={module.__name__: module.__version__ for module in (torch, transformers)},
        )
        (new / REPORT).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for file in (Path(model_folder(path)) / name for name in BESIDE):
            if file.is_file():
                shutil.copyfile(file, new / file.name)
    return target, content


def _scored(
    model: Any, kind: ModelKind, path: str, text: Path, length: int, max_sequences: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a text, both [R, S]. Raises SettingError where they cannot be, as of a fine-tuned model."""
    if kind.noun in TASKS:
        raise SettingError(f"input={text}: {SETTING}={path} is a {kind.noun}, which has no perplexity: leave it out")
    tokenizer = load_tokenizer(SETTING, path, kind)
    check_vocabulary(model, f"{SETTING}={path}", tokenizer)
    rows = measure.sequences_of(text, tokenizer, length, max_sequences)
    inputs, targets = measure.inputs_and_targets(rows, tokenizer, kind.causal)
    if (targets == measure.IGNORE).all():
        raise SettingError(
            f"input={text}: the vocabulary of {SETTING}={path} has not one of its words: give a text in the language "
            "that the model was trained on"
        )
    return inputs, targets


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
    scored = f"{content['task']}, {content['scored_positions']:,} positions of {content['text']}"
    if not content["text"]:
        has_none = content["task"] in TASKS.values()
        scored = f"none, as it predicts {content['task']}" if has_none else "not computed; input=FILE names a text"
    return "\n".join(
        [
            f"{content['model']} in {folder}",
            *lines,
            f"Latency: one sequence of {content['row']} tokens, on one thread. Perplexity: {scored}.",
            f"The fp32 file's logits differ from torch's by at most {content['largest_difference']:.1g}.",
        ]
    )
