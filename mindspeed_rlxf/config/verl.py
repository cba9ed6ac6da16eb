"""Translate verl's YAML (`ppo_trainer.yaml`, 0.5 to 0.9) to our keys, before anything is validated.

`verl_keys.yaml` lists verl's keys. What a key means in verl, and its default there, stays: where
units differ, the value is converted.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.estimator_traits import TRAITS
from mindspeed_rlxf.config.keys import Given
from mindspeed_rlxf.config.problems import Problem, ref
from mindspeed_rlxf.config.verl_tree import ACTOR, MODEL, REF, ROLLOUT, TABLE, VerlTree, asks

ESTIMATORS = {
    "rloo_vectorized": "rloo", "grpo_vectorized": "grpo",
    **{name: name for name in TRAITS if name != "dr_grpo"},
}  # fmt: skip
AGGREGATIONS = {
    "token-mean": "minibatch_tokens",
    "seq-mean-token-mean": "sequence_means",
    "seq-mean-token-sum-norm": "sequence_sums",
}
PENALTIES = {
    "kl": "kl", "k1": "kl", "abs": "abs", "mse": "mse", "k2": "mse", "low_var_kl": "low_var_kl",
    "k3": "low_var_kl", "full": "full",
}  # fmt: skip
PRECISIONS = {"bfloat16": True, "bf16": True, "float32": False, "fp32": False}
POOL = "global_pool"


def translate_verl(tree: Mapping[str, Any], count_rows: Callable[[str], int]) -> Given:
    """Return verl's tree in our keys, with the problems and notes found on the way.

    Args:
        tree: verl's keys, as read; interpolations are resolved here. Sections that only we have
            are kept, and beat the translation.
        count_rows: Returns the number of rows of a data file; may raise UserError.

    Raises:
        ConfigError: An interpolation cannot be resolved.
    """
    return _Translation(tree, count_rows).given


class _Translation(VerlTree):
    """One pass over the sections of verl's tree."""

    def __init__(self, tree: Mapping[str, Any], count_rows: Callable[[str], int]) -> None:
        super().__init__(tree)
        self.count_rows = count_rows
        self.copy_equal()
        self._translate_data()
        self._translate_run()
        self._translate_algorithm()
        self._translate_kl()
        for section, role in self.roles.items():
            self._translate_trained(section, role)
        for section, role in {**self.roles, REF: "ref"}.items():
            self._translate_engine(section, role)
        self._translate_sampling()
        self._translate_reward()
        self.sort_others()

    def _translate_data(self) -> None:
        get, put = self.get, self.put
        lengths = get("data.max_prompt_length"), get("data.max_response_length")
        put("actor_rollout.max_prompt_length", lengths[0], "data.max_prompt_length")
        put("actor_rollout.max_new_tokens", lengths[1], "data.max_response_length")
        put("training.seq_length", sum(lengths), "data.max_response_length")
        key = (
            "data.filter_overlong_prompts"
            if get("data.filter_overlong_prompts")
            else "data.truncation"
        )
        put("data.overlong_prompts", "drop" if get(key) is True else get(key), key)
        put("data.ground_truth_key", "reward_model.ground_truth")
        put("data.chat_template_kwargs", self.collect("data.apply_chat_template_kwargs"))
        if get("data.val_max_samples") != -1:
            self.move("data.val_max_samples", "validation.max_samples")
        put("training.model", "auto")
        for section, role in self.roles.items():
            key = f"{MODEL}.path" if section == ACTOR else "critic.model.path"
            if get(key) is None:
                self.given.problems.append(Problem(key, "is required", remedy="name a folder"))
            put(f"{role}.load", find_model(get(key)), key)
        names = ("data.tokenizer", f"{MODEL}.tokenizer_path", f"{MODEL}.path")
        key = next((key for key in names if get(key)), names[-1])
        put("training.tokenizer_name_or_path", find_model(get(key)), key)

    def _translate_run(self) -> None:
        get, put = self.get, self.put
        put("training.train_iters", self._count_iterations(), "trainer.total_training_steps")
        names = get("trainer.logger") or []
        names = [
            "jsonl",
            *(n for n in ([names] if isinstance(names, str) else names) if n != "console"),
        ]
        put("logging.trackers", names, "trainer.logger")
        if not self.given.sections["resource_pool"]:
            sizes = [get("trainer.n_gpus_per_node")] * get("trainer.nnodes")
            put(f"resource_pool.{POOL}", sizes, "trainer.n_gpus_per_node")
        put("training.save_interval", max(0, get("trainer.save_freq")), "trainer.save_freq")
        self.move("trainer.max_actor_ckpt_to_keep", "training.keep_last")
        put("validation.interval", max(0, get("trainer.test_freq")), "trainer.test_freq")
        put("validation.after", get("trainer.test_freq") > 0)
        words = {None: False, "auto": False, "disable": True}
        put(
            "training.new_run",
            self.choose("trainer.resume_mode", words, "use auto"),
            "trainer.resume_mode",
        )
        if "critic" in self.roles:
            self.move("trainer.critic_warmup", "critic.warmup_iters")
        if get("trainer.device") != "cuda":  # which verl replaces by npu itself
            self.move("trainer.device", "device.kind")
        names = (f"{ACTOR}.megatron.dtype", f"{ACTOR}.fsdp_config.dtype",
                 f"{ACTOR}.fsdp_config.mixed_precision.param_dtype")  # fmt: skip
        key = next((key for key in names if get(key)), "")
        put("training.bf16", self.choose(key, PRECISIONS) if key else True, key)

    def _count_iterations(self) -> Any:
        given = self.given.sections["training"].get("train_iters")
        key, files = "trainer.total_training_steps", self.get("data.train_files") or []
        if (steps := self.get(key)) is not None or given is not None:
            return given if steps is None else steps
        batch, epochs = self.get("data.train_batch_size"), self.get("trainer.total_epochs")
        try:
            names = [files] if isinstance(files, str) else files
            rows = sum(self.count_rows(str(Path(name).expanduser())) for name in names)
        except ValueError as error:
            rule = f"is required, as rows cannot be counted: {error}"
            self.given.problems.append(Problem(key, rule, remedy=f"use {key}=NUMBER"))
            return 1  # a legal value, as the problem is reported
        if rows < batch:
            self.refuse(
                "data.train_batch_size", f"must be at most the {rows} rows of the files", "lower it"
            )
            return 1
        filtered = ", before long prompts are dropped" * bool(
            self.get("data.filter_overlong_prompts")
        )
        counted = f"{epochs} epochs of {rows} rows{filtered}, in whole batches of {batch}"
        self.given.note(counted, f"training.train_iters={rows // batch * epochs}")
        return rows // batch * epochs

    def _translate_algorithm(self) -> None:
        get, put = self.get, self.put
        name = self.choose("algorithm.adv_estimator", ESTIMATORS)
        if name == "grpo" and not get("algorithm.norm_adv_by_std_in_grpo"):
            name = "dr_grpo"
        put("training.stage", "ray_ppo" if "critic" in self.roles else "ray_grpo")
        put("algorithm.adv_estimator", name, "algorithm.adv_estimator")
        traits = TRAITS[name]
        if traits.reads_token_rewards:
            self.move("algorithm.gamma", "algorithm.gamma")
        if traits.needs_critic:
            self.move("algorithm.lam", "algorithm.lam")
        if traits.discounts:
            put("algorithm.score_position", "eos")
        loss = self.choose(f"{ACTOR}.policy_loss.loss_mode", {"vanilla": "ppo", "gspo": "gspo"})
        put("actor_rollout.policy_loss", loss, f"{ACTOR}.policy_loss.loss_mode")
        bounds = get(f"{ACTOR}.clip_ratio_low"), get(f"{ACTOR}.clip_ratio_high")
        if None in bounds:
            self.move(f"{ACTOR}.clip_ratio", "actor_rollout.clip_ratio")
        elif get(f"{ACTOR}.clip_ratio") not in bounds:
            self.note(
                "clip_ratio_low and clip_ratio_high replace it, as in verl", f"{ACTOR}.clip_ratio"
            )
        mode = f"{ACTOR}.loss_agg_mode"
        found = self.choose(mode, AGGREGATIONS, "use seq-mean-token-sum-norm for sums of responses")
        # In verl too gspo ignores the mode.
        put("algorithm.loss_normalizer", "sequence_means" if loss == "gspo" else found, mode)
        if "critic" in self.roles and get("critic.loss_agg_mode") != get(mode):
            self.refuse("critic.loss_agg_mode", f"must be that of {ref(mode)}", "remove it")
        longest = get("data.max_response_length")
        for key in (f"{ACTOR}.loss_scale_factor", "reward_model.max_resp_len"):
            if get(key) not in (None, longest):
                self.refuse(
                    key, f"must be {ref('data.max_response_length')}={longest}", "remove it"
                )
        kind = "algorithm.rollout_correction.rollout_is"
        if self.choose(kind, {None: False, "token": True}):
            self.move(f"{kind}_threshold", "algorithm.rollout_is_threshold")
        elif (cap := get(f"{ACTOR}.tis_imp_ratio_cap") or 0) > 0:
            put("algorithm.rollout_is_threshold", cap, f"{ACTOR}.tis_imp_ratio_cap")
        if get("algorithm.rollout_correction.bypass_mode"):
            put("algorithm.old_log_probs", "rollout", "algorithm.rollout_correction.bypass_mode")
        if get("algorithm.filter_groups.enable"):
            batches = "algorithm.filter_groups.max_num_gen_batches"
            put("algorithm.max_num_gen_batches", get(batches) or None, batches)

    def _translate_kl(self) -> None:
        put, control = self.put, "algorithm.kl_ctrl"
        switches = {
            "algorithm.use_kl_in_reward": ("reward", f"{control}.kl_coef", "algorithm.kl_penalty"),
            f"{ACTOR}.use_kl_loss": ("loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"),
        }
        chosen = [key for key in switches if self.get(key)]
        for key, (_, *keys) in switches.items():
            if key not in chosen:
                self.note(f"no effect with {key.rpartition('.')[2]}=false", *keys)
        if len(chosen) > 1:
            rule = "must not stand together: one KL term is in the reward or in the loss"
            self.refuse(chosen[0], f"and {ref(chosen[1])}=true {rule}", "keep one")
        if not chosen:
            put(f"{control}.kl_coef", 0.0, f"{ACTOR}.use_kl_loss")
            return
        home, coefficient, kind = switches[chosen[0]]
        put("algorithm.kl_in", home, chosen[0])
        self.move(coefficient, f"{control}.kl_coef")
        put("algorithm.kl_penalty", self.choose(kind, PENALTIES), kind)
        if home == "reward" and self.get(f"{control}.type") == "adaptive":
            for key in ("type", "horizon", "target_kl"):
                self.move(f"{control}.{key}", f"{control}.{key}")

    def _translate_trained(self, section: str, role: str) -> None:
        """Translate batches and the optimizer."""

        def get(key: str) -> Any:
            return self.get(f"{section}.{key}")

        def put(target: str, value: Any, key: str) -> None:
            self.put(f"{role}.{target}", value, f"{section}.{key}")

        mini, samples = "ppo_mini_batch_size", self.get(f"{ROLLOUT}.n")
        put(mini if section == ACTOR else "critic_mini_batch_size", get(mini) * samples, mini)
        if get("use_dynamic_bsz"):
            limit, split = "ppo_max_token_len_per_gpu", get("ulysses_sequence_parallel_size")
            put("max_tokens_per_micro_batch", get(limit) * split, limit)
        else:
            put(
                "micro_batch_size",
                get("ppo_micro_batch_size_per_gpu"),
                "ppo_micro_batch_size_per_gpu",
            )
        iterations = self.given.sections["training"].get("train_iters")
        if (steps := get("optim.lr_warmup_steps") or -1) > 0 and type(iterations) is int:
            share = steps / iterations
            if int(share * iterations) < steps:  # which a schedule would round down
                share = math.nextafter(share, 1.0)
            put("lr_warmup_fraction", min(share, 0.999), "optim.lr_warmup_steps")
        for number, beta in enumerate(get("optim.betas") or (), 1):
            put(f"adam_beta{number}", beta, "optim.betas")
        styles = ("optim.lr_decay_style", "optim.lr_scheduler_type", "optim.warmup_style")
        key = next((key for key in styles if get(key)), styles[0])
        put("lr_decay_style", get(key), key)
        if get(key) == "cosine" and get("optim.min_lr_ratio"):
            put("min_lr", get("optim.min_lr_ratio") * get("optim.lr"), "optim.min_lr_ratio")
        clip = "grad_clip" if f"{section}.grad_clip" in self.written else "optim.clip_grad"
        put("clip_grad", get(clip), clip)
        self.put(
            f"{role}.balance_by_length", self.get("trainer.balance_batch"), "trainer.balance_batch"
        )

    def _translate_engine(self, section: str, role: str) -> None:
        """Translate layout, recomputation and the reference's micro-batches."""
        model = MODEL if section == ACTOR else "critic.model"
        if section != REF and self.get(f"{model}.lora_rank"):
            for key in ("rank", "alpha"):
                self.move(f"{model}.lora_{key}", f"{role}.lora.{key}")
            for key in ("target_modules", "exclude_modules"):
                self.move(f"{model}.{key}", f"{role}.lora.{key}")
        if not self.megatron:
            if section != REF:  # the reference's is the actor's
                self.put(f"{role}.backend", "fsdp", f"{section}.strategy", "model_engine")
            if section != REF and self.get(f"{model}.enable_gradient_checkpointing"):
                self.put(f"{role}.recompute", "full", f"{model}.enable_gradient_checkpointing")
            if section == REF:
                split = f"{ACTOR}.ulysses_sequence_parallel_size"
                self.move(split, "ref.ulysses_sequence_parallel_size")
                self._translate_reference()
            return
        home = f"{section}.megatron"
        tp = self.get(f"{home}.tensor_model_parallel_size")
        if section == REF:  # as the actor, where nothing else is said
            for key, entry in TABLE["every_role"].items():
                if isinstance(entry, str) and f"{REF}.{key}" not in self.written:
                    self.move(f"{ACTOR}.{key}", f"ref.{entry}")
            tp = self.given.sections["ref"].get("tensor_model_parallel_size")
            self._translate_reference()
        if (tp or 1) > 1 and self.get(f"{home}.sequence_parallel") is not False:
            self.put(f"{role}.sequence_parallel", True, f"{home}.sequence_parallel")
        if section != REF and self.get(f"{home}.use_distributed_optimizer") is None:
            self.put(f"{role}.use_distributed_optimizer", True)
        recompute = f"{home}.override_transformer_config.recompute"
        if self.get(f"{recompute}_granularity") == "full":
            for key in ("method", "num_layers"):
                self.move(f"{recompute}_{key}", f"{role}.recompute_{key}")

    def _translate_reference(self) -> None:
        by_tokens = self.get(f"{REF}.log_prob_use_dynamic_bsz")
        name = (
            "log_prob_max_token_len_per_gpu" if by_tokens else "log_prob_micro_batch_size_per_gpu"
        )
        size, split = self.get(f"{REF}.{name}"), self.get(f"{ACTOR}.ulysses_sequence_parallel_size")
        target = "max_tokens_per_micro_batch" if by_tokens else "micro_batch_size"
        self.put(f"ref.{target}", size and size * (split if by_tokens else 1), f"{REF}.{name}")

    def _translate_sampling(self) -> None:
        servers = self.collect(f"{ROLLOUT}.engine_kwargs.vllm")
        engines = {
            None: None,
            "hf": "transformers",
            "vllm": "vllm",
            "sglang": "vllm",
            "trtllm": "vllm",
        }
        engine = self.choose(f"{ROLLOUT}.name", engines)
        self.put("rollout.engine", engine, f"{ROLLOUT}.name")
        if engine == "vllm":
            if self.get(f"{ROLLOUT}.name") != "vllm":
                self.note("vllm generates in its place", f"{ROLLOUT}.name")
            size = f"{ROLLOUT}.tensor_model_parallel_size"
            self.move(size, "rollout.vllm.tensor_parallel_size")
            for key in ("gpu_memory_utilization", "max_num_seqs", "enforce_eager"):
                self.move(f"{ROLLOUT}.{key}", f"rollout.vllm.{key}")
            asked = {key: value for key, value in servers.items() if asks(value)}
            self.put("rollout.vllm.extra_args", asked)
        for section, ours in ((ROLLOUT, "actor_rollout"), (f"{ROLLOUT}.val_kwargs", "validation")):
            if self.get(f"{section}.do_sample"):
                for key in ("temperature", "top_k", "top_p"):
                    value = self.get(f"{section}.{key}")
                    self.put(
                        f"{ours}.{key}",
                        max(0, value) if key == "top_k" else value,
                        f"{section}.{key}",
                    )
        if self.get(f"{ROLLOUT}.val_kwargs.do_sample"):
            self.move(f"{ROLLOUT}.val_kwargs.n", "validation.n_samples")

    def _translate_reward(self) -> None:
        get, put, model = self.get, self.put, "reward_model"
        put("reward.kind", "huggingface" if get(f"{model}.enable") else "rule", f"{model}.enable")
        if get(f"{model}.enable"):
            put("reward.load", find_model(get(f"{model}.model.path")), f"{model}.model.path")
            size = f"{model}.micro_batch_size_per_gpu"
            self.move(size, "reward.micro_batch_size")
            if get(f"{model}.enable_resource_pool"):
                sizes = [get(f"{model}.n_gpus_per_node")] * get(f"{model}.nnodes")
                put("resource_pool.reward_pool", sizes, f"{model}.n_gpus_per_node")
                roles = {**dict.fromkeys(("actor_rollout", "ref", *self.roles.values()), POOL)}
                for role, pool in {**roles, "reward": "reward_pool"}.items():
                    put(f"placement.{role}", pool, f"{model}.enable_resource_pool")
        own = "custom_reward_function"
        if get(f"{own}.path"):
            arguments = self.collect(f"{own}.reward_kwargs")
            function = {
                "function": f"{get(f'{own}.path')}:{get(f'{own}.name')}",
                "arguments": arguments,
            }
            put("reward.function", function if arguments else function["function"], f"{own}.path")
        if get(f"{model}.overlong_buffer.enable"):
            for key, target in (("len", "buffer_len"), ("penalty_factor", "penalty_factor")):
                source = f"{model}.overlong_buffer.{key}"
                self.move(source, f"algorithm.overlong_{target}")


def find_model(path: Any) -> Any:
    """Return a model's folder: the path, or the folder of a name in this host's Hugging Face cache.

    A name that is not there is returned as it is.
    """
    if not isinstance(path, str) or path.count("/") != 1 or Path(path).expanduser().exists():
        return path
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(path, "config.json")
    except ValueError:  # no name of a model
        return path
    return str(Path(found).parent) if isinstance(found, str) else path
