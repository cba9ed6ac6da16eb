"""The rollout engine `vllm`: one server for each replica, its weights, requests and restarts."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.device import worlds
from mindspeed_rlxf.models.hf_adapters import is_adapter
from mindspeed_rlxf.rollout.bit_sums import bit_sums
from mindspeed_rlxf.rollout.receipts import SyncError, compare_receipts, summary
from mindspeed_rlxf.rollout.rollout_engine import (
    EngineLost,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    GenerationStats,
)
from mindspeed_rlxf.rollout.server_sizes import server_rows
from mindspeed_rlxf.rollout.threads import ask_all
from mindspeed_rlxf.rollout.transfer import in_buckets
from mindspeed_rlxf.rollout.vllm.client import Client, ServerError, reading
from mindspeed_rlxf.rollout.vllm.server import (
    ENGINE_SIDE,
    OptionsRefused,
    Server,
    server_command,
)
from mindspeed_rlxf.rollout.vllm.weights import AdapterFolder, DeviceBuffer, SharedMemory

MOST_FAILURES = 2  # of servers, until one has answered all that it was asked
STALL = 0.1  # of `runtime.timeout_s` without any token: the server hangs
CANARY_TOKENS = 300  # more than one block of the prefix cache: 16, or 128 on CPU and NPU


class VllmRollout:
    """One rank of a replica. Its leader owns the server; the others help to send weights.

    After a failure there is no server until the next `update_weights`, which starts another.

    Attributes:
        has_failed: Whether the server has failed since the last update; on leaders.
    """

    def __init__(
        self, config: RunConfig, folder: str = "", make_room: Callable[[], Any] = nullcontext
    ) -> None:
        """Start the server; a collective over the generating ranks.

        On CPU this does not wait for it. On devices the server takes its memory while all ranks
        `make_room`, and then sleeps. `folder` is for the server's log.
        """
        layout, rank, actor = config.rollout_layout, dist.get_rank(), config.actor_rollout
        self.config, self.is_leader, self.make_room = config, layout.is_leader(rank), make_room
        self.group, _ = dist.new_subgroups(layout.tp, backend="gloo")
        worlds.set_timeout([self.group])
        kind = device.resolve_kind(config.device.kind)
        self.on_cpu, self.on_npu = kind is DeviceKind.CPU, kind is DeviceKind.NPU
        is_deterministic = config.training.deterministic
        self.sends_seeds = self.on_cpu if is_deterministic is None else is_deterministic
        self.max_rows = server_rows(config, self.on_cpu, device.memory_total())
        self.timeout_s = config.runtime.timeout_s
        self.sums, self.receipts = dict[str, int](), list[Any]()
        self.num_bytes = 0  # of what was sent for this version
        self.base_version = -1  # of the weights; adapters have `weights_version`
        self.adapters = AdapterFolder(actor.lora, actor.load or "")
        self._stats, self.weights_version = GenerationStats(), -1
        self.has_failed = False
        self._num_failures = 0  # since a server answered all that it was asked
        self._is_ready = False
        self._must_check_cache = False  # set by an update, cleared by the next wake
        self._has_started = False  # any server, which shows that its configuration is right
        self._asleep = set[str]()
        self._num_adapters = 0  # loaded so far
        # Whether slices end early. Else one batch is in the engine, and all of it is waited for.
        self.runs_slices = config.rollout.runs_agents or config.rollout.max_staleness > config.lead
        self._queue: dict[int, GenerationRequest] = {}  # by place, in the order of `add`
        self._num_added_tokens = 0  # of prompts and parts of responses, not in `stats` yet
        self._environment = self._make_environment(kind)
        self._log = Path(folder) / f"vllm_{layout.dp_rank(rank):05d}.log"
        with self._room():
            if self.is_leader:
                self.server = self._launch()
                self._put_to_sleep()

    def _launch(self) -> Server:
        """Start a server.

        Where requests have no seeds its own is new at each start: replicas with the same one would
        draw alike, and a server that starts again would repeat the numbers of the one before.
        """
        seed = None if self.sends_seeds else int.from_bytes(os.urandom(4), "little") // 2
        python, options = server_command(self.config, self.max_rows, self.on_cpu, self.on_npu, seed)
        return Server(python, options, self._environment, self._log)

    def _make_environment(self, kind: DeviceKind) -> dict[str, str]:
        name = device.facts(kind).visible_devices
        if name is None:
            return {
                "RLXF_TRANSPORT": "shared_memory",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(self.config.device.cpu_threads),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or the executor `uni` is refused
            }
        numbers: list[Any] = [None] * self.config.rollout_tp
        dist.all_gather_object(numbers, device.host_number(), group=self.group)
        environment = {
            name: ",".join(numbers),
            "RLXF_TRANSPORT": "npu_ipc" if self.on_npu else "ipc",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # device handles are pickled
        }
        if self.config.rollout_tp > 1:
            environment |= device.second_ports(kind)
        if self.on_npu:
            environment["VLLM_ASCEND_ENABLE_NZ"] = "0"  # weights in NZ cannot be updated
            # CANN's set_env.sh adds its Python packages to the path.
            folders = [str(ENGINE_SIDE), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        return environment

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Have every rank of the replica make room, until the leader leaves the block."""
        with self.make_room():
            dist.barrier(self.group)
            try:
                yield
            finally:
                dist.barrier(self.group)

    @property
    def client(self) -> Client:
        """The leader's client, after its server has started.

        Raises OptionsRefused if no server has started so far, because of its configuration.
        """
        if not self._is_ready:
            try:
                self.server.wait_until_ready(self.config.runtime.start_timeout_s)
            except ServerError as error:
                mistake = "" if self._has_started else self.server.find_mistake()
                if not mistake:
                    raise
                raise OptionsRefused(f"{mistake} ({self.server.log})") from error
            self._is_ready = self._has_started = True
        return self.server.client

    @torch.no_grad()
    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send the tensors and compare receipts; start a new server first if the last one failed.

        With adapters the first call brings all weights, and so does the one after a failure; others
        may bring the adapters alone. A server that fails meanwhile waits for the next update, which
        the receipt asks for.

        Raises:
            SyncError: The server has other weights, or others were sent than in the last update.
            EngineLost: It failed twice.
            OptionsRefused: It does not start with this configuration.
            ValueError: vLLM cannot adapt a module.
        """
        started = time.monotonic()
        failure: ServerError | None = None
        stream = iter(tensors)
        first = next(stream)  # from now on the trained weights stay on the device
        with_base = not is_adapter(first[0])  # which comes before the adapters
        before = self.sums if with_base else {}, self.adapters.sums
        self.weights_version = version
        self.num_bytes = 0
        self.adapters.clear()
        if with_base:
            self.base_version = version
            self.sums = {}
        memory = SharedMemory()  # on CPU the weights of this version
        restarts = self.has_failed
        if with_base:
            with self._room():  # the server's weights come to the device
                try:
                    if restarts:
                        self._start_again()
                        before = {}, {}
                    if self.is_leader and not self.on_cpu:
                        self._begin_update()
                except ServerError as error:
                    failure = error
        failure = self._send_buckets(chain([first], stream), memory, failure)
        with self._room():
            if self.is_leader:
                try:
                    if failure is not None:
                        raise failure
                    sums = self._finish_update(before, memory, with_base)
                    self._add_receipt(started, {**before[0], **before[1]}, sums, restarts)
                except ServerError as error:
                    self._end_server(error)
                    self._add_receipt(started, {}, self.sums | self.adapters.sums, True)
        device.release_cache()  # the buffer, which the server has closed

    def _send_buckets(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        memory: SharedMemory,
        failure: ServerError | None,
    ) -> ServerError | None:
        """Send all tensors; return the server's failure, if it had one. A collective to the end.

        On CPU, and adapters everywhere, they are only kept on the host for `_finish_update`.
        """
        buffer = None if self.on_cpu else DeviceBuffer(self.group, tells_packed=self.on_npu)
        for sent in in_buckets(tensors, lambda each: each[1].nbytes):
            bucket = [pair for pair in sent if not is_adapter(pair[0])]
            if self.is_leader:
                self.adapters.keep(pair for pair in sent if is_adapter(pair[0]))
                totals = bit_sums([tensor for _, tensor in bucket])
                self.sums |= zip((name for name, _ in bucket), totals, strict=True)
                self.num_bytes += sum(tensor.nbytes for _, tensor in sent)
            if not bucket:
                continue
            if buffer is None:
                if self.is_leader:
                    memory.keep(bucket)
                continue
            try:
                buffer.send(bucket, None if failure or not self.is_leader else self.client)
            except ServerError as error:
                failure = error
        return failure

    def _begin_update(self) -> None:
        self._wake("weights")
        self.client.call("/pause?mode=keep")
        self.client.ask_workers("rlxf_begin", str(self.base_version))
        if not self.on_cpu and not self.on_npu:  # on NPU each bucket says that it is packed
            self.client.call("/init_weight_transfer_engine", {"init_info": {"packed": True}})
        self.client.call("/start_weight_update")

    def _finish_update(
        self,
        before: tuple[Mapping[str, int], Mapping[str, int]],
        memory: SharedMemory,
        with_base: bool,
    ) -> dict[str, int]:
        """End an update and compare receipts; return the sums of all that was sent.

        Args:
            before: The sums of the update before, of weights and of adapters; {} = none.
            memory: On CPU, what the server loads now.
            with_base: Whether the update has weights, not adapters alone.
        """
        client = self.client
        if with_base:
            if self.on_cpu:
                self._begin_update()
                for places in memory.buckets:
                    memory.load(places, client)
            client.call("/finish_weight_update", {"weight_version": str(self.base_version)})
        if not client.call("/reset_prefix_cache").get("success", True):
            raise SyncError("the server did not reset its prefix cache")
        if with_base:
            client.call("/resume")
        self._must_check_cache = True
        known = before[0] or self.sums
        if with_base:
            self._compare("rlxf_receipt", known, self.sums, self.base_version)
        if self.adapters.tensors:
            self._wake("weights")
            self._load_adapter()
            sums = self.adapters.sums
            self._compare("rlxf_adapter", before[1] or sums, sums, self.weights_version)
        return {**(self.sums if with_base else {}), **self.adapters.sums}

    def _add_receipt(
        self,
        started: float,
        before: Mapping[str, int],
        sent: Mapping[str, int],
        restarted: bool,
    ) -> None:
        seconds = round(time.monotonic() - started, 3)
        more = {"seconds": seconds, "bytes": self.num_bytes, "restarted": restarted}
        self.receipts.append({"version": self.weights_version, **summary(before, sent), **more})

    def _compare(
        self, method: str, known: Mapping[str, int], sent: Mapping[str, int], version: int
    ) -> None:
        workers, tp = self.client.ask_workers(method), self.config.rollout_tp
        if len(workers) != tp:
            raise SyncError(f"{tp} workers must give a receipt, not {len(workers)}")
        with reading(method):
            compare_receipts(known, sent, workers, version)

    def _load_adapter(self) -> None:
        """Have the server load the adapter, under a name that its caches have not seen."""
        version, names = str(self.weights_version), self.adapters.tensors
        unable = self.client.ask_workers("rlxf_begin_adapter", version, *names)[0]
        if unable:
            raise ValueError(
                f"vLLM cannot adapt {', '.join(unable[:3])}; add it to "
                "actor_rollout.lora.exclude_modules, or use rollout.engine=transformers"
            )
        self._num_adapters += 1
        name = f"version-{self.weights_version}-{self._num_adapters}"
        with self.adapters.written() as folder:
            self.client.load_adapter(name, folder)

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

        A collective: the replica's ranks must all have made room before. Does nothing after a
        failure.

        Raises:
            SyncError: The prefix cache still has a prompt from before the update, or the server
                has lost weights in its sleep.
            EngineLost: The server failed twice.
        """
        dist.barrier(self.group)
        if not self.is_leader or self.has_failed:
            return
        try:
            slept = "weights" in self._asleep
            self._wake("weights", "kv_cache")
            if slept and self.on_npu:  # vllm-ascend has transposed weights as it woke
                self._compare("rlxf_receipt", self.sums, self.sums, self.base_version)
            if self._must_check_cache:
                vocabulary = self.config.actor_rollout.architecture.vocab_size
                prompt = np.arange(min(CANARY_TOKENS, self.config.training.seq_length)) % vocabulary
                if cached := self.client.count_cached(prompt, self.base_version):
                    raise SyncError(
                        f"the prefix cache has {cached} tokens computed before the weights of "
                        f"version {self.weights_version}; it was not reset"
                    )
                self._must_check_cache = False
        except ServerError as error:
            self._end_server(error)

    def sleep(self) -> None:
        """Move the server's weights to the host and free its cache; on CPU it stays awake.

        A collective: no rank of the replica trains before the server has left its device.
        """
        if self.is_leader:
            self._put_to_sleep()
        dist.barrier(self.group)

    def _put_to_sleep(self) -> None:
        if self.on_cpu:
            return
        with suppress(ServerError):  # the next call notices; it may follow another error
            self.client.call("/sleep?level=1")
            self._asleep = {"weights", "kv_cache"}

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """Generate as `RolloutEngine.generate` says; ranks beside the leader yield stand-ins.

        After a failure of the server the other requests have no result.
        """
        assert not self._queue, "other requests are unfinished"
        self.add(requests)
        try:
            yield from self.advance(None)
        finally:
            self.withdraw()

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Append requests to the queue."""
        for request in requests:
            self._queue[request.place] = request
            num_begun = len(request.begun.tokens) if request.begun is not None else 0
            self._num_added_tokens += len(request.prompt) + num_begun

    def withdraw(self) -> list[GenerationRequest]:
        """Return the requests that have not ended, with what their responses have on the leader."""
        requests = list(self._queue.values())
        self._queue = {}
        return requests

    def advance(self, steps: int | None) -> Iterator[GenerationResult]:
        """Have the server draw `steps` tokens of each response; see `StepwiseEngine`.

        Only of the oldest `max_rows`, so that its cache keeps them from slice to slice, as they are
        asked for again with all that they have. After `rollout.slice_s` they keep what they have.
        Without `runs_slices`, and for None, the server draws all to the end. After a failure
        requests stay as they were.

        Raises:
            EngineLost: The server failed twice.
            SyncError: A response is from other weights.
            FloatingPointError: A log-prob is nan.
        """
        self._stats = GenerationStats(prompt_tokens=self._num_added_tokens)
        self._num_added_tokens = 0
        if not self.is_leader:
            for place in self._share_ended([]):
                del self._queue[place]
                reason = FinishReason.LENGTH
                yield GenerationResult(place, [0], [0.0], reason, self.weights_version)
            return
        ended: list[int] = []
        try:
            for result in self._ask_server(steps if self.runs_slices else None):
                ended.append(result.place)
                yield result
        finally:
            self._share_ended(ended)

    def _share_ended(self, places: list[int]) -> list[int]:
        """Return the leader's places; a collective of the replica, which waits for the leader."""
        shared = [places]
        dist.broadcast_object_list(shared, dist.get_global_rank(self.group, 0), self.group)
        return shared[0]

    def _ask_server(self, steps: int | None) -> Iterator[GenerationResult]:
        """Yield the responses that end, and keep what is drawn of others; less after a failure."""
        if self.has_failed:
            return
        slice_s = self.config.rollout.slice_s
        ends_at = math.inf if steps is None or slice_s is None else time.monotonic() + slice_s
        ask = partial(
            Client.generate,
            version=self.base_version,
            most_tokens=steps,
            timeout_s=self.timeout_s,
            ends_at=ends_at,
            has_own_seed=self.sends_seeds,
        )
        requests = list(self._queue.values())
        if steps is not None:
            requests = requests[: self.max_rows]
        try:
            for _, sample in self._ask_all(requests, ask):
                self._stats.sampled_tokens += sample.num_drawn
                self._stats.decoded_tokens += sample.num_drawn - 1
                place = sample.request.place
                if sample.has_ended:
                    del self._queue[place]
                    yield sample.make_result(self.weights_version)
                else:
                    self._queue[place] = sample.make_request(self.weights_version)
            # Responses that a stop string ends do not name their version.
            self.client.check_version(self.base_version)
        except (ServerError, TimeoutError) as error:
            self._end_server(error)
            return
        self._num_failures = 0

    def score(
        self,
        prompts: Sequence[np.ndarray],
        responses: Sequence[Sequence[int]],
        temperature: float = 1.0,
    ) -> list[list[float]]:
        """Score as `RolloutEngine.score` says, at temperature 1; the server knows no other.

        Raises EngineLost if the server fails.
        """
        assert temperature == 1.0, f"log-probs of prompts are at temperature 1, not {temperature:g}"
        self._stats = GenerationStats(prompt_tokens=sum(map(len, prompts)))
        found = {n: [0.0] * len(response) for n, response in enumerate(responses)}
        if self.is_leader:
            ask = partial(Client.score, timeout_s=self.timeout_s)
            try:
                found.update(self._ask_all(list(zip(prompts, responses, strict=True)), ask))
            except (ServerError, TimeoutError) as error:
                self._end_server(error, most_failures=1)
        dist.barrier(self.group)
        return list(found.values())

    def stats(self) -> GenerationStats:
        """Return the counts for the current or last call."""
        return self._stats

    def _ask_all(self, items: Sequence[Any], ask: Callable[..., Any]) -> Iterator[tuple[int, Any]]:
        """Yield (index, answer) as they come."""
        if items:
            most = min(self.max_rows, len(items))
            stall_s = STALL * self.timeout_s
            yield from ask_all(dict(enumerate(items)), partial(ask, self.client), most, stall_s)

    def _end_server(self, error: Exception, most_failures: int = MOST_FAILURES) -> None:
        """End the server that has failed; the next update starts another.

        Raises EngineLost after `most_failures`.
        """
        self.server.end()
        message = f"the vLLM server failed: {error}; {self.server.last_lines()}"
        print(message, file=sys.stderr, flush=True)
        self.has_failed = True
        self._num_failures += 1
        if self._num_failures >= most_failures:
            raise EngineLost(message) from error

    def _start_again(self) -> None:
        """Start another server, which has no weights; on devices it sleeps."""
        self.server = self._launch()
        self._is_ready = False
        self._asleep = set()
        self._put_to_sleep()
        self.has_failed = False
