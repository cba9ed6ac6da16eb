"""The plan of a run that trains adapters: Qwen2.5 7B with all roles on one device of 64 GB."""

from unittest.mock import patch

import pytest

from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.models.parameter_counts import model_elements
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.ops.planning import available
from mindspeed_rlxf.ops.planning.host_memory import disk_needed
from mindspeed_rlxf.ops.planning.memory import pool_memory, role_memory
from mindspeed_rlxf.ops.planning.plan import plan
from mindspeed_rlxf.ops.sizes import GIB

# rank x (inputs + outputs) of query and output, key and value, and the three of the MLP
ADAPTERS = 28 * 64 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))


@pytest.fixture(scope="module")
def config() -> RunConfig:
    overrides = ["dry_run=true", "device.kind=npu", "runtime.address=head:6379"]
    return resolve(compose("ppo_trainer_qwen25_7b_lora", overrides), "t")


def test_only_adapters_have_gradients_and_an_optimizer(config):
    """bf16: weights of 2 bytes, gradients of 4, two moments and main weights of 12."""
    assert ADAPTERS == 161_480_704
    actor, critic, ref = (
        role_memory(config, role, 0).state
        for role in (Role.ACTOR_ROLLOUT, Role.CRITIC, Role.REF)
    )  # fmt: skip
    weights = model_elements(config.actor_rollout.architecture, Head.LANGUAGE_MODEL)
    assert actor == (2 * (weights + ADAPTERS), 4 * ADAPTERS, 12 * ADAPTERS)
    assert critic.optimizer == 12 * (ADAPTERS + 3584), "the score head is trained too"
    assert ref == (0, 0, 0)
    assert disk_needed(config)["checkpoints (3, one being written)"] == 3 * 14 * (
        2 * ADAPTERS + 3584
    )


def test_the_run_fits_one_device(config):
    total = pool_memory(config, "main").total
    assert 30 * GIB < total < 60 * GIB
    sizes = dict.fromkeys(("free_disk", "host_memory"), lambda _: 2**40)
    with patch.multiple(available, **sizes):
        made = plan(config)
    assert made.problems == []
    assert "the actor's, without its adapters" in made.text and "adapters of rank 64" in made.text


def test_generation_copies_joined_adapters_and_no_weights(config):
    """Of query, key and value, and of gate and up, whose B has zeros beside each module's block."""
    actor = role_memory(config, Role.ACTOR_ROLLOUT, 0)
    (generate,) = (phase for phase in actor.phases if phase.name == "generate")
    queries = 3 * 64 * (3584 + 3584 + 2 * 512)
    gates = 2 * 64 * (3584 + 2 * 18944)
    assert generate.other == 2 * 28 * (queries + gates)
