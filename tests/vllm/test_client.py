"""The engine `vllm` against a stand-in for its server: weights, receipts, requests, failures."""

import base64
import json
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.schema import RuntimeConfig
from mindspeed_rlxf.engine import offload
from mindspeed_rlxf.engine.train_engine import MemoryKind
from mindspeed_rlxf.rollout import transfer
from mindspeed_rlxf.rollout.bit_sums import bit_sum
from mindspeed_rlxf.rollout.receipts import SyncError
from mindspeed_rlxf.rollout.replica import build_replica
from mindspeed_rlxf.rollout.rollout_engine import (
    Begun,
    EngineLost,
    FinishReason,
    GenerationRequest,
)
from mindspeed_rlxf.rollout.sampling import SamplingSettings, StopStrings
from mindspeed_rlxf.rollout.vllm import engine as engine_module, server, weights
from mindspeed_rlxf.rollout.vllm.client import Client
from mindspeed_rlxf.rollout.vllm.engine import VllmRollout
from tests.distributed.llamas import PLAIN, run_config

STAND_IN = Path(__file__).with_name("stand_in.py")
SETTINGS = SamplingSettings(True, 1.0, 0, 1.0, 0, 6, (3,))
NAMES = "a.weight", "b.weight", "norm.weight"
Make = Callable[..., VllmRollout]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: Any) -> Iterator[Make]:
    """Makes an engine whose interpreter runs the stand-in."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    monkeypatch.setattr(transfer, "BUCKET_BYTES", 64)
    monkeypatch.setattr(server, "END_S", 1.0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(device, "current_device", lambda: torch.device("cpu"))

    def made(
        fault: str = "",
        timeout_s: float = 1800.0,
        rank: int = 0,
        slice_s: float | None = None,
        **more: Any,
    ) -> VllmRollout:
        monkeypatch.setenv("FAULT", fault)
        lora = {"lora": {"rank": rank, "alpha": 12.0}}
        config = run_config(tmp_path, tmp_path, PLAIN, actor_rollout=lora)
        vllm = config.rollout.vllm.model_copy(update={"python": str(python), "max_num_seqs": 4})
        keys = {"engine": "vllm", "vllm": vllm, "slice_s": slice_s}
        rollout = config.rollout.model_copy(update=keys)
        runtime = RuntimeConfig(timeout_s=timeout_s, start_timeout_s=30.0)
        config = config.model_copy(update={"rollout": rollout, "runtime": runtime})
        engines.append(VllmRollout(config, str(tmp_path / "logs"), **more))
        return engines[-1]

    engines: list[VllmRollout] = []
    yield made
    for engine in engines:
        engine.server.end()
        assert not psutil.pid_exists(engine.server.process.pid)
        assert not Path(engine.server.client.path).parent.exists()
    dist.destroy_process_group()


def tensors(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(3, 4 if name != "norm.weight" else 1, generator=draw))
            for name in NAMES]  # fmt: skip


def adapters(seed: int) -> list[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [
        (f"a.{part}.weight", torch.randn(3, 3, generator=draw)) for part in ("lora_A", "lora_B")
    ]


def requests(count: int, settings: SamplingSettings = SETTINGS) -> list[GenerationRequest]:
    return [GenerationRequest(i, 50 + i, np.array([i, 9]), settings, 7) for i in range(count)]


def ask(engine: VllmRollout, count: int = 12, settings: SamplingSettings = SETTINGS) -> list[Any]:
    engine.wake()
    results = engine.generate(requests(count, settings))
    return sorted(results, key=lambda result: result.place)


def ask_with_updates(engine: VllmRollout, sent: list[Any], version: int) -> list[Any]:
    """Ask as the driver does: after a failure the weights come again, and the rest is asked for."""
    engine.add(requests(12))
    engine.wake()
    results = [*engine.advance(None)]
    while engine.has_failed:
        left = engine.withdraw()
        assert len(left) == 12 - len(results) > 0
        engine.update_weights(sent, version)
        engine.add(left)
        engine.wake()
        results += engine.advance(None)
    assert engine.withdraw() == []
    return sorted(results, key=lambda result: result.place)


def expected(place: int) -> list[int]:
    drawn = [(place + n) % 7 + 3 for n in range(6)]
    ends = [n for n, token in enumerate(drawn) if token == 3]
    return drawn[: ends[0] + 1] if ends else drawn


def test_responses_and_receipts_come_back(make: Make) -> None:
    engine = make()
    for version in (4, 5):
        engine.update_weights(tensors(version), version)
    first, second = engine.take_receipts()
    assert (first["changed"], second["changed"], second["version"]) == (None, 3, 5)
    assert second["total"] == sum(bit_sum(tensor) for _, tensor in tensors(5)) % 2**63
    results = ask(engine)
    assert [result.tokens for result in results] == [expected(i) for i in range(12)]
    assert [r.log_probs for r in results] == [[-t / 8 for t in r.tokens] for r in results]
    stops = [result.finish_reason is FinishReason.STOP for result in results]
    assert stops == [result.tokens[-1] == 3 for result in results] and not all(stops)
    assert all(result.token_versions == [5] * len(result.tokens) for result in results)
    assert engine.score([np.array([8, 9])], [[5, 6]]) == [[-5 / 8, -6 / 8]]
    assert engine.stats().prompt_tokens == 2


def test_further_options_stand_beside_those_of_the_run(tmp_path: Path) -> None:
    config = run_config(tmp_path, tmp_path, PLAIN)
    options = {"enable_prefix_caching": False, "disable_log_stats": False, "enforce_eager": True}
    options |= {"hf_overrides": {"rope_theta": 5.0}}
    vllm = config.rollout.vllm.model_copy(update={"extra_args": options})
    rollout = config.rollout.model_copy(update={"vllm": vllm})
    actor = config.actor_rollout.model_copy(update={"bf16": True, "fp32_head": True})
    changes = {"rollout": rollout, "actor_rollout": actor}
    _, words = server.server_command(config.model_copy(update=changes), 4, True, False)
    overrides = json.loads(words[words.index("--hf-overrides") + 1])
    assert overrides == {"head_dtype": "float32", "rope_theta": 5.0}
    assert "--no-enable-prefix-caching" in words and "--enforce-eager" in words
    assert not [word for word in words if word.endswith("disable-log-stats")]  # has no `--no-`


@pytest.mark.parametrize("fault", ["", "dies"])
def test_adapters_are_sent_alone_after_their_base(make: Make, fault: str) -> None:
    """Also where a new server, which needs both, takes the place of one."""
    engine = make(fault, timeout_s=25.0, rank=3)
    engine.update_weights([*tensors(), *adapters(0)], 0)
    loaded = [engine.client.adapter]
    assert [result.tokens for result in ask(engine, 3)] == [expected(i) for i in range(3)]
    for version in (1, 2):
        engine.update_weights(adapters(version), version)
        loaded.append(engine.client.adapter)
        results = ask_with_updates(engine, [*tensors(), *adapters(version)], version)
        assert [result.tokens for result in results] == [expected(i) for i in range(12)]
        assert {result.weights_version for result in results} == {version}
    assert engine.score([np.array([8, 9])], [[5, 6]]) == [[-5 / 8, -6 / 8]]
    assert len({*loaded}) == 3, "caches know adapters by their names"
    first, *others = [line for line in engine.take_receipts() if not line["restarted"]]
    assert (first["tensors"], first["changed"]) == (5, None)
    assert [(line["tensors"], line["changed"], line["bytes"]) for line in others] == [
        (2, 2, 72)
    ] * 2
    log = (Path(os.environ["STARTS"]).parent / "logs/vllm_00000.log").read_text()
    assert "'--max-lora-rank', '8'" in log and log.count("start ") == (2 if fault else 1)


def test_an_adapter_that_the_server_cannot_have_is_refused(make: Make) -> None:
    engine = make("unable", rank=3)
    with pytest.raises(ValueError, match=r"vLLM cannot adapt a; add it to .*exclude_modules"):
        engine.update_weights([*tensors(), *adapters(0)], 0)
    engine = make("old adapter", rank=3)
    engine.update_weights([*tensors(), *adapters(0)], 0)
    with pytest.raises(SyncError, match=r"version 1: a\.lora_A.*received with other bits"):
        engine.update_weights(adapters(1), 1)


class Letters:
    """A tokenizer whose token n is the letter n of the alphabet."""

    all_special_ids: ClassVar[list[int]] = []
    all_special_tokens: ClassVar[list[str]] = []

    def decode(self, tokens: Any, **_: Any) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


@pytest.mark.parametrize("fault", ["", "old info"])
def test_a_stop_string_is_searched_here(make: Make, fault: str) -> None:
    engine = make(fault)
    engine.update_weights(tensors(), 1)
    stop = StopStrings(("hi",), Letters())  # tokens 7 and 8
    settings = SamplingSettings(True, 1.0, 0, 1.0, 0, 6, (), stop)
    if fault:  # such a response does not name its weights
        with pytest.raises(SyncError, match="the server is from weights of version 0, not 1"):
            ask(engine, 1, settings)
        return
    (result,) = ask(engine, 1, settings)
    assert result.tokens == [3, 4, 5, 6, 7, 8] and result.finish_reason is FinishReason.STOP


def test_a_turn_is_asked_for_behind_its_conversation(make: Make) -> None:
    """Its limit, its stop strings and its random numbers are its own."""
    engine = make()
    engine.update_weights(tensors(), 1)
    engine.wake()
    seeds: list[int] = []
    ask_server = engine.client._ask

    def noted(route: str, body: Any, timeout_s: float) -> Any:
        seeds.append(body.get("sampling_params", {}).get("seed"))
        return ask_server(route, body, timeout_s)

    engine.client._ask = noted  # type: ignore[method-assign]
    stop = StopStrings(("hi",), Letters())  # tokens 7 and 8
    settings = SamplingSettings(True, 1.0, 0, 1.0, 0, 6, (), stop)
    earlier = Begun([4, 7], [-0.5, -0.25], [0, 0])
    first = GenerationRequest(0, 50, np.array([5, 9]), settings, 7)
    engine.add([replace(first, begun=earlier, turn_start=2), replace(first, place=1)])
    turn, whole = sorted(engine.advance(None), key=lambda result: result.place)
    assert turn.tokens == [4, 7, 8, 9, 3, 4] and whole.tokens == [8, 9, 3, 4, 5, 6]
    assert turn.log_probs == [-0.5, -0.25, *(-token / 8 for token in (8, 9, 3, 4))]
    assert turn.token_versions == [0, 0, 1, 1, 1, 1] and turn.finish_reason is FinishReason.LENGTH
    assert len({seed for seed in seeds if seed is not None}) == 2


def test_a_response_goes_on_in_the_next_slice(make: Make) -> None:
    """The stand-in begins its tokens anew in each request."""
    engine = make()
    engine.update_weights(tensors(), 1)
    engine.wake()
    asked: list[Any] = []
    ask_server = engine.client._ask

    def noted(route: str, body: Any, timeout_s: float) -> Any:
        if "sampling_params" in body:
            asked.append(body)
        return ask_server(route, body, timeout_s)

    engine.client._ask = noted  # type: ignore[method-assign]
    settings = SamplingSettings(True, 1.0, 0, 1.0, 3, 5, (3,))
    engine.runs_slices = True
    engine.add([GenerationRequest(0, 50, np.array([2, 9]), settings, 7)])
    assert list(engine.advance(2)) == []
    engine.update_weights(tensors(1), 2)
    asked.clear()
    assert list(engine.advance(2)) == [] and engine.stats().sampled_tokens == 2
    (begun,) = engine.withdraw()
    engine.add([begun])
    (result,) = engine.advance(2)
    assert result.tokens == [5, 6, 5, 6, 5] and result.token_versions == [1, 1, 2, 2, 2]
    assert result.log_probs == [-token / 8 for token in result.tokens]
    assert engine.stats().prompt_tokens == 2 + 4 and engine.withdraw() == []
    second, last = (body["sampling_params"] for body in asked)
    assert [body["token_ids"] for body in asked] == [[2, 9, 5, 6], [2, 9, 5, 6, 5, 6]]
    assert (second["max_tokens"], second["min_tokens"]) == (2, 1)
    assert (last["max_tokens"], last["min_tokens"]) == (1, 0)
    assert second["seed"] != last["seed"]


def test_a_slice_that_takes_too_long_ends_with_the_tokens_that_come_next(make: Make) -> None:
    """Of the stand-in these are two, of the five that a slice asks for."""
    engine = make(slice_s=1e-6)
    engine.update_weights(tensors(), 1)
    engine.wake()
    engine.runs_slices = True
    settings = SamplingSettings(True, 1.0, 0, 1.0, 0, 5, ())
    engine.add([GenerationRequest(place, 50, np.array([2, 9]), settings, 7) for place in (0, 1)])
    for _ in range(2):
        assert list(engine.advance(5)) == [] and engine.stats().sampled_tokens == 4
    results = list(engine.advance(5))
    assert [result.tokens for result in results] == [[5, 6, 5, 6, 5]] * 2
    assert len(results[0].log_probs) == 5


def test_a_stop_string_is_found_across_slices(make: Make) -> None:
    engine = make()
    engine.update_weights(tensors(), 1)
    engine.wake()
    stop = StopStrings(("gf",), Letters())  # tokens 6 and 5
    settings = SamplingSettings(True, 1.0, 0, 1.0, 0, 6, (), stop)
    engine.runs_slices = True
    engine.add([GenerationRequest(0, 50, np.array([2, 9]), settings, 7)])
    assert list(engine.advance(2)) == []
    (result,) = engine.advance(2)
    assert result.tokens == [5, 6, 5] and result.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("runs_slices", [False, True])
def test_a_slice_goes_on_with_the_oldest_responses(make: Make, runs_slices: bool) -> None:
    """Where only one batch is in the engine, a slice draws all of it."""
    engine = make()  # four rows at once
    engine.update_weights(tensors(), 1)
    engine.wake()
    engine.runs_slices = runs_slices
    engine.add(requests(6, SamplingSettings(True, 1.0, 0, 1.0, 0, 4, ())))
    ended = [sorted(result.place for result in engine.advance(2)) for _ in range(4)]
    assert ended == ([[], [0, 1, 2, 3], [], [4, 5]] if runs_slices else [[*range(6)], [], [], []])


FAULTS = {
    "stale head": "lm_head.weight: packed before this update",
    "skipped": "b.weight, norm.weight: not received",
    "twice": "norm.weight: received twice",
    "swapped": "a.weight, b.weight: received with other bits than were sent",
    "old receipt": "has version '0', not 2",
    "old version": "the first request is from weights of version default, not 2",
    "unnamed": "the first request is from weights of version None, not 1",
    "no worker": "1 workers must give a receipt, not 0",
    "refused": "did not reset its prefix cache",
    "cache": "the prefix cache has 64 tokens computed before the weights of version 2",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_sync_is_named(make: Make, fault: str) -> None:
    engine = make(fault)
    with pytest.raises(SyncError, match=FAULTS[fault]):
        for version in (1, 2):
            try:
                engine.update_weights(tensors(version), version)
                engine.wake()
            except SyncError:
                if version == 2 or fault not in ("old receipt", "old version"):
                    raise


def test_weights_that_did_not_change_are_counted(make: Make) -> None:
    engine = make()
    for version in (1, 2):  # as where an adapter is trained and not merged
        engine.update_weights(tensors(), version)
    assert [receipt["changed"] for receipt in engine.take_receipts()] == [None, 0]
    with pytest.raises(SyncError, match=r"a\.weight: received twice"):
        engine.update_weights([*tensors(), tensors()[0]], 3)
    with pytest.raises(SyncError, match=r"b\.weight: not sent, unlike in the last update"):
        engine.update_weights(tensors()[::2], 4)
    with pytest.raises(SyncError, match=r"b\.weight: sent, unlike in the last update"):
        engine.update_weights(tensors(), 5)


@pytest.mark.parametrize("fault", ["dies", "hangs", "errs", "breaks"])
def test_requests_go_to_a_new_server_after_a_failure(make: Make, fault: str, capfd: Any) -> None:
    engine = make(fault, timeout_s=25.0)  # hangs after 2.5 s without a token
    engine.update_weights(tensors(), 3)
    results = ask_with_updates(engine, tensors(1), 4)
    assert [result.tokens for result in results] == [expected(i) for i in range(12)]
    assert {result.weights_version for result in results} == {3, 4}
    first, second = engine.take_receipts()
    assert not first["restarted"] and second["restarted"] and second["changed"] is None
    text = capfd.readouterr().err
    assert "the vLLM server failed" in text and "start 1:" in text
    assert Path(os.environ["STARTS"]).read_text() == "2"


def test_a_request_that_waits_while_others_are_answered_is_no_failure(make: Make) -> None:
    engine = make("queues", timeout_s=15.0)  # hangs after 1.5 s without any token
    engine.update_weights(tensors(), 3)
    assert [result.tokens for result in ask(engine, 18)] == [expected(i) for i in range(18)]
    assert Path(os.environ["STARTS"]).read_text() == "1"


def test_after_two_failures_the_engine_is_lost(make: Make) -> None:
    engine = make("again dies")
    engine.update_weights(tensors(), 3)
    with pytest.raises(EngineLost, match=r"(?s)failed: .*last lines of .*start 2:"):
        ask_with_updates(engine, tensors(), 3)
    engine.on_cpu = False
    engine.sleep()  # on devices, a role's last step: the error must remain
    engine = make()
    engine.update_weights(tensors(), 3)
    engine.server.end()
    engine.on_cpu = False
    engine.sleep()
    engine = make("never ready")
    engine.update_weights(tensors(), 4)
    (receipt,) = engine.take_receipts()
    assert engine.has_failed and receipt["restarted"], "the driver sends the weights again"
    with pytest.raises(EngineLost, match=r"(?s)ended at its start with status 1.*no such model"):
        engine.update_weights(tensors(), 4)


def test_failures_of_earlier_iterations_do_not_count(make: Make) -> None:
    engine = make("again dies")  # at each server's fifth request
    engine.max_rows = 1
    for version in (1, 2):
        engine.update_weights(tensors(version), version)
        assert len(ask(engine, 5)) < 5
        engine.update_weights(tensors(version), version)
        assert len(ask(engine, 1)) == 1


REFUSALS = {
    "api_server.py: error: unrecognized arguments: --no": "error: unrecognized arguments: --no",
    "(EngineCore pid=7) ERROR 11-28 05:44:23 [core.py:110] ValueError: a cache": "^ValueError: a",
    "(APIServer pid=7) pydantic_core._pydantic_core.ValidationError: 1 validation error\n"
    "(APIServer pid=7)   Value error, no such quantization [type=value_error]": "no such quantiz",
}


@pytest.mark.parametrize("line", REFUSALS)
def test_a_server_that_refuses_its_options_is_not_started_again(make: Make, line: str) -> None:
    engine = make(f"refuses {line}")
    with pytest.raises(server.OptionsRefused, match=REFUSALS[line]):
        engine.update_weights(tensors(), 4)
    assert Path(os.environ["STARTS"]).read_text() == "1"


def test_an_error_after_a_start_is_no_refusal(make: Make) -> None:
    engine = make()
    engine.update_weights(tensors(), 4)
    os.environ["FAULT"] = "refuses ValueError: other processes have the memory"
    engine.server.end()
    engine.update_weights(tensors(), 5)
    with pytest.raises(EngineLost, match="other processes have the memory"):
        engine.update_weights(tensors(), 5)


def test_the_iterator_may_be_closed_early(make: Make) -> None:
    engine = make()
    engine.update_weights(tensors(), 3)
    engine.wake()
    results = engine.generate(requests(9))
    next(results)
    results.close()
    assert engine.server.process.poll() is None


def test_a_long_temporary_folder_leaves_room_for_names_of_sockets(
    make: Make, tmp_path: Path, monkeypatch: Any
) -> None:
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    engine = make()
    assert engine.client.is_ready()
    assert len(str(Path(engine.client.path).with_name(str(uuid.uuid4())))) <= 107


def test_a_server_on_npu_has_what_vllm_ascend_needs(make: Make, monkeypatch: Any) -> None:
    """Our modules also without PYTHONPATH, weights that can be updated, and ports of its own."""
    monkeypatch.setattr(device, "resolve_kind", lambda _: DeviceKind.NPU)
    monkeypatch.setattr(device, "host_number", lambda: "0")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    engine = make()
    environment = environment_of(engine)
    assert environment["PYTHONPATH"] == str(server.ENGINE_SIDE)
    assert environment["VLLM_ASCEND_ENABLE_NZ"] == "0"
    assert '"weight_nz_mode": 0' in engine.server.last_lines()
    vllm = engine.config.rollout.vllm.model_copy(update={"tensor_parallel_size": 2})
    rollout = engine.config.rollout.model_copy(update={"vllm": vllm})
    engine.config = engine.config.model_copy(update={"rollout": rollout})
    monkeypatch.setattr(dist, "all_gather_object", lambda found, *_, **__: found.__init__("01"))
    environment = engine._make_environment(DeviceKind.NPU)
    ranges = [environment[f"HCCL_{side}_SOCKET_PORT_RANGE"] for side in ("HOST", "NPU")]
    assert len(set(ranges)) == 2 and environment["ASCEND_RT_VISIBLE_DEVICES"] == "0,1"


def environment_of(engine: VllmRollout) -> dict[str, str]:
    return psutil.Process(engine.server.process.pid).environ()


def test_a_server_has_no_settings_of_the_trainers_allocator(make: Make, monkeypatch: Any) -> None:
    names = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
    for name in names:
        monkeypatch.setenv(name, "expandable_segments:True")
    assert not names & environment_of(make()).keys()


def test_a_server_gets_memory_that_training_has_released(make: Make, monkeypatch: Any) -> None:
    engine, releases, rooms = make(), list[None](), list[Callable[[], Any]]()
    monkeypatch.setattr(device, "release_cache", lambda: releases.append(None))
    made = lambda _, __, room: rooms.append(room) or engine  # noqa: E731
    monkeypatch.setattr(engine_module, "VllmRollout", made)
    trained: Any = SimpleNamespace(hf_tensors=list)
    replica = build_replica(engine.config, trained)
    for room in (*rooms, replica.make_room):
        with room():
            pass
    assert len(releases) == 2


@pytest.fixture
def on_cuda(monkeypatch: Any, tmp_path: Path) -> list[torch.Tensor]:
    """Engines are as on CUDA; the stand-in gets files of what handles name. Returns what is shared.

    A handle is the index of a tensor in the list.
    """
    shared, call = list[torch.Tensor](), Client.call

    def share(tensor: torch.Tensor) -> tuple[None, int]:
        shared.append(tensor)
        return None, len(shared) - 1

    def opened(self: Client, route: str, body: Any = None, timeout_s: float = 60.0) -> Any:
        if route == "/update_weights":
            update = body["update_info"]
            handles = json.loads(base64.b64decode(update["ipc_handles_pickled"]))
            file, sizes = tmp_path / "opened", update["tensor_sizes"]
            file.write_bytes(shared[handles["gpu"]].numpy().tobytes()[: sum(sizes)])
            starts = [sum(sizes[:n]) for n in range(len(sizes))]
            places = zip(
                update["names"], update["dtype_names"], update["shapes"], starts, strict=True
            )
            body = {"update_info": {"path": str(file), "tensors": list(places)}}
        return call(self, route, body, timeout_s)

    monkeypatch.setattr(device, "resolve_kind", lambda _: DeviceKind.CUDA)
    monkeypatch.setattr(device, "host_number", lambda: "0")
    monkeypatch.setattr(device, "identity", lambda: "gpu")
    monkeypatch.setattr(weights, "reduce_tensor", share)
    as_json = SimpleNamespace(dumps=lambda handles: json.dumps(handles).encode())
    monkeypatch.setattr(weights, "pickle", as_json)
    monkeypatch.setattr(Client, "call", opened)
    return shared


@pytest.mark.usefixtures("on_cuda")
def test_servers_start_on_devices_that_training_has_left(make: Make) -> None:
    starts, began, asleep = Path(os.environ["STARTS"]), list[int](), list[bool]()

    @contextmanager
    def make_room() -> Iterator[None]:
        before = int(starts.read_text()) if starts.exists() else 0
        yield
        began.append(int(starts.read_text()) - before)
        asleep.append("/sleep" in (starts.parent / "logs/vllm_00000.log").read_text())

    engine = make(make_room=make_room)
    assert (began, asleep) == ([1], [True])
    engine.server.end()
    engine.update_weights(tensors(), 1)  # fails
    assert sum(began) == 1 and engine.has_failed
    engine.update_weights(tensors(), 1)
    assert sum(began) == 2 and asleep[-1] and not engine.has_failed
    assert [receipt["restarted"] for receipt in engine.take_receipts()] == [True, True]
    assert ask(engine, 1)[0].tokens == expected(0)


@pytest.mark.usefixtures("on_cuda")
def test_a_server_on_a_device_that_fails_amid_generation_starts_with_the_next_weights(
    make: Make,
) -> None:
    engine = make("dies")
    engine.update_weights(tensors(), 1)
    results = ask_with_updates(engine, tensors(), 1)
    assert [result.tokens for result in results] == [expected(i) for i in range(12)]
    assert Path(os.environ["STARTS"]).read_text() == "2"


def test_the_ranks_of_a_replica_agree_on_what_a_failed_server_left(
    make: Make, monkeypatch: Any
) -> None:
    engine = make("dies")
    engine.update_weights(tensors(), 1)
    shared: list[Any] = []
    monkeypatch.setattr(dist, "broadcast_object_list", lambda values, *_: shared.append(values[0]))
    answered = {result.place for result in ask(engine)}
    assert [{*places} for places in shared] == [answered] and 0 < len(answered) < 12
    monkeypatch.setattr(
        dist, "broadcast_object_list", lambda values, *_: values.__setitem__(0, shared[0])
    )
    engine.is_leader = False
    engine.add(requests(12))
    assert {result.place for result in engine.advance(2)} == answered
    assert {left.place for left in engine.withdraw()} == {*range(12)} - answered
    engine.is_leader = True


def test_a_failure_amid_scoring_ends_the_run(make: Make) -> None:
    engine = make()
    engine.update_weights(tensors(), 1)
    engine.wake()
    engine.server.end()
    with pytest.raises(EngineLost, match="the vLLM server failed"):
        engine.score([np.array([8, 9])], [[5, 6]])


def test_a_buffer_of_the_device_is_shared_once_an_update(
    make: Make, on_cuda: list[torch.Tensor], monkeypatch: Any
) -> None:
    events, call = list[str](), Client.call
    monkeypatch.setattr(device, "synchronize", lambda: events.append("synchronize"))
    monkeypatch.setattr(device, "release_cache", lambda: events.append("release"))
    monkeypatch.setattr(
        Client,
        "call",
        lambda self, route, *more, **keys: events.append(route) or call(self, route, *more, **keys),
    )
    engine = make()
    events.clear()
    engine.update_weights(tensors(), 1)
    sent = [n for n, event in enumerate(events) if event == "/update_weights"]
    assert len(sent) == 2 and len(on_cuda) == 1
    assert all(events[n - 1] == "synchronize" for n in sent)
    assert events[-1] == "release" and "/finish_weight_update" in events


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(("deterministic", "has_seeds"), [(None, False), (True, True)])
def test_requests_on_devices_have_seeds_in_deterministic_runs_alone(
    make: Make, tmp_path: Path, deterministic: bool | None, has_seeds: bool
) -> None:
    engine = make()
    training = engine.config.training.model_copy(update={"deterministic": deterministic})
    config = engine.config.model_copy(update={"training": training})
    again = VllmRollout(config, str(tmp_path))
    again.update_weights(tensors(), 1)
    asked: list[Any] = []
    ask_server = again.client._ask

    def noted(route: str, body: Any, timeout_s: float) -> Any:
        if body.get("stream"):
            asked.append("seed" in body["sampling_params"])
        return ask_server(route, body, timeout_s)

    again.client._ask = noted  # type: ignore[method-assign]
    ask(again)
    seeds = [seed_of(each) for each in (engine, again)]
    again.server.end()
    again._start_again()
    seeds.append(seed_of(again))
    again.server.end()
    assert asked == [has_seeds] * 12
    # Replicas and starts draw alike only where each request has a seed.
    run_seed = str(engine.config.training.seed)
    assert seeds[1:] == [run_seed] * 2 if has_seeds else len({*seeds, run_seed}) == 4


def seed_of(engine: VllmRollout) -> str:
    words: Any = engine.server.process.args
    return str(words[words.index("--seed") + 1])


@pytest.mark.usefixtures("on_cuda")
def test_trained_weights_are_sent_without_a_way_over_the_host(make: Make, monkeypatch: Any) -> None:
    trained_weights = torch.randn(3, 4)
    moved = offload.Offload({MemoryKind.WEIGHTS: lambda: [trained_weights]}, [MemoryKind.WEIGHTS])
    offload.register(moved)
    returns, copied = list[bool](), offload._MovableMemory.onload
    monkeypatch.setattr(
        offload._MovableMemory,
        "onload",
        lambda self: returns.append(self.is_away) or copied(self),
    )

    def hf_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        with trained.holding(MemoryKind.WEIGHTS):
            yield "a.weight", trained_weights

    trained: Any = SimpleNamespace(
        holding=lambda *kinds: offload.holding((moved, kinds)),
        hf_tensors=hf_tensors,
        adapter_tensors=lambda: iter(()),
    )
    monkeypatch.setattr(
        engine_module,
        "VllmRollout",
        lambda _, __, room: make(make_room=room),
    )
    replica = build_replica(make().config, trained)
    moved.onload([MemoryKind.WEIGHTS])
    returns.clear()
    replica.take_weights(1, True)
    assert returns and not any(returns), "copies from the host"
    assert trained_weights.untyped_storage().nbytes() == 0, "the server has the device"


@pytest.mark.usefixtures("on_cuda")
def test_weights_wake_on_devices_that_training_has_left(make: Make, monkeypatch: Any) -> None:
    room, woken_in_room, call = [False], list[bool](), Client.call

    @contextmanager
    def make_room() -> Iterator[None]:
        room[0] = True
        yield
        room[0] = False

    def noted(self: Client, route: str, *more: Any) -> Any:
        if route.startswith("/wake_up"):
            woken_in_room.append(room[0])
        return call(self, route, *more)

    engine = make(make_room=make_room)
    monkeypatch.setattr(Client, "call", noted)
    engine.update_weights(tensors(), 1)
    assert woken_in_room == [True]


@pytest.mark.usefixtures("on_cuda")
def test_a_server_is_awake_between_the_ranks_of_its_replica(make: Make, monkeypatch: Any) -> None:
    """All have made room before it wakes, and none trains before it sleeps."""
    engine, calls, call = make(), list[str](), Client.call
    engine.update_weights(tensors(), 1)
    monkeypatch.setattr(dist, "barrier", lambda _: calls.append("barrier"))
    monkeypatch.setattr(
        Client, "call", lambda self, route, *more: calls.append(route) or call(self, route, *more)
    )
    engine.wake()
    engine.sleep()
    assert calls[:2] == ["barrier", "/wake_up?tags=kv_cache"]
    assert calls[-2:] == ["/sleep?level=1", "barrier"]
