"""The frozen teacher, and the one way to ask any masked language model for its hidden rows and its head.

Shapes: B rows, S positions, N selected positions, H hidden size, E input size of the
output embedding, V vocabulary.

A model is a transformers `*ForMaskedLM` of a family named in `TRANSFORMS`, or any module with `base_model(input_ids,
attention_mask)`, `get_output_embeddings()` and its own `head_rows(hidden)`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerBase

from distill.config import HERE, Teacher
from distill.errors import SettingError

EMBEDDED = HERE / "teacher" / "embedded"

# What each family does between the last hidden state and its output embedding: [N, H] -> [N, E].
TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "bert": lambda m, x: m.cls.predictions.transform(x),
    "distilbert": lambda m, x: m.vocab_layer_norm(m.activation(m.vocab_transform(x))),
    "roberta": lambda m, x: m.lm_head.layer_norm(nn.functional.gelu(m.lm_head.dense(x))),
    "modernbert": lambda m, x: m.head(x),
    "albert": lambda m, x: m.predictions.LayerNorm(m.predictions.activation(m.predictions.dense(x))),
}


def hidden_states(model: Any, ids: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor:
    """ids [B, S], attention [B, S] or None -> last hidden state [B, S, H]."""
    return model.base_model(input_ids=ids, attention_mask=attention).last_hidden_state


def head_rows(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """hidden [N, H] -> what the output embedding takes [N, E]."""
    own = getattr(model, "head_rows", None)
    return own(hidden) if own is not None else TRANSFORMS[model.config.model_type](model, hidden)


def output_embedding(model: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [V, E] and bias [V] (or None) of the output embedding."""
    layer = model.get_output_embeddings()
    return layer.weight, layer.bias


def logits(model: Any, hidden: torch.Tensor, vocab: int) -> torch.Tensor:
    """hidden [N, H] -> logits [N, vocab], without the rows that only pad the embedding."""
    weight, bias = output_embedding(model)
    return nn.functional.linear(head_rows(model, hidden), weight[:vocab], None if bias is None else bias[:vocab])


def check_family(model: Any, setting: str) -> None:
    """Refuse a model whose head is not understood, rather than train another function than the model computes.

    Raises:
        SettingError: unknown family, or the pieces above do not give the model's own logits.
    """
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if not hasattr(model, "head_rows") and family not in TRANSFORMS:
        known = ", ".join(sorted(TRANSFORMS))
        raise SettingError(f"{setting}: the family {family} is not known ({known}); give the model a head_rows method")
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    ids = torch.arange(8, device=device)[None]
    with torch.no_grad():
        whole = model(input_ids=ids)
        whole = getattr(whole, "logits", whole)[0]
        pieces = logits(model, hidden_states(model, ids, None)[0], whole.shape[-1])
    model.train(training)
    if not torch.allclose(whole, pieces, rtol=1e-3, atol=1e-3):
        raise SettingError(
            f"{setting}: the head of {type(model).__name__} ({family}) computes something else than known"
        )


def model_folder(path: str) -> str:
    """A run folder stands for the student in it; anything else is taken as it is (a folder, or a name on the Hub)."""
    student = Path(path).expanduser() / "student"
    return str(student if (student / "config.json").is_file() else Path(path).expanduser())


def load_pretrained(setting: str, path: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """A masked language model in fp32, from safetensors.

    Raises:
        SettingError: nothing loadable at `path`, or not with all its weights; the message names `setting`.
    """
    folder = model_folder(path)
    try:
        model, found = AutoModelForMaskedLM.from_pretrained(
            folder,
            revision=revision or "main",
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise SettingError(f"{setting}={path} does not load as a masked language model: {first_line(error)}") from error
    if missing := sorted(found["missing_keys"]):  # transformers has filled them with random numbers
        raise SettingError(f"{setting}={path} lacks weights of a masked language model, such as {missing[0]}")
    check_family(model, f"{setting}={path}")
    return model


def load_tokenizer(
    setting: str, path: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """A fast tokenizer with a mask token. Raises SettingError, which names `setting`, where there is none at `path`."""
    folder = model_folder(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, revision=revision or "main", trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise SettingError(f"{setting}={path} has no tokenizer that loads: {first_line(error)}") from error
    if tokenizer.mask_token_id is None or not tokenizer.is_fast:
        raise SettingError(f"{setting}={path}: masked language models need a fast tokenizer with a mask token")
    return tokenizer


def load_teacher(settings: Teacher) -> tuple[Any, PreTrainedTokenizerBase | None, str]:
    """The frozen teacher in evaluation mode, its tokenizer and its name for the report; None, None, "" for none."""
    if settings.kind == "none":
        return None, None, ""
    if settings.kind not in ("embedded", "pretrained"):
        raise SettingError(f"teacher.kind={settings.kind} is not known: choose one of embedded, pretrained, none")
    path = str(EMBEDDED) if settings.kind == "embedded" else settings.path
    if path is None:
        raise SettingError("teacher.path=null: give a model folder, a run folder or a name on the Hub")
    model = load_pretrained("teacher.path", path, settings.revision, settings.trust_remote_code)
    model.requires_grad_(False).eval()
    name = "the embedded teacher" if settings.kind == "embedded" else path
    return model, load_tokenizer("teacher.path", path, settings.revision, settings.trust_remote_code), name


def check_pair(teacher: Any | None, student: Any, tokenizer: PreTrainedTokenizerBase, cosine: bool) -> None:
    """Refuse models that do not fit the tokenizer, or each other. `teacher` may be None.

    Raises:
        SettingError: an embedding smaller than the vocabulary, or hidden sizes that differ under a cosine term.
    """
    for name, model in (("teacher", teacher), ("student", student)):
        if model is not None and (known := output_embedding(model)[0].shape[0]) < len(tokenizer):
            raise SettingError(
                f"{name}: it knows {known} tokens, but the tokenizer has {len(tokenizer)}; choose a fitting pair"
            )
    if teacher is None or not cosine:
        return
    sizes = teacher.config.hidden_size, student.config.hidden_size
    if sizes[0] != sizes[1]:
        raise SettingError(
            f"objective.cosine.weight: teacher and student have hidden sizes {sizes[0]} and {sizes[1]}; set it to 0"
        )


def check_tokenizers(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase, setting: str) -> None:
    """Refuse the model that `setting` names when its token ids (`theirs`) mean something else than this run's.

    Raises:
        SettingError: the vocabularies differ.
    """
    here, there = ours.get_vocab(), theirs.get_vocab()
    if here != there:
        differing = sum(here.get(token) != number for token, number in there.items())
        raise SettingError(
            f"{setting}: its vocabulary ({len(there)} tokens) is not the teacher's ({len(here)} tokens, {differing} of "
            "its own differ); choose models with one tokenizer"
        )


def longest_row(model: Any) -> int | None:
    """The most positions that a model can take; None where it names no limit."""
    config: Any = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    return None if limit is None else limit - position_offset(config.model_type, config.pad_token_id)


def position_offset(family: str, pad_id: int | None) -> int:
    """Rows of the position embedding that no position uses: RoBERTa counts from the one after its padding id."""
    return (pad_id or 0) + 1 if family == "roberta" else 0


def size(model: nn.Module) -> tuple[int, int]:
    """Number of parameters (tied ones once) and the bytes they take."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)


def first_line(error: BaseException) -> str:
    """What an error says, without the rest of a long message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
