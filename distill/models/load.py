"""Reads models and tokenizers from folders or the Hub, and refuses what does not fit the task."""

import itertools
import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from distill.config import HERE
from distill.config.models import BUNDLED
from distill.models.adapters import merged_folder
from distill.models.boundary import loading
from distill.models.check import check_model
from distill.models.converted import converted
from distill.models.kernels.attention import keep_soft_cap
from distill.models.kind import CAUSAL, CLASSES, MASKED, SPANS, ModelKind, refuse_other_kind
from distill.models.memory import require_memory_for_weights
from distill.models.ties import settle_ties, word_embeddings
from distill.models.wrapped_names import described, without_wrappers
from distill.runtime.errors import SettingError, first_line
from distill.runtime.hub import is_hub_reached

AS_SAVED = "give its files as they were saved together"  # the cure of a folder that does not load
UNKNOWN = "a \U0010ffff"  # its last character is in no vocabulary
# A text that tells apart how tokenizers split: case, digits, apostrophes, blanks, lines, accents and scripts.
SPLIT = "It's 12345 or 3.14, DON'T  ask!!\n\n\tna\u00efve caf\u00e9 (\u65e5\u672c\u8a9e) \u0645\u0631 \U0001f642 end "
FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors names the formats in which a model is read
ATTENTION = (None, "eager", "sdpa")  # that compute in fp32 on any device, as models are checked
# Of any family: tokenizer.json, tokenizer.model, vocab.txt, spiece.model, merges.txt, dict.txt and the like.
TOKENIZER_FILES = ("tokenizer*", "*vocab*", "*.model", "merges*", "dict*.txt", "*.tiktoken", "*.bpe")

logger = logging.getLogger(__name__)

# DeBERTa as its authors published it, v1 to v3: its head stands under other names and in another class of transformers,
# which computes the same. (The class that the configuration names by legacy=false has no output embedding to read.)
DEBERTA = ("deberta", "deberta-v2")
DEBERTA_HEAD = {
    r"^lm_predictions\.lm_head\.bias": "cls.predictions.bias",
    r"^lm_predictions\.lm_head\.": "cls.predictions.transform.",
}


def bundled_folder(name: str) -> str:
    """Where a model that ships with this package lies, one of `config.teacher.BUNDLED`."""
    return str(HERE / "teacher" / name)


def model_folder(path: str, setting: str = "model") -> str:
    """Where the files of a model lie: the student in a run folder, or what a GGUF file or a package was converted to.

    `bundled_deep` and `bundled_small`, where no folder has that name, are the models of this package. Of a folder with
    adapters of PEFT alone: the folder of the model that they were merged into.

    Anything else is taken as it is (a folder, or a name on the Hub).

    Raises:
        SettingError: a path that none can be, or a file or package that cannot be read; the message names `setting`.
    """
    try:
        if path in BUNDLED and not Path(path).exists():
            return bundled_folder(path)
        if (folder := converted(path, setting) or merged_folder(path, setting)) is not None:
            return str(folder)
        folder = Path(path).expanduser()
        return str(folder / "student" if (folder / "student").is_dir() else folder)
    except (OSError, RuntimeError) as error:  # it is too long, or ~NAME is nobody here
        raise SettingError(f"{path[:100]} is the path of no folder: {first_line(error)[:100]}") from error


class HubOptions(NamedTuple):
    """What else names a model on the Hub: a branch, tag or commit, and whether its own code may run."""

    revision: str | None = None  # the newest
    trust_remote_code: bool = False


class HubArguments(TypedDict, total=False):
    """What transformers' `from_pretrained` gets of them."""

    revision: str
    trust_remote_code: bool
    local_files_only: bool


THE_NEWEST = HubOptions()


def hub_arguments(folder: str, hub: HubOptions) -> HubArguments:
    """What transformers' `from_pretrained` gets; of a name while the Hub is not reached, to look in the cache alone."""
    is_cached_alone = not Path(folder).exists() and not is_hub_reached()
    arguments: HubArguments = {"revision": hub.revision or "main", "trust_remote_code": hub.trust_remote_code}
    return {**arguments, "local_files_only": True} if is_cached_alone else arguments


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

    Raises:
        SettingError: nothing loadable at `path`, or not with all its weights; the message names `setting`.
    """
    folder = model_folder(path, setting)
    refuse_custom_class(setting, path)
    config = saved_config(setting, path, hub)
    with loading(setting, path, folder, f"does not load as a {kind.noun}", AS_SAVED):
        refuse_other_kind(f"{setting}={path}", config, kind)
        _refuse_other_weights(setting, path, Path(folder))
        _refuse_adapters(setting, path, folder, hub)
        names, arguments = {}, hub_arguments(folder, hub)
        if config.model_type in DEBERTA:
            config.legacy, names = True, DEBERTA_HEAD
        fields = {**kind.fields, **(changes(config) if changes else {})}
        fields |= {"dtype": None} if mapped else {}  # the format of the files counts, which may be another one
        for name, value in fields.items():
            setattr(config, name, value)
        if not (mapped or hub.trust_remote_code):
            require_memory_for_weights(f"{setting}={path}", lambda: kind.auto_class.from_config(config))
        # With PEFT installed, transformers looks for adapters of a name on the Hub although files are to be local.
        place = str(_on_disk(folder, hub)) if arguments.get("local_files_only", False) else folder
        arguments_of_all = {**arguments, "config": config, "use_safetensors": True, "output_loading_info": True}
        arguments_of_all["dtype"] = "auto" if mapped else torch.float32
        model, report = kind.auto_class.from_pretrained(place, key_mapping=names or None, **arguments_of_all)
        if report["missing_keys"] and (renamed := without_wrappers(model, _on_disk(folder, hub))):
            logger.info(f"{setting}={path}: {described(renamed)}")
            exact = {f"^{re.escape(old)}$": new for old, new in renamed.items()}
            model, report = kind.auto_class.from_pretrained(place, key_mapping=exact, **arguments_of_all)
    _refuse_missing(setting, path, kind, model, report, new_heads)
    settle_ties(model)
    keep_soft_cap(model)
    if not mapped:
        _own_weights(model)
        check_model(model, f"{setting}={path}", kind)
    return model


def _refuse_missing(
    setting: str, path: str, kind: ModelKind, model: Any, report: dict[str, Any], new_heads: bool
) -> None:
    """Raises SettingError for weights that the files lack, but for heads that may be new, or that only they have."""
    missing, names = sorted(report["missing_keys"]), word_embeddings(model)  # filled with random numbers
    head = "" if names is None else names[0].removesuffix("weight")
    if left_out := next((name for name in sorted(report["unexpected_keys"]) if head and name.startswith(head)), None):
        raise SettingError(
            f"its files have {left_out}, which a {type(model).__name__} leaves out of its logits",
            setting=setting,
            value=path,
            cure="choose another, or correct its config.json where that can say that the head has it",
        )
    encoder = f"{model.base_model_prefix}."
    others = [name for name in missing if name.startswith(encoder) and not name.startswith(f"{encoder}pooler")]
    if not others and (new_heads or not missing):
        if missing:
            logger.info(f"{setting}={path}: its head for this task is new ({', '.join(missing)})")
        return
    besides = sorted(report["unexpected_keys"])
    problem, cure = f"it lacks weights of a {kind.noun}, such as {(others or missing)[0]}", "choose another"
    if besides and others:
        problem += f", and has others, such as {besides[0]}"
        cure = "save it from the model inside of its wrapper, such as model.module, or choose another"
    elif names is not None and missing == [names[0]] and model.config.tie_word_embeddings is False:
        problem += ", and its configuration ties no head to the embeddings"
        cure = "set tie_word_embeddings to true where its head is its embeddings, or choose another"
    raise SettingError(problem, setting=setting, value=path, cure=cure)


def _refuse_adapters(setting: str, path: str, folder: str, hub: HubOptions) -> None:
    """Raises SettingError for adapters beside the weights, which transformers adds only where PEFT is installed."""
    from transformers.utils import find_adapter_config_file, is_peft_available

    has_adapters = (Path(folder) / "adapter_config.json").is_file()
    if not Path(folder).is_dir() and is_peft_available():
        arguments = hub_arguments(folder, hub)
        alone = arguments.get("local_files_only", False)
        file = find_adapter_config_file(folder, revision=arguments["revision"], local_files_only=alone)
        has_adapters = file is not None
    if has_adapters:
        raise SettingError(
            f"{setting}={path} holds adapters beside its weights (adapter_config.json): merge them, such as by PEFT's "
            "merge_and_unload(), and save the model to a folder of its own"
        )


def _own_weights(model: Any) -> None:
    """Move weights into memory of their own: transformers gives windows on their file.

    They would change with it, or end the process where it is cut.
    """
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        tensor.data = tensor.data.clone()


def _refuse_other_weights(setting: str, path: str, folder: Path) -> None:
    """Refuse a folder whose weights are pickles, or numbers that transformers would take for floating-point ones."""
    files = sorted(folder.glob("*.safetensors"))
    if not files and any(folder.glob("*.bin")):
        raise SettingError(
            f"{setting}={path} has its weights as pickles, which can run code when they are read: write them as "
            "model.safetensors, with save_pretrained of transformers"
        )
    for file in files:
        with safe_open(file, "pt") as tensors:
            formats = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys() if name.endswith("weight")}  # noqa: SIM118
        if other := [f"{name} ({format})" for name, format in formats.items() if format not in FLOATS]:
            raise SettingError(
                f"{setting}={path} has weights in other formats than fp32, bf16 and fp16, such as {other[0]}: give the "
                "model as it was before it was quantized"
            )


def saved_config(setting: str, path: str, hub: HubOptions = THE_NEWEST) -> Any:
    """The configuration of a saved model.

    Raises:
        SettingError: there is none that loads, or its weights are quantized, or its attention is not computed here.
    """
    folder = model_folder(path, setting)
    if Path(folder).is_file():
        raise SettingError(f"{setting}={path} is a file: give the folder that it lies in, or a GGUF file (.gguf)")
    with loading(setting, path, folder, "does not load", "correct its config.json"):
        config = AutoConfig.from_pretrained(folder, **hub_arguments(folder, hub))
        if (quantization := getattr(config, "quantization_config", None)) is not None:
            method = quantization.get("quant_method", "an unnamed method")
            raise SettingError(
                f"{setting}={path} has weights that are quantized ({method}), and models are read in fp32, bf16 or "
                "fp16: give the model as it was before it was quantized"
            )
        if config.architectures is not None and not _is_list_of_names(config.architectures):
            raise SettingError(
                f"{setting}={path}: its config.json sets architectures={config.architectures}, which is no list of "
                "names of classes: correct it"
            )
        if (attention := config._attn_implementation) not in ATTENTION:
            raise SettingError(
                f"{setting}={path}: its config.json sets attn_implementation={attention}, and models are computed with "
                "sdpa or eager: delete that line"
            )
    return config


def _on_disk(folder: str, hub: HubOptions) -> Path:
    """Where the files of a model lie: a folder, or the cached snapshot of a name on the Hub, with its config.json."""
    if Path(folder).exists():
        return Path(folder)
    from transformers.utils import cached_file

    try:
        arguments = hub_arguments(folder, hub)
        offline = arguments.get("local_files_only", False)
        file = cached_file(folder, "config.json", revision=arguments["revision"], local_files_only=offline)
    except Exception:  # of whatever kind: whoever loads the model reports it
        return Path(folder)
    return Path(folder if file is None else file).parent


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_generic(folder: Path) -> bool:
    """Whether a folder's tokenizer is tokenizer.json as it stands, which AutoTokenizer overrules for some families."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    generic = isinstance(settings, dict) and settings.get("tokenizer_class") == "PreTrainedTokenizerFast"
    return generic and (folder / "tokenizer.json").is_file()


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
    """Refuse a folder of weights without the class that they belong to, as students of plain modules are saved.

    Raises:
        SettingError: with what to do instead; also for a run that has no student yet.
    """
    refuse_unfinished(setting, path)
    folder = Path(model_folder(path))
    if (folder / "model.safetensors").is_file() and not (folder / "config.json").is_file():
        group = setting.rpartition(".")[0] or setting
        chosen = "" if "." in group else f"{group}=custom "  # one of several teachers is no group with options
        raise SettingError(
            f"{setting}={path} holds the weights of a module of your own: name what makes it, as {chosen}"
            f"{group}._target_=package.module.callable {group}.path={path}"
        )


def load_tokenizer(
    setting: str, path: str, kind: ModelKind = MASKED, hub: HubOptions = THE_NEWEST
) -> PreTrainedTokenizerBase:
    """A fast tokenizer, with a mask token for masked models.

    Raises:
        SettingError: there is none at `path`; the message names `setting`.
    """
    folder = model_folder(path, setting)
    refuse_unfinished(setting, path)
    _refuse_no_files(setting, path, Path(folder))
    with loading(setting, path, folder, "has no tokenizer that loads", AS_SAVED):
        if _is_generic(Path(folder)):
            tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, **hub_arguments(folder, hub))
            tokenizer = _as_saved(setting, path, tokenizer, _on_disk(folder, hub))
        if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):  # transformers makes one up
            raise SettingError(f"{setting}={path} has no tokenizer that loads: give a folder with its tokenizer.json")
        check_tokenizer(setting, path, tokenizer, kind)
        if kind.heads == CLASSES.heads and tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
            tokenizer.add_special_tokens(
                {"pad_token": tokenizer.eos_token}
            )  # a decoder's; the student is saved with it
    return tokenizer


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
    """Refuse a tokenizer that gives ids beyond the number of its tokens, or that fails at a character it lacks.

    Embeddings, counts and number formats of ids are sized by that number.

    Raises:
        SettingError: also for one that is slow, or lacks the mask token of a masked model.
    """
    if not tokenizer.is_fast:
        raise SettingError(
            f"a {kind.noun} needs a fast tokenizer",
            setting=setting,
            value=path,
            cure="choose another model or tokenizer",
        )
    if tokenizer.mask_token_id is None and kind.heads == SPANS.heads:
        raise SettingError(
            "answers are found by encoders here, and this is the tokenizer of a causal language model",
            setting=setting,
            value=path,
            cure="choose a model such as bert or roberta",
        )
    if tokenizer.mask_token_id is None and kind.vocabulary and not kind.causal:
        raise SettingError(
            f"a {kind.noun} needs a tokenizer with a mask token, and that of a causal language model has none",
            setting=setting,
            value=path,
            cure=f"choose {CAUSAL.objective}, which learns from such a model, or another model or tokenizer",
        )
    if not isinstance(length := tokenizer.model_max_length, int | float):
        raise SettingError(
            f"{setting}={path}: its tokenizer_config.json sets model_max_length={length}, which is no number: "
            "correct it"
        )
    size, vocabulary = len(tokenizer), tokenizer.get_vocab()
    largest = max(vocabulary, key=lambda token: vocabulary[token])
    if vocabulary[largest] >= size:
        raise SettingError(
            f"{setting}={path}: its tokenizer has {size:,} tokens, but the id of {largest} is {vocabulary[largest]:,}: "
            "number its tokens without gaps, from 0"
        )
    special = [getattr(tokenizer, f"{name}_token_id") for name in ("unk", "bos", "eos", "pad", "cls", "sep", "mask")]
    numbers = [*tokenizer.backend_tokenizer.encode(UNKNOWN).ids, *(number for number in special if number is not None)]
    if beyond := [number for number in numbers if number >= size]:
        raise SettingError(
            f"{setting}={path}: its tokenizer has {size:,} tokens, but puts the id {beyond[0]:,} around a text: "
            "correct the post_processor in its tokenizer.json"
        )


def _refuse_no_files(setting: str, path: str, folder: Path) -> None:
    """Refuse a folder with none of the files of a tokenizer, for which transformers would make an empty one up."""
    if folder.is_dir() and not any(next(folder.glob(name), None) for name in TOKENIZER_FILES):
        teacher = setting.removesuffix(".path")
        is_model = setting.startswith("teacher") and setting.endswith(".path")
        elsewhere = f", or name where it lies as {teacher}.tokenizer=FOLDER" if is_model else ""
        raise SettingError(
            f"{setting}={path} has no tokenizer that loads: the folder has no tokenizer.json, nor a vocabulary; save "
            f"the tokenizer beside the model{elsewhere}"
        )


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
