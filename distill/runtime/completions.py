"""A server with OpenAI's completions API, as vLLM has it, or SGLang's own: requests side by side, repeated while busy.

Its key is read from the environment alone, and stands in no file, log or command line.
"""

import functools
import http.client
import json
import logging
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool  # whose threads end with the process, whatever they wait for
from typing import Any, TypeVar

from distill.runtime.errors import SettingError, StorageFailed, first_line
from distill.runtime.redaction import redact, remember

TRIES = 8
FIRST_WAIT, LONGEST_WAIT = 0.25, 30.0  # seconds before another try; twice as long each time
WORTH_A_LINE = 2.0  # seconds of waiting
LONGEST_REASON = 300  # characters of what a server says
SGLANG = "/generate"  # the end of its URL
BUSY = (408, 425, 429)  # statuses that a later try may not have, as those from 500 on

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Server:
    """Where a model is served.

    Attributes:
        setting: what error lines call it, such as `teacher`; its settings are `.url` and so on.
        url: such as http://localhost:8000/v1, or http://localhost:30000/generate of SGLang.
        model: its name there.
        requests: at a time.
        timeout: seconds without a byte, after which a request has failed.
        api_key_env: the variable of the environment that holds the key; None: it needs none.
    """

    setting: str
    url: str
    model: str
    requests: int
    timeout: float
    api_key_env: str | None
    tries: int = TRIES  # of a request

    @property
    def is_sglang(self) -> bool:
        """Whether it is asked in the form of SGLang, which scores a prompt of token ids nowhere else."""
        return self.url.rstrip("/").endswith(SGLANG)

    @property
    def at_once(self) -> int:
        """Requests whose answers are awaited together: several for each that is under way."""
        return 8 * self.requests

    def check(self) -> None:
        """Raises SettingError where nobody answers, where the key is missing, or where it has no such model.

        What else goes wrong is left to the requests that follow, which are repeated.
        """
        try:
            with urllib.request.urlopen(self._request("models"), timeout=self.timeout) as response:
                names = [one["id"] for one in json.load(response)["data"]]
        except (urllib.error.HTTPError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return
        except OSError as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ConnectionRefusedError | socket.gaierror):
                raise self.refused(f"nobody answers there ({first_line(reason)})", "start the server") from None
            return
        if self.model not in names:
            problem, cure = f"the server has {', '.join(map(str, names))}", "name one of these, or serve that model"
            raise SettingError(problem, setting=f"{self.setting}.model", value=self.model, cure=cure)

    def ask_all(self, requests: Iterable[tuple[Mapping[str, Any], Callable[[Any], Answer]]]) -> Iterator[Answer]:
        """What `ask` gives for each of these requests, in their order."""
        with ThreadPool(self.requests) as pool:
            yield from pool.imap(lambda request: self.ask(*request), requests)

    def ask(self, body: Mapping[str, Any], read: Callable[[Any], Answer]) -> Answer:
        """What `read` makes of the answer to a request; one that it refuses by a ValueError is asked for again.

        Raises:
            SettingError: the server refuses the request, or `read` the last answer too, as bad input.
            StorageFailed: there was no usable answer in `tries`.
        """
        body = body if self.is_sglang else {"model": self.model, **body}
        request = self._request("completions", json.dumps(body).encode())
        where = f"{self.setting}.url={redact(self.url)}"
        problem: Exception | str = ""
        for number in range(self.tries):
            wait = FIRST_WAIT
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    answer = json.load(response)
                return read(answer)
            except urllib.error.HTTPError as error:
                if error.code not in BUSY and error.code < 500:
                    raise self._refused(error) from None
                problem, wait = f"status {error.code}", _wait(number, error.headers.get("Retry-After"))
            except (OSError, http.client.HTTPException) as error:
                problem, wait = getattr(error, "reason", None) or type(error).__name__, _wait(number)
            except SettingError as error:
                problem = error
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                problem = f"an answer of another form: {first_line(error)}"
            if number < self.tries - 1:
                if wait >= WORTH_A_LINE:
                    _say(f"{where}: no answer that can be used ({problem}); trying {self.tries} times")
                time.sleep(wait)
        if isinstance(problem, SettingError):
            raise problem
        raise StorageFailed(
            f"{where}: no answer that can be used in {self.tries} tries ({problem}); "
            "what is there already is kept, and the same command resumes"
        )

    def refused(self, problem: str, cure: str) -> SettingError:
        return SettingError(problem, setting=f"{self.setting}.url", value=redact(self.url), cure=cure)

    def _refused(self, error: urllib.error.HTTPError) -> SettingError:
        """What a status from 400 on says of a request that no later try would mend."""
        text = ""
        with suppress(OSError, http.client.HTTPException):
            text = error.read(LONGEST_REASON * 10).decode("utf-8", "replace")
        with suppress(ValueError, AttributeError):
            found = json.loads(text)
            text = str((found.get("error") or found).get("message") or text)
        reason = redact(" ".join(text.split())[:LONGEST_REASON])
        if error.code in (401, 403):
            cure = f"let {self.setting}.api_key_env name the variable that holds the key"
        elif error.code == 404:
            cure = "give the URL as far as /v1, of a server with the completions API, or SGLang's as far as /generate"
        else:
            cure = "correct the request, or start the server for it"
        return self.refused(f"the server refuses a request (status {error.code}: {reason})", cure)

    def _request(self, path: str, body: bytes | None = None) -> urllib.request.Request:
        base = self.url.rstrip("/")
        if self.is_sglang:
            base, path = base.removesuffix(SGLANG), "v1/models" if body is None else SGLANG[1:]
        request = urllib.request.Request(f"{base}/{path}", body, {"Content-Type": "application/json"})
        if (name := self.api_key_env) is not None:
            if not (value := os.environ.get(name, "").strip()):
                problem, cure = "the environment has no such variable", f"set it: read -rs {name}; export {name}"
                raise SettingError(problem, setting=f"{self.setting}.api_key_env", value=name, cure=cure)
            remember("api_key", value)
            request.add_unredirected_header("Authorization", f"Bearer {value}")  # for this server alone
        return request


@functools.cache  # of all requests and tries that fail alike, the first one says so
def _say(problem: str) -> None:
    logger.warning(problem)


def _wait(number: int, asked: str | None = None) -> float:
    """Seconds before the try after this one; `asked`: what the server has asked for."""
    wait = float(asked) if asked is not None and asked.isdecimal() else FIRST_WAIT * 2**number
    return min(wait, LONGEST_WAIT)
