"""A server of a causal model in this process, with what Distill asks for of vLLM's completions API and of SGLang's."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

import torch

FAULTS = ("500", "timeout", "cut", "malformed", "few")
LATE = 2.0  # seconds of an answer that comes too late


@dataclass
class ModelServer:
    """What is served, and what goes wrong with it.

    Attributes:
        lies: it gives fewer log-probabilities than it is asked for, and does not say so.
        fault: of a request by its number, one of FAULTS; "" for none.
        requests: the bodies that it has got, with the headers of each.
    """

    model: Any
    tokenizer: Any
    name: str = "big"
    max_logprobs: int = 20
    key: str = ""
    lies: bool = False
    fault: Callable[[int], str] = lambda number: ""
    requests: list[tuple[dict[str, Any], dict[str, str]]] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)
    url: str = ""

    @property
    def sglang_url(self) -> str:
        return self.url.removesuffix("/v1") + "/generate"

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["model"] != self.name:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if body.get("prompt_logprobs", 0) > self.max_logprobs and not self.lies:
            return 400, {"message": f"{body['prompt_logprobs']} is greater than max allowed: {self.max_logprobs}"}
        choice = self.scored(body) if "prompt_logprobs" in body else self.written(body)
        return 200, {"choices": [{"index": 0, **choice}]}

    @torch.no_grad()
    def scored(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        scores: list[Any] = [None]
        with self.lock:
            log_probs = self.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        for row, own in zip(log_probs, ids[1:], strict=False):
            values, best = row.topk(min(body["prompt_logprobs"], self.max_logprobs))
            entries = {str(own): {"logprob": float(row[own]), "rank": int((row >= row[own]).sum())}}
            for rank, (value, token) in enumerate(zip(values.tolist(), best.tolist(), strict=True), 1):
                entries[str(token)] = {"logprob": value, "rank": rank}
            scores.append(entries)
        return {"text": "", "finish_reason": "length", "prompt_logprobs": scores}

    def of_sglang(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The same scores as SGLang gives them: [log-probability, token, text] beside one another."""
        ids, of_tokens, largest = body["input_ids"], [[None, body["input_ids"][0], None]], list[Any]([None])
        assert body["return_logprob"] and body["logprob_start_len"] == 0 and "model" not in body
        scores = self.scored({"prompt": ids, "prompt_logprobs": body["top_logprobs_num"]})["prompt_logprobs"]
        for own, entries in zip(ids[1:], scores[1:], strict=True):
            triples = sorted(([one["logprob"], int(token), None] for token, one in entries.items()), reverse=True)
            of_tokens.append([entries[str(own)]["logprob"], own, None])
            largest.append(triples[: body["top_logprobs_num"]])
        return 200, {"text": "", "meta_info": {"input_token_logprobs": of_tokens, "input_top_logprobs": largest}}

    @torch.no_grad()
    def written(self, body: dict[str, Any]) -> dict[str, Any]:
        """The most probable tokens, whatever the seed."""
        end, ids, log_probs = self.tokenizer.eos_token_id, list(body["prompt"]), list[float]()
        with self.lock:
            for _ in range(body["max_tokens"]):
                row = self.model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                ids.append(int(row.argmax()))
                log_probs.append(float(row.max()))
                if ids[-1] == end:
                    break
        ended = ids[-1] == end
        text = self.tokenizer.decode(ids[len(body["prompt"]) : -1 if ended else None])
        return {"text": text, "finish_reason": "stop" if ended else "length", "logprobs": {"token_logprobs": log_probs}}


class _Handler(BaseHTTPRequestHandler):
    served: ModelServer

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": self.served.name}]}).encode())

    def do_POST(self) -> None:
        served = self.served
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if served.key and self.headers.get("Authorization") != f"Bearer {served.key}":
            return self._send(401, b'{"error": {"message": "no such key"}}')
        with served.lock:
            number = len(served.requests)
            served.requests.append((body, dict(self.headers)))
        fault = served.fault(number)
        if fault == "500":
            return self._send(500, b"{}")
        native = self.path == "/generate"
        status, answer = served.of_sglang(body) if native else served.answer(body)
        if fault == "few":
            scores = answer["meta_info"]["input_top_logprobs"] if native else answer["choices"][0]["prompt_logprobs"]
            scores.pop()
        content = json.dumps(answer).encode()
        if fault == "timeout":
            time.sleep(LATE)
        self._send(status, content[:-7] if fault == "malformed" else content, cut=fault == "cut")

    def _send(self, status: int, content: bytes, cut: bool = False) -> None:
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if cut else content)


@contextmanager
def serving(model: Any, tokenizer: Any, **settings: Any) -> Iterator[ModelServer]:
    """A server of this model, with its address, while it is open."""
    served = ModelServer(model, tokenizer, **settings)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"served": served}))
    served.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
