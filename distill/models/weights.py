"""What a model's weights say: which are tied, how many there are; and where its attention scores are capped.

transformers leaves a head that a file has for itself apart, although the configuration ties it (tie_word_embeddings);
a model that is built from that configuration would have the embeddings for a head.
"""

import sys
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from distill.runtime.errors import SettingError

TIED = "tie_word_embeddings"


@torch.no_grad()
def settle_ties(model: Any) -> None:
    """Let the configuration of a transformers model, and its ties, say what its weights are.

    Weights that are tied, and separate ones that differ, stay as they are. Separate ones that are equal are tied where
    the configuration has them so. Other models, and those whose class cannot tie these two, are left alone.
    """
    ties, names = declared_ties(model), word_embeddings(model)
    if names is None or names[0] not in ties:
        return
    head, embeddings = (model.get_parameter(name) for name in names)
    is_tied = head is embeddings
    if is_tied == model.config.tie_word_embeddings:
        return
    model.config.update({TIED: is_tied or torch.equal(head, embeddings)})
    if model.config.tie_word_embeddings:
        for target, source in ties.items():  # its bias too, in BERT, of which the output embedding's is the one in use
            if target != names[0]:
                _replace(model, source, model.get_parameter(target))
        model.tie_weights()
    else:
        for target, source in ties.items():
            if model.get_parameter(target) is (shared := model.get_parameter(source)):
                _replace(model, target, nn.Parameter(shared.clone(), shared.requires_grad))
    model.all_tied_weights_keys.clear()
    model.all_tied_weights_keys.update(model.get_expanded_tied_weights_keys(all_submodels=True))


def refuse_tying(changes: dict[str, Any], model: Any, named: str) -> None:
    """Raises SettingError where `student.config` ties the two weights of a student that starts from separate ones."""
    if changes.get(TIED) is True and getattr(model.config, TIED, True) is False:
        raise SettingError(
            f"the output embedding of {named} has weights of its own, which are not those of its input embedding",
            setting=f"student.config.{TIED}",
            value="true",
            cure="leave it out",
        )


def declared_ties(model: Any) -> dict[str, str]:
    """The weights that the class of a model can tie, by name, with what it ties each to; whatever its configuration."""
    ties = getattr(model, "_tied_weights_keys", None) if isinstance(model, PreTrainedModel) else None
    is_set = isinstance(getattr(getattr(model, "config", None), TIED, None), bool)
    return dict(ties) if is_set and isinstance(ties, dict) else {}  # of classes of others a list, as in transformers 4


def word_embeddings(model: Any) -> tuple[str, str] | None:
    """The names of the weights of the output embedding and of the input embedding; None where one is missing."""
    if not isinstance(model, PreTrainedModel):
        return None
    layers = model.get_output_embeddings(), model.get_input_embeddings()
    if any(not isinstance(getattr(layer, "weight", None), nn.Parameter) for layer in layers):
        return None
    names = {id(module): name for name, module in model.named_modules()}
    head, embeddings = (f"{names[id(layer)]}.weight" for layer in layers)
    return head, embeddings


def _replace(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, parameter)


def size(model: nn.Module) -> tuple[int, int]:
    """Number of parameters (tied ones once) and the bytes they take, both as the model is published.

    Adapters of PEFT are merged into their layers then, and count for nothing.
    """
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    adapted = [module for module in model.modules() if peft is not None and isinstance(module, peft.BaseTunerLayer)]
    adapters = {id(parameter) for layer in adapted for parameter in layer.parameters()}
    adapters -= {id(parameter) for layer in adapted for parameter in layer.get_base_layer().parameters()}
    parameters = [parameter for parameter in model.parameters() if id(parameter) not in adapters]
    return sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)


def keep_soft_cap(model: Any) -> None:
    """Let a model whose attention scores have a soft cap use no SDPA, which leaves it out.

    transformers 5.17 takes SDPA for Gemma 2 by default, 5.23 does not.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
