"""Sequences in words: what the student is to predict stands in [[ ]]."""

from pathlib import Path

import numpy as np
import pytest
import torch
from chat_templates import CHATML, MARKED, TALK, smollm2
from job import Shelf
from test_chat_columns import written
from vocabularies import vocabulary_of

from distill.commands.cli import main
from distill.data.batch import Batch, Labels
from distill.data.collate.clm import causal_lm
from distill.data.shown import LEGEND, shown


def labels(positions: list[int], targets: list[int]) -> Labels:
    return Labels(torch.tensor(positions), torch.tensor(targets))


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["difference", "marked"])
def test_answers_of_conversations(template: str, tmp_path: Path) -> None:
    tokenizer = smollm2(template)
    tokens = written([{"messages": TALK}], tmp_path, "jsonl", tokenizer)
    batch = causal_lm(tokenizer, True).collate(tokens.sequences[np.arange(1)], np.zeros(1, np.uint64), np.arange(1))
    (text,) = shown(batch, tokenizer)
    assert text.count("[[") == 2 and "<|im_start|>assistant\n[[an ant<|im_end|>]]" in text
    # The end that parts documents is appended where the template ends in something else, and counts as that does.
    assert text.endswith("<|im_start|>assistant\n[[And the\n\nhats. <|im_end|>]]\n<|im_end|>")
    written_text = text.replace("[[", "").replace("]]", "")
    assert written_text == tokenizer.apply_chat_template(TALK, tokenize=False) + tokenizer.eos_token


def test_masked_words_classes_orders_and_answers() -> None:
    tokenizer = vocabulary_of("bert")
    cls, sep, pad, mask = (getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "pad", "mask"))
    words = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("the cat and the dog"))
    row = [cls, *words, sep, pad]
    length = len(row)
    ids = torch.tensor([row, row])
    seen = ids.clone()
    seen[0, 1], seen[1, 1] = mask, words[-1]
    valid = torch.tensor([place for place in range(2 * length) if place % length != length - 1])
    masked = labels([1, length + 1], [words[0]] * 2)
    batch = Batch({"input_ids": seen}, None, {"mlm": masked, "sop": labels([0, 1], [1, 0])}, valid, np.arange(2))
    first, second = shown(batch, tokenizer)
    text = tokenizer.decode(words[1:])
    assert first == f"[CLS] [[{tokenizer.decode(words[:1])}]] {text} [SEP]\nsop: swapped"
    assert second.startswith(f"[CLS] [[{tokenizer.decode(words[:1])} <- {tokenizer.decode(words[-1:])}]] {text}")
    batch = Batch({"input_ids": ids}, None, {"class": labels([1], [0])}, valid, np.arange(2))
    first, second = shown(batch, tokenizer, ("bad", "good"))
    assert "class" not in first and second.endswith("[SEP]\nclass: bad") and "[[" not in second
    spans = {"span_start": labels([0, 1], [2, 0]), "span_end": labels([0, 1], [3, 0])}
    first, second = shown(Batch({"input_ids": ids}, None, spans, valid, np.arange(2)), tokenizer)
    assert f"[[{tokenizer.decode(words[1:3])}]]" in first and second.endswith("\nno answer")


def test_the_command_prints_them(shelf: Shelf, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = shelf.arguments(tmp_path / "run", f"data.cache={tmp_path / 'cache'}")
    assert main(["prepare", "show=2", *arguments]) == 0
    said = capfd.readouterr().out
    assert said.startswith(LEGEND) and said.count("--- sequence") == 2 and said.count("[[") > 3
    for value in ("1001", "x", "", "-1"):
        assert main(["prepare", f"show={value}", *arguments]) == 2
        assert f"show={value}" in capfd.readouterr().err
