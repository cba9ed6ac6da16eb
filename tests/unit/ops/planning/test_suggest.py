"""Shipped configurations of real models fit 64 GiB, and so do suggested layouts when pasted."""

import re

import pytest

from mindspeed_rlxf.config.compose import builtin_config_dir, compose, config_names
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.planning.host_memory import host_memory_needed
from mindspeed_rlxf.ops.planning.memory import cache_rows, pool_memories
from mindspeed_rlxf.ops.planning.plan import plan
from mindspeed_rlxf.ops.planning.suggest import suggest, usable_bytes
from mindspeed_rlxf.ops.sizes import GIB, format_bytes

CLUSTER = ["device.kind=npu", "device.memory_gib=64", "runtime.address=head:6379"]
REAL = [name for name in config_names([builtin_config_dir()]) if "tiny" not in name]
ONE_RANK = (
    "tensor_model_parallel_size=1", "context_parallel_size=1", "sequence_parallel=false",
)  # fmt: skip
SUGGESTED = re.compile(r"\d\. ([\d.]+ GiB) of a device, rounds of generation: (\d+)(?:; less |$)")


def configured(name: str, *overrides: str) -> RunConfig:
    return resolve(compose(name, [*CLUSTER, *overrides]), name)


def largest(config: RunConfig) -> int:
    return max(each.total for each in pool_memories(config))


# one pool, no critic; a pool for each role
@pytest.mark.parametrize("name", ["grpo_trainer_llama31_8b_1node", "ppo_trainer_llama32_1b"])
def test_every_suggestion_is_accepted_when_it_is_pasted_and_reaches_its_figures(name: str) -> None:
    text = plan(configured(name, "plan.suggest=true")).text
    as_it_is, *lines = text.partition("Suggested layouts\n")[2].splitlines()
    assert as_it_is.startswith("  as it is: ") and len(lines) == 6
    sizes = []
    for title, words in zip(lines[::2], lines[1::2], strict=True):
        found = SUGGESTED.search(title)
        assert found is not None, title
        pasted = configured(name, *words.split())
        assert format_bytes(largest(pasted)) == found[1]
        assert largest(pasted) <= usable_bytes(64 * GIB)
        replicas = pasted.rollout_layout.dp
        rows = cache_rows(pasted)
        assert int(found[2]) == -(-pasted.samples_per_iteration // replicas // rows)
        actor = pasted.actor_rollout
        sizes.append(actor.tensor_model_parallel_size * actor.pipeline_model_parallel_size)
    assert sizes == sorted(sizes), "the plainest come first"


def test_sequences_that_fit_no_rank_are_divided_among_context_parallel_ranks() -> None:
    """Two layers with a small vocabulary, so that activations of 33792 tokens weigh most."""
    devices = [
        "resource_pool.main=2",
        "device.memory_gib=18",
        "actor_rollout.num_samples_per_step=1",
    ]
    shape = ["model.qwen3-8b.num_layers=2", "model.qwen3-8b.vocab_size=8000"]
    alone = [f"{role}.{key}" for role in ("actor_rollout", "ref") for key in ONE_RANK]
    name = "grpo_trainer_qwen3_8b_32k_1node"
    text = plan(configured(name, *devices, *shape, *alone, "plan.suggest=true")).text
    suggested = text.partition("Suggested layouts\n")[2].splitlines()[1::2]
    divided = [line for line in suggested if "actor_rollout.context_parallel_size=2" in line]
    assert len(divided) == 1
    assert all("_parallel_size=2" in line for line in suggested), "none has one rank"


def test_suggestions_need_the_memory_of_a_device() -> None:
    name = "ppo_trainer_llama32_1b"
    config = resolve(compose(name, [CLUSTER[0], CLUSTER[2], "plan.suggest=true"]), name)
    (problem,) = (each for each in plan(config).problems if each.key == "plan.suggest")
    assert str(problem) == (
        "plan.suggest=true needs device.memory_gib, which is unknown here; set it"
    )


def test_a_suggestion_says_what_it_has_less_of_than_the_layout_that_fits() -> None:
    name = "grpo_trainer_llama31_8b_1node"
    text = plan(configured(name, "plan.suggest=true")).text
    lines = text.partition("Suggested layouts\n")[2].splitlines()
    assert lines[0].startswith("  as it is: ") and len(lines) == 7
    sizes = [float(line.split(" GiB")[0].split()[-1]) for line in lines if " GiB of" in line]
    for title, size in zip(lines[1::2], sizes[1:], strict=True):
        less = title.partition("; less ")[2]
        assert ("memory" in less) == (size < sizes[0])


@pytest.mark.parametrize("gib", [8, 64])
def test_without_a_layout_that_fits_the_nearest_says_what_it_lacks(gib: int) -> None:
    """8 GiB of a device, or 64 GiB of a device and 1 GiB of the host."""
    name = "grpo_trainer_llama31_8b_1node"
    limits = f"device.memory_gib={gib}", "plan.host_memory_gib=1"
    text = plan(configured(name, "plan.suggest=true", *limits)).text
    suggested = text.partition("Suggested layouts\n")[2]
    reason, nearest, overrides = suggested.splitlines()
    lacking = float(reason.split("the nearest lacks ")[1].split(" GiB")[0])
    pasted = configured(name, *limits, *overrides.split())
    if gib == 8:
        assert nearest.startswith(f"  nearest: {format_bytes(largest(pasted))} of a device")
        missing = largest(pasted) - usable_bytes(8 * GIB)
    else:
        assert "fits 1.0 GiB of host memory" in reason and "more devices" not in suggested
        missing = host_memory_needed(pasted, pool_memories(pasted)).total - GIB
    assert lacking == pytest.approx(missing / GIB, abs=0.1)


def test_keys_are_spelled_as_the_file_nests_them() -> None:
    config = configured("ppo_trainer_llama32_1b", "plan.suggest=true")
    text = plan(config, nested=True).text.partition("Suggested layouts\n")[2]
    assert " actor_rollout_ref.actor_rollout." in text and " actor_rollout." not in text
    assert " critic." in text


@pytest.mark.parametrize("name", REAL)
def test_a_shipped_configuration_plans_and_fits_64_gib(name: str) -> None:
    config = configured(name)
    made = plan(config)
    verdicts = [line.strip() for line in made.text.splitlines() if ", has 64.0 GiB" in line]
    assert len(verdicts) == len(config.resource_pool)
    assert all(verdict.startswith("fits: needs ") for verdict in verdicts), verdicts
    assert len(made.text.splitlines()) < 150


@pytest.mark.parametrize("name", [name for name in REAL if name.endswith("node")])
def test_those_of_few_hosts_leave_a_tenth_of_the_device_and_fit_the_host(name: str) -> None:
    """Of 64 GiB, after 4 for the runtime; with 600 GiB of each host."""
    config = configured(name)
    pools = pool_memories(config)
    assert max(each.total for each in pools) <= 0.9 * (64 - 4) * GIB
    assert host_memory_needed(config, pools).total <= 600 * GIB
    assert {config.placement[role] for role in config.roles} == {"main"}
    hosts = int(name[-5])
    assert config.resource_pool["main"] == [8] * hosts
    actor = config.actor_rollout
    short = name == "ppo_trainer_llama3_8b_1node"  # the lengths of that of two hosts
    assert actor.max_prompt_length == (512 if short else 1024)
    assert actor.max_new_tokens == (512 if short else 32768 if "_32k_" in name else 8192)


def test_norms_are_recomputed_before_whole_layers_are() -> None:
    config = configured("grpo_trainer_llama31_8b_1node", "actor_rollout.recompute=none")
    words = suggest(config, nested=False, limit=28 * GIB).split()
    recomputed = [word for word in words if "recompute=" in word]
    assert "actor_rollout.recompute=elementwise" in recomputed, recomputed
