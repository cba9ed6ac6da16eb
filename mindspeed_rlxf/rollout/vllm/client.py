"""Requests to one vLLM server, over its Unix socket."""

from __future__ import annotations

import http.client
import json
import math
import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from mindspeed_rlxf.rollout.receipts import SyncError
from mindspeed_rlxf.rollout.rollout_engine import GenerationRequest
from mindspeed_rlxf.rollout.rows import GrowingSample

GENERATE = "/inference/v1/generate"
READ = "/health", "/weight_info"  # routes without a body
CALL_S = 600.0  # for one call, such as loading a bucket
NO_NUMBER = -9999.0  # what the server answers for a log-prob that is nan or -inf


class ServerError(RuntimeError):
    """The server ended, does not answer, or answers an error."""


class Client:
    """Asks one server; threads may share it. All methods raise ServerError."""

    def __init__(self, path: str, tells_versions: bool = True) -> None:
        """`tells_versions`: answers name the version of the weights; vLLM 0.23's do not."""
        self.path, self.tells_versions = path, tells_versions
        self.adapter = ""  # name of the loaded adapter, which answers requests; "" = none

    def call(self, route: str, body: Any = None, timeout_s: float = CALL_S) -> dict[str, Any]:
        """Return the JSON answer, {} if it has none."""
        text = b"".join(self._ask(route, body or {}, timeout_s))
        with reading(route):
            return dict(json.loads(text)) if text else {}

    def ask_workers(self, method: str, *arguments: str) -> list[Any]:
        """Call a method of the `Extension` on every worker; return their results."""
        body = {"method": method, "args": list(arguments)}
        return list(self.call("/collective_rpc", body).get("results", []))

    def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter from a folder in PEFT's format; it answers from now on, no other one."""
        loaded = {"lora_name": name, "lora_path": folder}
        list(self._ask("/v1/load_lora_adapter", loaded, CALL_S))  # the answer is no JSON
        if self.adapter:
            list(self._ask("/v1/unload_lora_adapter", {"lora_name": self.adapter}, CALL_S))
        self.adapter = name

    def is_ready(self) -> bool:
        """Return whether the server answers."""
        try:
            return not self.call("/health", timeout_s=5.0)
        except ServerError:
            return False

    def _ask(self, route: str, body: Any, timeout_s: float) -> Generator[bytes, None, None]:
        """Yield the answer's lines as they come; closing the generator aborts the request."""
        if route == GENERATE and self.adapter:
            body = {**body, "model": self.adapter}
        with reading(route), closing(http.client.HTTPConnection("localhost")) as connection:
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(timeout_s)
            connection.sock.connect(self.path)
            method, head = "GET" if route in READ else "POST", {"Content-Type": "application/json"}
            connection.request(method, route, json.dumps(body), head)
            answer = connection.getresponse()
            if answer.status != 200:
                problem = answer.read().decode("utf-8", "replace")
                raise ServerError(f"{route}: status {answer.status}: {problem[:2000]}")
            while line := answer.readline():
                yield line

    def generate(
        self,
        asked: GenerationRequest,
        on_part: Callable[[], None],
        version: int,
        most_tokens: int | None,
        timeout_s: float,
        ends_at: float = math.inf,
        has_own_seed: bool = True,
    ) -> GrowingSample:
        """Stream one response to its end, or the next `most_tokens` of it.

        After `ends_at`, in seconds of `time.monotonic`, only the tokens that come first.
        `on_part` is called, and may raise, whenever tokens arrive. With `has_own_seed` random
        numbers depend on seed, sample id and the number of tokens before; then vLLM draws one row
        after another. Stop strings are searched here, because the
        server has no tokenizer.

        Raises:
            SyncError: The response is from other weights than those of `version`.
            FloatingPointError: A log-prob is nan.
        """
        settings, sample = asked.settings, GrowingSample(asked)
        num_before = len(sample.tokens)
        stream = [asked.seed, asked.sample_id, *([num_before] if num_before else [])]
        seed = np.random.SeedSequence(stream).generate_state(1, np.uint64)
        num_left = settings.max_new_tokens - num_before
        most = num_left if most_tokens is None else min(most_tokens, num_left)
        least = settings.min_new_tokens - (num_before - sample.turn_start)
        sampling = {
            "max_tokens": most,
            "min_tokens": max(0, min(least, most)),
            "temperature": settings.temperature if settings.do_sample else 0.0,
            "top_k": settings.top_k or -1,
            "top_p": settings.top_p,
            "ignore_eos": True,  # the stop ids are the complete EOS set
            "stop_token_ids": list(settings.eos_token_ids),
            "logprobs": 0,  # of the sampled token alone
        }
        if has_own_seed:
            sampling["seed"] = int(seed[0] >> np.uint64(1))
        asked_body = body(sample.prefill_ids, sampling, True)
        with closing(self._ask(GENERATE, asked_body, timeout_s)) as lines:
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                on_part()
                with reading(GENERATE):
                    part = json.loads(line[6:])
                    if "error" in part:
                        raise ServerError(f"{GENERATE}: {part['error']}")
                    choice = part["choices"][0]
                    reason, ids = choice["finish_reason"], choice["token_ids"] or ()
                    entries = choice["logprobs"]["content"] if ids else ()
                    sample.log_probs += [entry["logprob"] for entry in entries]
                if reason in ("stop", "length"):
                    self._check_version(choice, version, f"sample {asked.sample_id}")
                elif reason is not None:
                    raise ServerError(f"{GENERATE}: ended by {reason}")
                if sample.append_until_end(ids) or reason:  # before a reason at stop strings
                    break
                if ids and time.monotonic() >= ends_at:
                    break
            else:
                raise ServerError(f"{GENERATE}: the stream ended early")
        del sample.log_probs[len(sample.tokens) :]
        if NO_NUMBER in sample.log_probs:
            raise FloatingPointError("a log-prob is nan; look for nan in the weights")
        return sample

    def score(
        self, pair: tuple[np.ndarray, Sequence[int]], _: Any, timeout_s: float
    ) -> list[float]:
        """Return the log-probs of the response to a prompt, at temperature 1."""
        prompt, response = pair
        tokens = np.concatenate((prompt, response))
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = self.call(GENERATE, body(tokens, sampling), timeout_s)
        with reading(GENERATE):
            entries = zip(answer["prompt_logprobs"][len(prompt) :], response, strict=True)
            return [entry[str(token)]["logprob"] for entry, token in entries]

    def count_cached(self, tokens: np.ndarray, version: int) -> int:
        """Ask for a token; return how many of the prompt's tokens the prefix cache had."""
        answer = self.call(GENERATE, body(tokens, {"max_tokens": 1, "temperature": 0.0}))
        with reading(GENERATE):
            self._check_version(answer["choices"][0], version, "the first request")
            details = answer["usage"].get("prompt_tokens_details") or {}
            return int(details.get("cached_tokens") or 0)

    def check_version(self, version: int, _: Any = None) -> None:
        """Raise SyncError if the server has other weights now; vLLM 0.23 cannot be asked."""
        if self.tells_versions:
            found = self.call("/weight_info").get("weight_version")
            self._check_version({"weight_versions": [{"version": found}]}, version, "the server")

    def _check_version(self, choice: Mapping[str, Any], version: int, what: str) -> None:
        spans = choice.get("weight_versions") or ([{"version": None}] * self.tells_versions)
        for found in (span["version"] for span in spans):
            if found != str(version):
                raise SyncError(f"{what} is from weights of version {found}, not {version}")


def body(tokens: np.ndarray, sampling: Mapping[str, Any], stream: bool = False) -> dict[str, Any]:
    """Return a request for one prompt, [tokens] int64."""
    params = {"detokenize": False, **sampling}
    return {"token_ids": tokens.tolist(), "sampling_params": params, "stream": stream}


@contextmanager
def reading(route: str) -> Iterator[None]:
    """Raise ServerError if no answer comes, or one without the expected form."""
    try:
        yield
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise ServerError(f"{route}: {type(error).__name__}: {error}") from error
