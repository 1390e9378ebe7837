"""A student's start from layers of its teacher: which ones, what it takes of them, and under which names.

The published DistilBERT starts from every second layer of BERT, embeddings and head included (Sanh et al. 2019). No
table of families is needed: an encoder's blocks are its first list of as many modules as it has layers, and everything
that belongs to no block is taken as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from distill.config.settings import StudentConfig
from distill.models.blocks import block_list
from distill.models.mlp import WIDTHS, take_neurons, width_of
from distill.runtime.errors import SettingError
from distill.runtime.progress import counted

AUTO = "auto"  # not a rule of numbers: `distill.runs.layer_search` scores subsets on sequences of the corpus
# Of transformers' configurations: the number of layers, and lists that have an entry for each of them.
NUM_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "attention_layers", "layer_rope_theta")
# BERT's names -> DistilBERT's, in the order in which they are replaced.
BERT_TO_DISTILBERT = (
    ("bert.embeddings", "distilbert.embeddings"),
    ("bert.encoder.layer", "distilbert.transformer.layer"),
    ("attention.self.query", "attention.q_lin"),
    ("attention.self.key", "attention.k_lin"),
    ("attention.self.value", "attention.v_lin"),
    ("attention.output.dense", "attention.out_lin"),
    ("attention.output.LayerNorm", "sa_layer_norm"),
    ("intermediate.dense", "ffn.lin1"),
    ("output.dense", "ffn.lin2"),
    ("output.LayerNorm", "output_layer_norm"),
    ("cls.predictions.transform.dense", "vocab_transform"),
    ("cls.predictions.transform.LayerNorm", "vocab_layer_norm"),
    ("cls.predictions.decoder", "vocab_projector"),
    ("cls.predictions.bias", "vocab_projector.bias"),
)


def every_second(available: int, count: int) -> list[int]:
    """0, 2, 4, ... as the published DistilBERT takes them; then those that are left out, from the top."""
    return sorted([*range(0, available, 2), *reversed(range(1, available, 2))][:count])


def even(available: int, count: int) -> list[int]:
    """Evenly spread from the first to the last; the first alone for one."""
    return [round(number * (available - 1) / max(count - 1, 1)) for number in range(count)]


def first(available: int, count: int) -> list[int]:
    """The lowest ones."""
    return list(range(count))


RULES: dict[str, Callable[[int, int], list[int]]] = {"every_second": every_second, "even": even, "first": first}


def choose_layers(layers: Sequence[int] | str | None, count: int | None, available: int) -> list[int]:
    """The teacher's layers to start from, of `available` ones.

    Args:
        layers: their numbers, or a rule; None: every second one. Of `auto`, what every other choice has in common: as
            many of them.
        count: how many a rule takes; None: half of them, rounded up.
    """
    if layers is None or isinstance(layers, str):
        rule = every_second if layers in (None, AUTO) else RULES[layers]
        return rule(available, number_of_layers(count, available))
    if count not in (None, len(layers)):
        problem = f"but student.layers={list(layers)} names {len(layers)}"
        raise SettingError(problem, setting="student.num_layers", value=count, cure="leave one of the two settings out")
    if not layers or any(not 0 <= layer < available for layer in layers):
        raise SettingError(f"student.layers={list(layers)}: the teacher has layers 0 to {available - 1}")
    return list(layers)


def number_of_layers(count: int | None, available: int) -> int:
    """How many layers a rule takes. Raises SettingError where there are not so many."""
    num_layers = (available + 1) // 2 if count is None else count
    if not 1 <= num_layers <= available:
        raise SettingError(
            f"student.num_layers={num_layers}: the teacher has {counted(available, 'layer')}, take 1 to {available}"
        )
    return num_layers


def student_fields(settings: StudentConfig, teacher: Any, chosen: list[int]) -> dict[str, Any]:
    """The student's configuration: the teacher's, with fewer layers, in the student's architecture."""
    family = teacher.config.model_type
    if settings.architecture in ("same", family):
        fields = teacher.config.to_dict()
        fields |= {name: [fields[name][layer] for layer in chosen] for name in PER_LAYER if fields.get(name)}
    elif (family, settings.architecture) == ("bert", "distilbert"):
        fields = _distilbert_fields(teacher.config)
    else:
        raise SettingError(
            f"student.architecture={settings.architecture}: layers of {family} fit only the same architecture"
            + (" or distilbert" if family == "bert" else "")
            + ": set student.architecture=same"
        )
    if settings.intermediate_size is not None:
        fields |= {_width_field(settings, teacher): settings.intermediate_size}
    if fields.get("attention_types"):  # of GPT-Neo: they count the layers, too
        fields["attention_types"] = [[[kind], 1] for kind in fields["attention_layers"]]
    return fields | {name: len(chosen) for name in NUM_LAYERS if name in fields}


def _width_field(settings: StudentConfig, teacher: Any) -> str:
    """What the teacher's configuration calls the neurons of an MLP. Raises SettingError where it cannot have fewer."""
    size, width, fields = settings.intermediate_size or 0, width_of(teacher) or 0, teacher.config.to_dict()
    known = [name for name in WIDTHS if fields.get(name, 0) in (None, width)]  # None: of a GPT-2
    problem, cure = "", "leave it out"
    if not (width and known) or block_prefix(teacher) is None:
        problem = f"the MLPs of a {type(teacher).__name__} are not known"
    elif settings.architecture not in ("same", teacher.config.model_type):
        problem = f"not with student.architecture={settings.architecture}"
    elif size >= width:
        problem, cure = f"the teacher's MLPs have {width:,} neurons", "give fewer, or leave it out"
    if problem:
        raise SettingError(problem, setting="student.intermediate_size", value=size, cure=cure)
    return known[0]


def copy_layers(
    settings: StudentConfig, teacher: Any, student: PreTrainedModel, chosen: list[int], alias: bool = False
) -> None:
    """Overwrite the student's weights with those of the chosen layers, the embeddings and the head.

    Args:
        alias: let the student have the teacher's tensors themselves, until it is sharded over ranks.
    """
    weights = _take_layers(teacher, chosen)
    if student.config.model_type != teacher.config.model_type:
        weights = _bert_to_distilbert(weights)
    if settings.intermediate_size is not None:  # the first neurons, until `distill.models.width` has chosen
        kept, width = torch.arange(settings.intermediate_size), width_of(teacher)
        assert width is not None, "the student was made"
        weights = take_neurons(weights, student.state_dict(), kept, width)
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
            cure="a place in the student may take layers of one kind only, by its number: give student.layers=auto or "
            "first, and leave the layers' parts alone in student.config",
        )


def _take_layers(teacher: Any, chosen: list[int]) -> dict[str, torch.Tensor]:
    """The teacher's tensors by name: those of the chosen blocks, numbered anew, and all that are in no block."""
    state, prefix = teacher.state_dict(), block_prefix(teacher)
    if prefix is None:  # one block that is called several times
        return dict(state)
    out = {name: tensor for name, tensor in state.items() if not name.startswith(prefix)}
    for new, old in enumerate(chosen):
        start = f"{prefix}{old}."
        out |= {
            f"{prefix}{new}.{name.removeprefix(start)}": tensor
            for name, tensor in state.items()
            if name.startswith(start)
        }
    return out


def block_prefix(model: nn.Module) -> str | None:
    """What the names of the blocks' tensors begin with; None where there are fewer blocks than layers."""
    depth: int = model.config.num_hidden_layers  # type: ignore[union-attr, assignment]
    blocks = block_list(model.base_model, depth)  # type: ignore[arg-type]
    if len(blocks) != depth:
        return None
    return next(f"{name}." for name, module in model.named_modules() if module is blocks)


def _distilbert_fields(bert: Any) -> dict[str, Any]:
    """The configuration of a DistilBERT of the size of this BERT configuration."""
    return {
        "vocab_size": bert.vocab_size,
        "dim": bert.hidden_size,
        "n_layers": bert.num_hidden_layers,
        "n_heads": bert.num_attention_heads,
        "hidden_dim": bert.intermediate_size,
        "max_position_embeddings": bert.max_position_embeddings,
        "activation": bert.hidden_act,
        "pad_token_id": bert.pad_token_id,
        "tie_word_embeddings": bert.tie_word_embeddings,
    }


def _bert_to_distilbert(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """BERT's weights under DistilBERT's names.

    DistilBERT has no segments: the embedding of segment 0, which BERT adds at every position, moves into the position
    embeddings, so that a student with all the layers computes exactly what the teacher does.
    """
    out = {}
    for name, tensor in state.items():
        if "token_type" in name or "pooler" in name or name.endswith("position_ids"):
            continue
        if name == "bert.embeddings.position_embeddings.weight":
            # In the format of training, whatever the two were saved in.
            tensor = tensor.float() + state["bert.embeddings.token_type_embeddings.weight"][0].float()
        for old, new in BERT_TO_DISTILBERT:
            name = name.replace(old, new)
        out[name] = tensor
    return out
