"""Every key of MindSpeed-LLM's Ray PPO is used, noted or refused; none is ignored silently."""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.compat.mindspeed_llm.keys import NO_OPS, REFUSED
from mindspeed_rlxf.compat.mindspeed_llm.translate import MOVED, translate
from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.enums import (
    AdvantageWhiten,
    AdvEstimator,
    KlPenalty,
    RewardKind,
    Role,
    Verifier,
)
from mindspeed_rlxf.config.keys import known_keys
from mindspeed_rlxf.config.load import resolve, resolve_with_notes
from mindspeed_rlxf.config.problems import ConfigError
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.planning.plan import plan
from tests.older_yaml import PPO, WITHOUT_CRITIC, write
from tests.unit.config.conftest import GRPO, WITHOUT_CRITIC as WITHOUT_CRITIC_KEYS

# Typed from the guide and the parser of the older toolkit, not taken from our lists.
OF_TRAINING = """
stage global_batch_size seq_length tokenizer_type tokenizer_name_or_path train_iters save_interval
distributed_backend no_shared_storage no_load_optim no_load_rng bf16 is_instruction_dataset
variable_seq_lengths no_shuffle sequence_parallel dataset_additional_keys no_save_optim no_save_rng
use_deter_comp
"""
OF_ACTOR = """
model do_sample temperature top_k top_p micro_batch_size ppo_mini_batch_size num_samples_per_step
max_prompt_length ppo_epochs clip_ratio entropy_coeff shuffle_minibatch use_kv_cache
tensor_model_parallel_size pipeline_model_parallel_size lr lr_decay_style min_lr weight_decay
lr_warmup_fraction clip_grad adam_beta1 adam_beta2 initial_loss_scale finetune load save
num_gpus_for_train num_gpus_for_infer pad_to_multiple_of data_path split max_tokens_to_oom
n_samples_per_prompt missing_eos_penalty dataset_category dpo_beta dpo_loss_type md5_validate
inference_tensor_model_parallel_size rollout_batch_size shuffle no_shuffle
"""
OF_REF = "model tensor_model_parallel_size pipeline_model_parallel_size micro_batch_size load"
OF_REWARD = f"{OF_REF} verifier extract_content_for_reward sequence_parallel"
OF_CRITIC = """
model tensor_model_parallel_size pipeline_model_parallel_size use_mcore_models micro_batch_size lr
lr_decay_style min_lr weight_decay lr_warmup_fraction clip_grad adam_beta1 adam_beta2
initial_loss_scale use_distributed_optimizer load save cliprange_value critic_mini_batch_size
critic_update_epochs no_load_optim no_load_rng is_instruction_dataset variable_seq_lengths
sequence_parallel
"""
OF_ALGORITHM = """
gamma lam adv_estimator kl_penalty kl_ctrl missing_eos_penalty verifier_function verifier_weight
advantage_whiten
"""
OF_KL_CTRL = "type kl_coef target_kl horizon"
OF_MODEL = """
use_mcore_models sequence_parallel num_layers hidden_size ffn_hidden_size num_attention_heads
group_query_attention num_query_groups seq_length max_position_embeddings vocab_size
padded_vocab_size make_vocab_size_divisible_by untie_embeddings_and_output_weights
disable_bias_linear attention_dropout hidden_dropout init_method_std position_embedding_type
rotary_base rotary_percent use_rotary_position_embeddings rope_scaling_type rope_scaling_factor
low_freq_factor high_freq_factor original_max_position_embeddings normalization norm_epsilon
use_fused_rmsnorm swiglu use_fused_swiglu use_flash_attn use_mc2 use_fused_rotary_pos_emb
no_masked_softmax_fusion attention_softmax_in_fp32 no_gradient_accumulation_fusion bf16 seed
add_qkv_bias adam_beta1 adam_beta2
"""
THEIRS = {
    "training": OF_TRAINING, "actor_rollout": OF_ACTOR, "ref": OF_REF, "reward": OF_REWARD,
    "critic": OF_CRITIC, "algorithm": OF_ALGORITHM, "algorithm.kl_ctrl": OF_KL_CTRL,
    "model": OF_MODEL,
}  # fmt: skip


def ours(section: str) -> set[str]:
    known = known_keys()
    if section == "model":
        return known["training"] - {"model"}  # architectures and defaults of roles
    return known[section]


@pytest.mark.parametrize("section", THEIRS)
def test_every_older_key_exists_here_or_is_moved_or_on_one_list(section):
    unsorted = []
    for key in THEIRS[section].split():
        homes = [key in ours(section), key in NO_OPS, key in REFUSED]
        if sum(homes) != 1 and not (sum(homes) == 0 and key in MOVED):
            unsorted.append(key)
    assert unsorted == []


def test_a_no_op_changes_nothing_and_is_noted_once(make_tree):
    """All keys at once, with the first value of each, with the second one, and so on."""
    base = resolve(translate(make_tree()), "test")
    values = {
        key: [7] if isinstance(entry.allowed, str) else list(entry.allowed)
        for key, entry in NO_OPS.items()
    }
    for number in range(max(map(len, values.values()))):
        given = {key: allowed[min(number, len(allowed) - 1)] for key, allowed in values.items()}
        sections = {f"{name}.{key}": given[key] for name in ("training", "critic") for key in given}
        config, notes = resolve_with_notes(translate(make_tree(sections)), "test")
        assert config == base
        words = re.split(r"[ ,:]+", " ".join(notes))
        noted = [word.partition("=")[0] for word in words if "=" in word]
        assert [key for key in given if noted.count(key) != 1] == []


OTHER_VALUES = [
    ("hidden_dropout", 0.1), ("attention_dropout", 0.1), ("rotary_percent", 0.5), ("swiglu", False),
    ("normalization", "LayerNorm"), ("position_embedding_type", "alibi"), ("no_load_rng", False),
    ("no_load_optim", False), ("finetune", False), ("use_mcore_models", False),
    ("split", "90,10,0"), ("md5_validate", True), ("extract_content_for_reward", True),
    ("disable_bias_linear", False), ("make_vocab_size_divisible_by", 128), ("shuffle", True),
    ("attention_softmax_in_fp32", False), ("is_instruction_dataset", False),
    ("variable_seq_lengths", False), ("no_save_optim", False),
    ("context_parallel_algo", "megatron_cp_algo"), ("context_parallel_algo", "hybrid_cp_algo"),
    ("hidden_dropout", False), ("make_vocab_size_divisible_by", True), ("use_kv_cache", "yes"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), OTHER_VALUES)
def test_a_key_without_effect_accepts_only_values_that_match_the_behaviour(problems, key, value):
    (problem,) = problems({f"actor_rollout.{key}": value})
    assert problem.startswith(f"actor_rollout.{key}=") and " must be " in problem
    assert "; use " in problem


def test_an_unsupported_key_is_refused_by_name_unless_its_value_is_neutral(problems):
    """All keys at once."""
    refused = [problem.partition(" is not supported: ")[0] for problem in problems(all_keys(16))]
    assert sorted(refused) == sorted(f"training.{key}=16" for key in REFUSED)
    assert problems(all_keys(None)) == problems(all_keys(False)) == []
    for number in range(max(len(entry.neutral) for entry in REFUSED.values())):
        neutral = {
            f"training.{key}": entry.neutral[number]
            for key, entry in REFUSED.items()
            if number < len(entry.neutral)
        }
        assert problems(neutral) == []


def all_keys(value: Any) -> dict[str, Any]:
    return {f"training.{key}": value for key in REFUSED}


# (change, where it arrives). Values that differ from what the tree of the tests has.
MOVES: list[tuple[dict[str, Any], Callable[[RunConfig], Any], Any]] = [
    ({"actor_rollout.no_shuffle": True}, lambda c: c.data.shuffle, False),
    ({"training.no-shuffle": False}, lambda c: c.data.shuffle, True),
    ({"model.small.seed": 42}, lambda c: c.training.seed, 42),
    ({"model.small.seed": 42, "training.seed": 7}, lambda c: c.training.seed, 7),
    ({"model.small.padded_vocab_size": 48}, lambda c: c.ref.architecture.vocab_size, 48),
    ({"actor_rollout.missing_eos_penalty": 2.0}, lambda c: c.algorithm.missing_eos_penalty, 2.0),
    ({"training.dataset_additional_keys": "labels categories"},
     lambda c: c.data.ground_truth_key, "labels"),
    ({"training.dataset_with_labels": True}, lambda c: c.data.ground_truth_key, "labels"),
    ({"training.dataset_with_labels": False}, lambda c: c.data.ground_truth_key, "ground_truth"),
    ({"critic.cliprange_value": 0}, lambda c: c.critic.cliprange_value, None),
    ({"critic.cliprange_value": -1.0}, lambda c: c.critic.cliprange_value, None),
    ({"critic.cliprange_value": 0.2}, lambda c: c.critic.cliprange_value, 0.2),
    ({"algorithm.advantage_whiten": False}, lambda c: c.algorithm.advantage_whiten,
     AdvantageWhiten.NONE),
    ({"reward": {"verifier": True}, "algorithm.verifier_weight": [2.0]}, lambda c: c.verifiers,
     [(Verifier.ACC, 2.0)]),
    ({"reward": {"verifier": True}}, lambda c: c.reward.kind, RewardKind.RULE),
    ({"training.use_deter_comp": True}, lambda c: c.training.deterministic, True),
    ({"training.use_deter_comp": False}, lambda c: c.training.deterministic, None),
    ({"model.small.group_query_attention": True}, lambda c: c.ref.architecture.kv_heads, 4),
    ({"model.small.group_query_attention": True, "model.small.num_query_groups": None},
     lambda c: c.ref.architecture.kv_heads, 1),
    ({"model.small.seq_length": 4096}, lambda c: c.training.seq_length, 24),
    ({"model.small.recompute_granularity": "full", "model.small.recompute_method": "block"},
     lambda c: [c.critic.recompute.value, c.critic.recompute_method], ["full", "block"]),
    ({"training.recompute_granularity": None, "training.recompute_num_layers": None},
     lambda c: [c.critic.recompute.value, c.critic.recompute_num_layers], ["none", 1]),
    ({"training.ulysses_sequence_parallel_size": 2, "training.context_parallel_algo":
      "ulysses_cp_algo", "critic.context_parallel_size": 1},
     lambda c: [c.actor_rollout.context_parallel_size, c.critic.context_parallel_size], [2, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "read", "value"), MOVES)
def test_a_moved_key_arrives(make_tree, changes, read, value):
    assert read(resolve(translate(make_tree(changes)), "test")) == value


def test_the_data_path_of_the_actor_is_that_of_the_data(make_tree, problems):
    for given, meant in {"a/b": ["a/b"], "1,a/b": ["a/b"], "a, b": ["a", "b"]}.items():
        tree = make_tree({"actor_rollout.data_path": given}, ("data.train_files",))
        config, notes = resolve_with_notes(translate(tree), "test")
        assert config.data.data_path == tuple(map(os.path.abspath, meant))
        assert config.data.default_data_source == "prompts"
        assert any(note.startswith("data.overlong_prompts=drop: ") for note in notes)
    (problem,) = problems({"actor_rollout.data_path": "1,a,2,b"}, ("data.train_files",))
    assert problem.startswith("actor_rollout.data_path='1,a,2,b' ") and "[a, b]" in problem


GROUP_NORM = {**GRPO, "algorithm.adv_estimator": "group_norm", "algorithm.kl_penalty": "kl"}


def test_group_norm_means_grpo_with_whitening_and_kl_in_the_loss(make_tree):
    algorithm = resolve(translate(make_tree(GROUP_NORM, WITHOUT_CRITIC_KEYS)), "test").algorithm
    assert algorithm.adv_estimator == AdvEstimator.GRPO
    assert algorithm.advantage_whiten is AdvantageWhiten.BATCH
    assert (algorithm.kl_in, algorithm.kl_penalty) == ("loss", KlPenalty.LOW_VAR_KL)
    plain = {**GROUP_NORM, "algorithm.advantage_whiten": False}
    whiten = resolve(
        translate(make_tree(plain, WITHOUT_CRITIC_KEYS)), "test"
    ).algorithm.advantage_whiten
    assert whiten is AdvantageWhiten.NONE


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({**GROUP_NORM, "algorithm.gamma": 0.9}, "algorithm.gamma=0.9"),
        ({"model.small.group_query_attention": False}, "model.small.group_query_attention=false"),
        ({"actor_rollout.missing_eos_penalty": 1.0, "algorithm.missing_eos_penalty": 0.5},
         "actor_rollout.missing_eos_penalty"),
        ({"algorithm.verifier_function": ["acc"]}, "algorithm.verifier_function="),
        ({"reward": {"verifier": True}, "algorithm.verifier_weight": [1.0, 2.0]},
         "algorithm.verifier_weight=[1.0, 2.0]"),
        ({"reward": {"verifier": True}, "algorithm.verifier_function": ["acc", "acc"]},
         "algorithm.verifier_function must name each function once"),
        ({"reward": {"verifier": True, "rules": {"a": "gsm8k"}}},
         "reward.rules="),
        ({"reward": {"verifier": True}, "actor_rollout.dataset_category": "1,0"},
         "actor_rollout.dataset_category='1,0' use 1 "),
        ({"actor_rollout.dataset_category": 1}, "actor_rollout.dataset_category=1 use 0 "),
        ({"actor_rollout.inference_tensor_model_parallel_size": 2},
         "actor_rollout.inference_tensor_model_parallel_size=2"),
        ({"algorithm.verifier_function": ["accc"], "reward": {"verifier": True}},
         "algorithm.verifier_function.0='accc' did you mean acc?"),
    ],
)  # fmt: skip
def test_contradictory_keys_are_refused(check_case, changes, start):
    check_case(changes, [start])


def resolved(name: str, folder: Path) -> tuple[RunConfig, list[str]]:
    tree = compose(name, ["device.kind=cpu", "runtime.address=head:6379"], folder)
    return resolve_with_notes(translate(tree), name)


@pytest.fixture
def in_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Their tokenizer of Llama 2 says how many tokens there are; its model YAML does not."""
    monkeypatch.chdir(tmp_path)
    for name, vocabulary in {"llama-2-7b": 32000, "Qwen2.5-Math-7B": 152064}.items():
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"vocab_size": vocabulary}))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "devices", "layouts"),
    [
        ("ppo_trainer_llama32_1b", 5, [(1, 1)] * 4),
        ("ppo_trainer_llama3_8b", 16, [(2, 2), (2, 1), (2, 2), (2, 1)]),
        ("ppo_trainer_llama2_7b", 16, [(4, 1), (2, 1), (4, 1), (2, 1)]),
    ],
)
def test_older_ppo_configurations_keep_their_meaning(in_their_folder, name, devices, layouts):
    """Their values are recorded, see test_resolved_values."""
    write(in_their_folder / "theirs")
    config, notes = resolved(name, in_their_folder / "theirs")
    found = [config.layout(role) for role in config.roles]
    assert [(layout.tp, layout.pp, layout.dp) for layout in found] == [(*x, 1) for x in layouts]
    assert sum(sum(sizes) for sizes in config.resource_pool.values()) == devices
    theirs = PPO[name]()["actor_rollout_ref"]["actor_rollout"]
    split = (theirs["num_gpus_for_train"], theirs["num_gpus_for_infer"])
    assert config.train_rollout_split == split
    vocabulary = 32000 if "llama2" in name else 128256  # of llama2, from the tokenizer's folder
    assert config.ref.architecture.vocab_size == vocabulary
    saved = os.path.abspath("ckpt")
    assert config.save_folder(Role.CRITIC) == Path(saved, "critic")
    starts = ["training.save_interval=10000 is over training.train_iters=1000: checkpoints",
              f"actor_rollout.save and critic.save are one folder, {saved}: ",
              "entropy_coeff=0.001: the loss has an entropy bonus of this weight"]  # fmt: skip
    assert [any(note.startswith(start) for note in notes) for start in starts] == [True] * 3
    assert len(notes) == len(set(notes)) < 35


@pytest.mark.parametrize(
    ("name", "samples", "idle"),
    [
        ("ray_grpo_full_llama32_1b_tp1pp1", 2, []),
        ("online_dpo_trainer_llama32_1b", 8, ["model.llama32-1b.sequence_parallel=true: no effect "
                                              "without tensor_model_parallel_size>1"]),
    ],
)  # fmt: skip
def test_their_configurations_without_a_critic_plan(in_their_folder, name, samples, idle):
    """Their values are recorded, see test_resolved_values."""
    write(in_their_folder / "theirs")
    config, notes = resolved(name, in_their_folder / "theirs")
    assert (config.samples_per_iteration, config.train_rollout_split) == (samples, (1, 1))
    shown = [" ".join(line.split()) for line in plan(config).text.splitlines()]
    assert f"samples {samples}" in shown
    start = "rollout llama32-1b actor_rollout 1 1 1 1 1 1 bf16 "
    assert any(line.startswith(start) for line in shown)
    assert [note for note in notes if ": no effect " in note] == idle


def leaves(tree: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Each key that holds no section, and the section that holds it."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value)
        else:
            yield tree, key


def altered(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return [*value, 1]
    return f"{value}-x" if isinstance(value, str) else value + 1


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_no_key_of_a_whole_file_is_lost(in_their_folder, name):
    """Another value is another configuration, another line, or refused; but for one of a model
    that `training`, which is over it, has too."""
    write(in_their_folder / "theirs")
    changes = ["device.kind=cpu", "runtime.address=head:6379"]
    tree = compose(name, changes, in_their_folder / "theirs")
    whole, lost = resolve_with_notes(translate(tree), name), []
    for section, key in leaves({k: v for k, v in tree.items() if k not in ("device", "runtime")}):
        value = section[key]
        section[key] = altered(value)
        with contextlib.suppress(ConfigError):
            under = section in tree["model"].values() and key in tree["training"]
            if resolve_with_notes(translate(tree), name) == whole and not under:
                lost.append(key)
        section[key] = value
    assert lost == [] and resolve_with_notes(translate(tree), name) == whole
