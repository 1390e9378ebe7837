"""Whether a folder of a student gives that student back: the same names and values of weights, and the same numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from distill.distributed.shard import plain_class
from distill.models.check import UNFIT, alike
from distill.models.kernels.attention import keep_soft_cap
from distill.models.modes import in_evaluation_mode
from distill.runtime.errors import SettingError
from distill.runtime.users_code import mistake

NUM_TOKENS = 8


def check_export(folder: Path, student: Any, weights: dict[str, torch.Tensor], auto_class: str | None) -> None:
    """Refuse a folder from which another model would load than the student.

    The weights are windows on the files of the folder, so a large student does not lie in memory a second time.

    Args:
        weights: of the student, by their names in its class.
        auto_class: of transformers, by which the model card loads it; None: the student's own class.

    Raises:
        SettingError: it does not load, or weights are missing, unexpected or different, or so are its outputs.
    """
    if not isinstance(student, PreTrainedModel):
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _refuse({"different": _different(stored, weights), "unexpected": sorted(stored.keys() - weights.keys())})
        return
    kind = plain_class(student) if auto_class is None else getattr(transformers, auto_class)
    trust = {} if auto_class is None else trust_of(student)
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its table of such weights stands in the way of our line
    try:
        loaded, report = kind.from_pretrained(
            folder, dtype="auto", use_safetensors=True, output_loading_info=True, **trust
        )
    except (OSError, *UNFIT) as error:
        raise SettingError(f"The student cannot be exported: its folder does not load ({mistake(error)})") from error
    finally:
        transformers_logging.set_verbosity(before)
    keep_soft_cap(loaded)
    same_class = type(loaded) is plain_class(student)  # else it lacks a head that is not used
    _refuse(
        {
            "missing": sorted(report["missing_keys"]),
            "unexpected": sorted(report["unexpected_keys"]) if same_class else [],
            "different": _different(loaded.state_dict(), weights),
        }
    )
    with _exact_products():  # of two devices, perhaps
        is_same = alike(_logits(loaded), _logits(student))
    if not is_same:
        raise SettingError(
            "The student cannot be exported: its folder loads with the same weights and other logits; keep all that "
            "its forward depends on in its config, so that config.json holds it"
        )


def trust_of(student: Any) -> dict[str, bool]:
    """What loads a student again whose code came with a model: the user trusts it, and it has run here already."""
    is_remote = isinstance(student, PreTrainedModel) and student.is_remote_code()
    return {"trust_remote_code": True} if is_remote else {}


def _different(stored: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> list[str]:
    """The names of weights that both have, with other values."""
    both = ((name, tensor, weights[name]) for name, tensor in stored.items() if name in weights)
    return [name for name, one, other in both if not torch.equal(one, other.detach().to(one.device, one.dtype))]


def _refuse(wrong: dict[str, list[str]]) -> None:
    kinds = [
        f"{len(names)} weights {kind}, such as {', '.join(names[:3])}" if len(names) > 1 else f"{names[0]} {kind}"
        for kind, names in wrong.items()
        if names
    ]
    if kinds:
        raise SettingError(
            f"The student cannot be exported: what loads from its folder is another model ({'; '.join(kinds)}); build "
            "it without wrappers that its class does not know"
        )


@contextmanager
def _exact_products() -> Iterator[None]:
    """Matrix products in fp32, which a program may have made less exact for speed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    """Of a few tokens, in evaluation mode, on the processor: those over the vocabulary, or the first that it gives."""
    device = next(model.parameters()).device
    ids = torch.arange(NUM_TOKENS, device=device)[None]
    with in_evaluation_mode(model):
        outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    named = [name for name in ("prediction_logits", "logits", "start_logits") if hasattr(outputs, name)]
    logits: torch.Tensor = getattr(outputs, named[0]) if named else outputs[0]
    return logits.float().cpu()
