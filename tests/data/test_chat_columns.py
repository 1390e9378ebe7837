"""What the columns of conversations may hold, in files and in memory: lists, JSON texts, contents in parts, tools."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import CHATML, MARKED, SHORT, TALK, smollm2
from tiny import all_of, parts, text_config
from transformers import PreTrainedTokenizerFast

from distill.commands.api.data import splits_of
from distill.config.settings import Config, SourceConfig
from distill.data.sequence_format import causal_format
from distill.data.sources._in_memory import source_in_memory
from distill.data.tokens import Text, Tokens, corpus_text, prepare
from distill.runtime.errors import SettingError

TOOLED = "{% if tools %}{{ tools | tojson }}{% endif %}"
TOOLS = [{"name": "find", "parameters": {"road": 1}}]
OTHER_TOOLS = [{"name": "count", "parameters": {"hat": "b"}}]


def config_of(path: Path, **more: Any) -> Config:
    settings = {"sequence_length": 512, "cross_documents": False, "heldout": 0.0, "workers": 1, "kind": "chat"}
    return text_config(path=str(path), cache=str(path.parent / "cache"), **{**settings, **more})


def written(records: list[Any], folder: Path, form: str, tokenizer: PreTrainedTokenizerFast, **more: Any) -> Tokens:
    """The sequences of records in a file of this form, or in memory."""
    config = config_of(folder / f"a.{form}", **more)
    if form == "memory":
        rows = splits_of(records, "data")["train"]
        names = {name: more[name] for name in ("field", "prompt", "template") if name in more}
        source = source_in_memory(rows, str(records), "rows", SourceConfig(kind="hub", **names), "corpus")
        return prepare(Text((source,), "corpus"), tokenizer, *parts(config), "train", causal_format)
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(records), folder / "a.parquet")
    else:
        (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return prepare(corpus_text(*parts(config)), tokenizer, *parts(config), "train", causal_format)


def texts_of(tokens: Tokens, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The text of each sequence with what counts in brackets."""
    pad, texts = causal_format(tokenizer).pad, []
    for row in all_of(tokens.sequences):
        text = ""
        for id_, is_target, _ in row.tolist():
            if id_ != pad:
                piece = tokenizer.decode([id_])
                text += f"[{piece}]" if is_target else piece
        texts.append(text.replace("][", ""))
    return texts


@pytest.mark.parametrize("form", ["jsonl", "parquet", "memory"])
@pytest.mark.parametrize(
    "change",
    [
        lambda talk: json.dumps(talk),
        lambda talk: [json.dumps(message) for message in talk],
        lambda talk: [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in talk],
        lambda talk: json.dumps([{"from": each["role"], "value": each["content"]} for each in talk]),
    ],
    ids=["JSON", "JSON of each", "parts", "JSON of ShareGPT"],
)
@pytest.mark.parametrize("column", ["messages", "conversations", "talk"])
def test_every_form_is_the_same_conversation(column: str, change: Any, form: str, tmp_path: Path) -> None:
    tokenizer = smollm2()
    named = {"field": column} if column == "talk" else {}
    found = [
        written([{column: each} for each in talks], tmp_path, form, tokenizer, **named)
        for talks in ([TALK, SHORT], [change(TALK), change(SHORT)])
    ]
    assert found[0].digest == found[1].digest and found[0].documents == 2


@pytest.mark.parametrize("form", ["jsonl", "parquet", "memory"])
@pytest.mark.parametrize(
    "change", [lambda tools: tools, json.dumps, lambda tools: [json.dumps(each) for each in tools]]
)
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["difference", "marked"])
def test_tools_reach_the_template(template: str, change: Any, form: str, tmp_path: Path) -> None:
    """Those of each conversation alone: columns give a record the fields of all others, which are null in it."""
    tokenizer = smollm2(TOOLED + template)
    given: list[tuple[list[Any], list[Any] | None]] = [(TALK, TOOLS), (SHORT, OTHER_TOOLS), (SHORT, None), (TALK, [])]
    records = [{"messages": talk, "tools": change(tools) if tools else None} for talk, tools in given]
    if form == "jsonl":
        del records[2]["tools"]
    found = texts_of(written(records, tmp_path, form, tokenizer), tokenizer)
    for text, (talk, tools) in zip(found, given, strict=True):
        whole = tokenizer.apply_chat_template(talk, tools=tools or None, tokenize=False)
        assert text.replace("[", "").replace("]", "").startswith(whole.replace("[", "").replace("]", ""))
        assert text.count("[an ant<|im_end|>") == 1


def test_tools_that_no_template_writes_are_counted(tmp_path: Path) -> None:
    records = [{"messages": SHORT, "tools": TOOLS}, {"messages": SHORT}]
    tokens = written(records, tmp_path, "jsonl", smollm2())
    assert tokens.documents == 2 and [*tokens.left_out.values()] == [1]
    assert "tools" in next(iter(tokens.left_out))
    assert not written(records, tmp_path, "jsonl", smollm2(TOOLED + CHATML)).left_out


@pytest.mark.parametrize("form", ["jsonl", "parquet", "memory"])
@pytest.mark.parametrize("change", [lambda talk: talk, json.dumps], ids=["lists", "JSON"])
def test_prompts_of_messages_do_not_count(change: Any, form: str, tmp_path: Path) -> None:
    """Not even the assistant's turns in them."""
    records = [{"prompt": change(TALK[:3]), "completion": change(TALK[3:])}]
    for template in (CHATML, MARKED):
        named = {"field": "completion", "prompt": "prompt"}
        (text,) = texts_of(written(records, tmp_path, form, smollm2(template), **named), smollm2())
        assert "[And the\n\nhats. <|im_end|>" in text and text.count("[") == 1 and "an ant" in text


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": json.dumps(TALK)[:-3]}, ["a.jsonl", "line 1", "JSON"]),
        ({"messages": [TALK[0], json.dumps(TALK[1])[:-3]]}, ["a.jsonl", "line 1", "JSON"]),
        ({"messages": SHORT, "tools": "[{"}, ["a.jsonl", "line 1", "tools", "JSON"]),
        ({"messages": SHORT, "tools": '"a"'}, ["a.jsonl", "line 1", "tools", "no list"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "a"}]}]},
            ["line 1", "no text", "image"],
        ),
        ({"messages": [{"role": "user", "content": {"text": "a"}}]}, ["line 1", "no text"]),
        ({"messages": "Hi"}, ["line 1", "JSON"]),
        ({"messages": [{"content": "Hi"}]}, ["line 1", "without a role", "rewrite it"]),
        ({"messages": [{"role": 1, "content": "Hi"}]}, ["line 1", "without a role"]),
        ({"messages": [{"from": "nobody", "value": "Hi"}]}, ["line 1", "without a role"]),
    ],
)
def test_what_is_malformed_is_named_with_its_place(record: Any, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(SettingError) as caught:
        written([record, {"messages": SHORT}], tmp_path, "jsonl", smollm2())
    assert all(word in str(caught.value) for word in words), caught.value


def test_conversations_are_not_read_as_plain_text(tmp_path: Path) -> None:
    for value in (TALK, json.dumps(TALK)):
        for record, named in (({"messages": value}, {"field": "messages"}), ({"text": value}, {})):
            with pytest.raises(SettingError) as caught:
                written([record] * 3, tmp_path, "jsonl", smollm2(), kind="jsonl", **named)
            assert "corpus.kind=chat" in caught.value.cure
    rows = {"messages": [json.dumps(TALK)[:-3]]}
    source = source_in_memory(datasets.Dataset.from_dict(rows), "", "rows", SourceConfig(kind="hub"), "corpus")
    with pytest.raises(SettingError, match="JSON"):
        list(source.documents(source.shards()[0]))


def test_conversations_without_an_answer_are_counted(tmp_path: Path) -> None:
    records = [{"messages": SHORT}, {"messages": TALK[:1]}, {"messages": []}, {"messages": [SHORT[0], SHORT[0]]}]
    tokens = written(records, tmp_path, "jsonl", smollm2())
    assert tokens.documents == 1 and [*tokens.left_out.values()] == [3]
    assert "assistant" in next(iter(tokens.left_out))
