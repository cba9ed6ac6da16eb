"""The shell scripts of `examples/mcore` start the right command with a valid configuration."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from mindspeed_rlxf import device
from mindspeed_rlxf.config.compose import builtin_config_dir, compose, config_names
from mindspeed_rlxf.config.enums import CONFIGURED, Role
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.planning.memory import pool_memories
from mindspeed_rlxf.ops.sizes import GIB

FOLDER = Path(__file__).parents[3] / "examples" / "mcore"
SCRIPTS = sorted(FOLDER.glob("*/ray_ppo_*.sh"))
BY_RULE = sorted(FOLDER.glob("*/ray_grpo_*.sh"))
IDS = [script.stem for script in SCRIPTS]
MULTI_NODE = FOLDER / "llama3" / "ray_ppo_llama3_8b_multi_node.sh"
MODELS = ("llama2", "llama3", "llama31", "llama32", "qwen25", "qwen3")


def start(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], **variables}
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def commands(script: Path, *arguments: str, **variables: str) -> list[list[str]]:
    """What the script would run, without running it."""
    done = start(script, *arguments, DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


def config_of(command: list[str], monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    env, address, _python, _script, option, name, *overrides = command
    assert (env, option) == ("env", "--config-name")
    monkeypatch.setenv("RAY_ADDRESS", address.removeprefix("RAY_ADDRESS="))
    monkeypatch.setattr(device, "device_count", lambda kind: 8)
    return resolve(compose(name, overrides), name)


def test_each_model_has_both_scripts() -> None:
    kinds = {(s.parent.name, "multi" if "multi_node" in s.name else "one") for s in SCRIPTS}
    assert kinds == {(model, kind) for model in MODELS for kind in ("one", "multi")}


@pytest.mark.parametrize("script", [*SCRIPTS, *BY_RULE], ids=lambda script: script.stem)
def test_configuration_is_valid_and_fits_the_nodes(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_nodes = 2 if "multi_node" in script.name else 1
    variables = {"MASTER_ADDR": "10.0.0.1"} if num_nodes == 2 else {}
    ray, train = commands(script, "training.train_iters=7", **variables, WAIT_S="60")
    assert "--head" in ray and '--resources={"NPU": 8}' in ray and "--port=6344" in ray
    config = config_of(train, monkeypatch)
    assert config.training.train_iters == 7 and config.device.kind.value == "npu"
    assert config.pool_settings.wait_s == 60
    sizes = sorted((n for pool in config.resource_pool.values() for n in pool), reverse=True)
    room = [8] * num_nodes
    for size in sizes:  # as Ray does it: the largest first
        where = next(i for i, left in enumerate(room) if left >= size)
        room[where] -= size
    assert sum(room) == 0, "devices are left over"
    for each in pool_memories(config):
        assert each.total <= 64 * GIB, each.pool


def default(model: str, script: str, variable: str) -> str:
    """What a script of the model takes, as an absolute path, where a variable is not given."""
    text = (FOLDER / model / f"{script.replace('MODEL', model)}.sh").read_text(encoding="utf-8")
    (found,) = re.findall(rf"\$\{{{variable}:-([^}}]*)\}}", text)
    return os.path.abspath(found)


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_a_run_reads_what_the_other_scripts_of_its_model_wrote(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = script.parent.name
    to_megatron, of_scorer = "ckpt_convert_MODEL_hf2mcore", "ckpt_convert_MODEL_hf2mcore_orm"
    prompts, back = "data_convert_MODEL_ppo", "ckpt_convert_MODEL_mcore2hf"
    language_model = default(model, to_megatron, "HF_DIR")
    assert default(model, back, "HF_DIR") == default(model, prompts, "TOKENIZER") == language_model
    assert default(model, back, "LOAD_DIR") == default(model, to_megatron, "SAVE_DIR")
    for weights, variable in (("hf", "HF_DIR"), ("mcore", "SAVE_DIR")):
        _, train = commands(script, MASTER_ADDR="10.0.0.1", WEIGHTS=weights)
        config = config_of(train, monkeypatch)
        loads = {role.value: config.role(role).load for role in CONFIGURED}
        trained, scorer = (default(model, s, variable) for s in (to_megatron, of_scorer))
        assert loads == {
            "actor_rollout": trained, "ref": trained, "critic": scorer, "reward": scorer
        }  # fmt: skip
        assert config.training.tokenizer_name_or_path == language_model
        assert list(config.data.data_path) == [default(model, prompts, "OUTPUT_PREFIX")]


@pytest.mark.parametrize(
    "name", [n for n in config_names([builtin_config_dir()]) if "tiny" not in n]
)
def test_every_configuration_names_its_folders_as_the_scripts_do(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "device_count", lambda kind: 8)
    config = resolve(compose(name, ["device.kind=npu", "runtime.address=head:6379"]), name)
    model, size = re.sub(r"_lora$|_agents$|(_32k)?_\dnode$", "", name).split("_")[-2:]
    default_name = default(model, "ckpt_convert_MODEL_hf2mcore", "HF_DIR")
    sized = default_name.replace(f"{model}-hf", f"{model}-{size}-hf")
    folder = config.training.tokenizer_name_or_path
    assert folder in (default_name, sized)
    scored = {Role.CRITIC, Role.REWARD}
    loads = {role: config.role(role).load for role in config.roles}
    assert {load for role, load in loads.items() if role not in scored} == {folder}
    has_fresh_head = name.endswith(("_lora", "_agents"))
    scorers = {folder, None} if has_fresh_head else {f"{folder}-orm", None}
    assert {load for role, load in loads.items() if role in scored} <= scorers
    prompts = default(model, "data_convert_MODEL_ppo", "OUTPUT_PREFIX")
    assert list(config.data.data_path) in ([prompts], [])


@pytest.mark.parametrize("rank", ["0", "1"])
def test_several_nodes_without_a_token_say_that_the_cluster_is_open(
    tmp_path: Path, rank: str
) -> None:
    variables = {"HOME": str(tmp_path), "DEVICE": "cpu", "MASTER_ADDR": "127.0.0.1"}
    done = start(MULTI_NODE, NODE_RANK=rank, DRY_RUN="1", **variables)
    assert done.returncode == 0 and "its cluster is open" in done.stderr


def test_the_first_node_has_a_dashboard_and_other_nodes_only_join() -> None:
    (ray, _) = commands(MULTI_NODE, MASTER_ADDR="10.0.0.1")
    assert "--dashboard-host=127.0.0.1" in ray
    (ray,) = commands(MULTI_NODE, MASTER_ADDR="10.0.0.1", NODE_RANK="1", DEVICE="cuda")
    assert ray[-2:] == ["--address=10.0.0.1:6344", "--num-gpus=8"] and "--head" not in ray


def test_another_configuration_drops_the_scripts_own_changes() -> None:
    script = FOLDER / "llama3" / "ray_ppo_llama3_8b_1node.sh"
    variables = {"CONFIG_NAME": "ppo_trainer_tiny", "DEVICE": "cpu", "DEVICES_PER_NODE": "2"}
    ray, train = commands(script, **variables, CONFIG_DIR="/my configs")
    assert '--resources={"rlxf_cpu": 2}' in ray
    assert train[4:8] == ["--config-name", "ppo_trainer_tiny", "--config-dir", "/my configs"]
    assert not any("placement" in word for word in train)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "MASTER_ADDR must be the address of node 0"),
        (
            {"MASTER_ADDR": "a", "WEIGHTS": "mcore", "CONFIG_NAME": "mine"},
            "WEIGHTS=mcore is for the script's own configuration; name the folders that mine is",
        ),
        ({"MASTER_ADDR": "a", "DEVICE": "gpu"}, "DEVICE=gpu must be npu, cuda or cpu"),
    ],
)
def test_a_missing_variable_is_named(variables: dict[str, str], message: str) -> None:
    done = start(MULTI_NODE, DRY_RUN="1", **variables)
    assert done.returncode == 2 and f"error: {message}" in done.stderr
