"""Translate verl's YAML (`ppo_trainer.yaml`, 0.5 to 0.9) to our keys, before anything is validated.

`verl_keys.yaml` lists verl's keys, and says what becomes of most; this module translates the rest.
What a key means in verl, and its default there, stays: where units differ, the value is converted.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.estimator_traits import TRAITS
from mindspeed_rlxf.config.keys import Given
from mindspeed_rlxf.config.problems import Problem, ref
from mindspeed_rlxf.config.verl_tree import ACTOR, MODEL, REF, RENAMED, ROLLOUT, VerlTree, asks

POOL, STEPS = "global_pool", "trainer.total_training_steps"


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
    """One pass over the sections of verl's tree; of several values for a key, the first counts."""

    def __init__(self, tree: Mapping[str, Any], count_rows: Callable[[str], int]) -> None:
        super().__init__(tree)
        self.count_rows = count_rows
        self._translate_data()
        self._translate_run()
        self._translate_algorithm()
        self._translate_kl()
        for section, role in {**self.roles, REF: "ref"}.items():
            self._translate_engine(section, role)
        self._translate_rollout()
        self._translate_reward()
        self.copy_equal()
        self.sort_others()

    def _translate_data(self) -> None:
        get, put = self.get, self.put
        longest = "data.max_response_length"
        self.move("data.max_prompt_length")
        self.move(longest)
        put("training.seq_length", get("data.max_prompt_length") + get(longest), longest)
        for key in (f"{ACTOR}.loss_scale_factor", "reward_model.max_resp_len"):
            if get(key) not in (None, get(longest)):
                self.refuse(key, f"must be {ref(longest)}={get(longest)}", "remove it")
        put("data.chat_template_kwargs", self.collect("data.apply_chat_template_kwargs"))
        put("training.model", "auto")
        models = {f"{MODEL}.path": "actor_rollout.load"}
        models |= {"critic.model.path": "critic.load"} if "critic" in self.roles else {}
        models |= {"reward_model.model.path": "reward.load"} if get("reward_model.enable") else {}
        for key, target in models.items():
            if not isinstance(get(key), str):
                self.given.problems.append(Problem(key, "is required", remedy="name a folder"))
            put(target, find_model(get(key)), key)
        for key in ("data.tokenizer", f"{MODEL}.tokenizer_path", f"{MODEL}.path"):
            put("training.tokenizer_name_or_path", find_model(get(key)), key)

    def _translate_run(self) -> None:
        get, put = self.get, self.put
        put("training.train_iters", self._count_iterations(), STEPS)
        names = _as_list(get("trainer.logger"))
        put("logging.trackers", ["jsonl", *(n for n in names if n != "console")], "trainer.logger")
        if not self.given.sections["resource_pool"]:
            self._make_pool(POOL, "trainer")
        put("validation.interval", max(0, get("trainer.test_freq")), "trainer.test_freq")
        put("validation.after", get("trainer.test_freq") > 0)

    def _make_pool(self, name: str, section: str) -> None:
        sizes = [self.get(f"{section}.n_gpus_per_node")] * self.get(f"{section}.nnodes")
        self.put(f"resource_pool.{name}", sizes, f"{section}.n_gpus_per_node")

    def _count_iterations(self) -> Any:
        if STEPS in self.written or "train_iters" in self.given.sections["training"]:
            return self.get(STEPS)
        batch, epochs = self.get("data.train_batch_size"), self.get("trainer.total_epochs")
        try:
            files = [Path(name).expanduser() for name in _as_list(self.get("data.train_files"))]
            rows = sum(self.count_rows(str(file)) for file in files)
        except (ValueError, TypeError) as error:
            rule = f"is required, as rows cannot be counted: {error}"
            self.given.problems.append(Problem(STEPS, rule, remedy=f"use {STEPS}=NUMBER"))
            return 1  # a legal value, as the problem is reported
        if batch > rows:
            rule = f"must be at most the {rows} rows of the files"
            self.refuse("data.train_batch_size", rule, "lower it")
        steps = rows // max(1, batch) * epochs
        counted = f"{epochs} epochs of {rows} rows, long prompts too, in whole batches of {batch}"
        self.given.note(counted, f"training.train_iters={steps}")
        return steps

    def _translate_algorithm(self) -> None:
        get, put = self.get, self.put
        put("training.stage", "ray_ppo" if "critic" in self.roles else "ray_grpo")
        words = RENAMED["algorithm.adv_estimator"].words
        name = words.get(str(get("algorithm.adv_estimator")), "gae")
        if name == "grpo" and get("algorithm.norm_adv_by_std_in_grpo") is False:
            put("algorithm.adv_estimator", "dr_grpo", "algorithm.norm_adv_by_std_in_grpo")
        if TRAITS[name].reads_token_rewards:
            self.move("algorithm.gamma")
        if TRAITS[name].needs_critic:
            self.move("algorithm.lam")
        if TRAITS[name].discounts:
            put("algorithm.score_position", "eos")
        mode, clip = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.clip_ratio"
        if get(f"{ACTOR}.policy_loss.loss_mode") == "gspo":  # which ignores the mode in verl too
            put("algorithm.loss_normalizer", "sequence_means", mode)
        if "critic" in self.roles and get("critic.loss_agg_mode") != get(mode):
            self.refuse("critic.loss_agg_mode", f"must be that of {ref(mode)}", "remove it")
        bounds = get(f"{clip}_low"), get(f"{clip}_high")
        if None in bounds:
            self.move(clip)
        elif get(clip) not in bounds:
            self.note("clip_ratio_low and clip_ratio_high replace it, as in verl", clip)

    def _translate_kl(self) -> None:
        put, control = self.put, "algorithm.kl_ctrl"
        switches = {
            "algorithm.use_kl_in_reward": ("reward", f"{control}.kl_coef"),
            f"{ACTOR}.use_kl_loss": ("loss", f"{ACTOR}.kl_loss_coef"),
        }
        chosen = [key for key in switches if self.get(key)]
        for key, (_, coefficient) in switches.items():
            if key not in chosen:
                self.note(f"no effect with {key.rpartition('.')[2]}=false", coefficient)
        if len(chosen) > 1:
            rule = "must not stand together: one KL term is in the reward or in the loss"
            self.refuse(chosen[0], f"and {ref(chosen[1])}=true {rule}", "keep one")
        if not chosen:
            put(f"{control}.kl_coef", 0.0, f"{ACTOR}.use_kl_loss")
            return
        home, coefficient = switches[chosen[0]]
        put("algorithm.kl_in", home, chosen[0])
        self.move(coefficient)
        if home == "reward" and self.get(f"{control}.type") == "adaptive":
            self.move(f"{control}.horizon")
            self.move(f"{control}.target_kl")

    def _translate_engine(self, section: str, role: str) -> None:
        """Translate batches, the optimizer and the layout of the actor, critic or reference."""

        def get(key: str) -> Any:
            return self.get(f"{section}.{key}")

        def put(target: str, value: Any, key: str) -> None:
            self.put(f"{role}.{target}", value, f"{section}.{key}")

        passes = "log_prob" if section == REF else "ppo"
        if get("log_prob_use_dynamic_bsz" if section == REF else "use_dynamic_bsz"):
            limit = f"{passes}_max_token_len_per_gpu"
            split = get("ulysses_sequence_parallel_size")
            put("max_tokens_per_micro_batch", get(limit) * split, limit)
        else:
            self.move(f"{section}.{passes}_micro_batch_size_per_gpu")
        if self.megatron and get("megatron.tensor_model_parallel_size") > 1:
            self.move(f"{section}.megatron.sequence_parallel")
        if section != REF:
            self._translate_training(section, get, put)

    def _translate_training(
        self, section: str, get: Callable[[str], Any], put: Callable[[str, Any, str], None]
    ) -> None:
        mini, is_actor = "ppo_mini_batch_size", section == ACTOR
        samples = get(mini) * self.get(f"{ROLLOUT}.n")
        put(mini if is_actor else "critic_mini_batch_size", samples, mini)
        iterations = self.given.sections["training"].get("train_iters")
        steps = -1 if get("optim.lr_warmup_steps") is None else get("optim.lr_warmup_steps")
        if steps >= self.megatron and type(iterations) is int:  # FSDP: 0 beats the ratio too
            share = steps / max(1, iterations)
            if int(share * iterations) < steps:  # which a schedule would round down
                share = math.nextafter(share, 1.0)
            put("lr_warmup_fraction", min(share, 0.999), "optim.lr_warmup_steps")
        for number, beta in enumerate(get("optim.betas"), 1):
            put(f"adam_beta{number}", beta, "optim.betas")
        if "cosine" in (get("optim.lr_scheduler_type"), get("optim.warmup_style")):
            lowest = (get("optim.min_lr_ratio") or 0) * get("optim.lr")
            put("min_lr", lowest or None, "optim.min_lr_ratio")
        role, balance = self.roles[section], "trainer.balance_batch"
        self.put(f"{role}.balance_by_length", self.get(balance), balance)
        recompute = f"{MODEL if is_actor else 'critic.model'}.enable_gradient_checkpointing"
        if not self.megatron:
            self.put(f"{role}.backend", "fsdp", f"{section}.strategy", "model_engine")
            self.put(f"{role}.recompute", "full" if self.get(recompute) else None, recompute)

    def _translate_rollout(self) -> None:
        servers, name = self.collect(f"{ROLLOUT}.engine_kwargs.vllm"), self.get(f"{ROLLOUT}.name")
        if RENAMED[f"{ROLLOUT}.name"].words.get(str(name)) == "vllm":
            asked = {key: value for key, value in servers.items() if asks(value)}
            self.put("rollout.vllm.extra_args", asked)
            if name != "vllm":
                self.note("vllm generates in its place", f"{ROLLOUT}.name")

    def _translate_reward(self) -> None:
        get, put, model = self.get, self.put, "reward_model"
        if get(f"{model}.enable") and get(f"{model}.enable_resource_pool"):
            self._make_pool("reward_pool", model)
            pools = dict.fromkeys(("actor_rollout", "ref", *self.roles.values()), POOL)
            for role, pool in {**pools, "reward": "reward_pool"}.items():
                put(f"placement.{role}", pool, f"{model}.enable_resource_pool")
        own = "custom_reward_function"
        if get(f"{own}.path"):
            arguments = self.collect(f"{own}.reward_kwargs")
            function = f"{get(f'{own}.path')}:{get(f'{own}.name')}"
            whole = {"function": function, "arguments": arguments}
            put("reward.function", whole if arguments else function, f"{own}.path")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


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
