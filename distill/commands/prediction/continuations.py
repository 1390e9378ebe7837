"""Continuations of a text or a conversation, from a causal language model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

import torch
from transformers import GenerationConfig

from distill.commands.prediction.batches import check_length, in_batches
from distill.commands.prediction.settings import PredictConfig
from distill.data.chat_template import ASSISTANT, COLUMNS, REWRITE, ChatTemplate, conversation_of
from distill.data.lines import Record
from distill.models.loaded import LoadedModel
from distill.runtime.errors import SettingError

MAX_NEW_TOKENS = 30


class Continuation(TypedDict):
    """What a model writes behind a text."""

    continuation: str
    ended: bool  # whether the model has ended the text before `max_new_tokens`


def continue_texts(model: LoadedModel, records: Sequence[Record], settings: PredictConfig) -> list[Continuation]:
    """The model's continuation of each record's `text`, or its answer to the conversation in `messages`.

    By default the most probable token is taken each time, and the outcome does not depend on batches but for rounding.
    Drawn tokens depend on the seed and on which texts are computed together. torch's own generator is left as it was.

    Returns:
        The text behind each record.

    Raises:
        SettingError: text and continuation together are longer than the model reads, or a conversation that the model's
            chat template does not take.
    """
    if not records:
        return []
    tokenizer, max_new_tokens = model.tokenizer, settings.max_new_tokens or MAX_NEW_TOKENS
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    chats = conversation_texts(model, records)
    ends = ends_of(model, bool(chats))
    texts = [str(chats.get(number) or record.get("text", "")) for number, record in enumerate(records)]
    prompts = [
        # A chat template writes the beginning of a text, too.
        (tokens_of(tokenizer, text) if number in chats else beginning_of(tokenizer, text)) or [first]
        for number, text in enumerate(texts)
    ]
    for number, prompt in enumerate(prompts, 1):
        if prompt == [None]:
            raise SettingError(
                f"text {number} is empty, and this tokenizer has no token for the beginning of a text: give some text"
            )
        check_length(model, f"text {number}", len(prompt) + max_new_tokens, f" with max_new_tokens={max_new_tokens}")
    outcomes = dict[int, Continuation]()
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode():
        torch.default_generator.manual_seed(settings.seed or 0)
        for device in devices:  # and no other: `torch.manual_seed` would seed every GPU of the process
            with torch.cuda.device(device):
                torch.cuda.manual_seed(settings.seed or 0)
        for numbers in in_batches([len(prompt) for prompt in prompts], settings.batch_size):
            written = _write(model, [prompts[number] for number in numbers], max_new_tokens, ends, settings)
            for number, tokens in zip(numbers, written, strict=True):
                end = next((index for index, token in enumerate(tokens) if token in ends), None)
                text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
                outcomes[number] = Continuation(continuation=str(text), ended=end is not None)
    return [outcomes[number] for number in range(len(records))]


def tokens_of(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """The tokens of a text, with those that the tokenizer puts around it where `special`."""
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def beginning_of(tokenizer: Any, text: str) -> list[int]:
    """A text as the tokenizer begins it, without what it puts behind: an end, behind which nobody wants to read on."""
    whole, inner = tokens_of(tokenizer, text, special=True), tokens_of(tokenizer, text)
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return whole[: start + len(inner)]
    return whole  # tokens that depend on those around them: it is not known where the text ends


def is_conversation(record: Any) -> bool:
    """Whether a record holds messages in place of a text."""
    return "text" not in record and any(column in record for column in COLUMNS)


def conversation_texts(model: LoadedModel, records: Sequence[Record]) -> dict[int, str]:
    """The conversations among the records by their indices, as text up to where the model's answer begins.

    Raises:
        SettingError: the model's tokenizer has no chat template or does not take one of them, it is none, or it already
            has the answer.
    """
    numbers = [number for number, record in enumerate(records) if is_conversation(record)]
    if not numbers:
        return {}
    template = ChatTemplate.of(model.tokenizer, f"model={model.path}: its chat template")
    if template is None:
        raise SettingError(f"model={model.path} has no chat template, so it answers no messages: give a text")
    texts = {}
    for number in numbers:
        column = next(column for column in COLUMNS if column in records[number])
        try:
            conversation = conversation_of(records[number], column)
        except ValueError as error:
            raise SettingError(f"text {number + 1}: in column {error}") from error
        if not conversation.messages:
            raise SettingError(f"text {number + 1}: {column} has no message: {REWRITE}")
        if conversation.messages[-1]["role"] == ASSISTANT:
            raise SettingError(
                f"text {number + 1}: its last message is the assistant's: leave that out, to have it predicted"
            )
        texts[number] = template.prompt(conversation)
    return texts


def ends_of(model: LoadedModel, chats: bool) -> list[int]:
    """The tokens at which a continuation ends; an answer in a conversation also at those of the saved model."""
    ends: list[Any] = [model.tokenizer.eos_token_id]
    if chats:
        saved = getattr(getattr(model.model, "generation_config", None), "eos_token_id", None)
        ends += saved if isinstance(saved, list) else [saved]
    return [end for end in dict.fromkeys(ends) if end is not None]


@contextmanager
def _own_settings(model: Any, sample: bool) -> Iterator[None]:
    """Within it nothing of the model's generation_config.json alters the most probable tokens, such as a penalty.

    transformers reads from it whatever a call of `generate` leaves out. Where tokens are drawn, it stays.
    """
    saved = getattr(model, "generation_config", None)
    if sample or saved is None:
        yield
        return
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = saved


def _write(
    model: LoadedModel, prompts: list[list[int]], max_new_tokens: int, ends: list[int], settings: PredictConfig
) -> list[list[int]]:
    """The new tokens of each prompt; prompts end at the same column, with padding before them."""
    width, pad = max(len(prompt) for prompt in prompts), ends[0] if ends else 0
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    drawing = {}
    if settings.sample:  # by what the model asks for besides
        drawing = {
            "temperature": settings.temperature or 1.0,
            "top_p": settings.top_p or 1.0,
            "top_k": settings.top_k or 0,
        }
    with _own_settings(model.model, bool(settings.sample)):
        written = model.model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=bool(settings.sample),
            num_beams=1,
            num_return_sequences=1,
            return_dict_in_generate=False,
            output_hidden_states=False,  # as nothing reads them, whatever its generation_config.json asks for
            bos_token_id=pad,  # nor is a prompt ever empty
            pad_token_id=pad,
            eos_token_id=ends or None,
            **drawing,
        )
    rows: list[list[int]] = written[:, width:].tolist()
    return rows
