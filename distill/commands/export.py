"""The command `distill export`: a student as ONNX files, of which the command checks the logits.

The inputs of a file are `input_ids` and `attention_mask`, int64 [B, S], and `token_type_ids` of a fine-tuned model that
separates two texts by them. The outputs are fp32: `logits`, [B, S, V] of a language model, [B, C] of one for classes or
values; `start_logits` and `end_logits`, [B, S], of one that finds answers. B and S are free.
Shapes: B sequences, S positions, V vocabulary, C classes.
"""

import inspect
import json
import logging
import shutil
import statistics
import timeit
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from distill.commands.arguments import Arguments, help_of, parse
from distill.config.base import LocalPath
from distill.runtime.errors import SettingError, first_line

if TYPE_CHECKING:
    from distill.models.loaded import LoadedModel

FP32, INT8, REPORT = "model.onnx", "model_int8.onnx", "report.json"
BESIDE = (".json", ".txt", ".jinja", ".model")  # endings of what a program needs beside the weights
TOLERANCE = 1e-4  # between the logits of the model and of its fp32 file, in parts of the largest where that exceeds 1
MAX_BYTES = 1_900_000_000  # an ONNX file is one message of protobuf, which ends at 2 GiB
TRACED, MEASURED = 24, 128  # tokens of the sequences that are traced and timed, or as many as the model takes
ROUNDS = 25  # of which the median is the latency

Inputs = dict[str, np.ndarray]  # each [B, S], by the names that the model has for them
Compute = Callable[[Inputs], list[np.ndarray]]  # gives the outputs in their order


class ExportArguments(Arguments):
    """Write a student as onnx/model.onnx (fp32) and onnx/model_int8.onnx, with its configuration and tokenizer.

    Their size, latency and logits are compared with torch's. It needs pip install 'distill-kd[onnx]'.

      distill export model=runs/distilbert_gutenberg
    """

    model: LocalPath = Field(title="MODEL", description="a run folder, or a folder with a model of transformers")
    format: Literal["onnx"] = Field("onnx", title="onnx", description="the only one so far")
    overwrite: bool = Field(False, description="replace a folder onnx/ that another program wrote")


HELP = help_of(ExportArguments, "export")


def run(arguments: list[str]) -> None:
    """Write the files into the folder of the model, and print what each costs."""
    import torch

    torch.set_num_threads(1)
    folder, report = export(parse(ExportArguments, arguments, "export"))
    print(f"{folder}: the logits of {FP32} differ from torch's by at most {report['largest_difference']:.1g}")
    for name, found in report["formats"].items():
        cost = f"{found['megabytes']:.2f} MB, {found['milliseconds']:.2f} ms"
        print(f"{name}: {cost} for a sequence of {report['sequence_length']} tokens, on one thread")


def export(options: ExportArguments) -> tuple[Path, dict[str, Any]]:
    """Write FOLDER/onnx/ with both files, what they need beside them, and report.json; gives folder and report."""
    from distill.models.converted import holds_adapters
    from distill.models.load import model_folder
    from distill.models.loaded import load_model
    from distill.models.weights import size
    from distill.runtime.files import atomic, refuse_overwriting

    need_packages()
    source, given = Path(model_folder(options.model)), Path(options.model).expanduser()
    is_merged = source.is_dir() and holds_adapters(given)  # then the model lies in a cache
    target = (given if is_merged else source) / "onnx"
    names = {file.name for file in target.glob("*")}
    is_export = {FP32, INT8, REPORT} <= names and all(name.endswith(BESIDE) for name in names - {FP32, INT8})
    refuse_overwriting(target, f"model={options.model}", overwrite=options.overwrite or is_export)
    if not (source / "config.json").is_file():
        problem = "neither a run folder with a student nor a model folder: config.json is missing"
        raise SettingError(problem, setting="model", value=options.model)
    loaded = load_model(options.model, "cpu")
    example = padded_inputs(loaded, 1, min(MEASURED, loaded.longest or MEASURED))
    with atomic(target) as new:
        new.mkdir()
        for file in (file for file in source.iterdir() if file.is_file() and file.name.endswith(BESIDE)):
            shutil.copyfile(file, new / file.name)
        to_onnx(loaded, new / FP32)
        difference = largest_difference(loaded, session(new / FP32))
        quantise(new / FP32, new / INT8)
        formats = {"torch fp32": (in_torch(loaded.model), size(loaded.model)[1])}
        for name, file in (("ONNX fp32", new / FP32), ("ONNX int8", new / INT8)):
            formats[name] = session(file), file.stat().st_size
        report = {
            "formats": {
                name: {
                    "megabytes": number / 1e6,
                    "milliseconds": 1e3
                    * statistics.median(timeit.repeat(partial(compute, example), number=1, repeat=ROUNDS)),
                }
                for name, (compute, number) in formats.items()
            },
            "sequence_length": example["input_ids"].shape[1],
            "largest_difference": difference,  # between the logits of torch and of the fp32 file
        }
        (new / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return target, report


def need_packages() -> None:
    """Raises SettingError, with the line that installs them, where a package is missing."""
    from distill.runtime.version import pip_install

    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        problem = f"it needs the package {error.name}, which is not installed"
        raise SettingError(problem, setting="format", value="onnx", cure=pip_install("onnx")) from None


def to_onnx(loaded: "LoadedModel", path: Path) -> None:
    """Write a model as fp32. Raises SettingError where it is too large, or torch's exporter does not understand it."""
    import torch

    from distill.models.weights import size

    model, name = loaded.model, type(loaded.model).__name__
    if size(model)[1] > MAX_BYTES:
        raise SettingError(f"{name} takes more than {MAX_BYTES:,} bytes, which is not exported", setting="model")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision, of which nothing is used
    model.config.update({"use_cache": False})  # of keys and values, which would be outputs
    inputs = {
        key: torch.from_numpy(value)
        for key, value in padded_inputs(loaded, 2, min(TRACED, loaded.longest or TRACED)).items()
    }
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of torch about itself
            torch.onnx.export(
                model, kwargs=inputs, f=str(path), dynamo=True, input_names=list(inputs), verbose=False,
                output_names=list(model(**inputs)), dynamic_shapes=dict.fromkeys(inputs, axes), external_data=False,
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


def session(path: Path) -> Compute:
    """An ONNX file as a function, on one thread of the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    loaded = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda inputs: list(loaded.run(None, inputs))


def in_torch(model: Any) -> Compute:
    """A model as a function of the same kind."""
    import torch

    @torch.no_grad()
    def compute(inputs: Inputs) -> list[np.ndarray]:
        outputs = model(**{name: torch.from_numpy(value) for name, value in inputs.items()})
        return [output.numpy() for output in outputs.values()]

    return compute


def largest_difference(loaded: "LoadedModel", exported: Compute) -> float:
    """Between the logits of both, over several batch sizes and lengths, with and without padding.

    Raises SettingError where it exceeds TOLERANCE: the file would compute something else than the model.
    """
    from distill.models.kind import CLASSES

    original, worst, largest = in_torch(loaded.model), 0.0, 1.0
    windows = [getattr(loaded.model.config, name, None) or 0 for name in ("sliding_window", "local_attention")]
    beyond = max(64, min(max(windows) + 16, 1024))  # longer than windows of attention
    for batch_size, length in ((1, TRACED), (3, 7), (2, beyond), (1, 1)):
        inputs = padded_inputs(loaded, batch_size, min(length, loaded.longest or beyond))
        valid = slice(None) if loaded.kind is CLASSES else inputs["attention_mask"].astype(bool)
        for expected, actual in zip(original(inputs), exported(inputs), strict=True):
            # numpy's maximum keeps what is no number, as max() does not.
            worst = float(np.maximum(worst, np.abs(expected - actual)[valid].max()))
            largest = float(np.maximum(largest, np.abs(expected)[valid].max()))
    if not worst <= TOLERANCE * largest:
        problem = f"the logits of {type(loaded.model).__name__} as an ONNX file differ from the model's by {worst:.2g}"
        raise SettingError(f"{problem}, more than {TOLERANCE:g} of the largest ({largest:.3g})", setting="model")
    return worst


def padded_inputs(loaded: "LoadedModel", batch_size: int, length: int) -> Inputs:
    """Random ids [B, S], an attention mask without the end of every second sequence, and two segments if it has any.

    Language models read no segments, as in their training.
    """
    model = loaded.model
    vocabulary = (model.get_output_embeddings() or model.get_input_embeddings()).weight.shape[0]
    ids = np.random.default_rng(0).integers(0, vocabulary, (batch_size, length))
    mask, segments = np.ones_like(ids), np.zeros_like(ids)
    mask[1::2, (length + 1) // 2 :] = 0
    segments[:, length // 3 :] = 1
    has_segments = "token_type_ids" in inspect.signature(model.forward).parameters and not loaded.kind.vocabulary
    has_segments = has_segments and getattr(model.config, "type_vocab_size", 0) > 1
    return {"input_ids": ids, "attention_mask": mask} | ({"token_type_ids": segments} if has_segments else {})
