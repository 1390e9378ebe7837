"""A student's start from layers of its teacher: which weights it takes, and under which names.

The published DistilBERT starts from every second layer of BERT, embeddings and head included (Sanh et al. 2019). No
table of families is needed: an encoder's blocks are its first list of as many modules as it has layers, and everything
that belongs to no block is taken as it is.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from distill.config.settings import StudentConfig
from distill.models.bert_to_distilbert import bert_to_distilbert, distilbert_fields
from distill.models.layer_choice import Layer, flat
from distill.models.protocol import block_list
from distill.runtime.errors import SettingError

# Of transformers' configurations: the number of layers, and lists that have an entry for each of them.
NUM_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "attention_layers", "layer_rope_theta")


def student_fields(settings: StudentConfig, teacher: Any, chosen: list[Layer]) -> dict[str, Any]:
    """The student's configuration: the teacher's, with fewer layers, in the student's architecture.

    Raises:
        SettingError: an architecture that takes no layers of this teacher.
    """
    family = teacher.config.model_type
    if settings.architecture in ("same", family):
        fields = teacher.config.to_dict()
        if fields.get("scale_attn_by_inverse_layer_idx") and flat(chosen) != [*range(len(chosen))]:
            raise SettingError(
                f"student.layers={chosen}: the attention of this teacher is divided by the number of its layer "
                "(scale_attn_by_inverse_layer_idx), so only its first layers can be taken: set student.layers=first"
            )
        for name in PER_LAYER:
            if fields.get(name):
                fields[name] = [fields[name][flat([layer])[0]] for layer in chosen]
    elif (family, settings.architecture) == ("bert", "distilbert"):
        fields = distilbert_fields(teacher.config)
    else:
        raise SettingError(
            f"student.architecture={settings.architecture}: layers of {family} fit only the same architecture"
            + (" or distilbert" if family == "bert" else "")
            + ": set student.architecture=same"
        )
    if fields.get("attention_types"):  # of GPT-Neo: they count the layers, too
        fields["attention_types"] = [[[kind], 1] for kind in fields["attention_layers"]]
    return fields | {name: len(chosen) for name in NUM_LAYERS if name in fields}


def copy_layers(
    settings: StudentConfig, teacher: Any, student: PreTrainedModel, chosen: list[Layer], alias: bool = False
) -> None:
    """Overwrite the student's weights with those of the chosen layers, the embeddings and the head.

    A layer that stands for several gets the means of their weights.

    Args:
        alias: let the student have the teacher's tensors themselves, until it is sharded over ranks.

    Raises:
        SettingError: they do not fit its shape, a part is in only one of the two, or layers that one is to stand for
            are of different kinds.
    """
    weights = _take_layers(teacher, chosen)
    if student.config.model_type != teacher.config.model_type:
        weights = bert_to_distilbert(weights)
    try:
        missing, unexpected = student.load_state_dict(weights, strict=False, assign=alias)
        if alias:
            student.tie_weights()
    except RuntimeError as error:  # sizes differ
        raise SettingError(
            f"student.config={settings.config}: the teacher's layers do not fit another shape; leave its sizes alone"
        ) from error
    parameters = dict(student.named_parameters())  # tied weights once: their other names may be missing
    if wrong := [*unexpected, *(name for name in missing if name in parameters)]:
        raise SettingError(
            f"{wrong[0]} is in the teacher's layers or in the student's, not in both",
            setting="student.layers",
            value=chosen,
            cure=_cure(teacher, student, chosen),
        )


def _cure(teacher: Any, student: PreTrainedModel, chosen: list[Layer]) -> str:
    """What helps where a layer is of another kind than its place in the student, which its number decides."""
    needed, kinds = _kinds(student), _kinds(teacher)
    fitting: list[int] = []
    for kind, wanted in zip(needed, (flat([layer])[0] for layer in chosen), strict=False):
        later = [number for number in range(fitting[-1] + 1 if fitting else 0, len(kinds)) if kinds[number] == kind]
        fitting += sorted(later, key=lambda number: abs(number - wanted))[:1]
    if not needed or len(fitting) < len(needed):
        first = [*range(len(chosen))]
        leave = "leave the layers' parts alone in student.config"
        return leave if kinds[: len(needed)] != needed else f"give student.layers={first}, or {leave}"
    return f"each place in the student takes layers of one kind, by its number: give student.layers={fitting} or auto"


def _kinds(model: PreTrainedModel) -> list[frozenset[tuple[str, torch.Size]]]:
    """Names and shapes of the tensors of each block; empty where there are fewer blocks than layers."""
    prefix = block_prefix(model)
    if prefix is None:
        return []
    parts: dict[int, set[tuple[str, torch.Size]]] = {}
    for name, tensor in model.state_dict().items():
        if name.startswith(prefix):
            number, _, part = name.removeprefix(prefix).partition(".")
            parts.setdefault(int(number), set()).add((part, tensor.shape))
    return [frozenset(parts.get(number, ())) for number in range(model.config.num_hidden_layers)]


def _take_layers(teacher: Any, chosen: list[Layer]) -> dict[str, torch.Tensor]:
    """The teacher's tensors by name: those of the chosen blocks, numbered anew, and all that are in no block."""
    state, prefix = teacher.state_dict(), block_prefix(teacher)
    if prefix is None:  # one block that is called several times
        return dict(state)
    out = {name: tensor for name, tensor in state.items() if not name.startswith(prefix)}
    for new, old in enumerate(chosen):
        first, *further = flat([old])
        start = f"{prefix}{first}."
        parts = [name.removeprefix(start) for name in state if name.startswith(start)]
        out |= {f"{prefix}{new}.{part}": state[f"{start}{part}"] for part in parts}
        for part in parts if further else []:
            tensors = [state[name] for layer in flat([old]) if (name := f"{prefix}{layer}.{part}") in state]
            if len({tensor.shape for tensor in tensors}) > 1 or len(tensors) <= len(further):
                raise SettingError(
                    f"student.layers={chosen}: layers {old} are of different kinds and have no mean ({part}): name one "
                    "of them"
                )
            if tensors[0].is_floating_point():
                mean = torch.stack([tensor.float() for tensor in tensors]).mean(0)
                out[f"{prefix}{new}.{part}"] = mean.to(tensors[0].dtype)
    return out


def block_prefix(model: nn.Module) -> str | None:
    """What the names of the blocks' tensors begin with; None where there are fewer blocks than layers."""
    depth: int = model.config.num_hidden_layers  # type: ignore[union-attr, assignment]
    blocks = block_list(model.base_model, depth)  # type: ignore[arg-type]
    if len(blocks) != depth:
        return None
    return next(f"{name}." for name, module in model.named_modules() if module is blocks)
