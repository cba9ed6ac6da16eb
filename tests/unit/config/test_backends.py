"""Rules about training engines."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.load import resolve, resolve_with_notes
from mindspeed_rlxf.config.problems import ConfigError

FSDP = {"training.backend": "fsdp"}
OTHER_POOL = {"resource_pool.other": 8, "placement.critic": "other"}


def test_the_reference_and_the_rollout_follow_the_actor(make_tree: Callable[..., Any]) -> None:
    config = resolve(make_tree({"actor_rollout.backend": "fsdp", **OTHER_POOL}), "test")
    assert config.ref.backend == "fsdp" and config.rollout.engine == "transformers"
    assert config.value_model.backend == "megatron"
    assert [config.backend_of(pool) for pool in ("main", "other")] == ["fsdp", "megatron"]


@pytest.mark.parametrize("changes", [FSDP, {}])
def test_a_context_parallel_group_is_one_replica(
    make_tree: Callable[..., Any], changes: dict[str, Any]
) -> None:
    sizes = {"training.context_parallel_size": 2}
    config = resolve(make_tree({**changes, **sizes}), "test")
    assert config.layout(Role.CRITIC).dp == 4
    assert config.layout(Role.CRITIC).leaders() == [0, 2, 4, 6]
    assert config.rollout_layout.dp == 8


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
        ({"training.context_parallel_size": 8, "training.tensor_model_parallel_size": 2},
         "times training.tensor_model_parallel_size=2 must divide the 8 heads"),
        ({"training.context_parallel_size": 2, "training.packed_sequences": False},
         "needs training.packed_sequences=true"),
        ({"ref.context_parallel_size": 2, "algorithm.kl_penalty": "full"},
         "ref.context_parallel_size=2 must be the actor's 1"),
        ({**FSDP, "training.recompute": "selective"}, "must be none or full"),
        ({**FSDP, "training.recompute": "elementwise"}, "must be none or full"),
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


OF_MEGATRON = {
    "training.tensor_model_parallel_size": 2,
    "training.pipeline_model_parallel_size": 2,
    "training.sequence_parallel": True,
    "training.recompute": "selective",
    "actor_rollout_ref.actor_rollout.tensor-model-parallel-size": 4,
}


@pytest.mark.parametrize("chosen", ["training.backend", "++actor_rollout.backend"])
def test_fsdp_on_the_command_line_resets_what_only_megatron_has(make_tree, chosen):
    """For the roles that it chooses alone, and not what the command line gives itself."""
    key = chosen.removeprefix("++")
    keys = {**OTHER_POOL, **OF_MEGATRON, key: "fsdp"}
    config, notes = resolve_with_notes(make_tree(keys), "test", [f"{chosen}=fsdp"])
    actor, ref, critic = config.actor_rollout, config.ref, config.value_model
    for role in (actor, ref):
        sizes = role.tensor_model_parallel_size, role.pipeline_model_parallel_size
        assert sizes == (1, 1) and not role.sequence_parallel
    assert actor.recompute.value == "full"
    assert critic.tensor_model_parallel_size == (1 if chosen == "training.backend" else 2)
    changed = " ".join(notes)
    for written in ("training.sequence_parallel", "actor_rollout.tensor_model_parallel_size"):
        assert written in changed


def test_fsdp_keeps_what_the_same_side_asks_for(make_tree):
    tree = make_tree({**FSDP, "training.tensor_model_parallel_size": 2})
    for overrides in ([], ["training.backend=fsdp", "training.tensor-model-parallel-size=2"]):
        with pytest.raises(ConfigError, match="tensor_model_parallel_size=2 must be 1"):
            resolve_with_notes(tree, "test", overrides)


def test_a_model_that_transformers_does_not_know_is_refused(
    problems: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonsense", "architectures": []}')
    found = problems({**FSDP, "training.model": "auto", "training.load": str(tmp_path)})
    assert all("a model that transformers knows, not nonsense; use another" in s for s in found)
    assert "training.load" in found[0]


def test_sizes_are_read_from_the_configuration_of_any_family(
    make_tree: Callable[..., Any], tmp_path: Path
) -> None:
    described = {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
        "vocab_size": 40, "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(described))
    changes = {**FSDP, "training.model": "auto", "training.load": str(tmp_path)}
    found = resolve(make_tree(changes), "test").actor_rollout.architecture
    assert (found.num_layers, found.kv_heads, found.head_dim, found.num_experts) == (3, 4, 16, 4)
