"""PPO with real vLLM servers: the native engine's tokens and curves, faults, failures."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from mindspeed_rlxf import device
from mindspeed_rlxf.cluster.interface import ColocatedRole
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import RuntimeConfig
from mindspeed_rlxf.data.batch import RoleOutput
from mindspeed_rlxf.roles.rollout import RolloutRole
from mindspeed_rlxf.rollout import transfer
from mindspeed_rlxf.rollout.bit_sums import bit_sum
from mindspeed_rlxf.rollout.receipts import SyncError
from mindspeed_rlxf.rollout.rollout_engine import GenerationRequest
from mindspeed_rlxf.rollout.sampling import SamplingSettings
from mindspeed_rlxf.rollout.vllm import server
from mindspeed_rlxf.rollout.vllm.client import Client
from mindspeed_rlxf.rollout.vllm.engine import VllmRollout
from mindspeed_rlxf.rollout.vllm.weights import SharedMemory
from tests.distributed import agents, programs
from tests.distributed.conftest import kept_pools, warm_runtime
from tests.distributed.groups import build_policy
from tests.distributed.llamas import run_config
from tests.processes import read_lines, run_python
from tests.unit.weights.folders_of import read_folder
from tests.vllm.conftest import ARCHITECTURE
from tests.vllm.tiny_runs import command, served_by

__all__ = ["kept_pools", "warm_runtime"]  # fixtures
pytestmark = pytest.mark.vllm
GREEDY = {"actor_rollout__do_sample": "false", "training__train_iters": 5, "runtime": "local"}
CURVES = ("actor/", "critic/", "response_length/")
SETTINGS = SamplingSettings(True, 1.0, 0, 1.0, 2, 40, (3,))


def test_ppo_has_the_native_engines_responses_and_curves(
    vllm_python: str, model: Path, tmp_path: Path
) -> None:
    for name, more in (("native", {}), ("vllm", served_by(vllm_python))):
        run_python(*command(model, tmp_path / name, **GREEDY, **more))
    native, vllm = (read_lines(tmp_path / name / "samples.jsonl") for name in ("native", "vllm"))
    assert len(native) == 160
    assert [each["response_ids"] for each in vllm] == [each["response_ids"] for each in native]
    native, vllm = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("native", "vllm"))
    for ours, theirs in zip(native, vllm, strict=True):
        names = [name for name in ours["metrics"] if name.startswith(CURVES)]
        assert len(names) > 20
        for name in names:
            assert theirs["metrics"][name] == pytest.approx(ours["metrics"][name], abs=1e-4), name
    probe, *syncs = read_lines(tmp_path / "vllm" / "sync.jsonl")
    assert probe["version"] == -1 and probe["log_prob_gap"] < 1e-3
    assert [line["version"] for line in syncs] == [0, 1, 2, 3, 4]
    assert all(line["changed"] == line["tensors"] for line in syncs)
    assert (tmp_path / "vllm/logs/vllm_00000.log").stat().st_size > 1000


@pytest.mark.parametrize("keys", [
    {"actor_rollout__temperature": 0.7},
    {"actor_rollout__top_p": 0.9, "actor_rollout__min_new_tokens": 3},
], ids=["temperature", "filters"])  # fmt: skip
def test_log_probs_are_those_of_training(
    vllm_python: str, model: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    more = {"training__train_iters": 2, "runtime": "local", "algorithm__max_log_prob_gap": 1e-3}
    run_python(*command(model, tmp_path / "run", **more, **keys, **served_by(vllm_python)))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(0 < line["metrics"]["rollout/log_prob_gap_max"] < 1e-4 for line in lines)


def test_parts_of_responses_have_the_log_probs_of_training(
    vllm_python: str, model: Path, tmp_path: Path
) -> None:
    """At a learning rate of 0 the weights of all parts are the same."""
    parts = {"rollout__max_staleness": 2, "rollout__slice_steps": 2, "actor_rollout__lr": 0.0}
    few = {"actor_rollout__num_samples_per_step": 12}
    more = {"training__train_iters": 3, "runtime": "local", **parts, **few}
    run_python(*command(model, tmp_path / "run", **more, **served_by(vllm_python)))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(0 < line["metrics"]["rollout/log_prob_gap_max"] < 1e-4 for line in lines)
    samples = read_lines(tmp_path / "run" / "samples.jsonl")
    assert any(s["weights_version"][0] < s["weights_version"][1] for s in samples)


def test_a_program_leads_the_native_engines_conversations(
    vllm_python: str, model: Path, tmp_path: Path
) -> None:
    keys = {
        **GREEDY, "training__train_iters": 2, "training__seq_length": 24,
        "actor_rollout__max_prompt_length": 6, "actor_rollout__max_new_tokens": 16,
        "+reward__rules": "{arithmetic: agent}",
    }  # fmt: skip
    agent = {"training__plugins": f"[{agents.__file__}]", "rollout__agent": "two_turns"}
    program = {
        "rollout__program": f"{programs.__file__}:two_turns",
        "rollout__program_processes": 8,
    }
    run_python(*command(model, tmp_path / "native", **keys, **agent))
    run_python(*command(model, tmp_path / "vllm", **keys, **program, **served_by(vllm_python)))
    native, vllm = (read_lines(tmp_path / name / "samples.jsonl") for name in ("native", "vllm"))
    assert len(native) == 64
    for name in ("response_ids", "turns"):
        assert [each[name] for each in vllm] == [each[name] for each in native]


class Engines:
    """Starts engines in this process, and ends their servers."""

    def __init__(self, python: str, model: Path, folder: Path) -> None:
        self.python, self.model, self.folder = python, model, folder
        self.tensors, self.made = sorted(read_folder(model).items()), list[VllmRollout]()

    def start(self, timeout_s: float = 1800.0) -> VllmRollout:
        config = run_config(
            self.model, self.model, ARCHITECTURE, training={"seq_length": 400},
            actor_rollout={"max_prompt_length": 300, "max_new_tokens": 40},
        )  # fmt: skip
        vllm = config.rollout.vllm.model_copy(update={"python": self.python, "max_num_seqs": 16})
        rollout = config.rollout.model_copy(update={"engine": "vllm", "vllm": vllm})
        runtime = RuntimeConfig(timeout_s=timeout_s)
        config = config.model_copy(update={"rollout": rollout, "runtime": runtime})
        self.made.append(VllmRollout(config, str(self.folder)))
        return self.made[-1]

    def changed(self, step: float) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor * (1 + step / 64)) for name, tensor in self.tensors]


@pytest.fixture(scope="module")
def engines(
    vllm_python: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "BUCKET_BYTES", 30_000)
        patch.setattr(device, "current_device", lambda: torch.device("cpu"))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        made = Engines(vllm_python, model, tmp_path_factory.mktemp("logs"))
        yield made
        for engine in made.made:
            engine.server.end()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def engine(engines: Engines) -> VllmRollout:
    return engines.start()


def requests(count: int = 32, settings: SamplingSettings = SETTINGS) -> list[GenerationRequest]:
    draw = np.random.default_rng(0)
    prompts = [draw.integers(4, 16, draw.integers(1, 60)) for _ in range(count)]
    return [GenerationRequest(i, 90 + i, prompts[i], settings, 5) for i in range(count)]


def responses(engine: VllmRollout, asked: list[GenerationRequest]) -> list[Any]:
    engine.wake()
    return sorted(engine.generate(asked), key=lambda result: result.place)


def test_samples_depend_on_seed_and_id_alone(engine: VllmRollout, engines: Engines) -> None:
    engine.update_weights(engines.tensors, 1)
    found = responses(engine, requests())
    assert len({tuple(result.tokens) for result in found}) > 25
    assert {len(result.tokens) < 40 for result in found} == {True, False}
    assert all(3 not in result.tokens[:2] for result in found), "min_new_tokens"
    alone = responses(engine, requests()[7:9])
    assert [result.tokens for result in alone] == [result.tokens for result in found[7:9]]
    scored = engine.score([r.prompt for r in requests()], [r.tokens for r in found])
    for result, logs in zip(found, scored, strict=True):
        assert result.log_probs == pytest.approx(logs, abs=1e-4)


class NativeScorer(RolloutRole):
    """A rank with the native engine."""

    def score_all(self, prompts: list[Any], responses: list[list[int]]) -> RoleOutput:
        """Report: the log-probs of the responses."""
        with self._awake() as engine:
            return RoleOutput(report=engine.score(prompts, responses, 1.0))


def score_by_native_engine(
    runtime: Any, folder: Path, prompts: list[Any], responses: list[list[int]]
) -> list[list[float]]:
    lengths = {"max_prompt_length": 300, "max_new_tokens": 40}
    config = run_config(
        folder, folder, ARCHITECTURE, training={"seq_length": 400}, actor_rollout=lengths
    )
    actor, rollout = build_policy(config, runtime.create_pools({"main": [1]})["main"], [3])
    rollout.group.build(
        NativeScorer, config, (3,), ColocatedRole(Role.ACTOR_ROLLOUT), None
    ).result()
    rollout._version = None
    rollout.update_weights(actor, 0)
    [log_probs] = rollout.group.call(NativeScorer.score_all, prompts, responses).result()
    scored: list[list[float]] = log_probs
    return scored


def test_parts_of_responses_have_the_native_engines_log_probs(
    engine: VllmRollout, engines: Engines, model: Path, tmp_path: Path, warm_runtime: Any,
    monkeypatch: Any,
) -> None:  # fmt: skip
    """Each token those of the weights by which it was sampled, of up to three in a response."""
    monkeypatch.setattr(engine, "runs_slices", True)
    asked = left = requests(16)
    found = list[Any]()
    versions = {20: 0.0, 21: 8.0, 22: 16.0}  # of the weights -> their change
    for version, change in versions.items():
        engine.update_weights(engines.changed(change), version)
        engine.add(left)
        engine.wake()
        for _ in range(1 if version < max(versions) else 5):
            found += engine.advance(8)
        left = engine.withdraw()
    assert left == [] and sorted(result.place for result in found) == list(range(16))
    found.sort(key=lambda result: result.place)
    assert any(set(result.token_versions) == versions.keys() for result in found)
    for version, change in versions.items():
        folder = shutil.copytree(model, tmp_path / str(version))
        save_file(dict(engines.changed(change)), folder / "model.safetensors", {"format": "pt"})
        prompts, responses = [r.prompt for r in asked], [r.tokens for r in found]
        scored = score_by_native_engine(warm_runtime, folder, prompts, responses)
        for result, expected in zip(found, scored, strict=True):
            for token, token_version in enumerate(result.token_versions):
                if token_version == version:
                    assert result.log_probs[token] == pytest.approx(expected[token], abs=1e-4)


def test_both_sides_sum_bits_alike(engine: VllmRollout, engines: Engines) -> None:
    engine.update_weights(engines.tensors, 2)
    (worker,) = engine.client.ask_workers("rlxf_receipt")
    sums = {name: bit_sum(tensor) for name, tensor in engines.tensors}
    assert {name: [total] for name, total in sums.items()} == worker["received"]
    assert {name: sums[name] for name in worker["loaded"]} == worker["loaded"]
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= worker["loaded"].keys()
    assert worker["stale"] == []


def skip(send: Any, self: SharedMemory, places: list[Any]) -> None:
    if "model.norm.weight" not in [place[0] for place in places]:
        send(self, places)


def twice(send: Any, self: SharedMemory, places: list[Any]) -> None:
    send(self, places)
    send(self, [place for place in places if place[0] == "model.norm.weight"])


def swap(send: Any, self: SharedMemory, places: list[Any]) -> None:
    other = {"input": "post_attention", "post_attention": "input"}
    for place in places:
        layer, _, norm = place[0].rpartition(".layers.0.")[::1]
        kind = norm.removesuffix("_layernorm.weight")
        place[0] = f"{layer}.layers.0.{other[kind]}_layernorm.weight" if kind in other else place[0]
    send(self, places)


LOADS = {
    "skipped bucket": (skip, r"model\.norm\.weight.*: not received"),
    "bucket twice": (twice, r"model\.norm\.weight: received twice"),
    "swapped names": (swap, r"layers\.0\.input_layernorm\.weight.*: received with other bits"),
}


@pytest.mark.parametrize("fault", LOADS)
def test_a_fault_of_a_bucket_is_named(
    engine: VllmRollout, engines: Engines, monkeypatch: Any, fault: str
) -> None:
    spoil, match = LOADS[fault]
    load = SharedMemory.load
    monkeypatch.setattr(
        SharedMemory,
        "load",
        lambda self, places, client: spoil(partial(load, client=client), self, places),
    )
    with pytest.raises(SyncError, match=match):
        engine.update_weights(engines.changed(3), 3)


SPOILED = {
    "old version": "the first request is from weights of version 4, not 5",
    "cache not reset": "the prefix cache has 256 tokens computed before the weights of version 5",
}
RESETS = "/reset_prefix_cache", "/pause?mode=keep", "/resume"  # each clears the prefix cache


@pytest.mark.parametrize("fault", SPOILED)
def test_a_fault_after_the_buckets_is_named(
    engine: VllmRollout, engines: Engines, monkeypatch: Any, fault: str
) -> None:
    engine.update_weights(engines.changed(4), 4)
    engine.wake()
    call = Client.call

    def spoiled(self: Client, route: str, body: Any = None, timeout_s: float = 60.0) -> Any:
        if fault == "cache not reset" and route in RESETS:
            return {"success": True}
        if fault == "old version" and route == "/finish_weight_update":
            body = {"weight_version": "4"}
        return call(self, route, body, timeout_s)

    monkeypatch.setattr(Client, "call", spoiled)
    with pytest.raises(SyncError, match=SPOILED[fault]):
        engine.update_weights(engines.changed(5), 5)
        engine.wake()


def test_an_adapter_that_is_not_merged_changes_nothing(
    engine: VllmRollout, engines: Engines
) -> None:
    """`tests/unit/roles/test_rollout.py` has the run's end by it."""
    engine.take_receipts()
    for version in (6, 7):
        engine.update_weights(engines.changed(6), version)
    assert [receipt["changed"] for receipt in engine.take_receipts()][-1] == 0


def test_a_stale_head_is_named(engines: Engines, tmp_path: Path, monkeypatch: Any) -> None:
    folder = shutil.copytree(server.ENGINE_SIDE, tmp_path / "side")
    text = (folder / "rlxf_vllm.py").read_text(encoding="utf-8")
    repair = "module.quant_method.process_weights_after_loading(module)"
    spoiled = text.replace(repair, f"hasattr(self, 'repaired') or {repair}; self.repaired = True")
    (folder / "rlxf_vllm.py").write_text(spoiled, encoding="utf-8")
    assert repair in text
    monkeypatch.setattr(server, "ENGINE_SIDE", folder)
    engine = engines.start()
    engine.update_weights(engines.tensors, 1)
    with pytest.raises(SyncError, match=r"lm_head\.weight: packed before this update"):
        engine.update_weights(engines.changed(64e-5), 2)
    engine.server.end()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_new_server_answers_what_a_failed_one_left(
    engines: Engines, sign: int, capfd: Any
) -> None:
    engine = engines.start(timeout_s=60.0)  # hangs after 6 s without a token
    engine.update_weights(engines.tensors, 1)
    wanted = [result.tokens for result in responses(engine, requests(64))]
    found, first = list[Any](), engine.server
    engine.update_weights(engines.tensors, 2)
    engine.add(requests(64))
    engine.wake()
    for result in engine.advance(None):
        if len(found) == 5:
            group = [p for p in psutil.process_iter() if _in_group(p, first.process.pid)]
            assert len(group) >= 2
            for process in group:
                process.send_signal(sign)
        found.append(result)
    assert engine.has_failed and len(found) < 64
    left = engine.withdraw()
    engine.update_weights(engines.tensors, 2)
    engine.add(left)
    engine.wake()
    found += engine.advance(None)
    assert engine.server is not first
    found.sort(key=lambda result: result.place)
    assert [result.tokens for result in found] == wanted
    assert {result.weights_version for result in found} == {2}
    assert engine.take_receipts()[-1]["restarted"]
    assert "last lines of" in capfd.readouterr().err
    engine.server.end()


def _in_group(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group
    except ProcessLookupError:
        return False


@pytest.mark.parametrize("tp", [1, 2])
def test_a_server_ends_with_its_owner(
    vllm_python: str, model: Path, tmp_path: Path, tp: int
) -> None:
    before = set(os.listdir("/dev/shm"))
    owner = f"""
import json, os, sys, time
from pathlib import Path
from mindspeed_rlxf.rollout.vllm.server import Server
options = ["--model", {str(model)!r}, "--load-format", "dummy", "--skip-tokenizer-init",
  "--dtype", "float32", "--kv-cache-memory-bytes", "100000000", "--enforce-eager",
  "--worker-extension-cls", "rlxf_vllm.Extension", "--max-model-len", "64",
  "--tensor-parallel-size", "{tp}"]
environment = {{"RLXF_TRANSPORT": "shared_memory", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}}
server = Server({vllm_python!r}, options, environment, Path({str(tmp_path / "log")!r}))
server.wait_until_ready(300)
print(json.dumps([server.process.pid, server.client.path]), flush=True)
os.kill(os.getpid(), 9)
"""
    with pytest.raises(AssertionError) as told:
        run_python("-c", owner)
    line = next(line for line in str(told.value).splitlines() if line.startswith("["))
    group, path = json.loads(line)
    deadline = time.monotonic() + 20
    while any(_in_group(process, group) for process in psutil.process_iter()):
        assert time.monotonic() < deadline, "processes of the server are left"
        time.sleep(0.2)
    assert not Path(path).parent.exists()
    while tp > 1 and {n for n in os.listdir("/dev/shm") if n.startswith("psm_")} - before:
        assert time.monotonic() < deadline, "shared memory of the server is left"
        time.sleep(0.2)
