"""A model as ONNX files: fp32, and int8 by dynamic quantisation.

The inputs are `input_ids` and `attention_mask`, int64 [B, S], and `token_type_ids` of a fine-tuned model that separates
two texts by them. The outputs are fp32: `logits`, [B, S, V] of a language model, [B, C] of one for classes or values;
`start_logits` and `end_logits`, [B, S], of one that finds answers. B and S are free.
Shapes: B sequences, S positions, V vocabulary, C classes.
"""

import inspect
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distill.models.check import max_positions
from distill.models.kind import SPANS
from distill.models.load import size
from distill.runtime.errors import SettingError, first_line
from distill.runtime.version import pip_install

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
SPAN = ("start_logits", "end_logits")
TOLERANCE = 1e-4  # between the logits of the model and of its fp32 file, in parts of the largest where that exceeds 1
MAX_BYTES = 1_900_000_000  # an ONNX file is one message of protobuf, which ends at 2 GiB

Logits = Callable[..., np.ndarray]  # the inputs, each [B, S] -> logits; those of SPAN as [B, S, 2]


class LogitsOnly(nn.Module):
    """A model that takes ids, attention mask and segments and gives nothing but logits, without a cache of its past."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        self.options = {"use_cache": False} if takes_cache else {}
        self.outputs = output_names(model)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **segments, **self.options)
        return tuple(getattr(outputs, name) for name in self.outputs)


def output_names(model: Any) -> tuple[str, ...]:
    """The outputs of a model that become those of its file."""
    return SPAN if type(model).__name__ in SPANS.classes(model.config.model_type) else ("logits",)


def input_names(model: Any) -> tuple[str, ...]:
    """The inputs that a model reads: of language models only ids and attention mask, as in their training."""
    has_segments = "token_type_ids" in inspect.signature(model.forward).parameters
    is_language_model = model.get_output_embeddings() is not None
    segments = getattr(model.config, "type_vocab_size", 0) > 1 and has_segments and not is_language_model
    return INPUTS if segments else INPUTS[:2]


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
                input_names=list(input_names(model)), output_names=list(output_names(model)),
                dynamic_shapes=dict.fromkeys(input_names(model), axes), verbose=False, external_data=False,
            )  # fmt: skip
    except torch.onnx.errors.OnnxExporterError as error:
        cause = first_line(error.__cause__ or error)
        raise SettingError(f"{type(model).__name__}: torch's ONNX exporter does not understand it ({cause})") from error


def quantise(fp32: Path, int8: Path) -> None:
    """Write the weights of matrix products and embeddings in int8, one scale a channel; activations as they come.

    Constants are folded first: where embedding and head share a matrix, the head's product would otherwise not be
    quantised, since its weight is the result of a transposition.
    """
    import onnx
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    folded = int8.with_name(f".{int8.name}.folded")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folded)
    onnxruntime.InferenceSession(str(fp32), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(folded)
    weights = {tensor.name for tensor in graph.graph.initializer}
    kept = [value for value in graph.graph.value_info if value.name not in weights]
    del graph.graph.value_info[:]  # that of a weight would be wrong once the quantiser has transposed it
    graph.graph.value_info.extend(kept)
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it advises a preparation that is the one above
    try:
        quantize_dynamic(graph, int8, per_channel=True, weight_type=QuantType.QInt8)
    finally:
        root.setLevel(level)
        folded.unlink()


def session(path: Path) -> Logits:
    """An ONNX file as a function, on one thread of the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    loaded = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda *inputs: _joined(loaded.run(None, dict(zip(INPUTS, inputs, strict=False))))


def _joined(outputs: Sequence[np.ndarray]) -> np.ndarray:
    return outputs[0] if len(outputs) == 1 else np.stack(outputs, -1)


def in_torch(model: Any) -> Logits:
    """A model as a function of the same kind."""
    inner = LogitsOnly(model)

    def run(*inputs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return _joined([output.numpy() for output in inner(*map(torch.from_numpy, inputs))])

    return run


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
        gap = np.abs(expected - actual)
        worst = float(np.maximum(worst, gap.max()))  # which keeps what is no number, as max() does not
        largest = float(np.maximum(largest, np.abs(expected).max()))
    if not worst <= TOLERANCE * largest:
        raise SettingError(
            f"{type(model).__name__}: the ONNX file's logits differ from the model's by {worst:.2g}, and {TOLERANCE:g} "
            f"of the largest ({largest:.3g}) is allowed: this family is not exported right by torch {torch.__version__}"
        )
    return worst


def padded_inputs(model: Any, batch_size: int, length: int) -> tuple[np.ndarray, ...]:
    """Random ids [B, S], an attention mask without the end of every second sequence, and two segments if it has any."""
    ids = np.random.default_rng(0).integers(0, vocabulary_of(model), (batch_size, length))
    mask, segments = np.ones_like(ids), np.zeros_like(ids)
    mask[1::2, (length + 1) // 2 :] = 0
    segments[:, length // 3 :] = 1
    return (ids, mask, segments)[: len(input_names(model))]


def vocabulary_of(model: Any) -> int:
    """How many ids a model reads."""
    embedding = model.get_output_embeddings() or model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def _lengths(model: Any) -> tuple[int, int, int]:
    """The lengths of the traced example, of a shorter one, and of one that is longer than windows of attention."""
    longest = max_positions(model) or 1024
    window = max(getattr(model.config, name, None) or 0 for name in ("sliding_window", "local_attention"))
    return min(24, longest), min(7, longest), min(longest, max(64, min(window + 16, 1024)))
