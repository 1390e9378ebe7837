"""The student as a folder that transformers and whatever reads its folders load."""

import copy
import json
import logging
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_model
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from distill.models.export_check import check_export, trust_of
from distill.models.pooling import MEAN, SavedPooling, save_pooling
from distill.models.pooling import OF_EXPORT as OF_POOLING
from distill.models.shapes import pooled_width
from distill.models.ties import TIED, declared_ties, word_embeddings
from distill.runtime.errors import SettingError, first_line
from distill.runtime.files import atomic
from distill.runtime.host import is_out_of_memory
from distill.runtime.users_code import MISTAKES, mistake

logger = logging.getLogger(__name__)

Fields = dict[str, Any]
LARGEST_FILE = "2GB"
CARD = "README.md"
FILES = (  # that a student's folder may have beside its card, by the form of its weights and the kind of its tokenizer
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    *OF_POOLING,
)


def export(
    student: Any,
    tokenizer: Any,
    folder: Path,
    card: str | None = None,
    durable: bool = False,
    auto_class: str | None = None,
    vectors: SavedPooling | None = None,
) -> None:
    """Write the student so that the Auto classes of transformers load it.

    Args:
        student: a transformers model of any class, or any other module, of which the weights alone are written.
        tokenizer: its tokenizer; a warning is logged where AutoTokenizer would not give it back.
        folder: appears whole or not at all; what stood there is replaced.
        card: the content of its README.md; None: there is none.
        durable: also flush everything to the disk, for what is not written again after a crash of the machine.
        auto_class: of transformers, by which the card loads the student; None: its own class.
        vectors: how a sentence encoder makes them, which its folder says too; None: it is none.

    Raises:
        SettingError: what loads from the folder is another model; then there is no folder.
    """
    with atomic(folder, durable) as new:
        weights = _write_weights(student, new)
        tokenizer.save_pretrained(new)
        if (new / "tokenizer.json").is_file():
            _rewrite(new / "tokenizer_config.json", lambda fields: _generic_tokenizer(fields, tokenizer, student))
        if card is not None:
            (new / CARD).write_text(card, encoding="utf-8")
        if vectors is not None:
            save_pooling(new, vectors, pooled_width(student, vectors.kind or MEAN))
        check_export(new, student, weights, auto_class)
    _check_tokenizer(tokenizer, folder, trust_of(student))


def try_export(student: Any) -> None:
    """Export the weights of a student of the user's class into a folder that is removed, before it is trained.

    Raises:
        SettingError: it cannot be saved, or what loads is another model; the message has the line of the user's file.
    """
    try:
        with TemporaryDirectory(prefix="distill-") as parent, torch.random.fork_rng([]):
            folder = Path(parent) / "student"
            check_export(folder, student, _write_weights(student, folder), None)
    except SettingError:
        raise
    except OSError as error:  # there is no room for it here, and may be where the run is
        logger.warning(f"the export of the student could not be tried before training: {first_line(error)}")
    except (*MISTAKES, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise SettingError(f"The student cannot be exported: {mistake(error)}") from error


def foreign_file(folder: Path) -> Path | None:
    """A file or folder here that no export writes; None where there is none."""
    others = (path for path in sorted(folder.iterdir()) if path.name != CARD and not is_of_export(path.name))
    return next(others, None)


def is_of_export(place: str) -> bool:
    """Whether a file of this name may be of a student, its card aside; `place` is relative to the student's folder."""
    return place in FILES or ("/" not in place and any(fnmatch(place, pattern) for pattern in FILES))


def _write_weights(student: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Write weights and configuration into a new folder; gives the weights by their names in the student's class."""
    if not isinstance(student, PreTrainedModel):
        folder.mkdir()
        save_model(student, str(folder / "model.safetensors"))
        state: dict[str, torch.Tensor] = student.state_dict()
        return state
    weights = _with_adapters_merged(student)
    tied = _untied_by_adapters(student, weights)
    # Files are made in memory before they are written: of a large model one after the other.
    student.save_pretrained(folder, state_dict=weights, max_shard_size=LARGEST_FILE)
    if tied:
        _rewrite(folder / "config.json", lambda fields: fields | tied)
    return weights


def _untied_by_adapters(student: Any, weights: dict[str, torch.Tensor]) -> Fields:
    """What config.json has otherwise where an adapter of the embeddings alone was merged into them: no tied head."""
    names, ties = word_embeddings(student), declared_ties(student)
    if names is None or names[0] not in ties or not student.config.tie_word_embeddings:
        return {}
    if torch.equal(*(weights[name] for name in names)):
        return {}
    for target in ties:  # transformers writes of two names for one tensor the first alone
        weights[target] = weights[target].clone()
    return {TIED: False}


def _with_adapters_merged(student: Any) -> dict[str, torch.Tensor]:
    """The state of a student in which PEFT has wrapped layers: each is its own layer with what the adapter adds."""
    state: dict[str, torch.Tensor] = student.state_dict()
    peft: Any = sys.modules.get("peft.tuners.tuners_utils")
    for name, layer in student.named_modules() if peft is not None else ():
        if isinstance(layer, peft.BaseTunerLayer):
            merged: Any = copy.deepcopy(layer)  # training continues with the layer as it is
            merged.merge()
            state = {key: tensor for key, tensor in state.items() if not key.startswith(f"{name}.")}
            state |= {f"{name}.{key}": tensor for key, tensor in merged.get_base_layer().state_dict().items()}
    return state


def _rewrite(path: Path, change: Callable[[Fields], Fields]) -> None:
    fields = change(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _generic_tokenizer(fields: Fields, tokenizer: Any, student: Any) -> Fields:
    """The content of tokenizer_config.json, for a class that takes tokenizer.json as it stands.

    That class gives `token_type_ids` too, which most models refuse; so the inputs are named.
    """
    segments = getattr(getattr(student, "config", None), "type_vocab_size", None) or 0
    inputs = [name for name in tokenizer.model_input_names if name != "token_type_ids" or segments > 1]
    return fields | {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs}


def _check_tokenizer(tokenizer: Any, folder: Path, trust: dict[str, bool]) -> None:
    """Warn where AutoTokenizer prefers the family's own tokenizer to the one in the folder, as it does for Qwen 2."""
    if not (folder / "config.json").is_file():  # without which AutoTokenizer reads nothing
        return
    if not _gives_back(AutoTokenizer, tokenizer, folder, trust):
        logger.warning(
            f"{folder}: AutoTokenizer does not give this student's tokenizer back; "
            "load it with transformers.PreTrainedTokenizerFast.from_pretrained"
        )


def tokenizer_class(tokenizer: Any, student: Any) -> str | None:
    """The class that gives a student's tokenizer back from its folder, where AutoTokenizer does not; else None.

    It is tried as a model card would have it, on a folder of its own that is removed.
    """
    config: Any = getattr(student, "config", None)
    if not hasattr(config, "save_pretrained") or trust_of(student):
        return None
    with TemporaryDirectory(prefix="distill-") as parent:
        folder = Path(parent)
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if not (folder / "tokenizer.json").is_file():
            return None
        _rewrite(folder / "tokenizer_config.json", lambda fields: _generic_tokenizer(fields, tokenizer, student))
        if _gives_back(AutoTokenizer, tokenizer, folder, {}):
            return None
        return "PreTrainedTokenizerFast" if _gives_back(PreTrainedTokenizerFast, tokenizer, folder, {}) else None


def _gives_back(kind: Any, tokenizer: Any, folder: Path, trust: dict[str, bool]) -> bool:
    """Whether a class of transformers loads this very tokenizer from a folder."""
    vocab = tokenizer.get_vocab()
    text = " ".join(list(vocab)[:1000])
    try:
        again = kind.from_pretrained(folder, **trust)
        ids, expected = (one(text, verbose=False).input_ids for one in (again, tokenizer))
        return bool(again.get_vocab() == vocab and ids == expected)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
