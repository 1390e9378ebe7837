"""Predictions of a trained model: tokens for masks, continuations, classes and values, and answers to questions."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, overload

import numpy as np
import torch
from pydantic import Field
from transformers import FillMaskPipeline, TextClassificationPipeline

from distill.commands.arguments import Arguments
from distill.config.base import ROWS, SEEDS
from distill.config.errors import parse
from distill.config.objective import SamplingConfig
from distill.data.chat_template import ASSISTANT, COLUMNS, REWRITE, ChatTemplate, conversation_of
from distill.data.collate.tables import Labelled
from distill.data.readers import Record
from distill.data.span_windows import SpanConfig, SpanWindows, span_windows
from distill.data.tables.squad import Question, Questions
from distill.evaluation.questions import AnswerConfig, Answered, find_answers
from distill.models.blocks import in_evaluation_mode
from distill.models.check import padding_of
from distill.models.generation import Completion, complete, ends_of
from distill.models.kind import CAUSAL, CLASSES, MASKED, SPANS, ModelKind
from distill.models.language_model import LanguageModel, OutputSpec
from distill.models.loaded import Held, LoadedModel, as_loaded
from distill.runtime.errors import SettingError, did_you_mean, raising_at_the_call
from distill.runtime.seed import key

Model = str | Path | LoadedModel | Held
Input = str | tuple[str, str] | Mapping[str, Any]
LONGEST = 512  # tokens of a sequence, of a model that sets no limit
MASKS = re.compile(r"\[MASK\]|<mask>")  # as people write them, whatever the model's own mask token is
DRAWING = ("top_k", "temperature", "top_p", "seed")
OPTIONS = {  # that a kind of model reads
    MASKED: ("top_k",),
    CAUSAL: ("max_new_tokens", "sample", *DRAWING),
    CLASSES: ("top_k", "sequence_length"),
    SPANS: ("top_k", "sequence_length", "no_answer", "max_answer_tokens"),
}
Count = Annotated[int, Field(ge=1, le=ROWS)]


class PredictOptions(Arguments):
    """Options of a prediction; which of them a model reads depends on its kind."""

    top_k: Count | None = None
    max_new_tokens: Count = 30
    sample: bool = False
    temperature: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, le=SEEDS)] = 0
    sequence_length: Count | None = None
    no_answer: bool | None = None
    max_answer_tokens: Count = 30
    batch_size: Count = 32

    def check(self, kind: ModelKind) -> None:
        """Raises SettingError for options that were given and that this kind of model does not read."""
        reads = OPTIONS[kind]
        for name, value in self.model_dump(exclude_unset=True, exclude_none=True, exclude={"batch_size"}).items():
            if name not in reads:
                problem = f"a {kind.noun} does not read it{did_you_mean(name, reads)}"
                cure = f"leave it out (it reads {', '.join(reads)})"
                raise SettingError(problem, setting=name, value=value, cure=cure)
            if name in DRAWING and kind is CAUSAL and not self.sample:
                raise SettingError("it is for sampling", setting=name, value=value, cure="set sample=true")


@overload
def predict(model: Model, inputs: Input, *, device: str = "auto", **options: Any) -> Record: ...
@overload
def predict(model: Model, inputs: list[Any], *, device: str = "auto", **options: Any) -> list[Record]: ...
@raising_at_the_call
def predict(model: Model, inputs: Input | Sequence[Input], *, device: str = "auto", **options: Any) -> Any:
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
            most probable ones are taken. Of the model's generation_config.json only what ends a text counts.
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
    if unknown := next((name for name in options if name not in PredictOptions.model_fields), None):
        near = did_you_mean(unknown, PredictOptions.model_fields)
        raise SettingError(f"not an option of distill.predict{near}", setting=unknown, cure="leave it out")
    settings, loaded = parse(PredictOptions, options, ""), as_loaded(model, device)
    settings.check(loaded.kind)
    several = isinstance(inputs, Sequence) and not isinstance(inputs, str | tuple)
    items = list(inputs) if several else [inputs]
    outcomes = predict_named([(f"input {number}", item) for number, item in enumerate(items, 1)], loaded, settings)
    return outcomes if several else outcomes[0]


def predict_named(inputs: Sequence[tuple[str, Any]], model: LoadedModel, options: PredictOptions) -> list[Record]:
    """The entries of each input and its prediction; an entry with the name of one, such as `class`, is `input_class`.

    Each input comes with what messages call it. Raises SettingError for one that the model does not read.
    """
    by_kind: dict[ModelKind, Any] = {MASKED: _masks, CAUSAL: _continuations, CLASSES: _classes, SPANS: _answers}
    records = [(name, _as_record(name, item, model.kind)) for name, item in inputs]
    queries = [_query(name, record, model, options) for name, record in records]
    order = sorted(range(len(queries)), key=lambda number: -len(str(queries[number])))  # so that little is padding
    with in_evaluation_mode(model.model):
        found = by_kind[model.kind](model, [queries[number] for number in order], options) if queries else []
    predictions = dict(zip(order, found, strict=True))
    return [
        {f"input_{key}" if key in predictions[number] else key: record[key] for key in record} | predictions[number]
        for number, (_, record) in enumerate(records)
    ]


def _as_record(name: str, item: Any, kind: ModelKind) -> Record:
    """An input as a dict. Raises SettingError where it is none, or no text that can be written."""
    if isinstance(item, tuple | list) and len(item) == 2 and kind is CLASSES:
        item = {"text": item[0], "second": item[1]}
    record = dict(item) if isinstance(item, Mapping) else {"text": item}
    try:
        json.dumps(record, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise SettingError(f"{name} is not UTF-8 ({error.reason}): convert it, such as with iconv") from None
    return record


def _query(name: str, record: Record, model: LoadedModel, options: PredictOptions) -> Any:
    """What the model reads of a record: a text with its own mask token, tokens, one or two texts, or a question.

    Raises SettingError where the record lacks that, or is longer than the model reads.
    """
    kind, needed = model.kind, ("question", "context") if model.kind is SPANS else ("text",)
    columns = {entry: model.corpus.get(entry) for entry in ("text", "second")}  # of the run that trained the model
    texts = record | {entry: record[column] for entry, column in columns.items() if column in record}
    messages = next((column for column in COLUMNS if texts.get(column) is not None), None)
    if missing := next((entry for entry in needed if not isinstance(texts.get(entry), str)), None):
        if kind is CAUSAL and messages and texts.get("text") is None:
            return _fitting(name, _chat_prompt(name, record, messages, model), model, options.max_new_tokens)
        or_messages = ', or {"messages": [{"role": "user", "content": TEXT}]}' if kind is CAUSAL else ""
        needs = f"a {kind.noun} needs {' and '.join(needed)}{or_messages}"
        raise SettingError(f"{name} has no {missing} that is text: {needs}")
    if texts.get("second") is not None and not (kind is CLASSES and isinstance(texts["second"], str)):
        raise SettingError(f"{name} has a second text, which a {kind.noun} does not read: leave it out")
    if kind is SPANS:
        return Question(name, texts["context"], texts["question"], ())
    if kind is CLASSES:
        return {"text": texts["text"], "text_pair": texts.get("second")}
    if kind is CAUSAL:
        return _fitting(name, _text_prompt(texts["text"], model.tokenizer), model, options.max_new_tokens)
    mask = str(model.tokenizer.mask_token)
    text = MASKS.sub(lambda _: mask, texts["text"])
    if mask not in text:
        raise SettingError(f"{name} has no mask to fill: write {mask} where a token is missing")
    _fitting(name, model.tokenizer(text, verbose=False)["input_ids"], model)
    return text


def written_prompt(name: str, item: Any, model: LoadedModel, new: int) -> tuple[Record, Any, list[int]]:
    """The record of a prompt, the text or messages in it, and its tokens. Raises SettingError as `_query`.

    Args:
        item: a text, or a record with `text`, `messages`, or either of them as `prompt`.
        new: tokens that are to follow.
    """
    record = _as_record(name, item, CAUSAL)
    if (given := record.get("prompt")) is not None:
        record |= {"text": given} if isinstance(given, str) else {"text": None, COLUMNS[0]: given}
    tokens = _query(name, record, model, PredictOptions(max_new_tokens=new))
    if isinstance(record.get("text"), str):
        return record, record["text"], tokens
    column = next(column for column in COLUMNS if record.get(column) is not None)
    return record, conversation_of(record, column).messages, tokens


def _fitting(name: str, ids: list[int], model: LoadedModel, new: int = 0) -> list[int]:
    """Some tokens. Raises SettingError for none, or where they and `new` ones are more than the model reads."""
    if not ids:
        raise SettingError(f"{name} is empty, and this tokenizer has no token for the beginning: give some text")
    if model.longest is not None and len(ids) + new > model.longest:
        problem = f"{name} has {len(ids):,} tokens" + f" and max_new_tokens={new}" * (new > 0)
        raise SettingError(f"{problem}, and model={model.path} reads {model.longest:,}: shorten it")
    return ids


def _text_prompt(text: str, tokenizer: Any) -> list[int]:
    """The tokens of a text without what the tokenizer puts behind it; of an empty one what begins a text, if any."""
    encoded = tokenizer(text, return_special_tokens_mask=True, verbose=False)
    behind = sum(takewhile(bool, reversed(encoded["special_tokens_mask"])))
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return encoded["input_ids"][: len(encoded["input_ids"]) - behind] or ([] if first is None else [first])


def _chat_prompt(name: str, record: Record, column: str, model: LoadedModel) -> list[int]:
    """The tokens of the messages in a column, up to where the answer begins."""
    template = ChatTemplate.of(model.tokenizer, f"model={model.path}: its chat template")
    if template is None:
        raise SettingError(f"model={model.path} has no chat template, so it answers no messages: give a text")
    try:
        conversation = conversation_of(record, column)
    except ValueError as error:
        raise SettingError(f"{name}: in column {error}") from error
    if not conversation.messages:
        raise SettingError(f"{name}: {column} has no message: {REWRITE}")
    if conversation.messages[-1]["role"] == ASSISTANT:
        raise SettingError(f"{name}: its last message is the assistant's: leave that out, to have it predicted")
    text = template.prompt(conversation)  # with what begins a text
    return list(model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _piped(pipeline: Any, model: LoadedModel, inputs: list[Any], batch_size: int, **arguments: Any) -> list[Any]:
    """What a pipeline of transformers gives for each input."""
    tokenizer: Any = copy.deepcopy(model.tokenizer)
    if tokenizer.pad_token_id is None:  # without which it makes no batches
        tokenizer.add_special_tokens({"pad_token": tokenizer.convert_ids_to_tokens(padding_of(tokenizer) or 0)})
    pipe = pipeline(model=model.model, tokenizer=tokenizer, device=model.device, batch_size=batch_size)
    return list(pipe((each for each in inputs), **arguments))  # no list, as it gives something else for one of one


def _segments(model: LoadedModel) -> dict[str, bool]:
    """Whether the tokenizer is to give segments: of a model that has embeddings for several."""
    return {"return_token_type_ids": getattr(model.model.config, "type_vocab_size", 0) > 1}


def _masks(model: LoadedModel, texts: list[str], options: PredictOptions) -> list[Record]:
    """`filled`, each text with the most probable token in place of each mask, and `masks`, their best tokens."""
    tokenizer: Any = model.tokenizer
    arguments = {"top_k": min(options.top_k or 5, len(tokenizer)), "tokenizer_kwargs": _segments(model)}
    outcomes = []
    for text, found in zip(texts, _piped(FillMaskPipeline, model, texts, options.batch_size, **arguments), strict=True):
        masks: list[list[Record]] = []
        for best in [found] if isinstance(found[0], dict) else found:
            names = [one["token_str"].strip() or tokenizer.convert_ids_to_tokens(one["token"]) for one in best]
            masks.append([{"token": name, "probability": one["score"]} for name, one in zip(names, best, strict=True)])
        # One token after the other, from the left: the token of a mask may itself be spelled like a mask.
        first, *parts = text.split(tokenizer.mask_token)
        filled = first + "".join(best[0]["token"] + part for best, part in zip(masks, parts, strict=True))
        outcomes.append({"filled": filled, "masks": masks})
    return outcomes


def _sequence_length(model: LoadedModel, options: PredictOptions, usual: int = LONGEST) -> int:
    """Tokens of a sequence: as set, else as in the run that trained the model, else `usual` or what it can read."""
    least, longest = model.tokenizer.num_special_tokens_to_add(pair=True) + 2, model.longest or LONGEST
    if (chosen := options.sequence_length) is not None and not least <= chosen <= longest:
        problem, cure = f"model={model.path} reads {least} to {longest:,} tokens", "give a number between these"
        raise SettingError(problem, setting="sequence_length", value=chosen, cure=cure)
    return chosen or min(model.corpus.get("sequence_length") or usual, longest)


def _classes(model: LoadedModel, texts: list[Any], options: PredictOptions) -> list[Record]:
    """`class`, `probability` and `probabilities` by class, the largest first; of a model that gives values `value`."""
    config = model.model.config
    is_value = config.problem_type == "regression" or config.num_labels == 1
    found = _piped(
        TextClassificationPipeline, model, texts, options.batch_size, top_k=options.top_k, truncation=True,
        max_length=_sequence_length(model, options), function_to_apply="none" if is_value else None,
        split_special_tokens=True, **_segments(model),
    )  # fmt: skip
    if is_value:
        return [{"value": each[0]["score"]} for each in found]
    scores = [{one["label"]: one["score"] for one in each} for each in found]
    return [{"class": next(iter(p)), "probability": max(p.values()), "probabilities": p} for p in scores]


def _answers(model: LoadedModel, asked: list[Question], options: PredictOptions) -> list[Record]:
    """`answer`, `start` and `end` (characters of the context), `score` and `no_answer_score` of each question.

    The rule is that which scores a run on SQuAD, as transformers 5 has no pipeline. `score` is the sum of the logits of
    the first and last token, `no_answer_score` that of having no answer minus `score`. With top_k also the `answers`.
    """
    usual, corpus = SpanConfig(), model.corpus
    length = _sequence_length(model, options, usual.sequence_length)
    stride = corpus.get("stride") or min(usual.stride, length // 3)
    max_query = min(corpus.get("max_query") or usual.max_query, max(length // 2 - 4, 1))
    may_lack = str(corpus.get("version")) == "2.0" if options.no_answer is None else options.no_answer
    questions = Questions("input", "2.0", tuple(asked))
    windows = span_windows(questions, model.tokenizer, SpanConfig(length, stride, max_query), "model", scoring=True)
    starts, ends = np.moveaxis(_span_logits(model, windows, options.batch_size), -1, 0)
    best = options.top_k or 1
    limits = AnswerConfig(max(best, AnswerConfig().n_best), options.max_answer_tokens)
    return [_answer(each, best, may_lack) for each in find_answers(questions, windows, starts, ends, limits)]


@torch.inference_mode()
def _span_logits(model: LoadedModel, windows: SpanWindows, batch_size: int) -> np.ndarray:
    """Those of an answer's first and last token, float32 [windows, S, 2]; 0 at padding, which no answer touches."""
    logits = np.zeros((*windows.sequences.shape, 2), np.float32)
    collator, reader = Labelled(windows), LanguageModel(model.model)
    for numbers in np.split(np.arange(len(windows)), range(batch_size, len(windows), batch_size)):
        ids, keys = windows.sequences[numbers].astype(np.int64), np.zeros(len(numbers), np.uint64)
        batch = collator.collate(ids, keys, numbers).to(model.device)
        found = reader(batch.inputs, batch.documents, OutputSpec(extra=("span",))).extra["span"]
        logits[numbers, : found.shape[1]] = found.float().cpu().numpy()
    return logits


def _answer(answered: Answered, best: int, may_lack: bool) -> Record:
    """The best answer or none, where a question may lack one; a context without a token has no span to answer with."""
    spans = [{"answer": c.text, "start": c.place[0], "end": c.place[1], "score": c.score} for c in answered.candidates]
    outcome: Record = {**spans[0], "no_answer_score": float(answered.null_odds)} if spans else {"score": None}
    if not spans or (may_lack and answered.null_odds > 0):
        outcome |= {"answer": "", "start": None, "end": None}
    if best > 1:
        probabilities = torch.tensor([each["score"] for each in spans], dtype=torch.float64).softmax(0).tolist()
        outcome["answers"] = [each | {"probability": p} for each, p in zip(spans[:best], probabilities, strict=False)]
    return outcome


def _continuations(model: LoadedModel, prompts: list[list[int]], options: PredictOptions) -> list[Record]:
    """`continuation` of each prompt, and whether the model has `ended` it.

    Drawn tokens depend on the seed and on which texts are computed together.
    """
    temperature = options.temperature if options.sample else 0.0
    how: Any = {"max_new_tokens": options.max_new_tokens, "top_k": options.top_k, "top_p": options.top_p}
    settings = SamplingConfig.model_construct(temperature=temperature, **how)
    ends, tokens = ends_of(model.model, tokenizer=model.tokenizer), [np.array(prompt) for prompt in prompts]
    keys, outcomes = key(options.seed, "predict", np.arange(len(prompts))), []
    for start in range(0, len(prompts), options.batch_size):
        few = slice(start, start + options.batch_size)
        written = complete(model.model, tokens[few], keys[few], settings, ends, len(model.tokenizer))
        for prompt, found in zip(prompts[few], written, strict=True):
            outcomes.append({"continuation": text_of(found, prompt, model.tokenizer), "ended": found.ended})
    return outcomes


def text_of(completion: Completion, prompt: Sequence[int], tokenizer: Any) -> str:
    """The text of a completion, without what ends it; with that of the prompt before it, it is that of all tokens.

    Decoded alone it would lack the blank before its first word with SentencePiece's tokenizers.
    """
    new = completion.tokens[: len(completion.tokens) - completion.ended].tolist()
    before, whole, alone = (
        str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in ([*prompt], [*prompt, *new], new)
    )
    return whole.removeprefix(before) if whole.startswith(before) else alone
