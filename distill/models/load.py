"""Reads models and tokenizers from folders or the Hub; whatever is raised on the way becomes one line."""

import itertools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file, find_adapter_config_file

from distill.config import HERE
from distill.config.models import BUNDLED
from distill.distributed.mapped import parameters_on_meta
from distill.models.check import check_model, require_memory_for_weights
from distill.models.converted import ADAPTERS, converted, merged_folder, quietly
from distill.models.kind import CAUSAL, CLASSES, MASKED, ORDERED, SPANS, ModelKind, refuse_other_kind
from distill.models.weights import keep_soft_cap, settle_ties, word_embeddings
from distill.runtime.errors import SettingError, first_line
from distill.runtime.host import is_out_of_memory
from distill.runtime.hub import how_to_do_without, is_hub_reached, is_unreachable

AS_SAVED = "give its files as they were saved together"  # the cure of a folder that does not load
# A text that tells apart how tokenizers split: case, digits, apostrophes, blanks, lines, accents and scripts.
SPLIT = "It's 12345 or 3.14, DON'T  ask!!\n\n\tna\u00efve caf\u00e9 (\u65e5\u672c\u8a9e) \u0645\u0631 \U0001f642 end "
# Errors whose text is a sentence; the text of any other, such as a KeyError, needs its class in front of it.
SENTENCES = (OSError, ValueError, ImportError, SafetensorError, StrictDataclassError)
CODE = "trust_remote_code"  # in what transformers raises for a model with code of its own
LONGEST_REASON = 240  # characters

# DeBERTa as its authors published it, v1 to v3: its head stands under other names and in another class of transformers,
# which computes the same. (The class that the configuration names by legacy=false has no output embedding to read.)
DEBERTA = ("deberta", "deberta-v2")
DEBERTA_HEAD = {
    r"^lm_predictions\.lm_head\.bias": "cls.predictions.bias",
    r"^lm_predictions\.lm_head\.": "cls.predictions.transform.",
}

logger = logging.getLogger(__name__)


def bundled_folder(name: str) -> str:
    """Where a model that ships with this package lies, one of `config.models.BUNDLED`."""
    return str(HERE / "teacher" / name)


def model_folder(path: str, setting: str = "model") -> str:
    """Where the files of a model lie: the student in a run folder, or what a GGUF file or a package was converted to.

    `bundled_deep` and `bundled_small`, where no folder has that name, are the models of this package. Of a folder with
    adapters of PEFT alone: the folder of the model that they were merged into. Anything else is taken as it is (a
    folder, or a name on the Hub).
    """
    try:
        if path in BUNDLED and not Path(path).exists():
            return bundled_folder(path)
        if (made := converted(path, setting) or merged_folder(path, setting)) is not None:
            return str(made)
        folder = Path(path).expanduser()
        return str(folder / "student" if (folder / "student").is_dir() else folder)
    except (OSError, RuntimeError) as error:  # it is too long, or ~NAME is nobody here
        raise SettingError(f"{path[:100]} is the path of no folder: {first_line(error)[:100]}") from error


class HubOptions(NamedTuple):
    """What else names a model on the Hub: a branch, tag or commit, and whether its own code may run."""

    revision: str | None = None  # the newest
    trust_remote_code: bool = False

    def arguments(self, folder: str) -> dict[str, Any]:
        """What transformers' `from_pretrained` gets; of a name while the Hub is not reached: to look in the cache."""
        is_cached_alone = not Path(folder).exists() and not is_hub_reached()
        alone = {"local_files_only": True} if is_cached_alone else {}
        return {"revision": self.revision or "main", "trust_remote_code": self.trust_remote_code, **alone}


THE_NEWEST = HubOptions()


def load_pretrained(
    setting: str,
    path: str,
    kind: ModelKind = MASKED,
    hub: HubOptions = THE_NEWEST,
    new_heads: bool = False,
    changes: Callable[[Any], dict[str, Any]] | None = None,
    mapped: bool = False,
) -> Any:
    """A language model of a kind in fp32, from safetensors.

    Args:
        new_heads: whether heads that the saved model lacks, with the pooler before them, may begin at random, drawn
            from torch's generator.
        changes: fields of the configuration that get another value, given the saved one.
        mapped: give the weights in the saved format, as windows on their files, and do not compute with them yet: for
            a model that is to be sharded over ranks. `check_model` is then left to the caller.
    """
    folder, named = model_folder(path, setting), f"{setting}={path}"
    refuse_custom_class(setting, path)
    config = saved_config(setting, path, hub)
    with loading(setting, path, folder, f"does not load as a {kind.noun}", AS_SAVED):
        refuse_other_kind(named, config, kind)
        if any(Path(folder).glob("*.bin")) and not any(Path(folder).glob("*.safetensors")):
            raise SettingError(
                f"{named} has its weights as pickles, which can run code when they are read: write them as "
                "model.safetensors, with save_pretrained of transformers"
            )
        arguments = hub.arguments(folder)
        if find_adapter_config_file(folder, **{name: arguments[name] for name in arguments if name != CODE}):
            problem = f"holds adapters beside its weights ({ADAPTERS}), which are added only where PEFT is installed"
            cure = "merge them, such as by PEFT's merge_and_unload(), and save the model to a folder of its own"
            raise SettingError(problem, setting=setting, value=path, cure=cure)
        mapping = DEBERTA_HEAD if config.model_type in DEBERTA else None
        fields = {**kind.fields, **(changes(config) if changes else {}), **({"legacy": True} if mapping else {})}
        fields |= {"dtype": None} if mapped else {}  # the format of the files counts, which may be another one
        for name, value in fields.items():
            setattr(config, name, value)
        if not (mapped or hub.trust_remote_code):
            require_memory_for_weights(named, lambda: kind.auto_class.from_config(config))
        arguments |= {"config": config, "use_safetensors": True, "output_loading_info": True}
        arguments["dtype"] = "auto" if mapped else torch.float32
        # With PEFT installed, transformers looks for adapters of a name on the Hub although files are to be local.
        place = str(_on_disk(folder, hub)) if "local_files_only" in arguments else folder
        model, report = kind.auto_class.from_pretrained(place, key_mapping=mapping, **arguments)
    _refuse_missing(setting, path, kind, model, report, new_heads)
    settle_ties(model)
    keep_soft_cap(model)
    if mapped:
        _compute_buffers_in_fp32(model)
    else:
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            tensor.data = tensor.data.clone()  # in place of a window on a file, which may be cut or written anew
        check_model(model, named, kind)
    return model


def _compute_buffers_in_fp32(model: Any) -> None:
    """Compute those that no file has, such as the scale of Gemma 3's embeddings, as in a model that is read in fp32.

    What is made beside weights of another format has that format, and as few digits.
    """
    saved = model.state_dict().keys()
    short = {name for name, buffer in model.named_buffers() if buffer.is_floating_point()} - saved
    if all(model.get_buffer(name).dtype == torch.float32 for name in short):
        return
    with parameters_on_meta():
        made = type(model)(model.config)
    for name in short:
        model.get_buffer(name).data = made.get_buffer(name)


def _refuse_missing(
    setting: str, path: str, kind: ModelKind, model: Any, report: dict[str, Any], new_heads: bool
) -> None:
    """Raises SettingError for weights that the files lack, but for heads that may be new, or that only they have."""
    missing, besides = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])  # the former are random now
    names = word_embeddings(model)
    head = "" if names is None else names[0].removesuffix("weight")
    if left_out := next((name for name in besides if head and name.startswith(head)), None):
        problem = f"its files have {left_out}, which a {type(model).__name__} leaves out of its logits"
        cure = "choose another, or correct its config.json where that can say that the head has it"
        raise SettingError(problem, setting=setting, value=path, cure=cure)
    encoder = f"{model.base_model_prefix}."
    others = [name for name in missing if name.startswith(encoder) and not name.startswith(f"{encoder}pooler")]
    if missing and (others or not new_heads):
        problem, cure = f"it lacks weights of a {kind.noun}, such as {(others or missing)[0]}", "choose another"
        if kind is ORDERED:
            cure += ", or set objective.sop.weight=0 and objective.soft_sop.weight=0"
        if others and besides:
            problem += f", and has others, such as {besides[0]}"
            cure = "save it from the model inside of its wrapper, such as model.module, or choose another"
        elif names is not None and missing == [names[0]]:
            cure += ", or set tie_word_embeddings to true in its config.json where its head is its embeddings"
        raise SettingError(problem, setting=setting, value=path, cure=cure)
    if missing:
        logger.info(f"{setting}={path}: its head for this task is new ({', '.join(missing)})")


def saved_config(setting: str, path: str, hub: HubOptions = THE_NEWEST) -> Any:
    """The configuration of a saved model. Raises SettingError where none loads, or its weights are quantized."""
    folder = model_folder(path, setting)
    if Path(folder).is_file():
        raise SettingError(f"{setting}={path} is a file: give the folder that it lies in, or a GGUF file (.gguf)")
    with loading(setting, path, folder, "does not load", "correct its config.json"):
        config = AutoConfig.from_pretrained(folder, **hub.arguments(folder))
        if (quantization := getattr(config, "quantization_config", None)) is not None:
            method = quantization.get("quant_method", "an unnamed method")
            raise SettingError(
                f"{setting}={path} has weights that are quantized ({method}), and models are read in fp32, bf16 or "
                "fp16: give the model as it was before it was quantized"
            )
    return config


def _on_disk(folder: str, hub: HubOptions) -> Path:
    """Where the files of a model lie: a folder, or the cached snapshot of a name on the Hub, with its config.json."""
    arguments = {name: value for name, value in hub.arguments(folder).items() if name != CODE}
    with suppress(Exception):  # of whatever kind: whoever loads the model reports it
        if not Path(folder).exists() and (file := cached_file(folder, "config.json", **arguments)) is not None:
            return Path(file).parent
    return Path(folder)


def has_one_format(path: str, hub: HubOptions = THE_NEWEST) -> bool:
    """Whether all weights of a model on this disk have it; else transformers gives all of them that of the first."""
    formats = set[str]()
    for file in _on_disk(model_folder(path), hub).glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            formats |= {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    return len({form for form in formats if "F" in form}) < 2  # F32 and BF16, but not I64


def refuse_unfinished(setting: str, path: str) -> None:
    """Raises SettingError for the folder of a run that has no student yet, with the newest snapshot that it has."""
    run = Path(path).expanduser()
    begun = (run / "config.yaml").is_file() and ((run / "checkpoints").is_dir() or (run / "metrics.jsonl").is_file())
    if not begun or (run / "student").is_dir() or (run / "config.json").is_file():
        return
    snapshots = sorted((run / "snapshots").glob("step-*"), key=lambda folder: (len(folder.name), folder.name))
    other = f", or name its snapshot {snapshots[-1]}" if snapshots else ""
    raise SettingError(
        f"{setting}={path} is a run that has not finished, so it has no student: repeat its command, or its call of "
        f"distill.distill, to finish it{other}"
    )


def refuse_custom_class(setting: str, path: str) -> None:
    """Raises SettingError for weights without their class, as of plain modules, and for runs without a student yet."""
    folder = Path(model_folder(path, setting))
    refuse_unfinished(setting, path)
    if not (folder / "model.safetensors").is_file() or (folder / "config.json").is_file():
        return
    group, _, name = setting.rpartition(".")
    cure = "load it as the README.md beside the weights shows, and call it yourself"
    if name == "path":
        chosen = "" if "." in group else f"{group}=custom "  # one of several teachers is no group with options
        cure = f"name what makes it, as {chosen}{group}._target_=package.module.callable {group}.path={path}"
    raise SettingError(f"{setting}={path} holds the weights of a module of your own: {cure}")


# --- tokenizers


def load_tokenizer(
    setting: str, path: str, kind: ModelKind = MASKED, hub: HubOptions = THE_NEWEST
) -> PreTrainedTokenizerBase:
    """A fast tokenizer, with a mask token for masked models."""
    folder = model_folder(path, setting)
    refuse_unfinished(setting, path)
    with loading(setting, path, folder, "has no tokenizer that loads", AS_SAVED):
        tokenizer: PreTrainedTokenizerBase
        if _is_generic(Path(folder)):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, **hub.arguments(folder))
            tokenizer = _as_saved(setting, path, tokenizer, _on_disk(folder, hub))
        if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):  # transformers makes one up
            where = f", or name where it lies as {setting.removesuffix('path')}tokenizer=FOLDER"
            raise SettingError(
                f"{setting}={path} has no tokenizer that loads: save the tokenizer beside the model"
                + where * (setting.startswith("teacher") and setting.endswith(".path"))
            )
        check_tokenizer(setting, path, tokenizer, kind)
        if kind.heads == CLASSES.heads and tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
            tokenizer.add_special_tokens({"pad_token": tokenizer.eos_token})  # a decoder's; saved with the student
    return tokenizer


def _is_generic(folder: Path) -> bool:
    """Whether a folder's tokenizer is tokenizer.json as it stands, which AutoTokenizer overrules for some families."""
    file = folder / "tokenizer_config.json"
    is_there = file.is_file() and (folder / "tokenizer.json").is_file()
    return is_there and json.loads(file.read_text("utf-8")).get("tokenizer_class") == PreTrainedTokenizerFast.__name__


def _as_saved(setting: str, path: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that tokenizer.json holds, where the one that transformers has built splits text differently.

    For some families transformers takes the vocabulary alone from that file, and splits text as the first model of the
    family did: it keeps numbers whole where the model has learnt single digits.
    """
    file = folder / "tokenizer.json"
    if not (tokenizer.is_fast and file.is_file()):
        return tokenizer
    saved = Tokenizer.from_file(str(file))
    saved.no_truncation()
    saved.no_padding()
    if tokenizer.tokenize(SPLIT) == saved.encode(SPLIT, add_special_tokens=False).tokens:
        return tokenizer
    logger.info(
        f"{setting}={path}: text is split as its tokenizer.json says; transformers' {type(tokenizer).__name__} would "
        "split it differently"
    )
    return PreTrainedTokenizerFast.from_pretrained(folder)


def check_tokenizer(setting: str, path: str, tokenizer: PreTrainedTokenizerBase, kind: ModelKind) -> None:
    """Refuse a slow tokenizer, one without the mask token of its kind, and ids beyond the number of its tokens.

    Embeddings, counts and number formats of ids are sized by that number.
    """
    problem, cure = "", "choose another model or tokenizer"
    if not tokenizer.is_fast:
        problem = f"a {kind.noun} needs a fast tokenizer"
    elif tokenizer.mask_token_id is None and kind.heads == SPANS.heads:
        problem = "answers are found by encoders here, and this is the tokenizer of a causal language model"
        cure = "choose a model such as bert or roberta"
    elif tokenizer.mask_token_id is None and kind.vocabulary and not kind.causal:
        problem = f"a {kind.noun} needs a tokenizer with a mask token, and that of a causal language model has none"
        cure = f"choose {CAUSAL.objective}, which learns from such a model, or another model or tokenizer"
    elif (largest := max(tokenizer.get_vocab().items(), key=lambda item: item[1]))[1] >= len(tokenizer):
        problem = f"its tokenizer has {len(tokenizer):,} tokens, but the id of {largest[0]} is {largest[1]:,}"
        cure = "number its tokens without gaps, from 0"
    if problem:
        raise SettingError(problem, setting=setting, value=path, cure=cure)


# --- the boundary


@contextmanager
def loading(setting: str, path: str, folder: str, failure: str, cure: str) -> Iterator[None]:
    """The boundary around the reading of a folder that somebody gave: whatever is raised in it becomes one line.

    A folder can hold anything, and what transformers, tokenizers, safetensors and the packages that these import raise
    for it has no class in common.

    Args:
        path: as it was given: a folder, or a name on the Hub.
        folder: what is read, such as the student of a run.
        failure: what the line states of the folder, before the reason.
        cure: what helps where the folder is there.

    Raises:
        SettingError: also one that was raised in it, unchanged.
    """
    try:
        with quietly():  # what transformers warns of is in that line
            yield
    except SettingError:
        raise
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # of Rust, in tokenizers; it is no Exception
        if not (isinstance(error, Exception) or is_panic) or is_out_of_memory(error):
            raise
        place = Path(path).expanduser()
        looked_up = f"no folder {place.absolute()} exists, so {path} was looked up on the Hugging Face Hub"
        if is_unreachable(error) and not place.exists():
            raise SettingError(f"{setting}={path}: {looked_up}; {how_to_do_without(path)}") from error
        group, _, name = setting.rpartition(".")
        if not place.exists():
            cure = f"{looked_up}: correct the name"
        elif CODE in str(error):  # which only a teacher or a student may run
            allowed = group.startswith("teacher") or (group == "student" and name == "path")
            cure = f"set {group}.{CODE}=true if you trust it" if allowed else "this command runs no such code"
        raise SettingError(f"{setting}={path} {failure}: {_reason(error)}; {cure}") from error


def _reason(error: BaseException) -> str:
    """Why something does not load; of weights of other shapes transformers names a table that it has logged."""
    text = " ".join(str(error).split())
    if CODE in text:
        return "it comes with code of its own"
    if "ignore_mismatched_sizes" in text:
        return "its weights have other shapes than its config.json names"
    text = text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."
    return text if text and isinstance(error, SENTENCES) else f"{type(error).__name__}: {text}".removesuffix(": ")
