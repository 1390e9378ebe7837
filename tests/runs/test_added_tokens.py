"""Tokenizers that are one but for special tokens at the end of one of them, such as a [PAD] that no text has."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job import Shelf, distill, results, save_model
from tiny import make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from vocabularies import vocabulary_of

from distill import load_pair
from distill.data.collate.clm import causal_lm
from distill.evaluation.sets import EvaluationSet
from distill.models.kind import CAUSAL, MASKED
from distill.runs.tokenizers import reads_same_tokens, refuse_tokens_beyond
from distill.runtime.errors import SettingError

SMALL = ["train.steps=2", "corpus.max_sequences=60", "corpus.sequence_length=32", "evaluate=heldout", "precision=fp32"]


def added(name: str, **special: Any) -> Any:
    tokenizer = vocabulary_of(name)
    tokenizer.add_special_tokens(special)
    return tokenizer


def test_which_tokenizers_read_the_same_tokens() -> None:
    plain, padded = vocabulary_of("gpt2"), added("gpt2", pad_token="[PAD]")
    assert all(reads_same_tokens(*pair, CAUSAL) for pair in ((plain, plain), (padded, plain), (plain, padded)))
    assert not reads_same_tokens(padded, plain, MASKED), "a masked model reads padding"
    assert not reads_same_tokens(added("gpt2", bos_token="<begin>"), plain, CAUSAL), "sequences have it"
    with_word = vocabulary_of("gpt2")
    with_word.add_tokens(["river"])
    assert not reads_same_tokens(with_word, plain, CAUSAL), "texts have it"
    assert not reads_same_tokens(make_tokenizer(), make_tokenizer(("river",)), MASKED)


@pytest.mark.parametrize("setting", ["corpus", "evaluate.sets=heldout", ""])
def test_a_text_with_such_a_token_is_refused(setting: str) -> None:
    padded = added("gpt2", pad_token="[PAD]", additional_special_tokens=["<|user|>"])
    shared, user = len(padded) - 2, padded.convert_tokens_to_ids("<|user|>")
    counts = np.bincount([0, 1, padded.pad_token_id], minlength=len(padded))
    counts[user] = setting == "corpus"
    ids = [1, padded.pad_token_id, user if setting.startswith("evaluate") else 1]
    arguments = shared, counts, [EvaluationSet("heldout", "", np.array([ids], np.uint16), 1)], causal_lm(padded, False)
    if not setting:
        return refuse_tokens_beyond(*arguments)
    with pytest.raises(SettingError, match=f"has the token {user}, ") as error:
        refuse_tokens_beyond(*arguments)
    assert error.value.setting == setting


def test_such_a_pair_trains_either_way_round(shelf: Shelf, tmp_path: Path) -> None:
    plain = save_model(tmp_path / "plain", "gpt2", 2)
    tokenizer, model = AutoTokenizer.from_pretrained(plain), AutoModelForCausalLM.from_pretrained(plain)
    tokenizer.add_special_tokens({"pad_token": "[ADDED]"})
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    padded = tmp_path / "padded"
    model.save_pretrained(padded)
    tokenizer.save_pretrained(padded)
    recipe = ["+recipe=distilgpt2_gutenberg", *shelf.corpus, *SMALL, "student=pretrained", "objective.clm.weight=0"]
    of_way = list[dict[str, float]]()
    for teacher, student in ((plain, padded), (padded, plain)):
        run = tmp_path / f"{teacher.name}-{student.name}"
        pair = [f"teacher.path={teacher}", f"student.path={student}", f"hydra.run.dir={run}"]
        assert distill(*recipe, *pair) == 0
        found = results(run)
        assert found["agreement"]["heldout"]["top1"] > 0.5, "they were one model"
        assert len(AutoTokenizer.from_pretrained(run / "student")) == len(AutoTokenizer.from_pretrained(student))
        pair = load_pair(teacher, student, sequence_length=24, device="cpu")
        losses = pair.objective({"soft": 1.0, "clm": 1.0})(["the quiet ship", "a stranger and the captain of the ship"])
        losses.total.backward()
        of_way.append(losses.terms)
    assert of_way[0] == pytest.approx(of_way[1], rel=1e-6), "over the tokens that both have"
