"""Models that a program holds: taken out of wrappers that compute the same, or refused as nothing here reads them."""

import copy
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from distill.distributed.shard import is_sharded
from distill.models.kind import CAUSAL, MASKED, kind_in_memory
from distill.runtime.errors import SettingError

PEFT = "peft."  # the package of the classes that hold adapters
COMPILED = "_orig_mod"  # what torch.compile calls the module in its own, whose class takes a second to import


def unwrapped(model: Any, name: str, learns: bool = False) -> Any:
    """The model inside of torch.compile, DataParallel, DistributedDataParallel and PEFT; any other model as it is.

    What is given computes the same, and has its weights in common with the wrapper, but for PEFT's: adapters are merged
    into a copy, or, where the model `learns`, stay in the model and are what is trained of it.

    Args:
        name: what error lines call the model: teacher, student or model.

    Raises:
        SettingError: a wrapper whose inside computes something else, or has a part of the weights alone.
    """
    while True:
        if COMPILED in getattr(model, "_modules", {}):
            model = getattr(model, COMPILED)
        elif isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif type(model).__module__.startswith(PEFT):
            model = _without_peft(model, name, learns)
        else:
            break
    if not isinstance(model, nn.Module):
        return model
    if isinstance(model, FullyShardedDataParallel) or is_sharded(model):
        raise SettingError(
            f"each rank has a part of the weights of this {type(model).__name__}",
            setting=name,
            cure="give the model as it was before it was sharded; backend=fsdp shards it",
        )
    if model._compiled_call_impl is not None:  # by its own compile(); a copy has the same weights without that
        model = copy.copy(model)
    compiled = [part for part, module in model.named_modules() if _is_compiled(module)]
    if compiled:
        raise SettingError(
            f"the part {compiled[0]} of this {type(model).__name__} is compiled, and its layers cannot be read",
            setting=name,
            cure="give the model as it was before torch.compile; precision.compile=true compiles it in a run",
        )
    return model


def _is_compiled(module: nn.Module) -> bool:
    return COMPILED in module._modules or module._compiled_call_impl is not None


def _without_peft(model: Any, name: str, learns: bool) -> Any:
    """The model of transformers in one of PEFT, with its adapters merged into a copy, or in place where it `learns`."""
    kind = getattr(getattr(model, "active_peft_config", None), "peft_type", "adapters")
    try:
        if learns and not model.active_peft_config.is_prompt_learning:
            return model.get_base_model()
        if not learns:
            return copy.deepcopy(model).merge_and_unload()
    except (AttributeError, NotImplementedError, ValueError, TypeError, RuntimeError):
        pass  # prompts, prefixes and other things that are no change of weights
    raise SettingError(
        f"what this {type(model).__name__} adds ({getattr(kind, 'value', kind)}) is no change of the model's weights",
        setting=name,
        cure="give its base model, model.get_base_model(), or one with adapters that can be merged, such as LoRA",
    )


def refuse_unread(model: Any, name: str) -> None:
    """Raises SettingError for a class of transformers itself that is of no kind that is read here; without its head."""
    is_other = isinstance(model, PreTrainedModel) and kind_in_memory(model) is None
    if not is_other or not type(model).__module__.startswith("transformers."):
        return
    family, given = model.config.model_type, type(model).__name__
    encoders = MODEL_MAPPING_NAMES.get(family, ())
    if given in ((encoders,) if isinstance(encoders, str) else encoders) and not model.config.is_encoder_decoder:
        heads = [*CAUSAL.classes(family)[:1], *MASKED.classes(family)[:1]]
        raise SettingError(
            f"a {given} has no head, so it predicts nothing",
            setting=name,
            cure=f"load it with one, as {' or '.join(heads) or 'another class'} does",
        )
    what = "a sequence-to-sequence model, which is" if model.config.is_encoder_decoder else "of a kind that is"
    raise SettingError(
        f"a {given} is {what} not supported",
        setting=name,
        cure="give a masked, causal, question answering or classification model of transformers",
    )
