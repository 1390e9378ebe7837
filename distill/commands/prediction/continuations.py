"""Continuations of a text, from a causal language model."""

from collections.abc import Sequence
from typing import TypedDict

import torch

from distill.commands.prediction.batches import check_length, in_batches
from distill.commands.prediction.settings import PredictConfig
from distill.data.lines import Record
from distill.models.loaded import LoadedModel

MAX_NEW_TOKENS = 30


class Continuation(TypedDict):
    """What a model writes behind a text."""

    continuation: str
    ended: bool  # whether the model has ended the text before `max_new_tokens`


def continue_texts(model: LoadedModel, records: Sequence[Record], settings: PredictConfig) -> list[Continuation]:
    """The model's continuation of each record's `text`.

    By default the most probable token is taken each time, and the outcome does not depend on batches but for rounding.
    Drawn tokens depend on the seed and on which texts are computed together. torch's own generator is left as it was.

    Returns:
        The text behind each record.

    Raises:
        SettingError: text and continuation together are longer than the model reads.
    """
    if not records:
        return []
    tokenizer, max_new_tokens = model.tokenizer, settings.max_new_tokens or MAX_NEW_TOKENS
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    encoded = tokenizer([record["text"] for record in records], verbose=False)
    prompts = [list(ids) or [first] for ids in encoded["input_ids"]]
    for number, prompt in enumerate(prompts, 1):
        check_length(model, f"text {number}", len(prompt) + max_new_tokens, f" with max_new_tokens={max_new_tokens}")
    outcomes = dict[int, Continuation]()
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode():
        torch.default_generator.manual_seed(settings.seed or 0)
        for device in devices:  # and no other: `torch.manual_seed` would seed every GPU of the process
            with torch.cuda.device(device):
                torch.cuda.manual_seed(settings.seed or 0)
        for numbers in in_batches([len(prompt) for prompt in prompts], settings.batch_size):
            written = _write(model, [prompts[number] for number in numbers], max_new_tokens, settings)
            for number, tokens in zip(numbers, written, strict=True):
                end = next((index for index, token in enumerate(tokens) if token == tokenizer.eos_token_id), None)
                text = tokenizer.decode(tokens[:end], skip_special_tokens=True)
                outcomes[number] = Continuation(continuation=str(text), ended=end is not None)
    return [outcomes[number] for number in range(len(records))]


def _write(
    model: LoadedModel, prompts: list[list[int]], max_new_tokens: int, settings: PredictConfig
) -> list[list[int]]:
    """The new tokens of each prompt; prompts end at the same column, with padding before them."""
    eos = model.tokenizer.eos_token_id
    width, pad = max(len(prompt) for prompt in prompts), 0 if eos is None else eos
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    drawing = {}
    if settings.sample:
        drawing = {
            "temperature": settings.temperature or 1.0,
            "top_p": settings.top_p or 1.0,
            "top_k": settings.top_k or 0,
        }
    written = model.model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max_new_tokens,
        do_sample=bool(settings.sample),
        num_beams=1,
        output_hidden_states=False,  # as nothing reads them, whatever its generation_config.json asks for
        bos_token_id=pad,  # nor is a prompt ever empty
        pad_token_id=pad,
        eos_token_id=eos,
        **drawing,
    )
    rows: list[list[int]] = written[:, width:].tolist()
    return rows
