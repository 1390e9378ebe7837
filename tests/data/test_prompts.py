"""Conversations, prompts and token ids: the tokens of chat templates, and which tokens count."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from chat_templates import CHATML, FAMILIES, MARKED, SHORT, SYSTEM, TALK, smollm2
from chats import FORMAT, TOKENIZER, chats, naive_rows
from reading import documents, prepared, texts, write_lines
from tiny import PAD, all_of, make_batches, parts, text_config
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vocabularies import vocabulary_of

from distill.commands.api.data import splits_of
from distill.config.settings import Config, SourceConfig
from distill.data.batch import Batch, Labels
from distill.data.chat_template import DEFAULT, ChatTemplate, Conversation
from distill.data.collate.clm import CausalLM, causal_lm
from distill.data.packing import load_tokenizer, without_first_space
from distill.data.sequence_format import causal_format, masked_format
from distill.data.sequence_store import ids_of
from distill.data.shown import shown
from distill.data.sources import Document, Part, Shard, Source, _files
from distill.data.sources._in_memory import source_in_memory
from distill.data.sources.chat import chat_template
from distill.data.tokens import Text, Tokens, prepare
from distill.runtime.errors import SettingError

THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nan ant"}
BARE = smollm2(None)  # without a template: conversations are written by the default
TOOLED = "{% if tools %}{{ tools | tojson }}{% endif %}"
TOOLS = [{"name": "find", "parameters": {"road": 1}}]
OTHER_TOOLS = [{"name": "count", "parameters": {"hat": "b"}}]
FORMS = pytest.mark.parametrize("form", ["jsonl", "parquet", "memory"])
TEMPLATES = pytest.mark.parametrize("template", [CHATML, MARKED], ids=["difference", "marked"])


def written(records: list[Any], folder: Path, tokenizer: Any, form: str = "jsonl", **more: Any) -> Tokens:
    """The sequences of records in a file of this form, or in memory."""
    given = {"sequence_length": 512, "cross_documents": False, "heldout": 0.0, "workers": 1, "kind": "chat"}
    config = text_config(path=f"{folder}/a.{form}", cache=f"{folder}/cache", **{**given, **more})
    if form == "memory":
        settings = SourceConfig(kind="hub", **{name: more[name] for name in ("field", "prompt") if name in more})
        source = source_in_memory(splits_of(records, "data")["train"], str(records), "rows", settings, "corpus")
        return prepare(Text((source,), "corpus"), tokenizer, *parts(config), "train", causal_format)
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(records), folder / "a.parquet")
    else:
        write_lines(folder / "a.jsonl", records)
    return prepared(config, tokenizer)


def talks_in(talks: list[Any], *arguments: Any, **more: Any) -> Tokens:
    return written([{"messages": talk} for talk in talks], *arguments, **more)


def sequences_of(tokens: Tokens, tokenizer: PreTrainedTokenizerFast) -> list[tuple[list[int], list[bool]]]:
    """Ids of each conversation, and whether each counts."""
    pad = causal_format(tokenizer).pad
    rows = [row[: np.flatnonzero(row["id"] != pad)[-1] + 1] for row in all_of(tokens.sequences)]
    return [(row["id"].tolist(), row["loss_mask"].tolist()) for row in rows]


def marked_texts(tokens: Tokens, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The text of each sequence with what counts in brackets."""
    pieces = (
        [
            f"[{tokenizer.decode([id_])}]" if counts else tokenizer.decode([id_])
            for id_, counts in zip(*row, strict=True)
        ]
        for row in sequences_of(tokens, tokenizer)
    )
    return ["".join(each).replace("][", "") for each in pieces]


# --- templates


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
    tokens = talks_in(talks, tmp_path, tokenizer)
    assert ("by the chat template of the tokenizer" in tokens.name) == (family != "bare")
    rows = sequences_of(tokens, tokenizer)
    assert rows == [expected(talk, tokenizer) for talk in talks]
    assert all(any(counts) and not all(counts) for _, counts in rows)
    answers = [id_ for id_, counts in zip(*rows[1], strict=True) if counts]
    assert tokenizer.decode(answers, skip_special_tokens=True).strip() == "an ant"
    assert answers[-1] == tokenizer.eos_token_id


def test_the_setting_overrides_and_both_are_in_the_key(tmp_path: Path) -> None:
    """A file of Jinja or its text; the student's tokenizer gets the one that was used."""
    tokenizer = smollm2()
    (tmp_path / "marked.jinja").write_text(MARKED)
    digests = [talks_in([TALK], tmp_path, each).digest for each in (tokenizer, smollm2(MARKED), BARE)]
    assert len(set(digests)) == 3
    for template in (MARKED, f"{tmp_path}/marked.jinja"):
        assert talks_in([TALK], tmp_path, tokenizer, template=template).digest == digests[1]
    assert len(list((tmp_path / "cache" / "tokens").glob("*/index.json"))) == 3  # what gives the same is not made again
    source, books = SourceConfig(kind="chat", path="x"), SourceConfig(kind="text", path="books")
    marked, own = source.changed(template=MARKED), SourceConfig(**{"_target_": "my.Source"})
    assert chat_template([source], tokenizer) == CHATML and chat_template([source], BARE) == DEFAULT
    assert chat_template([books, marked, own, marked.changed(fraction=0.5)], tokenizer) == MARKED
    assert chat_template([source, marked], tokenizer) is None is chat_template([books, own], tokenizer)
    for template, words in (("gone.jinja", "cannot be read"), ("{role}", "has no loop over messages")):
        with pytest.raises(SettingError, match=words):
            talks_in([TALK], tmp_path, tokenizer, template=template)


def test_the_default_begins_as_a_document_does(tmp_path: Path) -> None:
    """With the beginning-of-text token where that is another one than the end-of-text token, as in Llama."""
    said, same = "<|user|>\nthe hat\n<|assistant|>\nan ant\n", smollm2(None)
    same.bos_token = same.eos_token
    for tokenizer, begin in ((FAMILIES["llama3"], "<|begin_of_text|>"), (same, "")):
        template = ChatTemplate.of(tokenizer, "it", text=DEFAULT)
        assert template is not None and template.prompt(Conversation(SHORT)) == f"{begin}{said}<|assistant|>\n"
    records = [{"messages": talk} for talk in (SHORT, SHORT[:1], None)]  # a new tokenizer is trained on this
    assert texts(kind="chat", path=str(write_lines(tmp_path / "a.jsonl", records))) == [said]
    today = "{{ strftime_now('%d %b %Y') }}\n{% for message in messages %}{{ message.content }}{% endfor %}"
    made = ChatTemplate.of(smollm2(today), "it")
    assert made is not None and made.prompt(Conversation(SHORT)) == "01 Jan 2025\nthe hatan ant", "and tomorrow"


@pytest.mark.parametrize(
    ("tokenizer", "talk", "line"),
    [
        (FAMILIES["qwen"], [TALK[0], THOUGHT, *TALK[2:]], r"does not write turn 2 .*generation.*line 4"),
        (FAMILIES["gemma"], SYSTEM + TALK, r"refuses a conversation \(TemplateError: System role not supported\)"),
        (smollm2("{% for message in messages %}{{ 1 / 0 }}{% endfor %}"), TALK, r"ZeroDivisionError"),
        (smollm2("{% for m in messages %}{{ m.__class__.mro() }}{% endfor %}"), TALK, r"SecurityError|UndefinedError"),
        (smollm2(), [{"role": "user", "content": "a<|im_end|>"}, TALK[1]], r"holds <\|im_end\|>, the name of"),
    ],
    ids=["thoughts", "system", "error", "sandbox", "special"],
)  # fmt: skip
def test_what_is_ambiguous_or_fails_is_one_line(tokenizer: Any, talk: list[Any], line: str, tmp_path: Path) -> None:
    good = [TALK[0], THOUGHT] if tokenizer is FAMILIES["qwen"] else SHORT  # reasoning in the last turn is no problem
    with pytest.raises(SettingError, match=line) as caught:
        talks_in([good] * 3 + [talk], tmp_path, tokenizer)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("corpus.template=null: the chat template of")


# --- columns


@FORMS
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
def test_every_form_is_the_same_conversation(change: Any, form: str, tmp_path: Path) -> None:
    for column in ("messages", "conversations", "talk"):
        named = {"field": column} if column == "talk" else {}
        one, other = (
            written([{column: each} for each in talks], tmp_path, smollm2(), form, **named)
            for talks in ([TALK, SHORT], [change(TALK), change(SHORT)])
        )
        assert one.digest == other.digest and one.documents == 2


@FORMS
@pytest.mark.parametrize("change", [list, json.dumps, lambda tools: [*map(json.dumps, tools)]])
@TEMPLATES
def test_tools_reach_the_template(template: str, change: Any, form: str, tmp_path: Path) -> None:
    """Those of each conversation alone: columns give a record the fields of all others, which are null in it."""
    tokenizer = smollm2(TOOLED + template)
    given: list[tuple[list[Any], list[Any] | None]] = [(TALK, TOOLS), (SHORT, OTHER_TOOLS), (SHORT, None), (TALK, [])]
    records = [{"messages": talk, "tools": change(tools) if tools else None} for talk, tools in given]
    if form == "jsonl":
        del records[2]["tools"]
    found = marked_texts(written(records, tmp_path, tokenizer, form), tokenizer)
    for text, (talk, tools) in zip(found, given, strict=True):
        whole = tokenizer.apply_chat_template(talk, tools=tools or None, tokenize=False)
        assert text.replace("[", "").replace("]", "").startswith(whole.replace("[", "").replace("]", ""))
        assert text.count("[an ant<|im_end|>") == 1


@FORMS
@pytest.mark.parametrize("change", [list, json.dumps], ids=["lists", "JSON"])
@TEMPLATES
def test_prompts_of_messages_do_not_count(template: str, change: Any, form: str, tmp_path: Path) -> None:
    """Not even the assistant's turns in them."""
    records = [{"prompt": change(TALK[:3]), "completion": change(TALK[3:])}]
    tokens = written(records, tmp_path, smollm2(template), form, field="completion", prompt="prompt")
    (text,) = marked_texts(tokens, smollm2())
    assert "[And the\n\nhats. <|im_end|>" in text and text.count("[") == 1 and "an ant" in text


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": json.dumps(TALK)[:-3]}, ["a.jsonl", "line 1", "JSON"]),
        ({"messages": SHORT, "tools": '"a"'}, ["a.jsonl", "line 1", "tools", "no list"]),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "a"}]}]}, ["line 1", "no text", "image"]),
        ({"messages": "Hi"}, ["line 1", "JSON"]),
        ({"messages": [{"content": "Hi"}]}, ["line 1", "without a role", "rewrite it"]),
        ({"messages": [{"from": "nobody", "value": "Hi"}]}, ["line 1", "without a role"]),
    ],
)
def test_what_is_malformed_is_named_with_its_place(record: Any, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(SettingError) as caught:
        written([record, {"messages": SHORT}], tmp_path, smollm2())
    assert all(word in str(caught.value) for word in words), caught.value


def test_conversations_are_not_read_as_plain_text(tmp_path: Path) -> None:
    for value in (TALK, json.dumps(TALK)):
        for record, named in (({"messages": value}, {"field": "messages"}), ({"text": value}, {})):
            with pytest.raises(SettingError) as caught:
                written([record] * 3, tmp_path, smollm2(), kind="jsonl", **named)
            assert "corpus.kind=chat" in caught.value.cure
    with pytest.raises(SettingError, match="JSON"):
        written([{"messages": json.dumps(TALK)[:-3]}], tmp_path, smollm2(), "memory")


def test_what_is_of_no_use_is_counted(tmp_path: Path) -> None:
    """Conversations without an answer, and tools that no template writes."""
    tokens = talks_in([SHORT, TALK[:1], [], [SHORT[0], SHORT[0]]], tmp_path, smollm2())
    assert tokens.documents == 1 and tokens.left_out == {"no message of the assistant in it counts": 3}
    records = [{"messages": SHORT, "tools": TOOLS}, {"messages": SHORT}]
    tokens = written(records, tmp_path, smollm2())
    assert tokens.documents == 2 and [*tokens.left_out.values()] == [1] and "tools" in next(iter(tokens.left_out))
    assert not written(records, tmp_path, smollm2(TOOLED + CHATML)).left_out


# --- sequences in words: what the student is to predict stands in [[ ]]


@TEMPLATES
def test_answers_are_shown(template: str, tmp_path: Path) -> None:
    tokenizer = smollm2(template)
    tokens = talks_in([TALK], tmp_path, tokenizer)
    batch = causal_lm(tokenizer, True).collate(tokens.sequences[np.arange(1)], np.zeros(1, np.uint64), np.arange(1))
    (text,) = shown(batch, tokenizer)
    assert text.count("[[") == 2 and "<|im_start|>assistant\n[[an ant<|im_end|>]]" in text
    # The end that parts documents is appended where the template ends in something else, and counts as that does.
    assert text.endswith("<|im_start|>assistant\n[[And the\n\nhats. <|im_end|>]]\n<|im_end|>")
    plain = text.replace("[[", "").replace("]]", "")
    assert plain == tokenizer.apply_chat_template(TALK, tokenize=False) + tokenizer.eos_token


def test_masked_words_classes_orders_and_spans_are_shown() -> None:
    def labels(positions: list[int], targets: list[int]) -> Labels:
        return Labels(torch.tensor(positions), torch.tensor(targets))

    tokenizer = vocabulary_of("bert")
    words = tokenizer.convert_tokens_to_ids(tokenizer.tokenize("the cat and the dog"))
    row = [tokenizer.cls_token_id, *words, tokenizer.sep_token_id, tokenizer.pad_token_id]
    ids, length = torch.tensor([row, row]), len(row)
    seen = ids.clone()
    seen[0, 1], seen[1, 1] = tokenizer.mask_token_id, words[-1]
    valid = torch.tensor([place for place in range(2 * length) if place % length != length - 1])
    begin, rest, last = (tokenizer.decode(part) for part in (words[:1], words[1:], words[-1:]))
    for inputs, targets, first, second in (
        (seen, {"mlm": labels([1, length + 1], [words[0]] * 2), "sop": labels([0, 1], [1, 0])},
         f"[CLS] [[{begin}]] {rest} [SEP]\nsop: swapped",
         f"[CLS] [[{begin} <- {last}]] {rest} [SEP]\nsop: in their order"),
        (ids, {"class": labels([1], [0])}, f"[CLS] {begin} {rest} [SEP]", f"[CLS] {begin} {rest} [SEP]\nclass: bad"),
        (ids, {"span_start": labels([0, 1], [2, 0]), "span_end": labels([0, 1], [3, 0])},
         f"[CLS] {begin} [[{tokenizer.decode(words[1:3])}]] {tokenizer.decode(words[3:])} [SEP]",
         f"[CLS] {begin} {rest} [SEP]\nno answer"),
    ):  # fmt: skip
        batch = Batch({"input_ids": inputs}, None, targets, valid, np.arange(2))
        assert shown(batch, tokenizer, ("bad", "good")) == [first, second]


@pytest.mark.parametrize("cross", [True, False], ids=["packed", "apart"])
def test_targets_are_those_of_a_naive_loop(tmp_path: Path, cross: bool) -> None:
    found, expected = prepared(chats(tmp_path, cross_documents=cross), TOKENIZER), naive_rows(32, cross)
    assert found.prompts and found.sequences.dtype["id"] == np.uint16
    batches = make_batches(found.sequences, CausalLM(FORMAT, cross), len(expected), 1, 0)
    batch = batches.batch(np.arange(len(expected)), 0)
    places = batch.inputs.get("position_ids", [None] * len(expected))
    for row, given, positions in zip(expected, batch.ids.numpy(), places, strict=True):
        assert given[: len(row)].tolist() == [id_ for id_, _, _ in row]
        if positions is not None:
            first = {number: index for index, (_, _, number) in reversed(list(enumerate(row)))}
            assert positions[: len(row)].tolist() == [index - first[number] for index, (_, _, number) in enumerate(row)]
    wanted = {
        index * 32 + at: row[at + 1][0]
        for index, row in enumerate(expected)
        for at in range(len(row) - 1)
        if row[at + 1][1] and row[at + 1][2] == row[at][2]
    }
    assert dict(zip(*(each.tolist() for each in batch.targets), strict=True)) == wanted
    assert batch.num_valid == found.tokens == sum(map(len, expected)) and 0 < len(wanted) < 0.7 * found.tokens
    ids = [id_ for row in expected for id_, _, _ in row]
    counts = np.bincount(ids, minlength=len(TOKENIZER))
    counts[PAD] += all_of(found.sequences).size - len(ids)
    np.testing.assert_array_equal(found.counts, counts)


def test_prompt_and_completion_of_every_format(tmp_path: Path) -> None:
    records: list[Any] = [{"ask": f"Question {i}:", "answer": f" answer {i} "} for i in range(5)]
    records += [{"ask": "alone", "answer": ""}, {"ask": None, "answer": "unasked"}]
    expected = [(Part(f"Question {i}:", False), Part(f" answer {i} ")) for i in range(5)] + [(Part("unasked"),)]
    write_lines(tmp_path / "lines/train.jsonl", records)
    pq.write_table(pa.Table.from_pylist([{**each, "id": 1} for each in records]), tmp_path / "x.parquet")
    parquet = SourceConfig(kind="parquet", path=f"{tmp_path}/x.parquet", field="answer", prompt="ask")
    lines = parquet.changed(kind="jsonl", path=f"{tmp_path}/lines")
    for settings in (parquet, lines, lines.changed(kind="hub", path=None, hub=f"{tmp_path}/lines")):
        found = documents(settings)
        assert [document.parts for document in found] == expected and found[0].text == "Question 0: answer 0 "
    with pytest.raises(SettingError, match=r"^corpus\.prompt=nosuch: x\.parquet: no such field; it has ask, answer"):
        documents(parquet.changed(prompt="nosuch"))


@pytest.mark.parametrize("form", ["metaspace", "prepend", "bytes"])
def test_a_text_in_parts_has_no_space_before_each(form: str) -> None:
    """Tokenizers in the manner of SentencePiece put one before a text."""
    pieces = ["[UNK]", *"▁Ġabcdefghi"]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], unk_token="[UNK]"))
    if form == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first")])
    elif form == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    whole = tokenizer.to_str()
    first, rest = load_tokenizer(whole), load_tokenizer(without_first_space(whole))
    assert first.encode("ab cdef").ids == first.encode("ab c").ids + rest.encode("def").ids
    assert first.encode("def").ids != rest.encode("def").ids


class Riddles(Source):
    """As a user would write it: lines of a riddle, a bar and its answer."""

    prompts = True

    def __init__(self, path: str) -> None:
        self.path = path

    def shards(self) -> list[Shard]:
        return [Shard((self.path,))]

    def documents(self, shard: Shard) -> Iterator[Document]:
        for number, line in enumerate(Path(shard.paths[0]).read_text().splitlines()):
            riddle, answer = line.split("|")
            yield Document.of_parts(f"riddle {number}", [Part(riddle, loss=False), Part(answer)])


def own(folder: Path) -> Config:
    (folder / "riddles").write_text("the cat|an hat\nan hat|then\n")
    config = text_config(kind="text", heldout=0.0, sequence_length=32, workers=1, cache=str(folder))
    return config.changed(corpus=config.corpus.changed(target=f"{__name__}.Riddles", path=f"{folder}/riddles"))


def test_a_source_of_ones_own_with_prompts(
    tmp_path: Path, words: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, _ = all_of(prepared(own(tmp_path), TOKENIZER).sequences)
    text = row[row["id"] != PAD]
    assert TOKENIZER.decode(text["id"][~text["loss_mask"]]) == "the cat"
    assert TOKENIZER.decode(text["id"][text["loss_mask"]]) == "[CLS]an hat[SEP]"
    with monkeypatch.context() as patch:
        patch.setattr(Riddles, "prompts", False)
        with pytest.raises(SettingError, match=r"^Riddles gives documents of parts, such as riddle 0: .*prompts"):
            prepared(own(tmp_path), TOKENIZER)
    for config in (own(tmp_path), chats(tmp_path)):
        with pytest.raises(SettingError, match=r"^corpus: has prompts, .*objective\.task=clm"):
            prepared(config, words, made=masked_format)


# --- token ids: what stands inside a row stays, padding goes, and labels of -100 mark prompts

A, B, C, D = 40, 41, 42, 43  # ids of text


def source_in(rows: dict[str, Any]) -> Source:
    return source_in_memory(datasets.Dataset.from_dict(rows), str(rows), "rows", SourceConfig(kind="hub"), "corpus")


def rows_in(rows: dict[str, Any], tokenizer: Any, folder: Path, made: Any = causal_format) -> list[np.ndarray]:
    """The sequences without their padding."""
    config = text_config(kind="hub", hub="rows", heldout=0.0, sequence_length=16, cache=str(folder))
    found = prepare(Text((source_in(rows),), "corpus"), tokenizer, config.corpus, config.data, "train", made)
    pad = made(tokenizer).pad
    return [row[ids_of(row) != pad] for row in all_of(found.sequences)]


def ids_in(rows: dict[str, Any], tokenizer: Any, folder: Path, made: Any = causal_format) -> list[list[int]]:
    return [ids_of(row).tolist() for row in rows_in(rows, tokenizer, folder, made)]


def test_ends_of_documents_inside_a_row_stay(tmp_path: Path) -> None:
    """As `group_texts` packs them; a token that pads and ends a document is padding at the ends of a row alone."""
    tokenizer = vocabulary_of("gpt2")
    end = tokenizer.eos_token_id
    rows = {"input_ids": [[end, A, B, end, C, end, end], [A, end, end, B]]}
    assert ids_in(rows, tokenizer, tmp_path) == [[A, B, end, C, end], [A, end, end, B, end]]


def test_padding_of_its_own_goes_and_beginnings_and_separators_inside_stay(tmp_path: Path) -> None:
    tokenizer = vocabulary_of("gemma")
    pad, begin, end = tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id
    rows: dict[str, Any] = {
        "input_ids": [[pad, begin, A, end, pad, begin, B, end, pad]],
        "attention_mask": [[0, *[1] * 8]],
    }
    assert ids_in(rows, tokenizer, tmp_path) == [[begin, A, end, begin, B, end]]
    tokenizer = vocabulary_of("bert")
    cls, sep, pad = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id
    row = [cls, A, B, C, D, sep, A, B, C, sep]
    rows = {"input_ids": [[*row, pad, pad]], "labels": [[*row, -100, -100]]}
    assert ids_in(rows, tokenizer, tmp_path, masked_format) == [row]


def test_labels_mark_prompts(tmp_path: Path) -> None:
    """As of `apply_chat_template`, where Qwen ends turns with its end-of-text token."""
    tokenizer = vocabulary_of("qwen2")
    end = tokenizer.eos_token_id
    ids = [[A, B, end, C, D, end, end], [A, end, B, end, C, end, A], [A, B, end, end, end, end, end]]
    labels = [[-100, -100, -100, C, D, end, -100], [-100, -100, B, end, -100, -100, A], [-100] * 7]
    rows = {"input_ids": ids, "labels": labels}
    found = rows_in(rows, tokenizer, tmp_path)
    assert [row["id"].tolist() for row in found] == [[A, B, end, C, D, end], [A, end, B, end, C, end, A, end]]
    assert [row["loss_mask"].astype(int).tolist() for row in found] == [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0, 1, 1]]
    plain = {"input_ids": ids[:1], "labels": [[A, B, end, C, D, -100, -100]]}  # only padding does not count
    assert ids_in(plain, tokenizer, tmp_path) == [[A, B, end, C, D, end]]
    with pytest.raises(SettingError, match=r"^corpus: has prompts, which only causal models leave out"):
        ids_in(rows, vocabulary_of("bert"), tmp_path, masked_format)


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"labels": [[A, B], [A, C], [B, -100]]}, r"^corpus\.field=input_ids: rows has other ids in its column labels"),
        ({"attention_mask": [[1, 1], [1], [1, 1]]}, r"a row of rows has 2 ids and 1 numbers in attention_mask.*row 2"),
        ({"labels": [0, 1, 0]}, None),  # classes
    ],
)
def test_columns_of_something_else_are_refused(
    columns: dict[str, Any], line: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_files, "SHARD_ROWS", 1)  # the number of a row is that in the whole
    rows = {"input_ids": [[A, B]] * 3, **columns}
    if line is None:
        assert len(ids_in(rows, vocabulary_of("gpt2"), tmp_path)) == 3
        return
    with pytest.raises(SettingError, match=line):
        ids_in(rows, vocabulary_of("gpt2"), tmp_path)
