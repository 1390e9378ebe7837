"""One function for the predictions of all kinds of models."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

from distill.commands.prediction.continuations import continue_texts, is_conversation
from distill.commands.prediction.masks import fill_masks
from distill.commands.prediction.settings import Options, PredictConfig
from distill.commands.prediction.span_answers import answer_questions
from distill.commands.prediction.text_classes import classify
from distill.data.lines import Record
from distill.models.kind import CAUSAL, CLASSES, MASKED, SPANS, ModelKind
from distill.models.loaded import Held, LoadedModel, as_loaded
from distill.runtime.errors import SettingError, raising_at_the_call

Input = str | tuple[str, str] | Mapping[str, Any]
Answering = Callable[[LoadedModel, Sequence[Record], PredictConfig], Sequence[Mapping[str, object]]]
# By the noun of a kind of model: the function that predicts, and the texts that it reads of a record.
ANSWERS: dict[str, tuple[Answering, tuple[str, ...]]] = {
    MASKED.noun: (fill_masks, ("text",)),
    CAUSAL.noun: (continue_texts, ("text",)),
    CLASSES.noun: (classify, ("text",)),
    SPANS.noun: (answer_questions, ("question", "context")),
}
CONVERSATION = ', or {"messages": [{"role": "user", "content": TEXT}]}'


@overload
def predict(
    model: str | Path | LoadedModel | Held, inputs: Input, *, device: str = "auto", **options: Unpack[Options]
) -> Record: ...
@overload
def predict(
    model: str | Path | LoadedModel | Held, inputs: list[Any], *, device: str = "auto", **options: Unpack[Options]
) -> list[Record]: ...
@raising_at_the_call
def predict(
    model: str | Path | LoadedModel | Held,
    inputs: Input | Sequence[Input],
    *,
    device: str = "auto",
    **options: Unpack[Options],
) -> Any:
    """The prediction for an input, or for each of a list of inputs.

    A masked model fills masks (`[MASK]`, whatever its own mask token is), a causal model continues texts, a fine-tuned
    one gives classes with probabilities or values, or finds the answers to questions in their contexts. Models that are
    loaded compute in fp32, and code that comes with a model is never run.

    Args:
        model: a run folder, a snapshot, a model folder, a name on the Hub, what `distill.load_model` gave, or
            (model, tokenizer) in memory, which stay as they are.
        inputs: a text; for pairs of texts a tuple of both, or a dict with `text` and `second`; for answers a dict with
            `question` and `context`; for an answer in a conversation a dict with `messages`. Further entries of a dict,
            such as `id`, are kept in its outcome (`input_class` is a `class` that was there before). Or a list.
        top_k: tokens for a mask (5), classes (all) or answers (1) to return, or tokens to draw from (all).
        max_new_tokens: of a continuation (30).
        sample: draw the tokens of a continuation, by `temperature` (1), `top_k`, `top_p` (1) and `seed` (0); else the
            most probable ones are taken.
        sequence_length: tokens, of a fine-tuned model; None: as in the run that trained it, else all it reads.
        no_answer: whether a question may stay without an answer; None: as in the run that trained the model.
        max_answer_tokens: of an answer (30).
        batch_size: sequences per forward pass (32).
        device: as `distill.load_model` takes it, where the model is not loaded yet.

    Returns:
        A dict for one input, a list of them for a list: the input's own entries, and `filled` and `masks`;
        `continuation` and `ended`; `class`, `probability` and `probabilities`, or `value`; or `answer` with its place.

    Raises:
        SettingError: no such model, an input that it does not read, or an option that does not fit.
    """
    settings = PredictConfig(**options)
    loaded_model = as_loaded(model, device)
    settings.check(loaded_model.kind)
    several = isinstance(inputs, Sequence) and not isinstance(inputs, str | tuple)
    items = list(inputs) if several else [inputs]
    outcome = predict_records(
        loaded_model, [as_record(item, n, loaded_model.kind) for n, item in enumerate(items, 1)], settings
    )
    return outcome if several else outcome[0]


def predict_records(model: LoadedModel, records: Sequence[Record], settings: PredictConfig) -> list[Record]:
    """The predictions for records of `as_record`; each outcome begins with the record's own entries."""
    with model.evaluating():
        answers = ANSWERS[model.kind.noun][0](model, records, settings)
    return [_outcome(record, answer) for record, answer in zip(records, answers, strict=True)]


def _outcome(record: Record, answer: Mapping[str, object]) -> Record:
    """An entry of the record with the name of one of the answer, such as the `class` of a table, is `input_class`."""
    if taken := next((name for name in answer if name in record and f"input_{name}" in record), None):
        raise SettingError(
            f"an input has both {taken} and input_{taken}, and its prediction is {taken}: rename one of them"
        )
    return {f"input_{name}" if name in answer else name: value for name, value in record.items()} | {**answer}


def as_record(item: Any, number: int, kind: ModelKind, what: str = "input") -> Record:
    """An input as a dict with the texts that this kind of model reads.

    Args:
        number: which of the inputs it is, for messages, in which `what` is before it.

    Raises:
        SettingError: it lacks one of them, or is something else.
    """
    needed = ANSWERS[kind.noun][1]
    record: Any = item
    if isinstance(item, str) and needed == ("text",):
        record = {"text": item}
    elif isinstance(item, tuple | list) and len(item) == 2 and kind is CLASSES:
        record = {"text": item[0], "second": item[1]}
    if not isinstance(record, Mapping):
        raise SettingError(f"{what} {number} is not a record: a {kind.noun} needs {' and '.join(needed)}")
    if kind is not CLASSES and "second" in record and needed == ("text",):
        raise SettingError(f"{what} {number} has a second text, which a {kind.noun} does not read: leave it out")
    texts = () if kind is CAUSAL and is_conversation(record) else needed
    for name in (*texts, *(["second"] if "second" in record else [])):
        if not isinstance(record.get(name), str):
            raise SettingError(
                f"{what} {number} has no {name} that is text: a {kind.noun} needs {' and '.join(needed)}"
                f"{CONVERSATION * (kind is CAUSAL)}"
            )
    try:
        json.dumps(dict(record), ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise SettingError(f"{what} {number} is not UTF-8 ({error.reason}): convert it, such as with iconv") from None
    return dict(record)
