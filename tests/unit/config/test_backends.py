"""Rules about training engines."""

from collections.abc import Callable
from typing import Any

import pytest

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.load import resolve

FSDP = {"training.backend": "fsdp"}
OTHER_POOL = {"resource_pool.other": 8, "placement.critic": "other"}


def test_the_reference_and_the_rollout_follow_the_actor(make_tree: Callable[..., Any]) -> None:
    config = resolve(make_tree({"actor_rollout.backend": "fsdp", **OTHER_POOL}), "test")
    assert config.ref.backend == "fsdp" and config.rollout.engine == "transformers"
    assert config.value_model.backend == "megatron"
    assert [config.backend_of(pool) for pool in ("main", "other")] == ["fsdp", "megatron"]


def test_a_ulysses_group_is_one_replica(make_tree: Callable[..., Any]) -> None:
    changes = {**FSDP, "training.ulysses_sequence_parallel_size": 2}
    assert resolve(make_tree(changes), "test").layout(Role.CRITIC).dp == 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"critic.backend": "fsdp"}, "critic.backend=fsdp must be actor_rollout.backend=megatron"),
        ({**OTHER_POOL, "actor_rollout.backend": "fsdp", "ref.backend": "megatron",
          "resource_pool.third": 8, "placement.ref": "third"},
         "ref.backend=megatron must be actor_rollout.backend=fsdp"),
        ({**FSDP, "rollout.engine": "native"}, "use transformers"),
        ({**FSDP, "training.tensor_model_parallel_size": 2},
         "tensor_model_parallel_size=2 must be 1 with training.backend=fsdp"),
        ({**FSDP, "training.ulysses_sequence_parallel_size": 3}, "must divide the 8 heads"),
        ({"training.ulysses_sequence_parallel_size": 2}, "no effect without backend=fsdp"),
        ({**FSDP, "training.recompute": "selective"}, "must be none or full"),
        ({**FSDP, "resource_pool.other": 8, "placement.ref": "other", "placement.critic": "other",
          "actor_rollout.num_gpus_for_train": 4, "actor_rollout.num_gpus_for_infer": 4},
         "needs training.backend=megatron"),
    ],
)  # fmt: skip
def test_what_an_engine_cannot_do_is_refused(
    problems: Callable[..., list[str]], changes: dict[str, Any], expected: str
) -> None:
    found = problems(changes)
    assert any(expected in line for line in found), found
