"""Tiny tokenizers in the manner of each family's published one: WordPiece, byte-level BPE, SentencePiece."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AlbertTokenizer,
    BertTokenizer,
    CamembertTokenizer,
    CohereTokenizer,
    DebertaV2Tokenizer,
    GemmaTokenizer,
    GPT2Tokenizer,
    GPTNeoXTokenizer,
    LlamaTokenizer,
    MPNetTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    RobertaTokenizer,
    XLMRobertaTokenizer,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("Ġ", "an")]
PIECE_MERGES = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("#", "#")]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>"]
COHERE = ["<PAD>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "<BOS_TOKEN>", "<EOS_TOKEN>"]
COHERE += ["<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"]
END = "<|endoftext|>"


def _numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(pieces)}


def word_pieces(special: list[str]) -> dict[str, int]:
    """WordPiece: letters at the beginning of a word and inside it, and a few whole words."""
    return _numbered([*special, *LETTERS, *(f"##{letter}" for letter in LETTERS), ".", "the", "of", "and", "##ing"])


def byte_pieces(special: list[str]) -> dict[str, int]:
    """Byte-level BPE: every byte, and what `MERGES` makes."""
    return _numbered([*special, *BYTES, *("".join(pair) for pair in MERGES)])


def unigrams(special: list[str], *last: str) -> list[tuple[str, float]]:
    """SentencePiece's Unigram: letters and a few words, with their log-probabilities."""
    words = [("\u2581the", -3.0), ("ing", -3.5), (".", -4.0)]
    pieces = [("\u2581", -2.0), *((letter, -4.0) for letter in LETTERS), *words]
    return [*((piece, 0.0) for piece in special), *pieces, *((piece, 0.0) for piece in last)]


def sentence_pieces(special: list[str]) -> dict[str, int]:
    """SentencePiece's BPE, in which letters that it lacks become bytes; ## in it is text, as in Llama's."""
    lone = [f"<0x{byte:02X}>" for byte in range(256)]
    return _numbered([*special, *lone, "\u2581", *LETTERS, "#", *("".join(pair) for pair in PIECE_MERGES)])


def _of_llama3() -> PreTrainedTokenizerFast:
    """Byte-level, without a padding token, and with another token at the beginning of a text than at its end."""
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    tokenizer = _byte_level([begin, end])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin, eos_token=end)


def _of_modernbert() -> PreTrainedTokenizerFast:
    """Byte-level, with BERT's special tokens."""
    tokenizer = _byte_level(BERT)
    number = tokenizer.token_to_id
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, number(name)) for name in ("[CLS]", "[SEP]")]
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict(zip(names, BERT, strict=True)))


def _byte_level(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_pieces(special), MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
CAMEMBERT = ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<s>", "</s>"]
MAKE: dict[str, Callable[[], Any]] = {
    "bert distilbert electra": lambda: BertTokenizer(word_pieces(BERT)),
    "roberta": lambda: RobertaTokenizer(byte_pieces([*ROBERTA, "<mask>"]), MERGES),
    "xlm-roberta": lambda: XLMRobertaTokenizer(unigrams(ROBERTA, "<mask>")),
    "camembert": lambda: CamembertTokenizer(vocab=unigrams(CAMEMBERT, "<mask>")),
    "mpnet": lambda: MPNetTokenizer(word_pieces(["<s>", "<pad>", "</s>", "<unk>", "[UNK]", "<mask>"])),
    "albert": lambda: AlbertTokenizer(unigrams(["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"])),
    "deberta-v2": lambda: DebertaV2Tokenizer(unigrams(["[PAD]", "[CLS]", "[SEP]", "[UNK]"], "[MASK]"), unk_id=3),
    "modernbert": _of_modernbert,
    "gpt2 granite": lambda: GPT2Tokenizer(byte_pieces([END]), MERGES),
    "llama": _of_llama3,
    "qwen2 qwen3": lambda: Qwen2Tokenizer(byte_pieces([END]), MERGES),
    "mistral": lambda: LlamaTokenizer(sentence_pieces(["<unk>", "<s>", "</s>"]), PIECE_MERGES),
    "gemma gemma2 gemma3_text": lambda: GemmaTokenizer(sentence_pieces(GEMMA), PIECE_MERGES),
    "cohere cohere2": lambda: CohereTokenizer(byte_pieces(COHERE), MERGES),
    "gpt_neox": lambda: GPTNeoXTokenizer(byte_pieces([END, "<|padding|>"]), MERGES),
}


def vocabulary_of(family: str) -> Any:
    """A tokenizer of the class, and with the special tokens, that the published models of a family have."""
    return next(make for families, make in MAKE.items() if family in families.split())()


def special_ids(tokenizer: Any) -> dict[str, int]:
    """What a model's configuration says of a tokenizer: its size and the ids of the special tokens that it has."""
    names = [f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep")]
    found = {name: getattr(tokenizer, name) for name in names if getattr(tokenizer, name) is not None}
    return {"vocab_size": len(tokenizer), **found}


def byte_level(folder: Path, digits: bool) -> Path:
    """A saved tokenizer that merges 1 and 2 to 12 unless it keeps digits apart; its folder names GPT-2's class."""
    vocabulary = byte_pieces([END])
    vocabulary["12"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [("1", "2")]))
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END).save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}))
    return folder
