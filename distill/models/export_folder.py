"""The student as a folder that transformers and whatever reads its folders load, and that gives the student back."""

import copy
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_model
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from distill.distributed.shard import plain_class
from distill.models.blocks import in_evaluation_mode
from distill.models.check import UNFIT, alike
from distill.models.converted import quietly
from distill.models.kernels.masks import FLASH, attention_of
from distill.models.language_model import pooled_width
from distill.models.pooling import MEAN, SavedPooling, save_pooling
from distill.models.pooling import OF_EXPORT as OF_POOLING
from distill.models.weights import TIED, declared_ties, keep_soft_cap, word_embeddings
from distill.runtime.errors import SettingError, first_line
from distill.runtime.files import atomic
from distill.runtime.host import is_out_of_memory
from distill.runtime.users_code import MISTAKES, mistake

logger = logging.getLogger(__name__)

LARGEST_FILE = "2GB"
CARD = "README.md"
# What a student's folder may have beside its card, by the form of its weights and the kind of its tokenizer.
FILES = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "chat_template.jinja",
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "spiece.model", "sentencepiece.bpe.model", *OF_POOLING,
)  # fmt: skip


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
        tokenizer: its tokenizer; `tokenizer_class` says what gives it back where AutoTokenizer does not.
        folder: appears whole or not at all; what stood there is replaced.
        card: the content of its README.md; None: there is none.
        durable: also flush everything to the disk, for what is not written again after a crash of the machine.
        auto_class: of transformers, by which the card loads the student; None: its own class.
        vectors: how a sentence encoder makes them, which its folder says too; None: it is none.

    Raises:
        SettingError: what loads from the folder is another model; then there is no folder.
    """
    with atomic(folder, durable) as new, _by_sdpa(student):
        weights = _write_weights(student, new)
        _write_tokenizer(tokenizer, student, new)
        if card is not None:
            (new / CARD).write_text(card, encoding="utf-8")
        if vectors is not None:
            save_pooling(new, vectors, pooled_width(student, vectors.kind or MEAN))
        _check_export(new, student, weights, auto_class)


def try_export(student: Any) -> None:
    """Export the weights of a student of the user's class into a folder that is removed, before it is trained."""
    try:
        with TemporaryDirectory(prefix="distill-") as parent, torch.random.fork_rng([]):
            folder = Path(parent) / "student"
            _check_export(folder, student, _write_weights(student, folder), None)
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
    is_untied = _untied_by_adapters(student, weights)
    # Files are made in memory before they are written: of a large model one after the other.
    student.save_pretrained(folder, state_dict=weights, max_shard_size=LARGEST_FILE)
    if is_untied:
        config = folder / "config.json"
        fields = json.loads(config.read_text(encoding="utf-8")) | {TIED: False}
        config.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return weights


def _untied_by_adapters(student: Any, weights: dict[str, torch.Tensor]) -> bool:
    """Whether an adapter of the embeddings alone was merged into them, so that the head is tied to them no more."""
    names, ties = word_embeddings(student), declared_ties(student)
    if names is None or names[0] not in ties or not student.config.tie_word_embeddings:
        return False
    if torch.equal(*(weights[name] for name in names)):
        return False
    for target in ties:  # transformers writes of two names for one tensor the first alone
        weights[target] = weights[target].clone()
    return True


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


def _write_tokenizer(tokenizer: Any, student: Any, folder: Path) -> None:
    """Write a tokenizer; one with a tokenizer.json names a class that takes that file as it stands.

    That class gives `token_type_ids` too, which most models refuse; so the inputs are named.
    """
    tokenizer.save_pretrained(folder)
    if (folder / "tokenizer.json").is_file():
        segments = getattr(getattr(student, "config", None), "type_vocab_size", None) or 0
        inputs = [name for name in tokenizer.model_input_names if name != "token_type_ids" or segments > 1]
        file = folder / "tokenizer_config.json"
        fields = json.loads(file.read_text(encoding="utf-8"))
        fields |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs}
        text = json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")


def tokenizer_class(tokenizer: Any, student: Any) -> str | None:
    """The class that gives a student's tokenizer back from its folder, where AutoTokenizer does not; else None.

    AutoTokenizer prefers the family's own tokenizer for some, such as Qwen 2. It is tried as a model card would have
    it, on a folder of its own that is removed.
    """
    config: Any = getattr(student, "config", None)
    if not hasattr(config, "save_pretrained") or _trust_of(student):
        return None
    with TemporaryDirectory(prefix="distill-") as parent:
        folder = Path(parent)
        config.save_pretrained(folder)
        _write_tokenizer(tokenizer, student, folder)
        if not (folder / "tokenizer.json").is_file() or _gives_back(AutoTokenizer, tokenizer, folder):
            return None
        return "PreTrainedTokenizerFast" if _gives_back(PreTrainedTokenizerFast, tokenizer, folder) else None


def _gives_back(kind: Any, tokenizer: Any, folder: Path) -> bool:
    """Whether a class of transformers loads this very tokenizer from a folder."""
    vocab = tokenizer.get_vocab()
    text = " ".join(list(vocab)[:1000])
    try:
        again = kind.from_pretrained(folder)
        ids, expected = (one(text, verbose=False).input_ids for one in (again, tokenizer))
        return bool(again.get_vocab() == vocab and ids == expected)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


# --- whether the folder gives the student back: the same names and values of weights, and the same numbers


def _check_export(folder: Path, student: Any, weights: dict[str, torch.Tensor], auto_class: str | None) -> None:
    """Refuse a folder from which another model would load than the student.

    The weights are windows on the files of the folder, so a large student does not lie in memory a second time.

    Args:
        weights: of the student, by their names in its class.
        auto_class: of transformers, by which the model card loads it; None: the student's own class.
    """
    if not isinstance(student, PreTrainedModel):
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _refuse(different=_different(stored, weights), unexpected=stored.keys() - weights.keys())
        return
    kind = plain_class(student) if auto_class is None else getattr(transformers, auto_class)
    trust = {} if auto_class is None else _trust_of(student)
    try:
        with quietly():
            loaded, report = kind.from_pretrained(
                folder, dtype="auto", use_safetensors=True, output_loading_info=True, **trust
            )
    except (OSError, *UNFIT) as error:
        raise SettingError(f"The student cannot be exported: its folder does not load ({mistake(error)})") from error
    keep_soft_cap(loaded)
    same_class = type(loaded) is plain_class(student)  # else it lacks a head that is not used
    unexpected = report["unexpected_keys"] if same_class else ()
    different = _different(loaded.state_dict(), weights)
    _refuse(missing=report["missing_keys"], unexpected=unexpected, different=different)
    with _exact_products():  # of two devices, perhaps
        is_same = alike(_logits(loaded), _logits(student))
    if not is_same:
        raise SettingError(
            "The student cannot be exported: its folder loads with the same weights and other logits; keep all that "
            "its forward depends on in its config, so that config.json holds it"
        )


def _trust_of(student: Any) -> dict[str, bool]:
    """What loads a student again whose code came with a model: the user trusts it, and it has run here already."""
    is_remote = isinstance(student, PreTrainedModel) and student.is_remote_code()
    return {"trust_remote_code": True} if is_remote else {}


def _different(stored: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> list[str]:
    """The names of weights that both have, with other values."""
    both = ((name, tensor, weights[name]) for name, tensor in stored.items() if name in weights)
    return [name for name, one, other in both if not torch.equal(one, other.detach().to(one.device, one.dtype))]


def _refuse(**wrong: Any) -> None:
    """Raises SettingError where there are names of weights that are wrong, by what is wrong with them."""
    kinds = [f"{kind}: {', '.join(sorted(names)[:3])}" for kind, names in wrong.items() if names]
    if kinds:
        raise SettingError(
            f"The student cannot be exported: what loads from its folder is another model (weights {'; '.join(kinds)});"
            " build it without wrappers that its class does not know"
        )


@contextmanager
def _by_sdpa(student: Any) -> Iterator[None]:
    """While it is open a student that trains by flash attention, which takes no fp32, attends by torch's SDPA."""
    if not (name := attention_of(student)).startswith(FLASH):
        yield
        return
    student.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        student.set_attn_implementation(name)


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
    ids = torch.arange(8, device=next(model.parameters()).device)[None]
    with in_evaluation_mode(model):
        outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    named = [name for name in ("prediction_logits", "logits", "start_logits") if hasattr(outputs, name)]
    logits: torch.Tensor = getattr(outputs, named[0]) if named else outputs[0]
    return logits.float().cpu()
