"""A teacher that a server has: it scores the sequences of a corpus, token by token, for the cache that stands for it.

vLLM's server gives with `prompt_logprobs` the largest log-probabilities at each token of a prompt, given those before
it, and that of the token itself; SGLang's gives them beside one another with `return_logprob`. Prompts are sent as
token ids: a text would be cut up anew. Documents that share a sequence are sent one by one, as none of them sees
another.

Shapes: n positions, K entries kept exactly.
"""

import json
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distill.data.batch import PADDING, Batch
from distill.data.batches import Batches
from distill.runtime.completions import Server
from distill.runtime.errors import Damaged, SettingError, StorageFailed, first_line
from distill.teacher.cache import Cache, Positions, put, writing
from distill.teacher.sampling import stored

PROBES, PROBE_TOKENS = 8, 32
PROBES_FILE = "probes.json"
# Mean difference of log-probabilities in nats: a server's rounding in bf16 moves each by about 0.01, other weights
# of the same family by several tenths.
TOLERANCE = 0.05
SURPLUS = 1e-3  # of probability above 1, by rounding, or of tokens that no text has
NEVER = -1e4  # the log-probability of what takes the place of such a token: a number, whose exponential is 0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedRecorder:
    """What a cache keeps of a teacher that a server has, by sequence."""

    cache: Cache
    server: Server
    batches: Batches
    positions: Positions
    precision = "served"
    models = ()  # that ranks may shard

    @property
    def at_once(self) -> int:
        """Sequences whose answers are awaited together."""
        return self.server.at_once

    def records(self, indices: np.ndarray) -> np.ndarray:
        """The records [n] at the positions of these sequences. Raises as `Server.ask`."""
        found = [records for records, _ in self._scored(self._documents(self.batches.batch(indices, 0)))]
        return np.concatenate(found) if found else np.empty(0, self.cache.layout.record)

    def check(self) -> None:
        """Compare the server's model with the one that has begun the cache, by log-probabilities of a few sequences.

        A complete cache needs no server: one that does not answer soon is not asked then.

        Raises:
            SettingError: it is another model; or the cache is not complete, and there is no server or no such model.
            StorageFailed: as `Server.ask`.
        """
        path, is_whole, server = self.cache.folder / PROBES_FILE, self.cache.ready, self.server
        if is_whole and not path.exists():
            return
        if is_whole:
            server = replace(server, tries=min(server.tries, 3), timeout=min(server.timeout, 5.0))
        number = min(PROBES, len(self.batches.sequences))
        rows = np.linspace(0, len(self.batches.sequences) - 1, number).astype(np.int64)
        prompts = self.batches.batch(rows, 0).ids[:, :PROBE_TOKENS].tolist()
        try:
            server.check()
            asked = ((each, np.arange(len(each) - 1)) for each in prompts)
            found = np.stack([own for _, own in replace(self, server=server)._scored(asked)])
        except (SettingError, StorageFailed) as error:
            if not is_whole:
                raise
            logger.info(f"the cache of {server.model} is complete, and its server is not asked: {first_line(error)}")
            return
        if not path.exists():
            with writing(self.cache):
                path.parent.mkdir(parents=True, exist_ok=True)
                put(path, json.dumps({"model": server.model, "log_probs": found.tolist()}).encode())
            return
        difference = float(np.abs(found - _probes(path, found.shape)).mean())
        if not difference <= TOLERANCE:
            raise SettingError(
                f"this server's {server.model} is another model than the one that made {self.cache.folder}: "
                f"log-probabilities of {number} sequences differ by {difference:.2g} nats",
                setting=f"{server.setting}.model", value=server.model,
                cure="serve that model again, or serve this one by another name and give that",
            )  # fmt: skip

    def _scored(self, asked: Iterable[tuple[list[int], np.ndarray]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of prompts with places in them: the records [n] at these, and log-probabilities [n] of the tokens behind."""
        form = _sglang if self.server.is_sglang else _vllm
        return self.server.ask_all(
            (form(prompt, self.cache.layout.top_k), partial(self._read, prompt, places)) for prompt, places in asked
        )

    def _read(self, prompt: list[int], places: np.ndarray, answer: Any) -> tuple[np.ndarray, np.ndarray]:
        """An answer to one prompt. Raises ValueError where it is none, SettingError where it has too few entries."""
        layout, scores = self.cache.layout, _scores(answer)
        if len(scores) != len(prompt):
            raise ValueError(f"scores of {len(scores)} tokens for {len(prompt)}")
        ids, log_probs = np.empty((len(places), layout.top_k), np.int64), np.empty((len(places), layout.top_k + 1))
        own = np.empty(len(places))
        for number, place in enumerate(places.tolist()):
            given = scores[place + 1]
            own[number] = given[prompt[place + 1]]
            if len(given) < layout.top_k:
                raise SettingError(
                    f"the server gives {len(given)} of so many log-probabilities",
                    setting=f"{self.cache.setting}.top_k", value=layout.top_k,
                    cure=f"lower it, or start the server with --max-logprobs {layout.top_k}",
                )  # fmt: skip
            beyond = [token for token in given if token >= layout.vocabulary]  # the model's head may be padded
            if beyond and sum(math.exp(given[token]) for token in beyond) > SURPLUS:
                problem = f"the server's model writes a token {beyond[0]}, and the tokenizer has {layout.vocabulary}"
                cure = "give the tokenizer of that model"
                raise SettingError(problem, setting=f"{self.server.setting}.tokenizer", cure=cure)
            # The token that is there comes beside the largest ones where it is none of them.
            best = sorted(given.keys() - beyond, key=lambda token: (-given[token], token))[: layout.top_k]
            last = (token for token in reversed(range(layout.vocabulary)) if token not in given)
            best += islice(last, layout.top_k - len(best))
            ids[number], log_probs[number, :-1] = best, [given.get(token, NEVER) for token in best]
        mass = np.exp(log_probs[:, :-1]).sum(1)
        if not (np.isfinite(own).all() and (mass <= 1 + SURPLUS).all()):
            raise ValueError("no log-probabilities (the server's --logprobs-mode has to be raw_logprobs)")
        with np.errstate(divide="ignore"):
            log_probs[:, -1] = np.log1p(-np.minimum(mass, 1.0))
        columns = {"ids": torch.from_numpy(ids), "log_probs": torch.from_numpy(log_probs)}
        return stored(columns, layout.record), own

    def _documents(self, batch: Batch) -> Iterator[tuple[list[int], np.ndarray]]:
        """The documents of which positions are kept, as far as these need them, and the positions in each, in order."""
        ids, flat = batch.ids.numpy(), self.positions(batch)
        wanted = np.full(ids.shape, flat is None)
        if flat is not None:
            wanted.reshape(-1)[flat.numpy()] = True
        places = batch.inputs.get("position_ids")  # they start anew with each document
        begins = np.zeros(ids.shape, bool) if places is None else places.numpy() == 0
        if batch.documents is not None:
            begins[:, 1:] |= np.diff(batch.documents.numpy() == PADDING, axis=1)
        for row, begin, here in zip(ids, begins, wanted, strict=True):
            bounds = [0, *(np.flatnonzero(begin[1:]) + 1).tolist(), len(row)]
            for start, end in pairwise(bounds):
                if len(found := np.flatnonzero(here[start:end])):
                    # What is predicted at a place is the score of the token behind it; at the last one of any token.
                    prompt = row[start:end][: int(found[-1]) + 2].tolist()
                    yield prompt + prompt[:1] * (len(prompt) == int(found[-1]) + 1), found


def _vllm(prompt: list[int], top_k: int) -> dict[str, Any]:
    return {"prompt": prompt, "prompt_logprobs": top_k, "max_tokens": 1, "temperature": 1.0}


def _sglang(prompt: list[int], top_k: int) -> dict[str, Any]:
    of_prompt = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top_k}
    return {"input_ids": prompt, **of_prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}}


def _scores(answer: Any) -> list[dict[int, float]]:
    """Log-probabilities by token, at each token of a prompt; none at the first. Raises TypeError and the like."""
    if "meta_info" not in answer:
        (choice,) = answer["choices"]
        return [
            {int(token): float(one["logprob"]) for token, one in (at or {}).items()} for at in choice["prompt_logprobs"]
        ]
    largest, owns = (answer["meta_info"][name] for name in ("input_top_logprobs", "input_token_logprobs"))
    found = [
        {int(token): float(value) for value, token, *_ in (*(at or ()), own) if value is not None}
        for at, own in zip(largest, owns, strict=True)
    ]
    return found


def _probes(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The log-probabilities that a cache was begun with. Raises Damaged where they cannot be read."""
    try:
        found = np.array(json.loads(path.read_bytes())["log_probs"], np.float64)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise Damaged(
            path, f"{first_line(error)}; remove {path.parent}, and the same command makes it again"
        ) from error
    return found if found.shape == shape else np.full(shape, np.inf)
