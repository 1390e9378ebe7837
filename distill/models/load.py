"""Reads models and tokenizers from folders or the Hub, and refuses what is not understood."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerBase

from distill.config import HERE, TeacherConfig
from distill.errors import SettingError
from distill.models.language_model import LAST, LanguageModel, OutputSpec

EMBEDDED = HERE / "teacher" / "embedded"


def check_model(model: Any, setting: str) -> None:
    """Refuse a model that `LanguageModel` does not read right, rather than train another function than it computes.

    Raises:
        SettingError: the model cannot be watched, or what is read from it are not its own logits and hidden states.
    """
    training = model.training
    model.eval()
    ids = torch.arange(8, device=next(model.parameters()).device)[None]
    depth = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    layers = (*range(depth), LAST) if isinstance(depth, int) else (LAST,)
    try:
        with torch.no_grad():
            whole = model(input_ids=ids, attention_mask=None, **({"output_hidden_states": True} if depth else {}))
            logits = getattr(whole, "logits", whole)[0]
            reader = LanguageModel(model)
            found = reader({"input_ids": ids}, None, OutputSpec(True, None, layers))
            assert found.head_rows is not None
            pairs = [(reader.logits(found.head_rows, logits.shape[-1]), logits)]
            pairs += [(found.hidden[layer], whole.hidden_states[layer]) for layer in layers[:-1]]
    except (AttributeError, KeyError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        raise SettingError(
            f"{setting}: {type(model).__name__} does not offer what a language model has to: base_model, "
            f"get_output_embeddings() and a forward that calls both ({first_line(error)})"
        ) from error
    finally:
        model.train(training)
    if not all(read.shape == own.shape and torch.allclose(read, own, rtol=1e-3, atol=1e-3) for read, own in pairs):
        raise SettingError(
            f"{setting}: {type(model).__name__} computes something between its layers and its logits that is not "
            "understood; choose a model whose logits are those of its output embedding"
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
    check_model(model, f"{setting}={path}")
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


def teacher_path(settings: TeacherConfig) -> str:
    """The folder or Hub name of a teacher. Raises SettingError where none is given."""
    path = str(EMBEDDED) if settings.kind == "embedded" else settings.path
    if path is None:
        raise SettingError("teacher.path=null: give a model folder, a run folder or a name on the Hub")
    return path


def load_teacher(settings: TeacherConfig) -> tuple[Any, PreTrainedTokenizerBase | None, str]:
    """The frozen teacher in evaluation mode, its tokenizer and its name for the report; None, None, "" for none."""
    if settings.kind == "none":
        return None, None, ""
    path = teacher_path(settings)
    model = load_pretrained("teacher.path", path, settings.revision, settings.trust_remote_code)
    model.requires_grad_(False).eval()
    name = "the embedded teacher" if settings.kind == "embedded" else path
    return model, load_tokenizer("teacher.path", path, settings.revision, settings.trust_remote_code), name


def check_vocabulary(teacher: Any | None, student: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse models that do not know all tokens of the tokenizer. `teacher` may be None.

    Raises:
        SettingError: an output embedding smaller than the vocabulary.
    """
    for name, model in (("teacher", teacher), ("student", student)):
        if model is None:
            continue
        known = model.get_output_embeddings().weight.shape[0]
        if known < len(tokenizer):
            raise SettingError(
                f"{name}: it knows {known} tokens, but the tokenizer has {len(tokenizer)}; choose a fitting pair"
            )


def check_tokenizers(own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, setting: str) -> None:
    """Refuse the model that `setting` names when the ids of its tokenizer mean something else than this run's.

    Args:
        own: the tokenizer of this run.
        other: the tokenizer of that model.

    Raises:
        SettingError: the vocabularies differ.
    """
    here, there = own.get_vocab(), other.get_vocab()
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
