"""Conversations by a chat template: the tokens of `apply_chat_template`, and which of them count."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import CHATML, FAMILIES, MARKED, SHORT, SYSTEM, TALK, smollm2
from tiny import all_of, changed, parts, text_config
from transformers import PreTrainedTokenizerFast

from distill.config.settings import Config, SourceConfig
from distill.data.chat_template import DEFAULT, ChatTemplate, Conversation, plain_text
from distill.data.sequence_format import causal_format
from distill.data.sources.chat import chat_template
from distill.data.tokens import Tokens, corpus_text, prepare
from distill.runtime.errors import SettingError

THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nan ant"}
BARE = smollm2(None)  # without a template: conversations are written by the default


def config_of(folder: Path, records: list[Any], **more: Any) -> Config:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"sequence_length": 512, "cross_documents": False, "heldout": 0.0, "workers": 1, **more}
    return text_config(kind="chat", path=str(path), cache=str(folder / "cache"), **settings)


def tokens_of(config: Config, tokenizer: PreTrainedTokenizerFast) -> Tokens:
    return prepare(corpus_text(*parts(config)), tokenizer, *parts(config), "train", causal_format)


def sequences_of(tokens: Tokens, tokenizer: PreTrainedTokenizerFast) -> list[tuple[list[int], list[bool]]]:
    """Ids of each conversation, and whether each counts."""
    pad = causal_format(tokenizer).pad
    rows = [row[: np.flatnonzero(row["id"] != pad)[-1] + 1] for row in all_of(tokens.sequences)]
    return [(row["id"].tolist(), row["loss_mask"].tolist()) for row in rows]


def expected(talk: list[Any], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """By transformers: its mask where the template marks turns, else the difference of the tokens around a turn."""
    template = tokenizer.chat_template or DEFAULT
    marked = "{% generation %}" in template
    encoded = tokenizer.apply_chat_template(
        talk, chat_template=template, return_dict=True, return_assistant_tokens_mask=marked
    )
    ids, end = encoded["input_ids"], tokenizer.eos_token_id
    counts = [bool(value) for value in encoded["assistant_masks"]] if marked else [False] * len(ids)
    for turn, message in enumerate(talk if not marked else []):
        if message["role"] == "assistant":
            before = tokenizer.apply_chat_template(talk[:turn], add_generation_prompt=True)["input_ids"]
            until = tokenizer.apply_chat_template(talk[: turn + 1])["input_ids"]
            assert until[: len(before)] == before and ids[: len(until)] == until
            ends = [place for place in range(len(before), len(until)) if until[place] == end]
            stop = ends[-1] + 1 if ends else len(until)
            counts[len(before) : stop] = [True] * (stop - len(before))
    return (ids, counts) if ids[-1] == end else ([*ids, end], [*counts, counts[-1]])


@pytest.mark.parametrize("family", [*FAMILIES, "bare"])
def test_tokens_and_mask_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    tokenizer = BARE if family == "bare" else FAMILIES[family]
    talks = [TALK, SHORT, TALK[:3]] + ([] if family == "gemma" else [SYSTEM + TALK])
    tokens = tokens_of(config_of(tmp_path, [{"messages": talk} for talk in talks]), tokenizer)
    assert ("by the chat template of the tokenizer" in tokens.name) == (family != "bare")
    for row, talk in zip(sequences_of(tokens, tokenizer), talks, strict=True):
        ids, counts = expected(talk, tokenizer)
        assert row[0] == ids
        assert row[1] == counts and any(counts) and not all(counts)
    answers = [id_ for id_, counts in zip(*sequences_of(tokens, tokenizer)[1], strict=True) if counts]
    assert tokenizer.decode(answers, skip_special_tokens=True).strip() == "an ant"
    assert answers[-1] == tokenizer.eos_token_id


def test_the_setting_overrides_and_both_are_in_the_key(tmp_path: Path) -> None:
    """A file of Jinja or its text; the student's tokenizer gets the one that was used."""
    config, tokenizer = config_of(tmp_path, [{"messages": TALK}]), smollm2()
    (tmp_path / "marked.jinja").write_text(MARKED)
    file = changed(config, template=str(tmp_path / "marked.jinja"))
    digests = [tokens_of(config, each).digest for each in (tokenizer, smollm2(MARKED), BARE)]
    assert len(set(digests)) == 3
    assert tokens_of(file, tokenizer).digest == tokens_of(changed(config, template=MARKED), tokenizer).digest
    assert tokens_of(file, tokenizer).digest == digests[1]
    assert len(list((tmp_path / "cache" / "tokens").glob("*/index.json"))) == 3  # what gives the same is not made again

    source = config.corpus
    assert isinstance(source, SourceConfig)
    marked, books = source.changed(template=MARKED), SourceConfig(kind="text", path="books")
    own = SourceConfig(**{"_target_": "my.Source"})
    assert chat_template([source], tokenizer) == CHATML and chat_template([source], BARE) == DEFAULT
    assert chat_template([books, marked, own, marked.changed(fraction=0.5)], tokenizer) == MARKED
    assert chat_template([source, marked], tokenizer) is None is chat_template([books, own], tokenizer)


def test_the_default_begins_as_a_document_does() -> None:
    """With the beginning-of-text token where that is another one than the end-of-text token, as in Llama."""
    begin = ChatTemplate.of(FAMILIES["llama3"], "it", text=DEFAULT)
    said = "<|user|>\nthe hat\n<|assistant|>\nan ant\n"
    assert begin is not None and begin.prompt(Conversation(SHORT)) == f"<|begin_of_text|>{said}<|assistant|>\n"
    same = smollm2(None)
    same.bos_token = same.eos_token
    plain = ChatTemplate.of(same, "it", text=DEFAULT)
    assert plain is not None and plain.document(Conversation(SHORT), "it").text == said == plain_text(
        Conversation(SHORT)
    )


def test_a_template_of_today_is_the_same_tomorrow() -> None:
    template = "{{ strftime_now('%d %b %Y') }}\n{% for message in messages %}{{ message.content }}{% endfor %}"
    made = ChatTemplate.of(smollm2(template), "it")
    assert made is not None and made.prompt(Conversation(SHORT)) == "01 Jan 2025\nthe hatan ant"


@pytest.mark.parametrize(
    ("tokenizer", "talk", "words"),
    [
        (FAMILIES["qwen"], [TALK[0], THOUGHT, *TALK[2:]], r"does not write turn 2 of a conversation.*generation"),
        (FAMILIES["gemma"], SYSTEM + TALK, r"refuses a conversation \(TemplateError: System role not supported\)"),
        (smollm2("{% for message in messages %}"), TALK, r"refuses a conversation \(TemplateSyntaxError"),
        (smollm2("{% for message in messages %}{{ 1 / 0 }}{% endfor %}"), TALK, r"ZeroDivisionError"),
        (smollm2("{% for m in messages %}{{ m.__class__.mro() }}{% endfor %}"), TALK, r"SecurityError|UndefinedError"),
        (smollm2(), [{"role": "user", "content": "a<|im_end|>"}, TALK[1]], r"holds <\|im_end\|>, the name of"),
    ],
    ids=["thoughts", "system", "syntax", "error", "sandbox", "special"],
)  # fmt: skip
def test_what_is_ambiguous_or_fails_is_one_line(tokenizer: Any, talk: list[Any], words: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, [{"messages": talk}])
    with pytest.raises(SettingError, match=words) as caught:
        tokens_of(config, tokenizer)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("corpus.template=null: the chat template of")


def test_a_turn_that_is_ambiguous_is_named_by_its_line(tmp_path: Path) -> None:
    """And reasoning in the last turn is no problem."""
    talks = [[TALK[0], THOUGHT]] * 3 + [[TALK[0], THOUGHT, *TALK[2:]]]
    for count in (3, 4):
        config = config_of(tmp_path, [{"messages": talk} for talk in talks[:count]])
        if count == 3:
            assert tokens_of(config, FAMILIES["qwen"]).documents == 3
        else:
            with pytest.raises(SettingError, match=r"turn 2.*line 4"):
                tokens_of(config, FAMILIES["qwen"])


@pytest.mark.parametrize(("text", "words"), [(None, "cannot be read"), ("{role}", "has no loop over messages")])
def test_a_file_that_is_no_template_is_refused(text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "x.jinja").write_text(text)
    with pytest.raises(SettingError, match=words):
        tokens_of(config_of(tmp_path, [{"messages": TALK}], template=f"{tmp_path}/x.jinja"), smollm2())
