"""Scoring by a server: the requests that it gets, and the handling of its errors."""

import json
import math
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mindspeed_rlxf.config.secrets import Secret, url_secret
from mindspeed_rlxf.rewards import remote
from mindspeed_rlxf.rewards.outcome import Cause, Outcome, Sample
from mindspeed_rlxf.rewards.remote import RemoteRewards

Answer = Callable[[list[dict[str, Any]]], tuple[int, Any]]


class Server:
    """Answers by a function that a test sets; keeps the requests."""

    def __init__(self) -> None:
        self.answer: Answer = lambda samples: (200, {"scores": [1.0] * len(samples)})
        self.requests: list[list[dict[str, Any]]] = []
        self.headers: dict[str, str] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                samples = json.loads(body)["samples"]
                outer.requests.append(samples)
                outer.headers = dict(self.headers)
                status, found = outer.answer(samples)
                content = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/score?by=me"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(remote, "RETRY_S", 0.01)
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def ask(
    url: str,
    count: int,
    batch_size: int = 4,
    timeout_s: float = 20.0,
    headers: dict[str, Secret] | None = None,
) -> list[Outcome]:
    rewards = RemoteRewards(url_secret(url), headers or {}, batch_size, timeout_s)
    samples = [Sample("p", str(i), "t", "s", {"level": i}) for i in range(count)]
    return [future.result(60) for future in [rewards.submit(sample) for sample in samples]]


def test_samples_go_in_batches_and_scores_come_back_in_order(server: Server) -> None:
    server.answer = lambda samples: (
        200,
        {"scores": [{"score": float(s["response"]), "level": s["extra_info"]["level"]}
                    for s in samples]},
    )  # fmt: skip
    found = ask(server.url, 10)
    assert [outcome.result and outcome.result.score for outcome in found] == list(range(10))
    assert [outcome.result and outcome.result.parts for outcome in found] == [
        {"level": float(i)} for i in range(10)
    ]
    assert max(map(len, server.requests)) <= 4
    keys = {"prompt", "response", "ground_truth", "data_source", "extra_info"}
    assert set(server.requests[0][0]) == keys


def test_a_server_that_fails_at_first_is_asked_again(server: Server) -> None:
    broken = iter([503, 500, 429])

    def answer(samples: list[dict[str, Any]]) -> tuple[int, Any]:
        return next(broken, 200), {"scores": [0.5] * len(samples)}

    server.answer = answer
    (outcome,) = ask(server.url, 1)
    assert outcome.result is not None and outcome.result.score == 0.5
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("status", "answer", "cause", "said"),
    [
        (404, {}, Cause.REMOTE, "answered with status 404"),
        (200, b"not json", Cause.WRONG_RESULT, "the answer must be {'scores': [...]}"),
        (200, {"scores": []}, Cause.WRONG_RESULT, "with 1 scores, it is"),
        (200, {"scores": ["1.0"]}, Cause.WRONG_RESULT, "must be a number, it is str"),
        (200, b'{"scores": [NaN]}', Cause.NOT_FINITE, "must be finite"),
        (200, {"scores": [{"error": "no idea"}]}, Cause.REMOTE, "no idea"),
    ],
)
def test_an_answer_that_is_no_score_has_a_cause(
    server: Server, status: int, answer: Any, cause: Cause, said: str
) -> None:
    server.answer = lambda samples: (status, answer)
    (outcome,) = ask(server.url, 1)
    assert outcome.cause is cause and said in outcome.message
    assert len(server.requests) == 1, "asked again in vain"


def test_a_server_that_is_slow_or_absent_ends_at_the_deadline(server: Server) -> None:
    ends = threading.Event()
    server.answer = lambda samples: (ends.wait(30), (200, {"scores": [1.0]}))[1]
    (outcome,) = ask(server.url, 1, timeout_s=0.2)
    ends.set()
    assert outcome.cause is Cause.REMOTE and "gave no score within 0.2 s" in outcome.message
    server.http.shutdown()
    server.http.server_close()
    (outcome,) = ask(server.url, 1, timeout_s=0.2)
    assert outcome.cause is Cause.REMOTE and "Connection refused" in outcome.message


def test_an_address_that_cannot_be_sent_fails_and_ends_no_thread() -> None:
    url = f"http://{'a' * 64}.local/"
    found = ask(url, remote.CONNECTIONS + 1, batch_size=1, timeout_s=0.2)
    assert {outcome.cause for outcome in found} == {Cause.REMOTE}
    assert f"{url} cannot be asked: Unicode" in found[-1].message


def test_a_server_gets_secrets_and_no_failure_shows_them(server: Server) -> None:
    """User info, query and headers are sent; the message of a failed sample has none of them."""
    server.answer = lambda samples: (404, {})
    address = server.url.replace("http://", "http://me:canary@").replace("?by=me", "?key=canary")
    (outcome,) = ask(address, 1, headers={"X-Key": Secret("canary")})
    assert server.headers["Authorization"] == f"Basic {b64encode(b'me:canary').decode()}"
    assert server.headers["X-Key"] == "canary"
    assert outcome.cause is Cause.REMOTE and "canary" not in outcome.message
    (absent,) = ask("http://me:canary@127.0.0.1:1/?key=canary", 1, timeout_s=0.2)
    assert absent.cause is Cause.REMOTE and "canary" not in absent.message


def test_a_request_is_json_that_strict_servers_read(server: Server) -> None:
    rewards = RemoteRewards(url_secret(server.url), {}, 1, 20.0)
    sample = Sample("p", "r", "t", "s", {"x": [math.inf, {"y": math.nan}, 1.5]})
    assert rewards.submit(sample).result(60).result is not None
    assert server.requests[0][0]["extra_info"] == {"x": [None, {"y": None}, 1.5]}
