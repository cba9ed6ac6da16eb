"""Get scores from a server: batches of samples over HTTP, with retries until a deadline."""

import http.client
import json
import threading
import time
import weakref
from base64 import b64encode
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

from mindspeed_rlxf.config.secrets import Secret, reveal
from mindspeed_rlxf.rewards.outcome import Cause, Outcome, Sample, ScoreFailure, to_result

CONNECTIONS = 4  # requests at the same time
GATHER_S = 0.05  # how long a request waits for further samples
RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)  # waits before the next try; the last one repeats
MAX_ANSWER = 2**24  # bytes
READ = 2**16

Task: TypeAlias = tuple[Sample, "Future[Outcome]"]


class RemoteRewards:
    """Sends samples to a server in batches, in threads that start with the first sample.

    The request is {"samples": [{prompt, response, ground_truth, data_source, extra_info}, ...]}.
    The answer is {"scores": [...]}: for each sample, in order, a number, or an object of numbers
    with `score`, or {"error": text}.
    """

    def __init__(
        self, url: Secret, headers: Mapping[str, Secret], batch_size: int, timeout_s: float
    ) -> None:
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._arguments = url, reveal(headers), batch_size, timeout_s, self._queue
        weakref.finalize(self, self._queue.put, None)

    def submit(self, sample: Sample) -> Future[Outcome]:
        if not self._threads:
            for _ in range(CONNECTIONS):
                thread = threading.Thread(target=_post_tasks, args=self._arguments, daemon=True)
                self._threads.append(thread)
                thread.start()
        future: Future[Outcome] = Future()
        self._queue.put((sample, future))
        return future


def _post_tasks(
    url: Secret,
    headers: Mapping[str, str],
    size: int,
    timeout_s: float,
    queue: SimpleQueue[Task | None],
) -> None:
    """Post batches of the queue until it has None, which is left for the other threads."""
    while (task := queue.get()) is not None:
        tasks, until = [task], time.monotonic() + GATHER_S
        with suppress(Empty):
            while len(tasks) < size and (left := until - time.monotonic()) > 0:
                if (task := queue.get(timeout=left)) is None:
                    queue.put(None)
                    break
                tasks.append(task)
        try:
            outcomes = _ask_server(url, headers, [sample for sample, _ in tasks], timeout_s)
        except Exception as error:  # a bad address or sample
            outcomes = [
                Outcome(None, Cause.REMOTE, f"{url} cannot be asked: {type(error).__name__}")
            ] * len(tasks)
        for (_, future), outcome in zip(tasks, outcomes, strict=True):
            future.set_result(outcome)
    queue.put(None)


def _ask_server(
    url: Secret, headers: Mapping[str, str], samples: Sequence[Sample], timeout_s: float
) -> list[Outcome]:
    """Send samples until the server answers or timeout_s passes; return their outcomes."""
    deadline = time.monotonic() + timeout_s
    body = json.dumps({"samples": [asdict(sample) for sample in samples]}, default=str).encode()
    reason, tries = "", 0
    while (left := deadline - time.monotonic()) > 0:
        try:
            return _parse_answer(_post_once(url, headers, body, deadline), len(samples))
        except ScoreFailure as failure:
            return [Outcome(None, failure.cause, failure.message)] * len(samples)
        except (OSError, http.client.HTTPException) as error:
            reason = f"{type(error).__name__}: {error}"[:200]
        time.sleep(min(RETRY_S[min(tries, len(RETRY_S) - 1)], left))
        tries += 1
    text = f"{url} gave no score within {timeout_s:g} s (try {tries}: {reason})"
    return [Outcome(None, Cause.REMOTE, text)] * len(samples)


def _post_once(url: Secret, given: Mapping[str, str], body: bytes, deadline: float) -> bytes:
    """Return the body of an answer; raise OSError or HTTPException if a retry may help."""
    parts = urlsplit(url.get_secret_value())
    headers = {"Content-Type": "application/json", **given}
    user, at, host = parts.netloc.rpartition("@")
    if at:
        headers["Authorization"] = f"Basic {b64encode(unquote(user).encode()).decode()}"
    left = max(deadline - time.monotonic(), 0.001)
    is_https = parts.scheme == "https"
    kind = http.client.HTTPSConnection if is_https else http.client.HTTPConnection
    connection = kind(host, timeout=left)
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        content = bytearray()
        while chunk := answer.read1(READ):
            content += chunk
            if len(content) > MAX_ANSWER:
                raise ScoreFailure(Cause.OUTPUT, f"{url} answered more than {MAX_ANSWER} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError("timed out")
        if answer.status >= 500 or answer.status == 429:
            raise http.client.HTTPException(f"status {answer.status} {answer.reason}")
        if answer.status != 200:
            raise ScoreFailure(
                Cause.REMOTE, f"{url} answered with status {answer.status} {answer.reason}"
            )
        return bytes(content)
    finally:
        connection.close()


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
