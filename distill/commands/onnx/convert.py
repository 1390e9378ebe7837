"""A language model as ONNX files: fp32, and int8 by dynamic quantisation.

The inputs are `input_ids` and `attention_mask`, int64 [B, S], the output is `logits`, fp32 [B, S, V]; B and S are free.
Shapes: B sequences, S positions, V vocabulary.
"""

import inspect
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distill.models.check import max_positions
from distill.models.load import size
from distill.runtime.errors import SettingError, first_line
from distill.runtime.version import pip_install

INPUTS = ("input_ids", "attention_mask")
TOLERANCE = 1e-4  # between the logits of the model and of its fp32 file, in parts of the largest where that exceeds 1
MAX_BYTES = 1_900_000_000  # an ONNX file is one message of protobuf, which ends at 2 GiB

Logits = Callable[[np.ndarray, np.ndarray], np.ndarray]  # input_ids, attention_mask [B, S] -> logits [B, S, V]


class LogitsOnly(nn.Module):
    """A model that takes ids and attention mask and gives nothing but logits, without a cache of keys and values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        self.options = {"use_cache": False} if takes_cache else {}

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **self.options).logits


def need_packages() -> None:
    """Raises SettingError, with the line that installs them, where a package is missing."""
    for name in ("onnx", "onnxruntime", "onnxscript"):
        try:
            __import__(name)
        except ImportError:
            raise SettingError(
                f"format=onnx needs the package {name}, which is not installed: {pip_install('onnx')}"
            ) from None


def to_onnx(model: Any, path: Path) -> None:
    """Write a model in evaluation mode as fp32.

    Raises:
        SettingError: it is too large, or torch's exporter does not understand it.
    """
    if (weight := size(model)[1]) > MAX_BYTES:
        raise SettingError(f"{type(model).__name__} takes {weight:,} bytes; models over {MAX_BYTES:,} are not exported")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision, of which nothing is used
    inputs = padded_inputs(model, batch_size=2, length=_lengths(model)[0])
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of torch about itself
            torch.onnx.export(
                LogitsOnly(model), tuple(torch.from_numpy(part) for part in inputs), str(path), dynamo=True,
                input_names=list(INPUTS), output_names=["logits"], dynamic_shapes=dict.fromkeys(INPUTS, axes),
                verbose=False, external_data=False,
            )  # fmt: skip
    except torch.onnx.errors.OnnxExporterError as error:
        cause = first_line(error.__cause__ or error)
        raise SettingError(f"{type(model).__name__}: torch's ONNX exporter does not understand it ({cause})") from error


def quantise(fp32: Path, int8: Path) -> None:
    """Write the weights of matrix products and embeddings in int8, one scale a channel; activations as they come.

    Constants are folded first: where embedding and head share a matrix, the head's product would otherwise not be
    quantised, since its weight is the result of a transposition.
    """
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    folded = int8.with_name(f".{int8.name}.folded")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folded)
    onnxruntime.InferenceSession(str(fp32), options, providers=["CPUExecutionProvider"])
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it advises a preparation that is the one above
    try:
        quantize_dynamic(folded, int8, per_channel=True, weight_type=QuantType.QInt8)
    finally:
        root.setLevel(level)
        folded.unlink()


def session(path: Path) -> Logits:
    """An ONNX file as a function, on one thread of the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    loaded = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda ids, mask: loaded.run(None, {"input_ids": ids, "attention_mask": mask})[0]


def in_torch(model: Any) -> Logits:
    """A model as a function of the same kind."""
    inner = LogitsOnly(model)

    def run(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return inner(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()

    return run


def largest_difference(model: Any, exported: Logits) -> float:
    """Between the logits of both, over several batch sizes and lengths, with and without padding.

    Raises:
        SettingError: it exceeds TOLERANCE, so the file would compute something else than the model.
    """
    original, worst, largest = in_torch(model), 0.0, 1.0
    for batch_size, length in zip((1, 3, 2, 1), (*_lengths(model), 1), strict=False):
        ids, mask = padded_inputs(model, batch_size, length)
        expected = original(ids, mask)[mask.astype(bool)]
        gap = np.abs(expected - exported(ids, mask)[mask.astype(bool)])
        worst = float(np.maximum(worst, gap.max()))  # which keeps what is no number, as max() does not
        largest = float(np.maximum(largest, np.abs(expected).max()))
    if not worst <= TOLERANCE * largest:
        raise SettingError(
            f"{type(model).__name__}: the ONNX file's logits differ from the model's by {worst:.2g}, and {TOLERANCE:g} "
            f"of the largest ({largest:.3g}) is allowed: this family is not exported right by torch {torch.__version__}"
        )
    return worst


def padded_inputs(model: Any, batch_size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Random ids [B, S], and an attention mask without the end of every second sequence."""
    vocabulary = model.get_output_embeddings().weight.shape[0]
    ids = np.random.default_rng(0).integers(0, vocabulary, (batch_size, length))
    mask = np.ones_like(ids)
    mask[1::2, (length + 1) // 2 :] = 0
    return ids, mask


def _lengths(model: Any) -> tuple[int, int, int]:
    """The lengths of the traced example, of a shorter one, and of one that is longer than windows of attention."""
    longest = max_positions(model) or 1024
    window = max(getattr(model.config, name, None) or 0 for name in ("sliding_window", "local_attention"))
    return min(24, longest), min(7, longest), min(longest, max(64, min(window + 16, 1024)))
