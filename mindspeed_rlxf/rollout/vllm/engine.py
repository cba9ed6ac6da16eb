"""The rollout engine `vllm`: one server for each replica, its weights, requests and restarts."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.device import worlds
from mindspeed_rlxf.rollout.rollout_engine import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    GenerationStats,
)
from mindspeed_rlxf.rollout.transfer import bit_sum
from mindspeed_rlxf.rollout.vllm.client import Client, ServerError, SyncError, reading
from mindspeed_rlxf.rollout.vllm.server import ENGINE_SIDE, Server, server_command
from mindspeed_rlxf.rollout.vllm.weights import (
    DeviceHandles,
    SharedMemory,
    compare_receipts,
    make_buckets,
)

T = TypeVar("T")
R = TypeVar("R")
MOST_FAILURES = 2  # of a server in an iteration
STALL = 0.1  # of `runtime.timeout_s` without any token: the server hangs
MOST_ROWS = 256  # requests at once, where the configuration sets none; vLLM's default
CANARY_TOKENS = 300  # more than one block of the prefix cache: 16, or 128 on CPU and NPU
ANSWER_ERRORS = {False: 1e-3, True: 3e-2}
"""bf16 -> largest relative error of a layer; other weights make it about 1."""


class EngineLost(RuntimeError):
    """The server failed again and again; the same command continues the run."""


class VllmRollout:
    """One rank of a replica. Its leader owns the server; the others help to send weights."""

    def __init__(self, config: RunConfig, folder: str = "") -> None:
        """Start the server without waiting for it; a collective over the generating ranks.

        `folder` is for the server's log.
        """
        layout, rank, actor = config.rollout_layout, dist.get_rank(), config.actor_rollout
        self.config, self.is_leader = config, layout.is_leader(rank)
        self.names: list[str] = []  # of the model's tensors, from the first update
        groups = [  # every rank makes every group
            dist.new_group(list(range(first, first + layout.tp)), backend="gloo")
            for first in range(0, layout.world_size, layout.tp)
        ]
        self.group = groups[layout.dp_rank(rank)]
        worlds.set_timeout([self.group])
        self.kind = kind = device.resolve_kind(config.device.kind)
        self.on_cpu, self.on_npu = kind is DeviceKind.CPU, kind is DeviceKind.NPU
        self.max_rows = config.rollout.vllm.max_num_seqs or actor.num_samples_per_step or MOST_ROWS
        self.timeout_s = config.runtime.timeout_s
        self.stall_s = STALL * self.timeout_s
        self.memory, self.sums, self.receipts = SharedMemory(), dict[str, int](), list[Any]()
        self._stats, self._version = GenerationStats(), -1
        self._failures, self._ready, self._beat = 0, False, 0.0
        self._asleep, self._must_check_cache = set[str](), False
        python, options = server_command(config, self.on_cpu, self.on_npu)
        environment = self._make_environment(layout.tp)
        log = Path(folder) / f"vllm_{layout.dp_rank(rank):05d}.log"
        self._launch = lambda: Server(python, options, environment, log)
        self.server = self._launch() if self.is_leader else None

    def _make_environment(self, tp: int) -> dict[str, str]:
        name = device.facts(self.kind).visible_devices
        if name is None:
            return {
                "RLXF_TRANSPORT": "shared_memory",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(self.config.device.cpu_threads),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or the executor `uni` is refused
            }
        numbers: list[Any] = [None] * tp
        dist.all_gather_object(numbers, device.host_number(), group=self.group)
        return {
            name: ",".join(numbers),
            "RLXF_TRANSPORT": "npu_ipc" if self.on_npu else "ipc",
            **({"PYTHONPATH": f"{ENGINE_SIDE}:{os.environ['PYTHONPATH']}"} if self.on_npu else {}),
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # device handles are pickled
        }

    @property
    def client(self) -> Client:
        """The leader's client, after its server has started."""
        assert self.server is not None, "only a replica's leader has a server"
        if not self._ready:
            self.server.wait_until_ready(self.config.runtime.start_timeout_s)
            self._ready = True
        return self.server.client

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send all weights and compare receipts; a server that fails meanwhile is replaced.

        Raises:
            ValueError: A tensor comes twice, or others come than in the first update.
            SyncError: The server has other weights than were sent.
            EngineLost: It failed twice.
        """
        started, failure, names = time.monotonic(), None, list[str]()
        before, self.sums, self._version = self.sums, {}, version
        self.memory.clear()
        transport: Any = self.memory
        if not self.on_cpu:
            transport = DeviceHandles(device.identity(), self.group, self.on_npu)
        try:
            if self.is_leader:
                self._begin_update()
        except ServerError as error:
            failure = error
        for bucket in make_buckets(tensors):  # to its end, as it is a collective
            names += [name for name, _ in bucket]
            if self.is_leader:
                self.sums |= {name: bit_sum(tensor) for name, tensor in bucket}
                self.memory.keep(bucket)
            try:
                transport.send(bucket, None if failure or not self.is_leader else self.client)
            except ServerError as error:
                failure = error
        self.names = self.names or names
        if sorted(names) != sorted({*self.names}):
            odd = {*names} ^ {*self.names} or {name for name in names if names.count(name) > 1}
            raise ValueError(f"{min(odd)} must be sent once, as in the first update")
        try:
            if failure is not None:
                raise failure
            if self.is_leader:
                self._finish_update(started, before)
        except ServerError as error:
            self._replace_server(error)

    def _begin_update(self) -> None:
        self._wake("weights")
        self.client.call("/pause?mode=keep")
        self.client.ask_workers("rlxf_begin")
        if not self.on_cpu and not self.on_npu:  # vLLM 0.23 is told with each bucket
            packed = {"init_info": {"packed": True}}
            self.client.call("/init_weight_transfer_engine", packed)
        self.client.call("/start_weight_update")

    def _finish_update(
        self, started: float, before: Mapping[str, int], restarted: bool = False
    ) -> None:
        """End an update, compare receipts, and add one: a line of sync.jsonl.

        `before` are the sums of the update before, {} = not known; `changed` counts tensors with
        other bits. `total` is the sum of all sums; `first` names the first tensor.
        """
        client, version = self.client, self.weights_version
        client.call("/finish_weight_update", {"weight_version": str(version)})
        client.ask_workers("rlxf_finish", str(version))
        if not client.call("/reset_prefix_cache").get("success", True):
            raise SyncError("the server did not reset its prefix cache")
        client.call("/resume")
        self._must_check_cache = True
        limit = ANSWER_ERRORS[self.config.actor_rollout.bf16]
        workers, tp = client.ask_workers("rlxf_receipt"), self.config.rollout_tp
        with reading("rlxf_receipt"):
            error = compare_receipts(self.sums, workers, version, limit)
        if len(workers) != tp:
            raise SyncError(f"{tp} workers must give a receipt, not {len(workers)}")
        self.receipts.append(
            {
                "version": version,
                "seconds": round(time.monotonic() - started, 3),
                "bytes": self.memory.num_bytes,
                "tensors": len(self.sums),
                "changed": sum(self.sums[n] != before[n] for n in self.sums) if before else None,
                "first": next(iter(self.sums)),
                "total": sum(self.sums.values()) % 2**63,
                "answer_error": error,
                "restarted": restarted,
            }
        )

    def _send_again(self, restarted: bool) -> None:
        """Send the weights of the current version from host memory."""
        started, client = time.monotonic(), self.client
        client.ask_workers("rlxf_begin")
        client.call("/start_weight_update")
        for places in self.memory.buckets:
            self.memory.load(places, client)
        self._finish_update(started, {}, restarted)

    @property
    def weights_version(self) -> int:
        """Version of the loaded weights."""
        return self._version

    def take_receipts(self) -> list[Any]:
        """Return the receipts since the last call."""
        found, self.receipts = self.receipts, []
        return found

    def _wake(self, *tags: str) -> None:
        if missing := self._asleep & {*tags}:
            self.client.call("/wake_up?" + "&".join(f"tags={tag}" for tag in sorted(missing)))
            self._asleep -= missing

    def wake(self) -> None:
        """Bring the server's weights and cache to the device; check the cache after an update.

        Raises SyncError if the prefix cache still has a prompt from before the update.
        """
        if not self.is_leader:
            return
        try:
            slept = "weights" in self._asleep
            self._wake("weights", "kv_cache")
            if slept and self.on_npu:  # weights were lost or transposed while vllm-ascend slept
                self._send_again(restarted=False)
            if self._must_check_cache:
                vocabulary = self.config.actor_rollout.architecture.vocab_size
                prompt = np.arange(min(CANARY_TOKENS, self.config.training.seq_length)) % vocabulary
                if cached := self.client.count_cached(prompt, self.weights_version):
                    raise SyncError(
                        f"the prefix cache has {cached} tokens computed before the weights of "
                        f"version {self.weights_version}; it was not reset"
                    )
                self._must_check_cache = False
        except ServerError as error:
            self._replace_server(error)

    def sleep(self) -> None:
        """Move the server's weights to the host and free its cache; does nothing on CPU."""
        self._failures = 0  # an iteration ends
        if self.is_leader and self._ready and not self.on_cpu:
            try:
                self.client.call("/sleep?level=1")
                self._asleep = {"weights", "kv_cache"}
            except ServerError:  # the next call notices; it may follow another error
                self._ready = False

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """Generate as `RolloutEngine.generate` says; ranks beside the leader yield stand-ins.

        Raises:
            EngineLost: The server failed twice since it slept last.
            SyncError: A response is from other weights.
            FloatingPointError: A log-prob is nan.
        """
        self._stats, version = GenerationStats(), self.weights_version

        def ask(client: Client, request: GenerationRequest, beat: Any) -> GenerationResult:
            return client.generate(request, version, self.timeout_s, beat)

        try:
            if not self.is_leader:
                for each in requests:
                    yield GenerationResult(each.place, [0], [0.0], FinishReason.LENGTH, version)
                return
            for result in self._ask_all(requests, ask):
                self._stats.sampled_tokens += len(result.tokens)
                self._stats.decoded_tokens += len(result.tokens) - 1
                yield result
            # Responses that a stop string ends do not name their version.
            list(self._ask_all([version], lambda client, version, _: client.check_version(version)))
            self._stats.prompt_tokens = sum(len(request.prompt) for request in requests)
        finally:
            dist.barrier(self.group)

    def score(
        self,
        prompts: Sequence[np.ndarray],
        responses: Sequence[Sequence[int]],
        temperature: float = 1.0,
    ) -> list[list[float]]:
        """Score as `RolloutEngine.score` says, at temperature 1; the server knows no other."""
        assert temperature == 1.0, f"log-probs of prompts are at temperature 1, not {temperature:g}"
        self._stats = GenerationStats(prompt_tokens=sum(map(len, prompts)))
        found = {n: [0.0] * len(response) for n, response in enumerate(responses)}

        def ask(client: Client, number: int, beat: Any) -> tuple[int, list[float]]:
            beat()
            return number, client.score(prompts[number], responses[number], self.timeout_s)

        if self.is_leader:
            found.update(self._ask_all(range(len(prompts)), ask))
        dist.barrier(self.group)
        return list(found.values())

    def stats(self) -> GenerationStats:
        """Return the counts for the current or last call."""
        return self._stats

    def _ask_all(
        self, items: Sequence[T], ask: Callable[[Client, T, Callable[[], None]], R]
    ) -> Iterator[R]:
        """Yield `ask`'s results as they come, in threads; after a failure ask a new server.

        `ask` calls its last argument whenever the server shows life.
        """
        waiting = dict(enumerate(items))
        while waiting:
            done, stopped = queue.SimpleQueue[tuple[int, Any]](), threading.Event()
            threads = ThreadPoolExecutor(min(self.max_rows, len(waiting)), "vllm")
            try:
                self._beat, client = time.monotonic(), self.client
                for number in waiting:
                    item = partial(ask, client, waiting[number])
                    threads.submit(self._ask_one, number, item, done, stopped)
                while waiting:
                    number, result = self._take(done)
                    if isinstance(result, Exception):
                        raise result
                    del waiting[number]
                    yield result
            except ServerError as error:
                stopped.set()
                assert self.server is not None
                self.server.kill()  # which ends the threads
                threads.shutdown(cancel_futures=True)
                self._replace_server(error)
            finally:
                stopped.set()
                threads.shutdown(cancel_futures=True)

    def _ask_one(self, number: int, ask: Any, done: Any, stopped: threading.Event) -> None:
        def beat() -> None:
            self._beat = time.monotonic()
            if stopped.is_set():
                raise ServerError("nobody waits for the answer")

        try:
            done.put((number, ask(beat)))
        except Exception as error:
            done.put((number, error))

    def _take(self, done: queue.SimpleQueue[tuple[int, Any]]) -> tuple[int, Any]:
        while True:
            try:
                found = done.get(timeout=1.0)
                self._beat = time.monotonic()
                return found
            except queue.Empty:
                if time.monotonic() - self._beat > self.stall_s:
                    raise ServerError(f"it sent no token for {self.stall_s:g} s") from None

    def _replace_server(self, error: ServerError) -> None:
        """Start the server anew with the current weights; EngineLost after MOST_FAILURES."""
        while True:
            assert self.server is not None
            self.server.kill()
            lost = f"the vLLM server failed: {error}; {self.server.last_lines()}"
            print(lost, file=sys.stderr, flush=True)
            self._failures, self._ready, self._asleep = self._failures + 1, False, set()
            if self._failures >= MOST_FAILURES:
                raise EngineLost(lost) from error
            self.server = self._launch()
            try:
                return self._send_again(restarted=True)
            except ServerError as again:
                error = again
