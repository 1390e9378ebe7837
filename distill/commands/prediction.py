"""Predictions of a trained model: tokens for masks, continuations, classes and values, and answers to questions."""

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, overload

import numpy as np
import torch
from pydantic import Field
from tokenizers.processors import TemplateProcessing
from torch.nn.utils.rnn import pad_sequence
from transformers import FillMaskPipeline, GenerationConfig, TextClassificationPipeline

from distill.commands.arguments import Arguments
from distill.config.errors import parse
from distill.config.model import ROWS, SEEDS
from distill.data.chat_template import ASSISTANT, COLUMNS, REWRITE, ChatTemplate, conversation_of
from distill.data.collate.spans import Spans
from distill.data.lines import Record
from distill.data.span_windows import SpanConfig, SpanWindows, span_windows
from distill.data.tables.squad import Question, Questions
from distill.evaluation.measures.answers import AnswerConfig, Answered, find_answers
from distill.models.check import padding_of
from distill.models.kind import CAUSAL, CLASSES, MASKED, SPANS, ModelKind
from distill.models.language_model import LanguageModel, OutputSpec
from distill.models.loaded import Held, LoadedModel, as_loaded
from distill.runtime.errors import SettingError, did_you_mean, raising_at_the_call

Input = str | tuple[str, str] | Mapping[str, Any]
LONGEST = 512  # tokens of a sequence, of a model that sets no limit
MASKS = re.compile(r"\[MASK\]|<mask>")  # as people write them, whatever the model's own mask token is
DRAWING = ("top_k", "temperature", "top_p", "seed")
# By the noun of a kind of model: the texts of a record that it reads, and the options.
TEXTS = {MASKED.noun: ("text",), CAUSAL.noun: ("text",), CLASSES.noun: ("text",), SPANS.noun: ("question", "context")}
OPTIONS = {
    MASKED.noun: ("top_k",),
    CAUSAL.noun: ("max_new_tokens", "sample", *DRAWING),
    CLASSES.noun: ("top_k", "sequence_length"),
    SPANS.noun: ("top_k", "sequence_length", "no_answer", "max_answer_tokens"),
}


Count = Annotated[int, Field(ge=1, le=ROWS)]


class PredictOptions(Arguments):
    """Options of a prediction; None: not given, so that what a kind of model does not read can be refused."""

    top_k: Count | None = None
    max_new_tokens: Count | None = None
    sample: bool | None = None
    temperature: Annotated[float, Field(gt=0, le=1e6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=SEEDS)] | None = None
    sequence_length: Count | None = None
    no_answer: bool | None = None
    max_answer_tokens: Count | None = None
    batch_size: Count = 32

    def check(self, kind: ModelKind) -> None:
        """Raises SettingError for options that this kind of model does not read."""
        reads = OPTIONS[kind.noun]
        for name, value in self:
            if value is None:
                continue
            if name not in (*reads, "batch_size"):
                problem, near = f"a {kind.noun} does not read it", did_you_mean(name, list(reads))
                cure = f"leave it out (it reads {', '.join(reads)})"
                raise SettingError(problem + near, setting=name, value=value, cure=cure)
            if name in DRAWING and kind is CAUSAL and not self.sample:
                raise SettingError("it is for sampling", setting=name, value=value, cure="set sample=true")


@overload
def predict(
    model: str | Path | LoadedModel | Held, inputs: Input, *, device: str = "auto", **options: Any
) -> Record: ...
@overload
def predict(
    model: str | Path | LoadedModel | Held, inputs: list[Any], *, device: str = "auto", **options: Any
) -> list[Record]: ...
@raising_at_the_call
def predict(
    model: str | Path | LoadedModel | Held, inputs: Input | Sequence[Input], *, device: str = "auto", **options: Any
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
            most probable ones are taken. Nothing else that the model's generation_config.json asks for counts.
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
    records = [as_record(item, f"input {number}", loaded.kind) for number, item in enumerate(items, 1)]
    outcomes = list(map(beside, records, predict_records(loaded, records, settings)))
    return outcomes if several else outcomes[0]


def as_record(item: Any, what: str, kind: ModelKind) -> Record:
    """An input as a dict with the texts that this kind of model reads.

    Args:
        what: which of the inputs it is, for messages.

    Raises:
        SettingError: it lacks one of them, or is something else.
    """
    needed, record = TEXTS[kind.noun], item
    if isinstance(item, str) and needed == ("text",):
        record = {"text": item}
    elif isinstance(item, tuple | list) and len(item) == 2 and kind is CLASSES:
        record = {"text": item[0], "second": item[1]}
    needs = f"a {kind.noun} needs {' and '.join(needed)}"
    if kind is CAUSAL:
        needs += ', or {"messages": [{"role": "user", "content": TEXT}]}'
    if not isinstance(record, Mapping):
        raise SettingError(f"{what} is not a record: {needs}")
    if kind is not CLASSES and "second" in record and needed == ("text",):
        raise SettingError(f"{what} has a second text, which a {kind.noun} does not read: leave it out")
    texts = () if kind is CAUSAL and _messages_of(record) else needed
    for name in (*texts, *(["second"] if "second" in record else [])):
        if not isinstance(record.get(name), str):
            raise SettingError(f"{what} has no {name} that is text: {needs}")
    try:
        json.dumps(dict(record), ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise SettingError(f"{what} is not UTF-8 ({error.reason}): convert it, such as with iconv") from None
    return dict(record)


def predict_records(model: LoadedModel, records: Sequence[Record], options: PredictOptions) -> list[Record]:
    """The predictions for records of `as_record`."""
    by_kind = {MASKED.noun: _masks, CAUSAL.noun: _continuations, CLASSES.noun: _classes, SPANS.noun: _answers}
    with model.evaluating():
        return by_kind[model.kind.noun](model, records, options) if records else []


def beside(record: Record, answer: Record) -> Record:
    """A prediction behind the entries of its input; an entry with its name, such as `class`, becomes `input_class`."""
    if taken := next((name for name in answer if name in record and f"input_{name}" in record), None):
        raise SettingError(
            f"an input has both {taken} and input_{taken}, and its prediction is {taken}: rename one of them"
        )
    return {f"input_{name}" if name in answer else name: value for name, value in record.items()} | answer


def _piped(pipeline: Any, model: LoadedModel, inputs: list[Any], batch_size: int, **arguments: Any) -> list[Any]:
    """What a pipeline of transformers gives for each input."""
    tokenizer: Any = copy.deepcopy(model.tokenizer)
    if tokenizer.pad_token_id is None:  # without which it makes no batches
        tokenizer.add_special_tokens({"pad_token": tokenizer.convert_ids_to_tokens(padding_of(tokenizer) or 0)})
    if tokenizer.mask_token and tokenizer.cls_token and not tokenizer.num_special_tokens_to_add():  # as in training
        ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (tokenizer.cls_token, tokenizer.sep_token)}
        first, last = ids
        single = f"{first} $A {last}"
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=single, pair=f"{single} $B:1 {last}:1", special_tokens=[*ids.items()]
        )
    pipe = pipeline(model=model.model, tokenizer=tokenizer, device=model.device)
    order = sorted(range(len(inputs)), key=lambda number: -len(str(inputs[number])))  # so that little is padding
    # A generator, as a pipeline gives something else for a list of one.
    outcomes = pipe((inputs[number] for number in order), batch_size=batch_size, **arguments)
    return [outcome for _, outcome in sorted(zip(order, outcomes, strict=True), key=itemgetter(0))]


def _segments(model: LoadedModel) -> dict[str, bool]:
    """Whether the tokenizer is to give segments: of a model that has embeddings for several."""
    return {"return_token_type_ids": getattr(model.model.config, "type_vocab_size", 0) > 1}


def _check_length(model: LoadedModel, what: str, length: int, further: str = "") -> None:
    """Raises SettingError where a sequence is longer than the model reads; `further` names what counts besides."""
    if model.longest is not None and length > model.longest:
        raise SettingError(
            f"{what} has {length:,} tokens{further}, and model={model.path} reads {model.longest:,}: shorten it"
        )


def _sequence_length(model: LoadedModel, options: PredictOptions) -> int:
    """Tokens of a sequence: as set, else as in the run that trained the model, else all that the model reads."""
    longest, requested = model.longest or LONGEST, options.sequence_length
    least = model.tokenizer.num_special_tokens_to_add(pair=True) + 2
    if requested is not None and not least <= requested <= longest:
        problem, cure = f"model={model.path} reads {least} to {longest:,} tokens", "give a number between these"
        raise SettingError(problem, setting="sequence_length", value=requested, cure=cure)
    trained = model.corpus.get("sequence_length")
    return requested or min(trained if isinstance(trained, int) else LONGEST, longest)


def _masks(model: LoadedModel, records: Sequence[Record], options: PredictOptions) -> list[Record]:
    """`filled`, each text with the most probable token in place of each mask, and `masks`, their best tokens."""
    tokenizer, mask = model.tokenizer, str(model.tokenizer.mask_token)
    texts = [MASKS.sub(lambda _: mask, record["text"]) for record in records]
    for number, ids in enumerate(tokenizer(texts, verbose=False)["input_ids"], 1):
        _check_length(model, f"text {number}", len(ids))
        if tokenizer.mask_token_id not in ids:
            raise SettingError(f"text {number} has no mask to fill: write {mask} where a token is missing")
    top_k = min(options.top_k or 5, len(tokenizer))
    outcomes = []
    arguments = {"top_k": top_k, "tokenizer_kwargs": _segments(model)}
    for text, found in zip(texts, _piped(FillMaskPipeline, model, texts, options.batch_size, **arguments), strict=True):
        masks = [
            [
                {
                    "token": each["token_str"].strip() or str(tokenizer.convert_ids_to_tokens(each["token"])),
                    "probability": each["score"],
                }
                for each in tokens
            ]
            for tokens in ([found] if isinstance(found[0], dict) else found)
        ]
        # One token after the other, from the left: the token of a mask may itself be spelled like a mask.
        first, *parts = text.split(mask)
        filled = first + "".join(tokens[0]["token"] + part for tokens, part in zip(masks, parts, strict=True))
        outcomes.append({"filled": filled, "masks": masks})
    return outcomes


def _classes(model: LoadedModel, records: Sequence[Record], options: PredictOptions) -> list[Record]:
    """`class`, `probability` and `probabilities` by class, the largest first; of a model that gives values `value`."""
    config = model.model.config
    if config.problem_type == "multi_label_classification":
        raise SettingError(
            f"model={model.path} gives a text several classes at once (problem_type={config.problem_type}), which "
            "predict does not: choose a model of one class for each text, or of values"
        )
    is_value = config.problem_type == "regression" or config.num_labels == 1
    names = {"text": "text", "second": "text_pair"}
    texts = [{name: record[key] for key, name in names.items() if key in record} for record in records]
    found = _piped(
        TextClassificationPipeline, model, texts, options.batch_size, top_k=options.top_k, truncation=True,
        max_length=_sequence_length(model, options), function_to_apply="none" if is_value else "softmax",
        split_special_tokens=True, **_segments(model),
    )  # fmt: skip
    if is_value:
        return [{"value": each[0]["score"]} for each in found]
    return [
        {
            "class": each[0]["label"],
            "probability": each[0]["score"],
            "probabilities": {of["label"]: of["score"] for of in each},
        }
        for each in found
    ]


def _answers(model: LoadedModel, records: Sequence[Record], options: PredictOptions) -> list[Record]:
    """The answer to each record's `question` in its `context`, by the rule that scores a run on SQuAD.

    transformers 5 has no pipeline for it. Longer contexts are read in windows, with the stride of the run that trained
    the model where there is one.

    Returns:
        For each record `answer`, empty where it has none, its first and last character in the context as `start` and
        `end`, its `score` (the sum of the logits of its first and last token), and `no_answer_score`, the same of
        having no answer minus `score`; with `top_k` above 1 also the best `answers`.
    """
    usual, length, corpus = SpanConfig(), _sequence_length(model, options), model.corpus
    if options.sequence_length is None and "sequence_length" not in corpus:
        length = min(length, usual.sequence_length)
    stride = int(corpus.get("stride") or min(usual.stride, length // 3))
    max_query = int(corpus.get("max_query") or min(usual.max_query, max(length // 2 - 4, 1)))
    allowed = str(corpus.get("version")) == "2.0" if options.no_answer is None else options.no_answer
    asked = (Question(str(number), each["context"], each["question"], ()) for number, each in enumerate(records))
    questions = Questions("input", "2.0" if allowed else "1.1", tuple(asked))
    config = SpanConfig(length, stride, max_query)
    try:
        windows = span_windows(questions, model.tokenizer, config, "windows", scoring=True)
    except SettingError as error:
        raise SettingError(str(error).replace("windows.", "")) from None
    logits, best = _span_logits(model, windows, options.batch_size), options.top_k or 1
    limits = AnswerConfig(max(best, AnswerConfig().n_best), options.max_answer_tokens or 30)
    answered = find_answers(questions, windows, logits[..., 0], logits[..., 1], limits)
    return [_answer(each, best, allowed) for each in answered]


@torch.inference_mode()
def _span_logits(model: LoadedModel, windows: SpanWindows, batch_size: int) -> np.ndarray:
    """Those of an answer's first and last token, float32 [windows, S, 2]; 0 at padding, which no answer touches."""
    logits = np.zeros((*windows.sequences.shape, 2), np.float32)
    collator, language_model = Spans(windows), LanguageModel(model.model)
    order = np.argsort(-(windows.sequences != windows.pad_id).sum(1), kind="stable")
    for start in range(0, len(order), batch_size):
        numbers = order[start : start + batch_size]
        ids, keys = windows.sequences[numbers].astype(np.int64), np.zeros(len(numbers), np.uint64)
        batch = collator.collate(ids, keys, numbers).to(model.device)
        found = language_model(batch.inputs, batch.documents, OutputSpec(extra=("span",))).extra["span"]
        logits[numbers, : found.shape[1]] = found.float().cpu().numpy()
    return logits


def _answer(answered: Answered, best: int, allowed: bool) -> Record:
    """The best answer or none, which is `allowed`; a context without a token has no span to answer with."""
    spans: list[Record] = [
        {"answer": each.text, "start": each.place[0], "end": each.place[1], "score": each.score}
        for each in answered.candidates
    ]
    outcome: Record = dict(spans[0]) if spans else {"score": None}
    if not spans or (allowed and answered.null_odds > 0):
        outcome |= {"answer": "", "start": None, "end": None}
    outcome["no_answer_score"] = float(answered.null_odds) if spans else None
    if best > 1:
        probabilities = torch.tensor([each["score"] for each in spans], dtype=torch.float64).softmax(0).tolist()
        outcome["answers"] = [each | {"probability": p} for each, p in zip(spans[:best], probabilities, strict=False)]
    return outcome


def _continuations(model: LoadedModel, records: Sequence[Record], options: PredictOptions) -> list[Record]:
    """`continuation` of each record's `text`, or the answer to its `messages`, and whether the model has `ended` it.

    By default the most probable token is taken each time, and the outcome does not depend on batches but for rounding.
    Drawn tokens depend on the seed and on which texts are computed together. torch's own generator is left as it was.
    transformers' pipeline takes texts and not tokens, and would put an end behind them where the tokenizer does.
    """
    tokenizer, new = model.tokenizer, options.max_new_tokens or 30
    chats = _conversations(model, records)
    prompts = [
        # A chat template writes the beginning of a text, too.
        _ids(tokenizer, chats[number]) if number in chats else _beginning(tokenizer, record["text"])
        for number, record in enumerate(records)
    ]
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise SettingError(
                f"text {number} is empty, and this tokenizer has no token for the beginning of a text: give some text"
            )
        _check_length(model, f"text {number}", len(prompt) + new, f" with max_new_tokens={new}")
    ends: Any = [tokenizer.eos_token_id]
    if chats:
        saved = getattr(getattr(model.model, "generation_config", None), "eos_token_id", None)
        ends += saved if isinstance(saved, list) else [saved]
    ends = [end for end in dict.fromkeys(ends) if end is not None]
    config = GenerationConfig(max_new_tokens=new, eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0)
    if options.sample:
        config.update(
            do_sample=True, temperature=options.temperature or 1.0, top_k=options.top_k or 0, top_p=options.top_p or 1.0
        )
    outcomes = dict[int, Record]()
    for number, tokens in _generated(model, prompts, config, options):
        end = next((index for index, token in enumerate(tokens) if token in ends), None)
        text = str(tokenizer.decode(tokens[:end], skip_special_tokens=True))
        outcomes[number] = {"continuation": text, "ended": end is not None}
    return [outcomes[number] for number in range(len(records))]


def _generated(
    model: LoadedModel, prompts: list[list[int]], config: GenerationConfig, options: PredictOptions
) -> Iterator[tuple[int, list[int]]]:
    """The new tokens of each prompt, with its index, in batches of prompts of like length."""
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    writer = copy.copy(model.model)  # the same weights; what a call leaves out is read from the model's own config
    writer.generation_config = GenerationConfig()
    device = model.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.inference_mode():
        torch.default_generator.manual_seed(options.seed or 0)
        if device.type == "cuda":  # and no other: `torch.manual_seed` would seed every GPU of the process
            with torch.cuda.device(device):
                torch.cuda.manual_seed(options.seed or 0)
        for start in range(0, len(order), options.batch_size):
            numbers = order[start : start + options.batch_size]
            sequences = [torch.tensor(prompts[number]) for number in numbers]
            ids = pad_sequence(sequences, True, config.pad_token_id, padding_side="left")
            mask = pad_sequence([torch.ones_like(each) for each in sequences], True, 0, padding_side="left")
            written = writer.generate(ids.to(device), attention_mask=mask.to(device), generation_config=config)
            yield from zip(numbers, written[:, ids.shape[1] :].tolist(), strict=True)


def _ids(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """The tokens of a text, with those that the tokenizer puts around it where `special`."""
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def _beginning(tokenizer: Any, text: str) -> list[int]:
    """A text as the tokenizer begins it, without what it puts behind: an end, behind which nobody wants to read on."""
    whole, inner = _ids(tokenizer, text, special=True), _ids(tokenizer, text)
    if not inner:
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        return [] if first is None else [first]
    for start in range(len(whole) - len(inner) + 1):
        if whole[start : start + len(inner)] == inner:
            return whole[: start + len(inner)]
    return whole  # tokens that depend on those around them: it is not known where the text ends


def _messages_of(record: Mapping[str, Any]) -> str | None:
    """The column of a record that holds messages in place of a text, if one does."""
    return None if "text" in record else next((column for column in COLUMNS if column in record), None)


def _conversations(model: LoadedModel, records: Sequence[Record]) -> dict[int, str]:
    """The conversations among the records by their indices, as text up to where the model's answer begins.

    Raises:
        SettingError: the model's tokenizer has no chat template or does not take one of them, it is none, or it already
            has the answer.
    """
    columns = {number: column for number, record in enumerate(records) if (column := _messages_of(record))}
    if not columns:
        return {}
    template = ChatTemplate.of(model.tokenizer, f"model={model.path}: its chat template")
    if template is None:
        raise SettingError(f"model={model.path} has no chat template, so it answers no messages: give a text")
    texts = {}
    for number, column in columns.items():
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
