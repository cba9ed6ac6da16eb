"""Get scores from a server: sample batches over HTTP, retried until a deadline."""

import json
import math
import threading
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from http.client import HTTPException
from queue import Empty, SimpleQueue
from typing import TypeAlias
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPSHandler,
    OpenerDirector,
    Request,
)

from mindspeed_rlxf.config.secrets import Secret, reveal
from mindspeed_rlxf.data.files import without_nan
from mindspeed_rlxf.rewards.outcome import Cause, Outcome, Sample, ScoreFailure, to_result

CONNECTIONS = 4  # requests at the same time
GATHER_S = 0.05  # how long a request waits for further samples
RETRY_S = 1.0  # before the next try
_Queue: TypeAlias = SimpleQueue[tuple[Sample, Future[Outcome]]]
OPENER = OpenerDirector()  # without proxies and redirects, which would get the headers too
for handler in (HTTPHandler, HTTPSHandler, HTTPErrorProcessor, HTTPDefaultErrorHandler):
    OPENER.add_handler(handler())


class RemoteRewards:
    """Sends samples to a server in batches, from threads.

    The request is {"samples": [{prompt, response, ground_truth, data_source, extra_info}, ...]},
    the answer {"scores": [...]} with one entry per sample, in order: a number, an object with
    `score` and further numbers, or {"error": text}.
    """

    def __init__(
        self, url: Secret, headers: Mapping[str, Secret], batch_size: int, timeout_s: float
    ) -> None:
        self._queue: _Queue = SimpleQueue()
        arguments = url, reveal(headers), batch_size, timeout_s, self._queue
        for _ in range(CONNECTIONS):
            threading.Thread(target=_post_tasks, args=arguments, daemon=True).start()

    def submit(self, sample: Sample) -> Future[Outcome]:
        """Queue a sample."""
        future: Future[Outcome] = Future()
        self._queue.put((sample, future))
        return future


def _post_tasks(
    url: Secret, headers: Mapping[str, str], size: int, timeout_s: float, queue: _Queue
) -> None:
    """Post batches from the queue, forever."""
    while True:
        tasks = [queue.get()]
        deadline = time.monotonic() + GATHER_S
        with suppress(Empty):
            while len(tasks) < size:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                tasks.append(queue.get(timeout=left_s))
        try:
            outcomes = _ask_server(url, headers, [sample for sample, _ in tasks], timeout_s)
        except Exception as error:  # a bad address or sample
            message = f"{url} cannot be asked: {type(error).__name__}"
            outcomes = [Outcome(None, Cause.REMOTE, message)] * len(tasks)
        for (_, future), outcome in zip(tasks, outcomes, strict=True):
            future.set_result(outcome)


def _is_no_json(number: float) -> bool:
    return not math.isfinite(number)


def _ask_server(
    url: Secret, headers: Mapping[str, str], samples: Sequence[Sample], timeout_s: float
) -> list[Outcome]:
    """Send samples until the server answers or timeout_s passes."""
    deadline = time.monotonic() + timeout_s
    # JSON has neither NaN nor infinity, and strict servers refuse them.
    entries = without_nan([asdict(sample) for sample in samples], is_null=_is_no_json)
    body = json.dumps({"samples": entries}, default=str).encode()
    reason = ""
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        try:
            return _parse_answer(_post_once(url, headers, body, left_s), len(samples))
        except ScoreFailure as failure:
            return [Outcome(None, failure.cause, failure.message)] * len(samples)
        except (OSError, HTTPException) as error:
            reason = f"{type(error).__name__}: {error}"[:200]
        time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
    text = f"{url} gave no score within {timeout_s:g} s ({reason})"
    return [Outcome(None, Cause.REMOTE, text)] * len(samples)


def _post_once(
    url: Secret, user_headers: Mapping[str, str], body: bytes, timeout_s: float
) -> bytes:
    """Return an answer's body; raise OSError or HTTPException if a retry may help."""
    address = urlsplit(url.get_secret_value())
    headers = {"Content-Type": "application/json", **user_headers}
    user, at, host = address.netloc.rpartition("@")
    if at:
        headers["Authorization"] = f"Basic {b64encode(unquote(user).encode()).decode()}"
    request = Request(urlunsplit(address._replace(netloc=host)), body, headers)
    try:
        with OPENER.open(request, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except HTTPError as error:
        if error.code >= 500 or error.code == 429:
            raise
        message = f"{url} answered with status {error.code} {error.reason}"
        raise ScoreFailure(Cause.REMOTE, message) from None


def _parse_answer(answer: bytes, count: int) -> list[Outcome]:
    try:
        scores = json.loads(answer)["scores"]
        if not isinstance(scores, list) or len(scores) != count:
            raise ValueError(f"not {count} scores")
    except (ValueError, KeyError, TypeError, RecursionError):
        rule = f"the answer must be {{'scores': [...]}} with {count} scores, it is {answer[:60]!r}"
        raise ScoreFailure(Cause.WRONG_RESULT, rule) from None
    outcomes = []
    for score in scores:
        try:
            if isinstance(score, dict) and "error" in score:
                raise ScoreFailure(Cause.REMOTE, str(score["error"])[:300])
            outcomes.append(Outcome(to_result(score)))
        except ScoreFailure as failure:
            outcomes.append(Outcome(None, failure.cause, failure.message))
    return outcomes
