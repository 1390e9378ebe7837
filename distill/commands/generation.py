"""Completions of prompts, divided between ranks, and what of them becomes a corpus.

Ranks write the completions of groups of prompts, which nothing splits, line by line into `OUTPUT.parts/`; once all are
there, rank 0 writes those that pass the filters into OUTPUT, in the order of the prompts.
"""

import hashlib
import json
import logging
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, TypedDict

import numpy as np
from pydantic import Field

from distill.commands.arguments import Arguments
from distill.commands.predict import Request as Inputs
from distill.commands.predict import read
from distill.commands.prediction import text_of, written_prompt
from distill.config.base import SEEDS
from distill.config.objective import SamplingConfig
from distill.config.settings import Config
from distill.data.duplicates import digest_of
from distill.data.prompts import prompt_of
from distill.data.sequence_format import causal_format, first_token
from distill.data.sequence_store import ids_of, subsample
from distill.data.tokens import corpus_texts, prepare
from distill.distributed import Ranks
from distill.models.generation import complete, ends_of, repeated_ngrams
from distill.models.kind import CAUSAL
from distill.models.loaded import LoadedModel, load_model, saved_digest
from distill.models.teacher import teacher_tokenizer
from distill.runs.identity import difference, listed
from distill.runtime.completions import Server
from distill.runtime.errors import Damaged, SettingError
from distill.runtime.files import atomic, write_text
from distill.runtime.jsonl import JsonLines
from distill.runtime.progress import Progress
from distill.runtime.seed import key
from distill.teacher.members import settings_by_member

CUT = "\ufffd"  # what a part of a character's bytes is decoded to
SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p")
DECIDING = (*SAMPLING, "seed", "group_size")  # what completions depend on besides model and prompts

Count = Annotated[int, Field(ge=1, le=1_048_576)]

logger = logging.getLogger(__name__)


class GenerateOptions(Arguments):
    """How completions are drawn, and which of them stay."""

    prompt_tokens: Count = 32
    max_new_tokens: Count = 256
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Count | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, le=SEEDS)] = 0
    group_size: Count = 16
    min_tokens: Count = 1
    finished: bool = False
    max_repeated: Annotated[float, Field(ge=0, le=1)] | None = None
    max_perplexity: Annotated[float, Field(gt=1)] | None = None
    duplicates: bool = False


class Line(TypedDict):
    """A completion, as OUTPUT has it but for its number."""

    number: int  # of its prompt
    id: Any
    prompt: Any  # a text, or messages
    completion: Any
    finish_reason: str  # stop, where the model has ended it, or length
    seed: int
    logprob: float  # the sum over its tokens
    tokens: int  # with the one that ends it


class Prompt(NamedTuple):
    """What is to be continued."""

    id: Any
    written: Any  # a text, or messages
    tokens: np.ndarray  # int64


Written = tuple[str, bool, float, int]  # a completion, whether the model has ended it, and `logprob` and `tokens`


@dataclass(frozen=True)
class Writer:
    """What continues prompts: a model here, or one on a server.

    Attributes:
        model: without its weights where a server has it.
        digest: of its weights, or its name on the server.
    """

    options: GenerateOptions
    model: LoadedModel
    digest: str
    server: Server | None = None

    @classmethod
    def of(cls, path: str | None, options: GenerateOptions, config: Config, ranks: Ranks) -> Self:
        """The model in that folder or of that name, else of that server. Raises SettingError where it cannot be had."""
        if path is not None:
            model = load_model(path, str(ranks.device))
            if model.kind is not CAUSAL:
                cure = "give a causal language model"
                raise SettingError(f"a {model.kind.noun} writes no text", setting="model", value=model.path, cure=cure)
            return cls(options, model, saved_digest(model.path, model.model, model.tokenizer, config.data.cache))
        alone = next(iter(settings_by_member(config).values()), None)
        if alone is None or alone.server is None:
            cure = "give model=MODEL, or teacher=served with teacher.url, teacher.model and teacher.tokenizer"
            raise SettingError("nothing to write with", setting="model", cure=cure)
        if alone.server.is_sglang:
            raise alone.server.refused("it is asked for texts in the form of OpenAI", "give the URL as far as /v1")
        ranks.decide(alone.server.check)
        tokenizer, name = teacher_tokenizer(alone.model, CAUSAL, alone.setting), alone.server.model
        return cls(options, LoadedModel(None, tokenizer, CAUSAL, name), name, alone.server)

    def groups(self, count: int) -> list[np.ndarray]:
        """The numbers of so many prompts, as they are continued together."""
        size = self.options.group_size if self.server is None else self.server.at_once
        return np.split(np.arange(count), np.arange(size, count, size))

    def lines(self, prompts: Sequence[Prompt], numbers: np.ndarray) -> Iterator[Line]:
        """The completions of a group of prompts, which have these numbers."""
        seed = self.options.seed
        written = (self._here if self.server is None else self._there)(prompts, key(seed, "generate", numbers))
        for number, prompt, (text, ended, log_prob, tokens) in zip(numbers.tolist(), prompts, written, strict=True):
            text = text if ended else text.rstrip(CUT)
            yield Line(
                number=number, id=prompt.id, prompt=prompt.written,
                completion=text if isinstance(prompt.written, str) else [{"role": "assistant", "content": text}],
                finish_reason="stop" if ended else "length", seed=seed, logprob=log_prob, tokens=tokens,
            )  # fmt: skip

    def _here(self, prompts: Sequence[Prompt], keys: np.ndarray) -> Iterator[Written]:
        model, tokenizer = self.model.model, self.model.tokenizer
        settings = SamplingConfig(**{name: getattr(self.options, name) for name in SAMPLING})
        ends = ends_of(model, tokenizer=tokenizer)
        written = complete(model, [prompt.tokens for prompt in prompts], keys, settings, ends, len(tokenizer))
        for prompt, found in zip(prompts, written, strict=True):
            text = text_of(found, prompt.tokens.tolist(), tokenizer)
            yield text, found.ended, float(found.log_probs.sum()), len(found.tokens)

    def _there(self, prompts: Sequence[Prompt], keys: np.ndarray) -> Iterator[Written]:
        assert self.server is not None
        options, seeds = self.options, (keys >> np.uint64(33)).tolist()
        how = {"max_tokens": options.max_new_tokens, "temperature": options.temperature, "top_p": options.top_p}
        # What a request leaves out vLLM takes from the model's own `generation_config`.
        how |= {"top_k": options.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": 1}
        bodies = [{"prompt": p.tokens.tolist(), "seed": seed} | how for p, seed in zip(prompts, seeds, strict=True)]
        return self.server.ask_all((body, _read) for body in bodies)


def _read(answer: Any) -> Written:
    """What a server has written. Raises ValueError or the like for an answer of another form."""
    (choice,) = answer["choices"]
    text, how, scores = choice["text"], choice["finish_reason"], choice["logprobs"]["token_logprobs"]
    if not isinstance(text, str) or how not in ("stop", "length") or not math.isfinite(sum(map(float, scores))):
        raise ValueError(f"no completion (finish_reason={how})")
    return text, how == "stop", sum(map(float, scores)), len(scores)


def generate(writer: Writer, prompts: Sequence[Prompt], output: Path, ranks: Ranks) -> None:
    """Write the completions of all prompts; all ranks call it. Raises SettingError for an output that is another's."""
    folder = output.with_name(f"{output.name}.parts")
    ranks.decide(lambda: _begin(folder, writer, prompts))
    done = {line["number"] for line in _lines(folder)}
    ranks.barrier()  # before any rank writes
    groups = writer.groups(len(prompts))[ranks.rank :: ranks.size]
    there = sum(number in done for group in groups for number in group.tolist())
    log = JsonLines(folder / f"rank-{ranks.rank}.jsonl")
    with Progress("completions", sum(map(len, groups)), "prompts", start=there) as progress:
        for group in groups:
            if not done.issuperset(group.tolist()):  # what is missing of it is written with the rest at its side
                for line in writer.lines([prompts[number] for number in group], group):
                    if line["number"] not in done:
                        log.append({**line})
                        progress.update(progress.n + 1)
    log.close()
    ranks.barrier()
    ranks.decide(lambda: _finish(folder, writer, len(prompts), output))


def prompts_of(path: str | None, writer: Writer, config: Config) -> list[Prompt]:
    """The prompts of a file, else of the corpus. Raises SettingError where they cannot be continued."""
    return list(_of_corpus(writer, config) if path is None else _of_file(path, writer))


def _of_file(path: str, writer: Writer) -> Iterator[Prompt]:
    ids = set[str]()
    inputs = read(Inputs.model_validate({"model": "", "input": path}), None)
    for number, (name, item) in enumerate(inputs):
        record, prompt, tokens = written_prompt(name, item, writer.model, writer.options.max_new_tokens)
        if (chosen := str(record.get("id", number))) in ids:
            raise SettingError(f"{name}: the id {chosen} is there twice", setting="input", cure="give each its own")
        ids.add(chosen)
        yield Prompt(record.get("id", number), prompt, np.array(tokens, np.int64))


def _of_corpus(writer: Writer, config: Config) -> Iterator[Prompt]:
    """The beginnings of texts: of each sequence that of its longest document."""
    corpus, data, model, new = config.corpus, config.data, writer.model, writer.options.max_new_tokens
    limit, first = writer.options.prompt_tokens, first_token(model.tokenizer)
    texts, room = corpus_texts(corpus, data), max(1, limit - (first is not None))
    for text in texts.values():
        if text.prompts:
            problem = "it has prompts of its own, which would be cut and left out like other text"
            raise SettingError(problem, setting=text.setting, cure="give the file as input=FILE")
    if model.longest is not None and limit + new > model.longest:
        problem = f"with prompt_tokens={limit} longer than what the model reads ({model.longest} tokens)"
        raise SettingError(problem, setting="max_new_tokens", value=new, cure="lower one of them")
    for name, text in texts.items():
        tokens = prepare(text, model.tokenizer, corpus, data, "train", causal_format)
        sequences = subsample(tokens.sequences, text.max_sequences, "prompts", data.shuffle_bytes)
        for number in range(len(sequences)):
            (sequence,) = sequences[np.array([number])]
            ids = ids_of(prompt_of(sequence, causal_format(model.tokenizer), room, room).tokens)
            ids = _of_whole_characters(ids, model.tokenizer)
            if len(ids):
                if first is not None:  # without which some models write nothing of use; most texts begin in the middle
                    ids = np.array([first, *ids[ids != first]])
                written = model.tokenizer.decode(ids.tolist(), skip_special_tokens=True)
                yield Prompt(f"{name}-{number}" if name else number, written, ids)


def _of_whole_characters(ids: np.ndarray, tokenizer: Any) -> np.ndarray:
    """Token ids without those at both ends that are a part of a character."""
    while len(ids) and tokenizer.decode(ids.tolist()).startswith(CUT):
        ids = ids[1:]
    while len(ids) and tokenizer.decode(ids.tolist()).endswith(CUT):
        ids = ids[:-1]
    return ids


def _begin(folder: Path, writer: Writer, prompts: Sequence[Prompt]) -> None:
    """Note what the completions depend on. Raises SettingError where another command has begun some."""
    if not prompts:
        raise SettingError("there is not one prompt", setting="input", cure="give a file with some, or a corpus")
    digest, path = hashlib.sha256(), folder / "settings.json"
    for prompt in prompts:
        digest.update(f"{prompt.id!r} {len(prompt.tokens)} ".encode() + prompt.tokens.tobytes())
    now = {name: getattr(writer.options, name) for name in DECIDING}
    now |= {"model": writer.digest, "prompts": digest.hexdigest()}
    if not path.exists():
        folder.mkdir(exist_ok=True)
        write_text(path, json.dumps(now))
    before = json.loads(path.read_bytes())
    if found := [text for name in now if (text := difference(name, before, now))]:
        cure = f"restore them, remove {folder}, or give another output"
        raise SettingError(f"it was begun with other settings ({listed(found)})", setting="output", cure=cure)


def _lines(folder: Path) -> Iterator[Line]:
    """What all ranks have written, of any number of them. Raises Damaged for a line that is none."""
    for path in sorted(folder.glob("*.jsonl")):
        *whole, _torn = path.read_bytes().split(b"\n")  # of a rank that was killed
        for number, text in enumerate(whole, 1):
            try:
                line: Line = json.loads(text)
                complete = line.keys() >= Line.__required_keys__
            except (ValueError, AttributeError):
                complete = False
            if not complete:
                raise Damaged(path, f"line {number} is no completion; remove it, and the same command goes on")
            yield line


def _finish(folder: Path, writer: Writer, count: int, output: Path) -> None:
    """Write the output, and log how many completions each filter has left out."""
    reasons, seen = Counter[str](), set[bytes]()
    lines = {line["number"]: line for line in _lines(folder)}
    if len(lines) < count:
        raise SettingError(f"{count - len(lines)} completions of other hosts are not in {folder}: give a shared folder")
    with atomic(output, durable=True) as new, new.open("w", encoding="utf-8") as file:
        for number in range(count):
            if reason := _left_out(lines[number], writer, seen):
                reasons[reason] += 1
            else:
                shown = {name: value for name, value in lines[number].items() if name != "number"}
                file.write(json.dumps(shown, ensure_ascii=False) + "\n")
    shutil.rmtree(folder)
    out = "".join(f"; left out: {number:,} by {reason}" for reason, number in reasons.most_common())
    logger.info(f"{count - reasons.total():,} of {count:,} completions in {output}{out}")


def _left_out(line: Line, writer: Writer, seen: set[bytes]) -> str:
    """By which filter a completion is left out; empty where it stays. `seen`: digests of those before it."""
    options, written, ended = writer.options, line["completion"], line["finish_reason"] == "stop"
    text = written if isinstance(written, str) else written[0]["content"]
    if not text.strip() or line["tokens"] - ended < options.min_tokens:
        return "length"
    if options.finished and not ended:
        return "cut off"
    if options.max_repeated is not None:
        ids = writer.model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        repeated, grams = repeated_ngrams(ids)
        if repeated > options.max_repeated * grams:
            return "repeated 4-grams"
    if options.max_perplexity is not None and -line["logprob"] > math.log(options.max_perplexity) * line["tokens"]:
        return "perplexity"
    digest = digest_of(json.dumps([line["prompt"], written]))
    if digest in seen and not options.duplicates:
        return "duplicates"
    seen.add(digest)
    return ""
