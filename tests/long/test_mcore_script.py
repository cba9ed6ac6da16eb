"""The scripts of `examples/mcore` run on tiny models in place of their own.

The scripts of a folder for one node run in order and with their defaults, but with smaller sizes
and lengths. The scripts for two nodes start a configuration with one device on each node.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.schema import RunConfig
from tests.chaos.tiny_run import settings
from tests.distributed.llamas import make_llama
from tests.processes import ROOT, start_logged, with_sources
from tests.unit.data.byte_tokenizer import write_tokenizer

pytestmark = pytest.mark.long

PORT = "6399"  # not the script's own, which may be a user's, nor one of the workers', from 10000 on
SCRIPTS = sorted((ROOT / "examples" / "mcore").glob("*/ray_ppo_*.sh"))
ONE, MULTI = ([s for s in SCRIPTS if s.stem.endswith(kind)] for kind in ("_1node", "_multi_node"))
ENDS_S = 180.0  # on a signal, a run first finishes its iteration


SIZES = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 8,
    "num_query_groups": 8, "kv_channels": 8, "vocab_size": 280, "max_position_embeddings": 1024,
}  # fmt: skip
LENGTHS = [
    "training.train_iters=2", "training.global_batch_size=8", "actor_rollout.max_new_tokens=8",
    "actor_rollout.ppo_mini_batch_size=4", "critic.critic_mini_batch_size=4",
    "ref.micro_batch_size=1", "reward.micro_batch_size=1",
]  # fmt: skip
SHORT = [
    "training.seq_length=1024", "actor_rollout.max_prompt_length=512", "critic.warmup_iters=0",
]  # fmt: skip
"""Of the configurations that are made for one host, whose responses are long."""
MEGATRON = ("llama3", "qwen3")  # the weights are converted first, and loaded so


def start(script: Path, log: Path, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    """In the folder of the log, without what a private cluster has set for Ray in this process."""
    own = {"DEVICE": "cpu", "MASTER_PORT": PORT, "PYTHON": sys.executable}
    environment = {k: v for k, v in with_sources(**own).items() if not k.startswith("RAY_")}
    environment |= variables
    return start_logged(["bash", str(script), *arguments], log, environment, log.parent)


def finish(script: Path, log: Path, timeout_s: float, *arguments: str, **variables: str) -> int:
    """The exit code; the script is ended when it takes too long."""
    process = start(script, log, *arguments, **variables)
    try:
        return process.wait(timeout=timeout_s)
    finally:
        process.terminate()
        process.wait(timeout=ENDS_S)


def left_of_ray() -> dict[psutil.Process, str]:
    """Processes of the scripts' Ray, with their command lines."""
    found = {p: " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])}
    return {process: line for process, line in found.items() if f":{PORT}" in line}


@pytest.fixture(autouse=True)
def port_is_free_afterwards() -> Iterator[None]:
    """What a failed test leaves is killed, so that the next one can start."""
    yield
    for process in left_of_ray():
        with contextlib.suppress(psutil.Error):
            process.kill()


def config_of(name: str, *overrides: str) -> RunConfig:
    where = ("device.kind=cpu", "runtime.address=head:6379")
    return resolve(compose(name, [*where, *overrides]), name)


def with_sizes(config: RunConfig) -> list[str]:
    """Overrides that make the model of a configuration small."""
    (model,) = {config.role(role).model for role in config.roles}
    family = config.actor_rollout.architecture
    own = SIZES if family.kv_channels else {k: v for k, v in SIZES.items() if k != "kv_channels"}
    return [f"++model.{model}.{key}={size}" for key, size in own.items()]


def make_inputs(folder: Path, model: str, small: RunConfig) -> None:
    """What a user has before the first script: two Hugging Face folders and the rows."""
    for name, scored in (("hf", False), ("hf-orm", True)):
        weights = folder / "model_from_hf" / f"{model}-{name}"
        make_llama(weights, small.actor_rollout.architecture, scored)
        write_tokenizer(weights)
    questions = [f"{a}+{b}" for a in range(4) for b in range(6)]
    rows = [{"question": q, "answer": "2"} for q in questions]
    gsm8k = folder / "dataset" / "gsm8k" / "train.jsonl"
    gsm8k.parent.mkdir(parents=True)
    gsm8k.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    table = pa.Table.from_pylist([{"prompt": q} for q in questions])
    pq.write_table(table, folder / "dataset" / "descriptiveness-00000-of-00001.parquet")


@pytest.mark.parametrize("script", ONE, ids=lambda script: script.stem)
def test_the_scripts_of_a_model_lead_from_its_weights_to_a_run(tmp_path, script):
    model = script.parent.name
    size = script.stem.split("_")[3]
    name = f"ppo_trainer_{model}_{size}"
    own = (ROOT / "configs" / "rlxf" / f"{name}_1node.yaml").exists()
    name += "_1node" * own
    ours = [*with_sizes(config_of(name)), *LENGTHS, *(SHORT if own else [])]
    make_inputs(tmp_path, model, config_of(name, *ours))
    before, log = [f"data_convert_{model}_ppo"], tmp_path / "log"
    if model in MEGATRON:
        before += [f"ckpt_convert_{model}_hf2mcore", f"ckpt_convert_{model}_hf2mcore_orm"]
    for earlier in before:
        assert finish(script.with_name(f"{earlier}.sh"), log, 200) == 0, log.read_text()
    weights = "mcore" if model in MEGATRON else "hf"
    code = finish(script, log, 500, *ours, WEIGHTS=weights)
    text = log.read_text()
    assert code == 0, text
    assert f"joined the Ray cluster at 127.0.0.1:{PORT} (RAY_ADDRESS=" in text
    run = tmp_path / "outputs" / name
    assert (run / "metrics.jsonl").read_text().count("\n") == 2
    assert_own_layout(run)
    assert list(left_of_ray().values()) == []


def assert_own_layout(run: Path) -> None:
    """The run had all eight devices, and the configuration's parallel sizes."""
    found = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    config = config_of(run.name)
    for role in config.roles:
        kept, section = config.role(role), found[role.value]
        for key in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "bf16"):
            assert section[key] == getattr(kept, key), f"{role.value}.{key}"
    pools = [count for count in found["resource_pool"].values() if isinstance(count, list)]
    assert sum(map(sum, pools)) == 8


def two_iterations(folder: Path, *more: str) -> list[str]:
    return [*settings(folder / "run", devices=1), "training.train_iters=2", *more]


@pytest.mark.parametrize("script", MULTI, ids=lambda script: script.stem)
def test_two_nodes_train_as_one_and_both_end(tmp_path: Path, script: Path) -> None:
    """Node 1 is started first, and waits; a device on each."""
    nodes = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "DASHBOARD_PORT": "8399"}
    nodes |= {"CONFIG_NAME": "ppo_trainer_tiny", "DEVICES_PER_NODE": "1"}
    nodes |= {"RAY_AUTH_TOKEN": "00112233" * 8}  # the same on both
    pools = ("~resource_pool", "+resource_pool={main: [1, 1]}")
    arguments = [a for a in two_iterations(tmp_path, *pools) if "resource_pool.main" not in a]
    worker = start(script, tmp_path / "worker", NODE_RANK="1", **nodes)
    head = start(script, tmp_path / "head", *arguments, **nodes)
    try:
        code = head.wait(timeout=900)
        text = (tmp_path / "head").read_text()
        assert code == 0, text + (tmp_path / "worker").read_text()
        count = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")
        assert "pool main: ranks 0-1 on" in text and count == 2
        assert worker.wait(timeout=ENDS_S) == 0
    finally:
        for process in (head, worker):
            process.terminate()
            process.wait(timeout=ENDS_S)
    said = (tmp_path / "worker").read_text()
    assert f"waiting for Ray at 127.0.0.1:{PORT}" in said
    assert "node 0 has ended; see its console for the result of the run" in said
    assert list(left_of_ray().values()) == []
