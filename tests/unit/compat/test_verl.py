"""Options of verl's example scripts translate and plan; every other key is noted or refused."""

import json
from pathlib import Path

import pytest

from mindspeed_rlxf.compat.verl.files import is_verl, read_verl
from mindspeed_rlxf.compat.verl.table import ACTOR, NO_EFFECT, RENAMED, ROLLOUT, TABLE
from mindspeed_rlxf.compat.verl.translate import translate_verl
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.keys import find_field
from mindspeed_rlxf.config.load import resolve_raw
from mindspeed_rlxf.config.problems import ConfigError
from mindspeed_rlxf.config.raw_config import RawConfig
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.files import count_rows
from mindspeed_rlxf.ops.planning.plan import plan
from tests.registries import restored_registries

# Keys and values of examples/{ppo,grpo}_trainer/*.sh of verl (Apache-2.0), by version and script.
SCRIPTS: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("verl_options.json").read_text("utf-8")
)
CORRECTION = "algorithm.rollout_correction"
ROWS = 7473  # of gsm8k's training split
QWEN = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
QWEN2 = {
    **QWEN, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
}  # fmt: skip
QWEN3 = {
    **QWEN, "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288,
    "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960,
}  # fmt: skip
MODELS = {
    "deepseek-ai/deepseek-llm-7b-chat": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 30,
        "num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 102400,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    },
    **dict.fromkeys(
        ("Qwen/Qwen2-7B-Instruct", "models/Qwen2-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"), QWEN2
    ),
    "Qwen/Qwen2.5-3B-Instruct": {
        **QWEN, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2, "intermediate_size": 11008, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    **dict.fromkeys(("Qwen/Qwen3-8B", "verl/models/Qwen3-8B"), QWEN3),
}  # fmt: skip


@pytest.fixture
def translate(tmp_path, monkeypatch):
    """Return a function from options in verl's grammar to what they become, all models being
    folders; the defaults are those of a PPO run of one device."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, config in MODELS.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "base.yaml").write_text("dry_run: true\ndevice: {kind: npu, memory_gib: 64}\n")

    def run(*options: str) -> RawConfig:
        return translate_verl(read_verl(tmp_path / "base.yaml", options), lambda _: ROWS)

    return run


PPO = (
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B", "critic.model.path=Qwen/Qwen3-8B",
    "data.train_files=train.parquet", "data.val_files=test.parquet",
    "actor_rollout_ref.rollout.name=vllm",
)  # fmt: skip
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4")


@pytest.fixture
def resolved(translate):
    def run(*options: str) -> RunConfig:
        return resolve_raw(translate(*PPO, *options), "base")[0]

    return run


@pytest.fixture
def refused(translate):
    """Return the one problem of these options."""

    def run(*options: str) -> str:
        (problem,) = translate(*PPO, *options).problems
        return str(problem)

    return run


def test_data_sources_of_verl_are_scored_by_its_rules_where_no_function_is(translate):
    rules = translate(*PPO).sections["reward"]["rules"]
    assert rules["openai/gsm8k"] == "gsm8k_verl" and rules["lighteval/MATH"] == "math_verl"
    assert rules["math_dapo"] == rules["aime24"] == "math_dapo_verl"
    by_function = translate(*PPO, "custom_reward_function.path=f.py").sections["reward"]
    assert "rules" not in by_function


@pytest.mark.parametrize("script", SCRIPTS)
def test_options_of_a_script_translate_and_plan(translate, script):
    raw = translate(*SCRIPTS[script])
    if "lora" in script:
        assert raw.sections["actor_rollout"]["lora"] == {"rank": 64, "alpha": 32}
    config, notes = resolve_raw(raw, "base")
    assert all("GiB" in str(problem) for problem in plan(config, False).problems)  # too small here
    options = dict(option.lstrip("+").split("=", 1) for option in SCRIPTS[script])
    n = int(options.get(f"{ROLLOUT}.n", 1))
    batch, files = (
        int(options["data.train_batch_size"]),
        options["data.train_files"].count(".parquet"),
    )
    assert config.training.global_batch_size == batch
    assert config.actor_rollout.ppo_mini_batch_size == n * int(
        options[f"{ACTOR}.ppo_mini_batch_size"]
    )
    steps = options.get("trainer.total_training_steps")
    epochs = int(options.get("trainer.total_epochs", 1))
    assert config.training.train_iters == int(steps or files * ROWS // batch * epochs)
    told = " ".join(notes)  # every key that asks for something and is not translated
    missing = [
        key
        for key, value in options.items()
        if key not in RENAMED
        and value not in ("", "False")
        and not any(at in told for at in _sections(key))
    ]
    assert missing == []


def _sections(key: str) -> list[str]:
    """Return how notes name a key: with its value, or one of its sections."""
    parts = key.split(".")
    return [f"{key}=", *(".".join(parts[:end]) for end in range(2, len(parts)))]


def test_a_ppo_run_keeps_verls_defaults(resolved):
    config = resolved(f"{ROLLOUT}.n=4", "data.train_batch_size=512")
    actor, critic, algorithm = config.actor_rollout, config.value_model, config.algorithm
    assert (algorithm.lam, algorithm.score_position) == (1.0, "eos")
    assert algorithm.kl_ctrl.kl_coef == 0 and Role.REF not in config.roles
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.2, 3.0)
    assert (actor.lr, critic.lr, actor.weight_decay, critic.cliprange_value) == (
        1e-6,
        1e-5,
        0.01,
        0.5,
    )
    assert (actor.ppo_mini_batch_size, critic.critic_mini_batch_size) == (1024, 1024)
    assert config.training.train_iters == 7473 // 512 * 30
    assert (config.training.seq_length, actor.bf16) == (1024, True)
    assert actor.recompute.value == critic.recompute.value == "full" and actor.do_sample
    assert config.data.ground_truth_key == "reward_model.ground_truth"
    assert not config.validation.after and config.training.save_interval == 0


def test_kl_of_the_loss_and_of_the_reward_become_one_term(resolved):
    loss = resolved(*GRPO, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.02").algorithm
    assert (loss.kl_in, loss.kl_penalty.value, loss.kl_ctrl.kl_coef) == ("loss", "low_var_kl", 0.02)
    control = ("algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.2")
    found = resolved(
        "algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=k3", *control
    ).algorithm
    assert (found.kl_in, found.kl_penalty.value) == ("reward", "low_var_kl")
    assert (found.kl_ctrl.type, found.kl_ctrl.target_kl, found.kl_ctrl.kl_coef) == (
        "adaptive",
        0.2,
        0.001,
    )


MEGATRON = (f"{ACTOR}.megatron.tensor_model_parallel_size=2", "trainer.nnodes=2")
NATIVE = (*GRPO, f"{ACTOR}.strategy=megatron", f"{ROLLOUT}.name=null")
TRANSFORMER = f"{ACTOR}.megatron.override_transformer_config"
SPLIT = (*NATIVE, "rollout.nnodes=1", "rollout.n_gpus_per_node=8")
OLDER_WEIGHTS = (
    "algorithm.rollout_is_threshold=3.0", "algorithm.rollout_is_veto_threshold=1e-4",
    "algorithm.rollout_is_level=token", "algorithm.rollout_is_mode=truncate",
)  # fmt: skip
CASES = {
    "batches by tokens": (
        (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ulysses_sequence_parallel_size=2"),
        {"actor_rollout.max_tokens_per_micro_batch": 32768, "ref.max_tokens_per_micro_batch": 32768,
         "actor_rollout.backend": "fsdp", "critic.context_parallel_size": None,
         "ref.context_parallel_size": 2,
         "critic.max_tokens_per_micro_batch": 32768},
    ),
    "batches by tokens of Megatron": (
        (*MEGATRON, f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.megatron.context_parallel_size=2"),
        {"actor_rollout.max_tokens_per_micro_batch": 32768, "ref.context_parallel_size": 2,
         "critic.max_tokens_per_micro_batch": 32768},
    ),
    "Megatron's layout, also the reference's": (
        (*MEGATRON, f"{ACTOR}.megatron.param_offload=true",
         f"{ACTOR}.megatron.context_parallel_size=2",
         f"{ACTOR}.megatron.override_transformer_config.recompute_granularity=full",
         f"{ACTOR}.megatron.override_transformer_config.recompute_num_layers=2"),
        {"actor_rollout.tensor_model_parallel_size": 2, "ref.tensor_model_parallel_size": 2,
         "actor_rollout.context_parallel_size": 2, "ref.context_parallel_size": 2,
         "actor_rollout.sequence_parallel": True, "actor_rollout.use_distributed_optimizer": True,
         "actor_rollout.offload": {"weights": True}, "ref.offload": {"weights": True},
         "actor_rollout.recompute": "full", "actor_rollout.recompute_num_layers": 2,
         "resource_pool.global_pool": [8, 8], "critic.tensor_model_parallel_size": None},
    ),
    "servers of vLLM": (
        (f"{ROLLOUT}.tensor_model_parallel_size=2", f"+{ROLLOUT}.engine_kwargs.vllm.swap_space=4",
         f"{ROLLOUT}.name=sglang"),
        {"rollout.engine": "vllm",
         "rollout.vllm": {"tensor_parallel_size": 2, "extra_args": {"swap_space": 4}}},
    ),
    "warm-up in steps": (
        ("trainer.total_training_steps=100", "critic.optim.lr_warmup_steps=10"),
        {"training.train_iters": 100, "critic.lr_warmup_fraction": 0.1},
    ),
    "no warm-up with FSDP": (
        ("trainer.total_training_steps=100", f"{ACTOR}.optim.lr_warmup_steps=0",
         f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1", "critic.optim.lr_warmup_steps_ratio=0.2"),
        {"actor_rollout.lr_warmup_fraction": 0.0, "critic.lr_warmup_fraction": 0.2},
    ),
    "cosine": (
        (f"{ACTOR}.optim.lr_scheduler_type=cosine", f"{ACTOR}.optim.min_lr_ratio=0.1"),
        {"actor_rollout.lr_decay_style": "cosine", "actor_rollout.min_lr": pytest.approx(1e-7)},
    ),
    "GSPO ignores the mode": (
        (*GRPO, f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.clip_ratio_low=3e-4"),
        {"actor_rollout.policy_loss": "gspo", "algorithm.loss_normalizer": "sequence_means",
         "actor_rollout.clip_ratio_low": 3e-4, "actor_rollout.clip_ratio_high": 0.2},
    ),
    "Dr. GRPO": (
        (*GRPO, "algorithm.norm_adv_by_std_in_grpo=false",
         f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"),
        {"algorithm.adv_estimator": "dr_grpo", "algorithm.loss_normalizer": "sequence_sums",
         "algorithm.lam": None, "algorithm.score_position": None, "training.stage": "ray_grpo"},
    ),
    "one clip range": (
        (f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_low=null",
         f"{ACTOR}.clip_ratio_high=null"),
        {"actor_rollout.clip_ratio": 0.1, "actor_rollout.clip_ratio_low": None},
    ),
    "importance weights": (
        (f"{CORRECTION}.rollout_is=token",), {"algorithm.rollout_is_threshold": 2.0},
    ),
    "no importance weights where the rollout is the behaviour policy": (
        (f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.bypass_mode=true"),
        {"algorithm.rollout_is_threshold": None, "algorithm.old_log_probs": "rollout"},
    ),
    "one response to a prompt": (
        ("algorithm.adv_estimator=grpo",),
        {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.advantage_whiten": "none",
         "algorithm.gamma": None, "training.stage": "ray_grpo"},
    ),
    "one response to a prompt, whitened": (
        ("algorithm.adv_estimator=reinforce_plus_plus_baseline",),
        {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.advantage_whiten": "batch"},
    ),
    "one response to a prompt, with a KL penalty in its reward": (
        ("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=true"),
        {"algorithm.adv_estimator": "grpo", "algorithm.advantage_whiten": None},
    ),
    "no loss that balances experts": (
        (*MEGATRON, f"{TRANSFORMER}.moe_router_load_balancing_type=none",
         f"{TRANSFORMER}.moe_aux_loss_coeff=0.01"),
        {"actor_rollout.moe_aux_loss_coeff": 0.0},
    ),
    "validation": (
        (f"{ROLLOUT}.val_kwargs.do_sample=true", f"{ROLLOUT}.val_kwargs.n=4", "trainer.test_freq=5",
         f"{ROLLOUT}.val_kwargs.temperature=0.6", "data.val_max_samples=100"),
        {"validation.n_samples": 4, "validation.temperature": 0.6, "validation.interval": 5,
         "validation.after": None, "validation.max_samples": 100, "validation.top_k": None},
    ),
    "rewards of verl": (
        ("custom_reward_function.path=mine.py", "+custom_reward_function.reward_kwargs.strict=true",
         "reward_model.reward_manager=dapo", "reward_model.overlong_buffer.enable=true",
         "reward_model.overlong_buffer.len=64"),
        {"reward.function": {"function": "mine.py:compute_score", "arguments": {"strict": True}},
         "reward.kind": "rule", "algorithm.overlong_buffer_len": 64},
    ),
    "a reward model on a pool of its own": (
        ("reward.reward_model.enable=true", "reward.reward_model.model_path=models/rm",
         "reward.reward_model.enable_resource_pool=true", "reward.reward_model.nnodes=1",
         "reward.reward_model.n_gpus_per_node=4"),
        {"reward.kind": "huggingface", "reward.load": "models/rm",
         "placement.reward": "reward_pool", "resource_pool.reward_pool": [4],
         "placement.critic": "global_pool"},
    ),
    "long prompts": (("data.truncation=left",), {"data.overlong_prompts": "left"}),
    "trackers": (("trainer.logger=[console,swanlab]",), {"logging.trackers": ["jsonl", "swanlab"]}),
    "a template's variables": (
        ("+data.apply_chat_template_kwargs.enable_thinking=false",),
        {"data.chat_template_kwargs": {"enable_thinking": False}},
    ),
    "another column of ground truths": (
        ("data.ground_truth_key=answer",), {"data.ground_truth_key": "answer"},
    ),
    "keys of ours beside verl's": (
        ("+training.save_interval=7", "trainer.save_freq=9", "device.kind=cpu"),
        {"training.save_interval": 7, "device.kind": "cpu"},
    ),
    "the older of two names of a reward": (
        ("reward_model.enable=true", "reward_model.model.path=rm",
         "custom_reward_function.path=x.py", "custom_reward_function.name=foo",
         "reward.reward_model.enable=false", "reward.reward_model.model_path=null",
         "reward.custom_reward_function.path=null",
         "reward.custom_reward_function.name=compute_score"),
        {"reward.kind": "huggingface", "reward.load": "rm", "reward.model_weight": 0.0,
         "reward.function": {"function": "x.py:foo"}},
    ),
    "FSDP's adapters of two": (
        ("actor_rollout_ref.model.lora_rank=64", "actor_rollout_ref.model.lora_alpha=32",
         "actor_rollout_ref.model.lora.rank=0", "actor_rollout_ref.model.lora.alpha=16"),
        {"actor_rollout.lora": {"rank": 64, "alpha": 32}},
    ),
    "Megatron's adapters of two": (
        (f"{ACTOR}.strategy=megatron", "actor_rollout_ref.model.lora.rank=64",
         "actor_rollout_ref.model.lora_rank=0"),
        {"actor_rollout.lora": {"rank": 64, "alpha": 32}},
    ),
    "the newer name of Ulysses, also in token budgets": (
        (*GRPO, f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=24576",
         f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=4",
         f"{ACTOR}.ulysses_sequence_parallel_size=1"),
        {"actor_rollout.context_parallel_size": 4,
         "actor_rollout.max_tokens_per_micro_batch": 98304},
    ),
    "Megatron has no Ulysses": (
        (*MEGATRON, f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ulysses_sequence_parallel_size=4"),
        {"actor_rollout.context_parallel_size": None,
         "actor_rollout.max_tokens_per_micro_batch": 16384},
    ),
    "FSDP's clipping since 0.8": (
        (f"{ACTOR}.grad_clip=1.0", f"{ACTOR}.optim.clip_grad=0.3", "critic.grad_clip=0.4"),
        {"actor_rollout.clip_grad": 0.3, "critic.clip_grad": 0.4},
    ),
    "FSDP's clipping up to 0.7": (
        (f"{ACTOR}.grad_clip=0.5", f"{ACTOR}.optim.clip_grad=1.0",
         "trainer.use_legacy_worker_impl=auto"),
        {"actor_rollout.clip_grad": 0.5},
    ),
    "prompts of a batch with the filter": (
        (*GRPO, "algorithm.filter_groups.enable=true", "data.gen_batch_size=1536",
         "algorithm.filter_groups.max_num_gen_batches=3"),
        {"training.global_batch_size": 1024, "algorithm.max_num_gen_batches": 3},
    ),
    "prompts of a batch without the filter": (
        ("data.gen_batch_size=512", "data.train_batch_size=256"),
        {"training.global_batch_size": 512, "training.train_iters": 7473 // 512 * 30},
    ),
    "warm-up of the actor after the critic's": (
        ("trainer.total_training_steps=100", "trainer.critic_warmup=50",
         f"{ACTOR}.optim.lr_warmup_steps=10", "critic.optim.lr_warmup_steps_ratio=0.1"),
        {"actor_rollout.lr_warmup_fraction": 0.2, "critic.lr_warmup_fraction": 0.1},
    ),
    "a share of all steps after the critic's": (
        ("trainer.total_training_steps=100", "trainer.critic_warmup=50",
         f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"),
        {"actor_rollout.lr_warmup_fraction": 0.2},
    ),
    "steps of complete files": (
        ("trainer.total_training_steps=null", "trainer.total_epochs=2"),
        {"training.train_iters": 7473 // 1024 * 2},
    ),
    "keys of ours in sections of both": (
        ("+reward.rules={my/source: math}", "+data.default_data_source=x", "critic.vf_coef=0.5",
         "data.data_source_key=kind"),
        {"reward.rules": {**TABLE["rules"], "my/source": "math"}, "data.default_data_source": "x",
         "critic.vf_coef": 0.5, "data.data_source_key": "kind"},
    ),
    "a longer model": (
        ("+actor_rollout_ref.model.override_config.max_position_embeddings=65536",
         "+critic.model.override_config.model_config.max_position_embeddings=65536",
         "+actor_rollout_ref.model.override_config.attention_dropout=0."),
        {"actor_rollout.max_position_embeddings": 65536, "ref.max_position_embeddings": 65536,
         "critic.max_position_embeddings": 65536},
    ),
    "what a reference and a resumed run do not read": (
        (*MEGATRON, "trainer.resume_mode=auto", "trainer.resume_from_path=checkpoints/x",
         "actor_rollout_ref.ref.megatron.override_transformer_config.recompute_granularity=full"),
        {"training.new_run": False, "ref.recompute": None},
    ),
    "a default of verl's file": (
        ("+reward_model.model.external_lib=${actor_rollout_ref.model.external_lib}",
         "critic.optim.lr=${actor_rollout_ref.actor.optim.lr}"),
        {"critic.lr": 1e-6, "actor_rollout.lr": None},
    ),
    "log-probs of the rollout, where generation runs ahead": (
        (*SPLIT, "async_training.staleness_threshold=0.5"), {"algorithm.old_log_probs": "rollout"},
    ),
    "log-probs of the rollout, one step off-policy": (
        SPLIT, {"algorithm.old_log_probs": "rollout"},
    ),
    "log-probs that are computed again, one step off-policy": (
        (*SPLIT, f"{CORRECTION}.bypass_mode=false"), {"algorithm.old_log_probs": None},
    ),
    "log-probs that are computed again, in verl 0.7.0": (
        (*SPLIT, "async_training.compute_prox_log_prob=true"), {"algorithm.old_log_probs": None},
    ),
    "log-probs of the update, in verl 0.7.0": (
        (*SPLIT, "async_training.use_rollout_log_probs=false"), {"algorithm.old_log_probs": None},
    ),
    "no older log-probs by a key of the actor": (
        (f"{ACTOR}.use_rollout_log_probs=true",), {"algorithm.old_log_probs": None},
    ),
    "trackers in quotes": (
        ("trainer.logger=\"['console', 'wandb']\"",), {"logging.trackers": ["jsonl", "wandb"]},
    ),
    "chunks of a stage": (
        (*MEGATRON, f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
         f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=3"),
        {"actor_rollout.num_layers_per_virtual_pipeline_stage": 6},  # 36 / (2 x 3)
    ),
    "a loss that looks for covariances": (
        (*GRPO, f"{ACTOR}.policy_loss.loss_mode=kl_cov", f"{ACTOR}.policy_loss.kl_cov_ratio=0.02",
         f"{ACTOR}.policy_loss.ppo_kl_coef=1.0", f"{ACTOR}.policy_loss.clip_cov_lb=1.0"),
        {"actor_rollout.policy_loss": "kl_cov", "actor_rollout.covariance_fraction": 0.02,
         "actor_rollout.covariance_kl_coef": 1.0},
    ),
    "sums of responses": (
        (*GRPO, "algorithm.adv_estimator=opo", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"),
        {"algorithm.adv_estimator": "opo", "algorithm.loss_normalizer": "sequence_totals"},
    ),
    "rejection": (
        (*GRPO, f"{CORRECTION}.rollout_rs='token_k1,seq_max_k2'",
         f"{CORRECTION}.rollout_rs_threshold='0.6_1.6,2.5'"),
        {"algorithm.rollout_rejection": {"token_k1": [0.6, 1.6], "seq_max_k2": [2.5]}},
    ),
    "rejection in verl 0.6": (
        (*GRPO, f"{CORRECTION}.rollout_rs=geometric", f"{CORRECTION}.rollout_rs_threshold=1.25",
         f"{CORRECTION}.rollout_rs_threshold_lower=0.5",
         f"{CORRECTION}.rollout_token_veto_threshold=1e-4"),
        {"algorithm.rollout_rejection": {"seq_mean_k1": [0.8, 2.0], "seq_max_k1": [1e-9, 1e4]}},
    ),
    "importance weights of verl 0.6.0": (
        (*GRPO, *OLDER_WEIGHTS, "algorithm.rollout_is=true"),
        {"algorithm.rollout_is_threshold": 3.0,
         "algorithm.rollout_rejection": {"seq_max_k1": [1e-9, 1e4]}},
    ),
    "importance weights of verl 0.6.0 that are only measured": (
        (*GRPO, *OLDER_WEIGHTS, "algorithm.rollout_is=false"),
        {"algorithm.rollout_is_threshold": None, "algorithm.rollout_rejection": None},
    ),
    "one limit of a ratio": (
        (*GRPO, f"{CORRECTION}.rollout_rs=seq_sum_k1", f"{CORRECTION}.rollout_rs_threshold=2.0"),
        {"algorithm.rollout_rejection": {"seq_sum_k1": [0.5, 2.0]}},
    ),
    "devices that only generate": (
        (*GRPO, f"{ACTOR}.strategy=megatron", "trainer.n_gpus_per_node=4", "rollout.nnodes=1",
         "rollout.n_gpus_per_node=4", f"{ROLLOUT}.tensor_model_parallel_size=2"),
        {"actor_rollout.num_gpus_for_train": 4, "actor_rollout.num_gpus_for_infer": 2,
         "resource_pool.global_pool": [4, 2], "resource_pool.other_roles": [2],
         "placement.reward": "other_roles", "rollout.max_staleness": 1},
    ),
    "devices of a reference beside a split pool": (
        (*SPLIT, *MEGATRON, "rollout.nnodes=2", f"{ACTOR}.use_kl_loss=true",
         f"{ACTOR}.megatron.expert_model_parallel_size=4"),
        {"actor_rollout.num_gpus_for_train": 16, "actor_rollout.num_gpus_for_infer": 12,
         "resource_pool.global_pool": [8, 8, 8, 4], "resource_pool.other_roles": [4],
         "placement.ref": "other_roles", "placement.reward": "other_roles",
         "ref.expert_model_parallel_size": 2},
    ),
    "a reference on nodes of its own beside a split pool": (
        (*SPLIT, "trainer.nnodes=2", "rollout.nnodes=3", f"{ACTOR}.use_kl_loss=true",
         f"{ACTOR}.megatron.tensor_model_parallel_size=4",
         f"{ACTOR}.megatron.pipeline_model_parallel_size=4"),
        {"actor_rollout.num_gpus_for_train": 16, "actor_rollout.num_gpus_for_infer": 8,
         "resource_pool.global_pool": [8, 8, 8], "resource_pool.other_roles": [8, 8]},
    ),
    "replicas that do not divide the prompts": (
        (*SPLIT, "trainer.n_gpus_per_node=6"),  # 1024 over 4, not over 6 or 5
        {"actor_rollout.num_gpus_for_train": 4, "actor_rollout.num_gpus_for_infer": 9,
         "resource_pool.global_pool": [6, 7], "resource_pool.other_roles": [1]},
    ),
    "devices that only generate, with FSDP": (
        (*GRPO, f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.n_gpus_per_node=4", "rollout.engine=vllm"),
        {"actor_rollout.num_gpus_for_train": None, "resource_pool.global_pool": [8, 4, 4],
         "rollout.engine": "vllm"},
    ),
    "fully asynchronous, with parts of responses": (
        (*SPLIT, "async_training.staleness_threshold=0.5", "async_training.require_batches=2",
         "data.train_batch_size=0", "data.gen_batch_size=1", f"{ACTOR}.ppo_mini_batch_size=32",
         f"{ROLLOUT}.n=4", "rollout.total_rollout_steps=2560", "rollout.test_freq=5"),
        {"rollout.max_staleness": 2, "training.global_batch_size": 4 * 2 * 32,
         "actor_rollout.ppo_mini_batch_size": 32 * 4, "training.train_iters": 10,
         "validation.interval": 5},
    ),
    "fully asynchronous, with whole responses": (
        (*SPLIT, "async_training.staleness_threshold=1.5", "async_training.partial_rollout=false"),
        {"rollout.max_staleness": 2},
    ),
    "fully asynchronous, with servers": (
        (*SPLIT, "async_training.staleness_threshold=1.5", f"{ROLLOUT}.name=vllm"),
        {"rollout.max_staleness": 3, "rollout.engine": "vllm"},
    ),
    "synchronous, by the fully asynchronous trainer": (
        (*SPLIT, "async_training.staleness_threshold=0"), {"rollout.max_staleness": None},
    ),
    "V1 on the same devices": (
        (*NATIVE, "trainer.v1.trainer_mode=colocate_async",
         "trainer.v1.colocate_async.num_warmup_batches=3"),
        {"rollout.max_staleness": 3},
    ),
    "V1 on devices of its own": (
        (*NATIVE, "trainer.v1.trainer_mode=separate_async",
         f"{ROLLOUT}.nnodes=1", "trainer.v1.sampler.max_off_policy_threshold=2",
         "trainer.v1.separate_async.num_warmup_batches=3"),
        {"rollout.max_staleness": 2, "actor_rollout.num_gpus_for_infer": 7},
    ),
    "V1 with FSDP": (
        (*GRPO, "trainer.v1.trainer_mode=colocate_async"), {"rollout.max_staleness": 0},
    ),
    "micro-batches of more devices than train in verl": (
        (*GRPO, "trainer.n_gpus_per_node=6", f"{ACTOR}.ppo_mini_batch_size=192",
         f"{ROLLOUT}.n=5", f"{ACTOR}.ppo_micro_batch_size_per_gpu=32", "rollout.nnodes=1",
         "rollout.n_gpus_per_node=2"),
        {"actor_rollout.micro_batch_size": 8},  # of 960 / 8 samples
    ),
    "servers over several nodes": (
        (*GRPO, f"{ROLLOUT}.tensor_model_parallel_size=16", "trainer.nnodes=4"),
        {"rollout.vllm": {"tensor_parallel_size": 8}},
    ),
    "experts over ranks of tensor parallelism": (
        (*GRPO, *MEGATRON, f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
         f"{ACTOR}.megatron.expert_model_parallel_size=8"),
        {"actor_rollout.expert_model_parallel_size": 4, "ref.expert_model_parallel_size": 4},
    ),
    "a frequency that is off": (("trainer.test_freq=false",), {"validation.interval": 0}),
    "micro-batches over all devices": (
        (f"{ACTOR}.ppo_micro_batch_size=32", "critic.ppo_micro_batch_size=32",
         "critic.ppo_micro_batch_size_per_gpu=2"),
        {"actor_rollout.micro_batch_size": 4, "critic.micro_batch_size": 2},
    ),
    "fp32": ((f"{ACTOR}.fsdp_config.dtype=float32",), {"training.bf16": False}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_values_are_converted(translate, case):
    options, expected = CASES[case]
    raw = translate(*PPO, *options)
    assert raw.problems == []
    for path, value in expected.items():
        section, _, key = path.partition(".")
        assert raw.sections[section].get(key) == value, path


@pytest.mark.parametrize(
    "case",
    [
        "one response to a prompt", "devices that only generate",
        "a reference on nodes of its own beside a split pool",
        "replicas that do not divide the prompts",
    ],
)  # fmt: skip
def test_sizes_that_are_changed_fit(translate, case):
    config, _ = resolve_raw(translate(*PPO, *CASES[case][0]), "base")
    assert all("GiB" in str(problem) for problem in plan(config, False).problems)


@pytest.mark.parametrize("most", ["~", "0", "-1"])
def test_verl_has_no_limit_of_generated_batches_unless_it_is_positive(resolved, most):
    limit = "algorithm.filter_groups.max_num_gen_batches"
    option = f"~{limit}" if most == "~" else f"{limit}={most}"
    config = resolved(*GRPO, "algorithm.filter_groups.enable=true", option)
    assert config.algorithm.max_num_gen_batches is None


def test_a_plugins_estimator_may_be_named_and_says_whether_there_is_a_critic(translate, tmp_path):
    (tmp_path / "own.py").write_text(
        "from mindspeed_rlxf.algorithms.estimators import gae, register_estimator\n"
        "from mindspeed_rlxf.config.estimator_traits import EstimatorTraits\n"
        "register_estimator('own_gae', EstimatorTraits(needs_critic=True))(gae)\n"
    )
    with restored_registries():
        raw = translate(*PPO, "+training.plugins=[own.py]", "algorithm.adv_estimator=own_gae")
    assert raw.problems == []
    assert raw.sections["algorithm"]["adv_estimator"] == "own_gae"
    assert "stage" not in raw.sections["training"] and raw.sections["critic"]["load"]


REFUSALS = [
    ((f"{ACTOR}.loss_agg_mode=mean",), f"{ACTOR}.loss_agg_mode='mean' must be one of"),
    (("critic.loss_agg_mode=seq-mean-token-mean",), "critic.loss_agg_mode="),
    ((f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true"), "algorithm.use_kl_in"),
    (("algorithm.adv_estimator=ropo",), "algorithm.adv_estimator='ropo' must be one of"),
    ((f"{ACTOR}.strategy=veomni",), f"{ACTOR}.strategy='veomni' must be one of fsdp"),
    (("reward_model.enable=true", "reward_model.model.path=rm", "custom_reward_function.path=x.py"),
     "reward_model.enable=true and custom_reward_function.path leave open which scores"),
    ((f"{ACTOR}.megatron.dynamic_context_parallel=true",), f"{ACTOR}.megatron.dynamic_context"),
    (("async_flow.enable=true", "async_flow.queue=4"),
     "async_flow is not supported: another schedule"),
    (("trainer.v1.trainer_mode=separate",),
     "trainer.v1.trainer_mode='separate' must be one of sync"),
    ((f"{ACTOR}.megatron.override_transformer_config.strange=1",), f"{ACTOR}.megatron.override"),
    (("reward_model.max_resp_len=7",), "reward_model.max_resp_len=7 must be"),
    (("data.max_prompt_length=long",), "data.max_prompt_length='long' must be a number"),
    (("data.train_batch_size=8000",), "data.train_batch_size=8000 must be at most the 7473 rows"),
    (("trainer.logger={wandb: 1}",), "trainer.logger.wandb: unknown key of verl"),
    (("algorithm.adv_estimator={gae: 1}",), "algorithm.adv_estimator.gae: unknown key of verl"),
    (("algorithm=3",), "algorithm=3 must be a section of keys"),
    ((f"{ROLLOUT}.val_kwargs=[1]",), f"{ROLLOUT}.val_kwargs=[1] must be a section of keys"),
    (("algorithm.adv_estimator=[gae]",), "algorithm.adv_estimator=['gae'] must be one of"),
    (("model_engine=veomni",), "model_engine='veomni' must be one of dp, megatron"),
    ((f"{ACTOR}.optim.betas=0.9",), f"{ACTOR}.optim.betas=0.9 must be a list"),
    ((f"{ACTOR}.use_kl_loss=maybe",), f"{ACTOR}.use_kl_loss='maybe' must be true or false"),
    ((f"{ACTOR}.ppo_mini_batch_size=x",), f"{ACTOR}.ppo_mini_batch_size='x' must be a number"),
    (("data.train_files=7",), "trainer.total_training_steps is required"),
    (("trainer.nodes=2",), "trainer.nodes: unknown key of verl; did you mean trainer.nnodes?"),
    (("traner.nnodes=2",), "traner: unknown key of verl; did you mean trainer?"),
    (("~critic.model.path",), "critic.model.path is required"),
    ((f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=2",
      f"{CORRECTION}.bypass_mode=true"), f"{CORRECTION}.rollout_rs='token_k1' needs log-probs"),
    (("algorithm.rollout_is=true", "algorithm.rollout_is_threshold=3.0",
      "algorithm.rollout_is_mode=mask"), "algorithm.rollout_is_mode='mask' must be truncate"),
    ((f"{CORRECTION}.bypass_mode=true", f"{ACTOR}.policy_loss.loss_mode=gspo"),
     f"{ACTOR}.policy_loss.loss_mode='gspo' and"),
    (("trainer.resume_mode=resume_path",), "trainer.resume_mode='resume_path' must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "start"), REFUSALS)
def test_what_cannot_be_translated_is_one_problem_at_verls_key(refused, options, start):
    assert refused(*options).startswith(start)


@pytest.mark.parametrize(
    "option",
    [
        f"+{ACTOR}.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=6",
        f"+{ACTOR}.megatron.override_transformer_config.account_for_loss_in_pipeline_split=true",
        f"{ACTOR}.megatron.use_megatron_fsdp=true",
        "reward_model.megatron.context_parallel_size=2",
        "reward_model.sandbox_fusion.url=http://h/run_code",
    ],
)
def test_a_place_that_changes_no_number_is_noted(translate, option):
    raw = translate(*PPO, *MEGATRON, option)
    key = option.lstrip("+").partition("=")[0]
    noted = [item for items in raw.notes.values() for item in items]
    assert raw.problems == [] and any(key.startswith(i.partition("=")[0]) for i in noted)


def test_a_size_that_is_given_twice_must_be_the_same(translate):
    twice = f"+{ACTOR}.megatron.override_transformer_config.context_parallel_size"
    options = *PPO, *MEGATRON, f"{ACTOR}.megatron.context_parallel_size=2"
    assert translate(*options, f"{twice}=2").problems == []
    (problem,) = translate(*options, f"{twice}=4").problems
    assert problem.key == twice[1:]


def test_a_problem_of_ours_names_verls_key(translate):
    raw = translate(*PPO, f"{ACTOR}.ppo_mini_batch_size=100")
    with pytest.raises(ConfigError) as caught:
        resolve_raw(raw, "base")
    (problem,) = [str(p) for p in caught.value.problems if "ppo_mini" in p.key and "actor" in p.key]
    assert problem.startswith(f"{ACTOR}.ppo_mini_batch_size=100 must divide the 1024 samples")


def test_rows_that_cannot_be_counted_ask_for_the_number_of_steps(tmp_path):
    tree = {"data": {"train_files": "absent.parquet"}, "trainer": {}}
    problems = [str(p) for p in translate_verl(tree, count_rows).problems]
    assert any(p.startswith("trainer.total_training_steps is required") for p in problems)


@pytest.mark.parametrize("text", ["", "[1, 2]", "hello", "training: {seq_length: 8}"])
def test_a_file_without_verls_sections_is_one_problem(tmp_path, text):
    (tmp_path / "other.yaml").write_text(text)
    with pytest.raises(ConfigError, match="must hold verl's sections"):
        read_verl(tmp_path / "other.yaml")


def test_a_complete_file_has_interpolations_and_absent_values(tmp_path):
    text = """
    defaults: [ppo_trainer, _self_]
    data: {train_files: [a.parquet, b.parquet], max_response_length: 256}
    actor_rollout_ref:
      model: {path: policy, _target_: verl.Model}
      rollout: {name: "???", response_length: "${oc.select:data.max_response_length,512}", n: 2}
      actor: {optim: {lr: 2e-6}, ppo_mini_batch_size: 64}
    critic:
      model: {path: "${actor_rollout_ref.model.path}"}
      optim: {lr: "${actor_rollout_ref.actor.optim.lr}"}
    trainer: {total_epochs: 2}
    """
    (tmp_path / "verl.yaml").write_text(text)
    raw = translate_verl(read_verl(tmp_path / "verl.yaml", ["data.train_batch_size=100"]), len)
    assert [str(p) for p in raw.problems] == [
        "data.train_batch_size=100 must be at most the 18 rows of the files; lower it"
    ]
    critic = raw.sections["critic"]
    assert (critic["load"], critic["lr"], critic["critic_mini_batch_size"]) == ("policy", 2e-6, 128)


def test_the_table_names_keys_that_exist_and_none_twice():
    entries = [*RENAMED.values(), *(found["also"] for found in RENAMED.values() if "also" in found)]
    for target in {entry["to"] for entry in entries}:
        section = target.partition(".")[0]
        assert section in ("resource_pool", "placement") or find_field(target.split(".")), target
    for entry in entries:
        parts = {*entry.get("if", ()), *entry.get("unless", ()), *entry.get("times", ())}
        assert parts <= RENAMED.keys(), parts
    patterns = [p for entry in TABLE["refused"] for p in entry["keys"].split()]
    assert len(patterns) == len({*patterns}) and not {*patterns} & {*NO_EFFECT}
    assert not {*RENAMED} & {*NO_EFFECT, *patterns}


def test_only_verls_trees_are_taken_for_verls():
    nested = {"actor_rollout_ref": {"actor_rollout": {}, "ref": {}}}
    assert not is_verl(nested) and not is_verl({"training": {}})
    assert is_verl({"trainer": {}}) and is_verl({"actor_rollout_ref": {"model": {"path": "x"}}})
