"""Requests to one vLLM server, over its Unix socket."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from mindspeed_rlxf.rollout.rollout_engine import FinishReason, GenerationRequest, GenerationResult

GENERATE = "/inference/v1/generate"
CALL_S = 600.0  # for one call, such as loading a bucket
NO_NUMBER = -9999.0  # what the server answers for a log-prob that is nan or -inf


class ServerError(RuntimeError):
    """The server ended, does not answer, or answers an error."""


class SyncError(RuntimeError):
    """The server does not have the weights that it should have."""


class Connection(http.client.HTTPConnection):
    """An HTTP connection over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self.path = path

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Client:
    """Asks one server; threads may share it. All methods raise ServerError."""

    def __init__(self, path: str) -> None:
        self.path = path

    def call(self, route: str, body: Any = None, timeout_s: float = CALL_S) -> dict[str, Any]:
        """Return the JSON answer to a POST, {} if it has none."""
        parts = self._ask(route, {} if body is None else body, timeout_s)
        text = b"".join(parts)
        return dict(json.loads(text)) if text else {}

    def ask_workers(self, method: str, *arguments: str) -> list[Any]:
        """Call a method of the `Extension` on every worker; return their results."""
        body = {"method": method, "args": list(arguments)}
        return list(self.call("/collective_rpc", body).get("results", []))

    def is_ready(self) -> bool:
        """Return whether the server answers."""
        try:
            return not b"".join(self._ask("/health", None, 5.0))
        except ServerError:
            return False

    def _ask(self, route: str, body: Any, timeout_s: float) -> Generator[bytes, None, None]:
        """Yield the answer's lines as they come; closing the generator aborts the request."""
        connection = Connection(self.path, timeout_s)
        try:
            text = None if body is None else json.dumps(body)
            head = {"Content-Type": "application/json"}
            connection.request("GET" if body is None else "POST", route, text, head)
            answer = connection.getresponse()
            if answer.status != 200:
                problem = answer.read().decode("utf-8", "replace")
                raise ServerError(f"{route}: status {answer.status}: {problem[:2000]}")
            while line := answer.readline():
                yield line
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{route}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def generate(
        self, asked: GenerationRequest, version: int, timeout_s: float, on_part: Callable[[], None]
    ) -> GenerationResult:
        """Stream one response; `on_part` is called, and may raise, whenever tokens arrive.

        Random numbers depend on seed and sample id. Stop strings are searched here, because the
        server has no tokenizer.

        Raises:
            SyncError: The response is from other weights than those of `version`.
            FloatingPointError: A log-prob is nan.
        """
        settings, tokens, log_probs = asked.settings, list[int](), list[float]()
        seed = np.random.SeedSequence([asked.seed, asked.sample_id]).generate_state(1, np.uint64)
        sampling = {
            "max_tokens": settings.max_new_tokens,
            "min_tokens": settings.min_new_tokens,
            "temperature": settings.temperature if settings.do_sample else 0.0,
            "top_k": settings.top_k or -1,
            "top_p": settings.top_p,
            "seed": int(seed[0] >> np.uint64(1)),
            "ignore_eos": True,  # the stop ids are the complete EOS set
            "stop_token_ids": list(settings.eos_token_ids),
            "logprobs": 0,  # of the sampled token alone
        }
        with closing(self._ask(GENERATE, body(asked.prompt, sampling, True), timeout_s)) as lines:
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                part = json.loads(line[6:])
                if "error" in part:
                    raise ServerError(f"{GENERATE}: {part['error']}")
                on_part()
                choice, ended = part["choices"][0], False
                check_version(choice, version, f"sample {asked.sample_id}")
                entries = choice["logprobs"]["content"] if choice["token_ids"] else []
                for token, entry in zip(choice["token_ids"], entries, strict=True):
                    tokens.append(token)
                    log_probs.append(entry["logprob"])
                    if ended := bool(settings.stop and settings.ends_with(tokens)):
                        break
                if ended or choice["finish_reason"] in ("stop", "length"):
                    break
                if choice["finish_reason"] is not None:
                    raise ServerError(f"{GENERATE}: ended by {choice['finish_reason']}")
            else:
                raise ServerError(f"{GENERATE}: the stream ended early")
        if NO_NUMBER in log_probs:
            raise FloatingPointError("a log-prob is nan; look for nan in the weights")
        reason = FinishReason.of(tokens, settings)
        return GenerationResult(asked.place, tokens, log_probs, reason, version)

    def score(self, prompt: np.ndarray, response: Sequence[int], timeout_s: float) -> list[float]:
        """Return the response's log-probs at temperature 1."""
        tokens = np.concatenate((prompt, response))
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = self.call(GENERATE, body(tokens, sampling), timeout_s)
        entries = zip(answer["prompt_logprobs"][len(prompt) :], response, strict=True)
        return [entry[str(token)]["logprob"] for entry, token in entries]

    def count_cached(self, tokens: np.ndarray, version: int) -> int:
        """Ask for a token; return how many of the prompt's tokens the prefix cache had."""
        answer = self.call(GENERATE, body(tokens, {"max_tokens": 1, "temperature": 0.0}))
        check_version(answer["choices"][0], version, "the first request")
        return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def body(tokens: np.ndarray, sampling: Mapping[str, Any], stream: bool = False) -> dict[str, Any]:
    """Return a request for one prompt, [tokens] int64."""
    params = {"detokenize": False, **sampling}
    return {"token_ids": tokens.tolist(), "sampling_params": params, "stream": stream}


def check_version(choice: Mapping[str, Any], version: int, what: str) -> None:
    """Raise SyncError if the last part of an answer names other weights; vLLM 0.23 names none."""
    for span in choice.get("weight_versions") or ():
        if span["version"] != str(version):
            raise SyncError(f"{what} is from weights of version {span['version']}, not {version}")
