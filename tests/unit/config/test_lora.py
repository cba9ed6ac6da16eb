"""Keys of adapters: what they select, what they are refused with, what the reference becomes."""

import pytest

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.load import resolve, resolve_with_notes
from mindspeed_rlxf.config.lora import LoraConfig, linear_modules
from mindspeed_rlxf.trainer.preflight import check_weights
from tests.distributed.llamas import PLAIN, make_llama
from tests.unit.config.conftest import TREE

LORA = {"actor_rollout.lora.rank": 4}
SPLIT = {
    "resource_pool.main": 16, "actor_rollout.num_gpus_for_train": 8,
    "actor_rollout.num_gpus_for_infer": 8, "resource_pool.other": 8, "placement.critic": "other",
    "placement.reward": "other",
}  # fmt: skip


@pytest.mark.parametrize(
    ("targets", "excluded", "selected"),
    [
        ("all-linear", [], {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
                            "down_proj"}),
        (["q_proj", "self_attn.v_proj"], [], {"q_proj", "v_proj"}),
        (r".*\.(gate|up)_proj", [], {"gate_proj", "up_proj"}),
        ("all-linear", ["k_proj"], {"q_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
                                    "down_proj"}),
        ("all-linear", r".*\.mlp\..*", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (["proj", "model"], [], set()),
    ],
)  # fmt: skip
def test_modules_are_selected_as_peft_does(targets, excluded, selected):
    """By whole names, ends of names behind a dot, or a regular expression of the whole name."""
    lora = LoraConfig.model_validate(
        {"rank": 1, "target_modules": targets, "exclude_modules": excluded}
    )
    architecture = resolve(TREE, "t").actor_rollout.architecture
    found = {name for name in linear_modules(architecture) if lora.selects(name)}
    assert {name.rpartition(".")[2] for name in found} == selected
    assert len(found) == architecture.num_layers * len(selected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"actor_rollout.lora": {"rank": 4, "target_modules": ["c_attn"]}},
         "actor_rollout.lora.target_modules=['c_attn'] and exclude_modules must leave some of "
         "small's modules q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
        ({"training.lora": {"rank": 4, "target_modules": ["gate_proj"]},
          "model.small.num_experts": 4}, "some of small's modules q_proj, k_proj, v_proj, o_proj;"),
        ({**LORA, "actor_rollout.tensor_model_parallel_size": 8},
         "actor_rollout.tensor_model_parallel_size=8 must be at most num_query_groups=4 with"),
        ({"actor_rollout.lora": {"rank": 4, "dropout": 0.1}},
         "actor_rollout.lora.dropout=0.1 must be 0"),
        ({**LORA, **SPLIT, "rollout.tensor_model_parallel_size": 8},
         "rollout.tensor_model_parallel_size=8 must be at most num_query_groups=4 with"),
        ({"actor_rollout.lora.rank": 600, "rollout.engine": "vllm"},
         "actor_rollout.lora.rank=600 must be at most 512 with rollout.engine=vllm"),
        ({**LORA, "ref.load": "elsewhere"}, "ref.load="),
        ({**LORA, "resource_pool.other": 8, "placement.ref": "other"}, "placement.ref=other must"),
    ],
)  # fmt: skip
def test_what_adapters_cannot_do_is_refused(problems, changes, said):
    (problem,) = problems(changes)
    assert said in problem


def test_targets_that_no_module_of_transformers_has_are_refused(make_tree, tmp_path):
    make_llama(tmp_path, PLAIN)
    changes = {"training.lora": {"rank": 4, "target_modules": ["c_attn"]},
               "actor_rollout.backend": "fsdp", "actor_rollout.load": str(tmp_path),
               "critic.lora": {"rank": 0}, "placement.ref": "main", "resource_pool.other": 8,
               "placement.critic": "other", "placement.reward": "other"}  # fmt: skip
    config = resolve(make_tree(changes, ("placement.ref",)), "t")
    (problem,) = check_weights(config, Role.ACTOR_ROLLOUT)
    said = "actor_rollout.lora.target_modules=['c_attn'] and exclude_modules must leave some"
    assert str(problem).startswith(said) and "gate_proj, up_proj, down_proj" in str(problem)


def test_the_reference_is_the_actor(make_tree):
    changes = {**LORA, "resource_pool.other": 8, "placement.critic": "other",
               "actor_rollout.tensor_model_parallel_size": 2, "ref.bf16": True}  # fmt: skip
    config, notes = resolve_with_notes(make_tree(changes, ("placement.ref",)), "t")
    assert config.role(Role.REF) is config.actor_rollout
    assert config.layout(Role.REF) == config.layout(Role.ACTOR_ROLLOUT)
    assert config.placement[Role.REF] == "main"
    assert any(note.startswith("ref.bf16=true: no effect with") for note in notes)
    split = {**changes, "resource_pool.main": 8, "actor_rollout.num_gpus_for_train": 4,
             "actor_rollout.num_gpus_for_infer": 4, "placement.reward": "other"}  # fmt: skip
    config = resolve(make_tree(split, ("placement.ref",)), "t")
    assert config.layout(Role.REF) == config.layout(Role.ACTOR_ROLLOUT)
    assert config.layout(Role.REF).world_size == 4
