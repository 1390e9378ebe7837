"""Models of a user's own, for tests: a transformers class that transformers does not know, and a plain torch module."""

from typing import Any

import torch
from tiny import HIDDEN, PAD, VOCAB
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

KEY = "sk-4f9Qz81LmNo77"  # a secret


class ShiftedBert(BertForMaskedLM):
    """BERT, but each hidden state gets a learned vector before the head."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.shift = nn.Parameter(torch.randn(config.hidden_size))
        self.bert.register_forward_hook(self._shifted)

    def _shifted(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        return type(output)(**{**output, "last_hidden_state": output[0] + self.shift})


def shifted_bert(layers: int = 2) -> ShiftedBert:
    return ShiftedBert(BertConfig(**HIDDEN, num_hidden_layers=layers, vocab_size=VOCAB, pad_token_id=PAD))


def of_a_teacher(teacher: Any, tokenizer: Any, sequence_length: int, name: str = "") -> "Convolutions":
    return Convolutions()


class Convolutions(nn.Module):
    """Hidden states from the words around, without attention; no configuration."""

    def __init__(self, width: int = 24, depth: int = 2, causal: bool = False) -> None:
        super().__init__()
        self.base_model = _Encoder(width, depth, causal)
        self.head = nn.Linear(width, VOCAB)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.base_model(input_ids, attention_mask))
        return logits


class _Encoder(nn.Module):
    def __init__(self, width: int, depth: int, causal: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(_Block(width, (2, 0) if causal else (1, 1)) for _ in range(depth))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.words(input_ids)
        for layer in self.layers:
            if attention_mask is not None:
                hidden = hidden * attention_mask[..., None]
            hidden = layer(hidden)
        return hidden


class _Block(nn.Module):
    def __init__(self, width: int, padding: tuple[int, int]) -> None:
        super().__init__()
        self.words, self.padding = nn.Conv1d(width, width, 3), padding

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.words(nn.functional.pad(hidden.mT, self.padding)).mT.tanh()


def flat() -> Convolutions:
    """One whose blocks are in no list."""
    model = Convolutions()
    model.base_model.layers = nn.Sequential(*model.base_model.layers)
    return model


class Blind(nn.Module):
    """One that says nothing of its parts."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return input_ids.float()


def service(tokenizer: Any, pat: str) -> nn.Module:
    """A student that takes a key, as one that is fetched from somewhere would."""
    assert pat == KEY
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes))


class Adapted(nn.Module):
    """A linear layer with an addition of low rank, as adapters wrap them."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.base_layer(hidden) + self.lora_B(self.lora_A(hidden))
        return added


def adapted(teacher: Any) -> Any:
    """A student with such layers, for `student._target_`."""
    student = BertForMaskedLM(teacher.config)
    for block in student.bert.encoder.layer:
        block.attention.self.query = Adapted(block.attention.self.query)
    return student


def with_adapters(teacher: Any) -> nn.Module:
    """A copy of the teacher whose queries learn by adapters of PEFT, and nothing else of it."""
    import peft

    student = BertForMaskedLM(teacher.config)
    student.load_state_dict(teacher.state_dict())
    adapted: nn.Module = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["query"]), student)
    return adapted


class NeedsWord(BertForMaskedLM):
    """One whose constructor takes more than a configuration, as `from_pretrained` does not give it."""

    def __init__(self, config: BertConfig, word: str) -> None:
        super().__init__(config)


def without_a_word(teacher: Any) -> Any:
    return NeedsWord(teacher.config, "word")


class Unsaved(Convolutions):
    """A module that refuses to give its weights."""

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError("this one is not to be saved")


def unsaved(tokenizer: Any) -> Any:
    model = Unsaved()
    model.head = nn.Linear(24, len(tokenizer))
    model.base_model.words = nn.Embedding(len(tokenizer), 24)
    return model
