"""The folder that PEFT saves, with adapters alone: merged into the model that they were trained on, once.

The outcome is an ordinary folder beside those of `distill.models.converted`, and whatever reads models reads that.
"""

import hashlib
import importlib.util
import json
import logging
import shutil
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from distill.data.disk_cache import once
from distill.models.boundary import quietly
from distill.models.converted import CACHE, ORIGIN, Origin
from distill.models.kind import saved_class
from distill.models.ties import settle_ties
from distill.runtime.errors import SettingError, first_line
from distill.runtime.files import atomic, make_folder
from distill.runtime.version import pip_install

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base_model_name_or_path"
# Of tokenizers, as a folder of any family may have them.
TOKENIZER = ("tokenizer*", "*vocab*", "*.model", "merges*", "special_tokens_map.json", "added_tokens.json", "*.jinja")
CLASSIFIERS = ("score.weight", "classifier.weight", "classifier.out_proj.weight", "out_proj.weight")  # [classes, H]
FORM = 1  # of the folders; another number makes them anew

logger = logging.getLogger(__name__)


def holds_adapters(folder: Path) -> bool:
    """Whether a folder has adapters of PEFT, and no weights of a model beside them."""
    weights = (file for kind in ("*.safetensors", "pytorch_model*.bin") for file in folder.glob(kind))
    return (folder / CONFIG).is_file() and all(file.name.startswith("adapter_") for file in weights)


def merged_folder(path: str, setting: str) -> Path | None:
    """The folder of the model that a folder of adapters gives with its base; None for a path that is no such folder.

    Raises:
        SettingError: PEFT or the base model is not there, or the adapters are no change of its weights.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir() or not holds_adapters(folder):
        return None
    try:
        base = json.loads((folder / CONFIG).read_text("utf-8")).get(BASE)
    except (OSError, ValueError, AttributeError) as error:
        problem = f"its {CONFIG} is damaged ({first_line(error)})"
        raise _refused(problem, setting, path, "save the adapters again") from error
    merging = f"merge them with merge_and_unload() of PEFT and save the outcome; its base is {base}"
    if not base or not isinstance(base, str):
        cure = f"set {BASE} in that file to the folder or Hub name of the model that they were trained on"
        raise _refused(f"it holds adapters of PEFT, and its {CONFIG} names no base model", setting, path, cure)
    if not (folder / WEIGHTS).is_file():
        raise _refused(f"it has the {CONFIG} of adapters and no {WEIGHTS}", setting, path, "save them with PEFT again")
    if importlib.util.find_spec("peft") is None:
        cure = f"run `{pip_install('lora')}`, or {merging}"
        raise _refused("it holds adapters of PEFT, which is not installed", setting, path, cure)
    place = _base_folder(base, folder)
    files = [folder / CONFIG, folder / WEIGHTS, *(sorted(place.glob("*")) if place else ())]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    key = hashlib.sha256(repr((FORM, str(folder.resolve()), str(place or base), stats)).encode()).hexdigest()[:12]
    return _written(str(folder), str(place or base), key, path, setting)


def _refused(problem: str, setting: str, path: str, cure: str) -> SettingError:
    return SettingError(problem, setting=setting, value=path, cure=cure)


def _base_folder(base: str, folder: Path) -> Path | None:
    """Where the base model lies, from here or from its adapters; None: it is a name on the Hub."""
    for place in (Path(base).expanduser(), folder / base):
        if place.is_dir():
            return (place / "student" if (place / "student").is_dir() else place).resolve()
    return None


@cache
def _written(folder: str, base: str, key: str, path: str, setting: str) -> Path:
    root = Path(CACHE).expanduser()
    make_folder(root, "HOME")
    target = root / f"{Path(folder).resolve().name}-merged-{key}"
    with once(target) as missing:
        if missing:
            logger.info(f"{setting}={path}: merging its adapters into {base}, once, in {target}")
            try:
                with quietly(), atomic(target) as new:
                    _write(Path(folder), base, new)
            except SettingError:
                raise
            except Exception as error:  # of transformers and PEFT, which have no class in common
                problem = f"its adapters cannot be merged into their base {base} ({first_line(error)[:200]})"
                cure = f"correct {BASE} in its {CONFIG}, or merge them with merge_and_unload() of PEFT"
                raise _refused(problem, setting, path, cure) from error
    return target


def _write(folder: Path, base: str, new: Path) -> None:
    """Write the merged model in fp32, with the tokenizer of the adapters' folder or else of the base."""
    import peft

    config = AutoConfig.from_pretrained(base)
    adapters = peft.PeftConfig.from_pretrained(str(folder))
    cls, fields = _class_of(config, adapters, folder)
    model, report = cls.from_pretrained(
        base, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **fields
    )
    with safe_open(folder / WEIGHTS, "pt") as tensors:
        stored = {name.removeprefix("base_model.model.") for name in tensors.keys()}  # noqa: SIM118
    if missing := sorted({*report["missing_keys"]} - stored):  # transformers has filled them with random numbers
        raise ValueError(f"neither has {missing[0]}")
    settle_ties(model)
    adapted = peft.PeftModel.from_pretrained(model, str(folder), config=adapters).eval()
    if not hasattr(adapted.base_model, "merge_and_unload"):
        raise ValueError(f"{adapters.peft_type.value} adds something else than weights")
    merged: Any = adapted.merge_and_unload()
    settle_ties(merged)
    merged.save_pretrained(new)
    source = folder if any(folder.glob("tokenizer*")) else Path(base)
    if source.is_dir():
        for file in {file for pattern in TOKENIZER for file in source.glob(pattern) if file.is_file()}:
            shutil.copyfile(file, new / file.name)
    else:
        AutoTokenizer.from_pretrained(base).save_pretrained(new)
    (new / ORIGIN).write_text(json.dumps(asdict(Origin(folder.resolve().name)), indent=1) + "\n", encoding="utf-8")


def _class_of(config: Any, adapters: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The class of transformers that the adapters were trained in, and fields of its configuration."""
    task = str(getattr(adapters.task_type, "value", adapters.task_type))
    if task == "SEQ_CLS":
        with safe_open(folder / WEIGHTS, "pt") as tensors:
            heads = [name for name in tensors.keys() if name.endswith(CLASSIFIERS)]  # noqa: SIM118
            classes = tensors.get_slice(heads[-1]).get_shape()[0] if heads else config.num_labels
        fields = {} if classes == config.num_labels else {"num_labels": classes}
        return transformers.AutoModelForSequenceClassification, fields
    named = getattr(transformers, saved_class(config), None)
    return named or transformers.AutoModelForCausalLM, {}
