"""The chat template that a student's tokenizer gets writes conversations as they were trained on."""

from typing import Any

import pytest
from chats import TEMPLATE, TOKENIZER, conversations, naive
from transformers import PreTrainedTokenizerBase

from distill.config.settings import SourceConfig
from distill.data.sources.chat import chat_template

QUOTES = "\"'{{ role }}' {{% é \U0001f600 \\\\ \t{role}>>\n {content}\n\n<{role}>"
ASKED = [{"role": "user", "content": "an '\"{{ cat }}"}, {"role": "assistant", "content": "the\nhat"}]


def chat(template: str | None = TEMPLATE, **more: Any) -> SourceConfig:
    return SourceConfig(kind="chat", path="chats.jsonl", template=template, **more)


def written(template: str | None, messages: list[dict[str, Any]], **options: Any) -> Any:
    assert isinstance(TOKENIZER, PreTrainedTokenizerBase)
    return TOKENIZER.apply_chat_template(messages, chat_template=template, **options)


def test_its_tokens_are_those_of_training() -> None:
    """Where no token can reach from what stands before a content into it; training cuts the text there."""
    setting = "[PAD]{role}:[PAD]{content}[SEP]"
    template = chat_template([chat(setting)], TOKENIZER.bos_token)
    plain = [each for each in conversations() if not any("[SEP]" in message["content"] for message in each)]
    assert len(plain) > 3
    for each in plain:
        ids = written(template, each, tokenize=True, return_dict=False)
        assert ids == [id_ for id_, _ in naive(each, setting)[:-1]]  # the last one ends the document


@pytest.mark.parametrize("template", [TEMPLATE, QUOTES, "{content}", None])
def test_it_writes_what_the_setting_does(template: str | None) -> None:
    text = "<|{role}|>\n{content}\n" if template is None else template
    expected = "".join(text.format(**message) for message in ASKED)
    found = chat_template([chat(template, target_role="clerk")], None)
    assert written(found, ASKED, tokenize=False) == expected
    prompt = text.partition("{content}")[0].format(role="clerk")
    assert written(found, ASKED, tokenize=False, add_generation_prompt=True) == expected + prompt


def test_only_one_way_of_writing_is_a_template() -> None:
    books, own = SourceConfig(kind="text", path="books"), SourceConfig(**{"_target_": "my.Source"})
    assert chat_template([books, own], None) is None
    assert chat_template([books, chat(), own, chat(fraction=0.5)], None) == chat_template([chat()], None) is not None
    assert chat_template([chat(), chat("{content}\n")], None) is None
