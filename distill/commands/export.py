"""The command `distill export`: a student as ONNX files, with the size, latency and perplexity of each format.

The inputs of a file are `input_ids` and `attention_mask`, int64 [B, S], and `token_type_ids` of a fine-tuned model that
separates two texts by them. The outputs are fp32: `logits`, [B, S, V] of a language model, [B, C] of one for classes or
values; `start_logits` and `end_logits`, [B, S], of one that finds answers. B and S are free.
Shapes: B sequences, S positions, V vocabulary, C classes, R sequences of a text.
"""

import inspect
import json
import logging
import math
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from distill.commands.arguments import Arguments, LocalFile, parse
from distill.config.model import ROWS, LocalPath
from distill.runtime.errors import SettingError, choose, first_line

if TYPE_CHECKING:
    from distill.models.loaded import LoadedModel

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
FP32, INT8, REPORT = "model.onnx", "model_int8.onnx", "report.json"
# What a program needs beside the weights, as the folder of the model has it.
BESIDE = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model"),
)
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
SPAN = ("start_logits", "end_logits")
TOLERANCE = 1e-4  # between the logits of the model and of its fp32 file, in parts of the largest where that exceeds 1
MAX_BYTES = 1_900_000_000  # an ONNX file is one message of protobuf, which ends at 2 GiB
LENGTH = 128  # tokens of the sequences that are measured, or as many as the model takes
ROUNDS, WARM_UP = 25, 3
BATCH = 4  # sequences at once: the logits of one take 60 MB with a large vocabulary

Logits = Callable[..., np.ndarray]  # the inputs, each [B, S] -> logits; those of SPAN as [B, S, 2]


class ExportArguments(Arguments):
    """What the command takes."""

    model: LocalPath
    format: str = "onnx"
    input: LocalFile | None = None
    max_sequences: int = Field(200, ge=1, le=ROWS)
    overwrite: bool = False


def run(arguments: list[str]) -> None:
    """Write the files into the folder of the model, and print the table."""
    options = parse(ExportArguments, arguments, "export")
    choose("format", options.format, ["onnx"])
    import torch

    torch.set_num_threads(1)
    print(table(*export(options)))


def export(options: ExportArguments) -> tuple[Path, dict[str, Any]]:
    """Write FOLDER/onnx/ with both files, configuration, tokenizer and report.json; gives that folder and the report.

    Raises:
        SettingError: a package, a model or a text that is missing or does not load, or a folder in the way.
    """
    import torch
    import transformers

    from distill.models.adapters import holds_adapters
    from distill.models.load import model_folder, size
    from distill.models.loaded import load_model
    from distill.runtime.files import atomic, refuse_overwriting

    need_packages()
    source, given = Path(model_folder(options.model)), Path(options.model).expanduser()
    is_merged = source.is_dir() and holds_adapters(given)  # then the model lies in a cache
    target = (given if is_merged else source) / "onnx"
    names = {file.name for file in target.iterdir()} if target.is_dir() else set()
    is_export = {FP32, INT8, REPORT} <= names <= {FP32, INT8, REPORT, *BESIDE}
    texts = [] if options.input is None else [options.input]
    refuse_overwriting(target, f"model={options.model}", texts, options.overwrite or is_export)
    if not (source / "config.json").is_file():
        problem = "neither a run folder with a student nor a model folder: config.json is missing"
        raise SettingError(problem, setting="model", value=options.model)
    loaded = load_model(options.model, "cpu")
    model, length = loaded.model, min(LENGTH, loaded.longest or LENGTH)
    scored = None if options.input is None else inputs_and_targets(loaded, options.input, length, options.max_sequences)
    with atomic(target) as new:
        new.mkdir()
        to_onnx(model, new / FP32)
        difference = largest_difference(model, session(new / FP32))
        quantise(new / FP32, new / INT8)
        formats = {"torch fp32": in_torch(model)}
        formats |= {"ONNX fp32": session(new / FP32), "ONNX int8": session(new / INT8)}
        seconds = latencies(formats, padded_inputs(model, 1, length))
        bytes_of = [size(model)[1], *((new / name).stat().st_size for name in (FP32, INT8))]
        report = {
            "model": type(model).__name__,
            "kind": loaded.kind.noun,
            "formats": {
                name: {
                    "megabytes": number / 1e6,
                    "milliseconds": 1e3 * seconds[name],  # for a sequence, on one thread
                    "perplexity": None if scored is None else perplexity(logits, *scored),
                }
                for (name, logits), number in zip(formats.items(), bytes_of, strict=True)
            },
            "sequence_length": length,
            "text": None if options.input is None else options.input.name,
            "scored_positions": 0 if scored is None else int((scored[1] >= 0).sum()),
            "largest_difference": difference,  # between the logits of torch and of the fp32 file
            "versions": {module.__name__: module.__version__ for module in (torch, transformers)},
        }
        (new / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        for file in (source / name for name in BESIDE):
            if file.is_file():
                shutil.copyfile(file, new / file.name)
    return target, report


def table(folder: Path, report: dict[str, Any]) -> str:
    """The report as a table of text."""
    lines = [f"{report['model']} in {folder}", f"{'':<12}{'MB':>9}{'ms':>11}{'perplexity':>13}{'change':>9}"]
    plain = report["formats"]["torch fp32"]["perplexity"]
    for name, measured in report["formats"].items():
        score, cost = measured["perplexity"], f"{measured['megabytes']:>9.2f}{measured['milliseconds']:>11.2f}"
        scores = f"{'-':>13}" if score is None else f"{score:>13,.2f}{100 * (score / plain - 1):>+8.2f}%"
        lines.append(f"{name:<12}{cost}{scores}")
    text = "not computed; input=FILE names a text for a language model"
    if report["text"]:
        text = f"{report['scored_positions']:,} positions of {report['text']}"
    return "\n".join(
        [
            *lines,
            f"Latency: one sequence of {report['sequence_length']} tokens, on one thread. Perplexity: {text}.",
            f"The fp32 file's logits differ from torch's by at most {report['largest_difference']:.1g}.",
        ]
    )


def need_packages() -> None:
    """Raises SettingError, with the line that installs them, where a package is missing."""
    from distill.runtime.version import pip_install

    for name in ("onnx", "onnxruntime", "onnxscript"):
        try:
            __import__(name)
        except ImportError:
            problem = f"it needs the package {name}, which is not installed"
            raise SettingError(problem, setting="format", value="onnx", cure=pip_install("onnx")) from None


def logits_only(model: Any) -> Any:
    """The model as a module of ids, attention mask and segments that gives its logits alone, without a cache."""
    from torch import Tensor, nn

    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    names = output_names(model)

    class LogitsOnly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(
            self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
        ) -> tuple[Tensor, ...]:
            segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
            outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **segments, **options)
            return tuple(getattr(outputs, name) for name in names)

    return LogitsOnly()


def output_names(model: Any) -> tuple[str, ...]:
    """The outputs of a model that become those of its file."""
    from distill.models.kind import SPANS

    return SPAN if type(model).__name__ in SPANS.classes(model.config.model_type) else ("logits",)


def input_names(model: Any) -> tuple[str, ...]:
    """The inputs that a model reads: of language models only ids and attention mask, as in their training."""
    has_segments = "token_type_ids" in inspect.signature(model.forward).parameters
    is_language_model = model.get_output_embeddings() is not None
    segments = getattr(model.config, "type_vocab_size", 0) > 1 and has_segments and not is_language_model
    return INPUTS if segments else INPUTS[:2]


def to_onnx(model: Any, path: Path) -> None:
    """Write a model in evaluation mode as fp32.

    Raises:
        SettingError: it is too large, or torch's exporter does not understand it.
    """
    import torch

    from distill.models.load import size

    name = type(model).__name__
    if (weight := size(model)[1]) > MAX_BYTES:
        raise SettingError(
            f"{name} takes {weight:,} bytes; models over {MAX_BYTES:,} are not exported", setting="model"
        )
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision, of which nothing is used
    inputs = padded_inputs(model, batch_size=2, length=_lengths(model)[0])
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of torch about itself
            torch.onnx.export(
                logits_only(model), tuple(torch.from_numpy(part) for part in inputs), str(path), dynamo=True,
                input_names=list(input_names(model)), output_names=list(output_names(model)),
                dynamic_shapes=dict.fromkeys(input_names(model), axes), verbose=False, external_data=False,
            )  # fmt: skip
    except torch.onnx.errors.OnnxExporterError as error:
        cause = first_line(error.__cause__ or error)
        raise SettingError(f"torch's ONNX exporter does not understand {name} ({cause})", setting="model") from error


def quantise(fp32: Path, int8: Path) -> None:
    """Write the weights of matrix products and embeddings in int8, one scale a channel; activations as they come.

    Constants are folded first: where embedding and head share a matrix, the head's product would otherwise not be
    quantised, since its weight is the result of a transposition.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    folded = int8.with_name(f".{int8.name}.folded")
    quant_pre_process(fp32, folded, skip_symbolic_shape=True)
    model = onnx.load(folded)
    folded.unlink()
    weights = {tensor.name for tensor in model.graph.initializer}
    kept = [value for value in model.graph.value_info if value.name not in weights]
    del model.graph.value_info[:]  # that of a weight would be wrong once the quantiser has transposed it
    model.graph.value_info.extend(kept)
    quantize_dynamic(model, int8, per_channel=True, weight_type=QuantType.QInt8)


def session(path: Path) -> Logits:
    """An ONNX file as a function, on one thread of the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    loaded = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def logits(*inputs: np.ndarray) -> np.ndarray:
        outputs = loaded.run(None, dict(zip(INPUTS, inputs, strict=False)))
        return outputs[0] if len(outputs) == 1 else np.stack(outputs, -1)

    return logits


def in_torch(model: Any) -> Logits:
    """A model as a function of the same kind."""
    import torch

    inner = logits_only(model)

    def logits(*inputs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            outputs = [output.numpy() for output in inner(*map(torch.from_numpy, inputs))]
        return outputs[0] if len(outputs) == 1 else np.stack(outputs, -1)

    return logits


def largest_difference(model: Any, exported: Logits) -> float:
    """Between the logits of both, over several batch sizes and lengths, with and without padding.

    Raises:
        SettingError: it exceeds TOLERANCE, so the file would compute something else than the model.
    """
    original, worst, largest = in_torch(model), 0.0, 1.0
    for batch_size, length in zip((1, 3, 2, 1), (*_lengths(model), 1), strict=False):
        inputs = padded_inputs(model, batch_size, length)
        expected, actual = original(*inputs), exported(*inputs)
        if expected.ndim == 3:  # an output for each position
            valid = inputs[1].astype(bool)
            expected, actual = expected[valid], actual[valid]
        worst = float(np.maximum(worst, np.abs(expected - actual).max()))  # keeps what is no number, as max() does not
        largest = float(np.maximum(largest, np.abs(expected).max()))
    if not worst <= TOLERANCE * largest:
        raise SettingError(
            f"the logits of {type(model).__name__} as an ONNX file differ from the model's by {worst:.2g}, and "
            f"{TOLERANCE:g} of the largest ({largest:.3g}) is allowed: torch does not export this family right",
            setting="model",
        )
    return worst


def padded_inputs(model: Any, batch_size: int, length: int) -> tuple[np.ndarray, ...]:
    """Random ids [B, S], an attention mask without the end of every second sequence, and two segments if it has any."""
    vocabulary = (model.get_output_embeddings() or model.get_input_embeddings()).weight.shape[0]
    ids = np.random.default_rng(0).integers(0, vocabulary, (batch_size, length))
    mask, segments = np.ones_like(ids), np.zeros_like(ids)
    mask[1::2, (length + 1) // 2 :] = 0
    segments[:, length // 3 :] = 1
    return (ids, mask, segments)[: len(input_names(model))]


def _lengths(model: Any) -> tuple[int, int, int]:
    """The lengths of the traced example, of a shorter one, and of one that is longer than windows of attention."""
    from distill.models.check import max_positions

    longest = max_positions(model) or 1024
    window = max(getattr(model.config, name, None) or 0 for name in ("sliding_window", "local_attention"))
    return min(24, longest), min(7, longest), min(longest, max(64, min(window + 16, 1024)))


def latencies(formats: dict[str, Logits], inputs: tuple[np.ndarray, ...]) -> dict[str, float]:
    """Median seconds of these inputs; the formats take turns, so that other load slows all alike."""
    times: dict[str, list[float]] = {name: [] for name in formats}
    for _ in range(WARM_UP + ROUNDS):
        for name, logits in formats.items():
            start = time.perf_counter()
            logits(*inputs)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds[WARM_UP:]) for name, seconds in times.items()}


def inputs_and_targets(
    loaded: "LoadedModel", path: Path, length: int, max_sequences: int
) -> tuple[np.ndarray, np.ndarray]:
    """A text (.txt or .txt.gz) as inputs [R, S], full sequences, and targets [R, S], negative where there is none.

    A causal model predicts every next token, a masked one those 15 % that the evaluation of runs masks too. Of more
    than `max_sequences` it takes so many, evenly spread.

    Raises:
        SettingError: a model without perplexity, no such file, or a text that does not fill a sequence.
    """
    from distill.data import readers
    from distill.data.collate.mlm import IGNORE, masked_lm
    from distill.evaluation.sets import MASKING, SEED
    from distill.models.kind import CLASSES, SPANS
    from distill.runtime.seed import key

    tokenizer = loaded.tokenizer
    if loaded.kind in (CLASSES, SPANS):
        problem = f"model={loaded.path} is a {loaded.kind.noun}, which has no perplexity"
        raise SettingError(problem, setting="input", value=path, cure="leave it out")
    if not path.is_file():
        raise SettingError("no such file", setting="input", value=path, cure="give a plain text")
    try:
        text = "".join(readers.lines(path))
    except readers.InvalidFile as error:
        reason = str(error).removeprefix(path.name).lstrip(":, ")  # the setting has the name
        raise SettingError(reason, setting="input", value=path) from error
    encoded = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True, verbose=False)
    every = [ids for ids in encoded["input_ids"] if len(ids) == length]
    if not every:
        problem = f"it has fewer than {length} tokens, one sequence"
        raise SettingError(problem, setting="input", value=path, cure="give a longer text")
    chosen = np.unique(np.linspace(0, len(every) - 1, min(max_sequences, len(every))).round().astype(int))
    sequences = np.array(every, np.int64)[chosen]
    if loaded.kind.causal:
        return sequences, np.concatenate([sequences[:, 1:], np.full((len(sequences), 1), IGNORE)], 1)
    masking = masked_lm(MASKING, tokenizer, np.bincount(sequences.reshape(-1), minlength=len(tokenizer)))
    inputs, targets = masking.mask(sequences, key(SEED, "evaluation mask", np.arange(len(sequences))))
    if (targets == IGNORE).all():
        problem = f"the vocabulary of model={loaded.path} has not one of its words"
        cure = "give a text in the language that the model was trained on"
        raise SettingError(problem, setting="input", value=path, cure=cure)
    return inputs, targets


def perplexity(logits: Logits, inputs: np.ndarray, targets: np.ndarray) -> float:
    """exp of the mean negative log-likelihood of the targets, in float64."""
    import torch
    from torch.nn.functional import cross_entropy

    total, count = 0.0, 0
    for start in range(0, len(inputs), BATCH):
        ids, labels = inputs[start : start + BATCH], targets[start : start + BATCH]
        scored = labels >= 0
        found = torch.from_numpy(logits(ids, np.ones_like(ids))[scored]).double()
        total += cross_entropy(found, torch.from_numpy(labels[scored]), reduction="sum").item()
        count += int(scored.sum())
    return math.exp(min(total / count, 700.0))
