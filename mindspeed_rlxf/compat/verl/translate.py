"""Translate verl's YAML (`ppo_trainer.yaml`, 0.5 to 0.9) to our keys, before anything is validated.

`keys.yaml` lists verl's keys, and says what becomes of most; this file translates the rest.
What a key means in verl, and its default there, stays: where units differ, the value is converted.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from mindspeed_rlxf.compat.verl.agents import convert_agents
from mindspeed_rlxf.compat.verl.asynchronous import (
    BYPASS,
    UPDATES,
    convert_old_log_probs,
    convert_staleness,
    find_batch_size,
    is_fully_asynchronous,
)
from mindspeed_rlxf.compat.verl.files import find_model
from mindspeed_rlxf.compat.verl.table import ACTOR, LEGACY, MODELS, RENAMED, ROLLOUT, TABLE
from mindspeed_rlxf.compat.verl.translation import Translation
from mindspeed_rlxf.config.hf_config import read_hf_config
from mindspeed_rlxf.config.problems import Problem, ref
from mindspeed_rlxf.config.raw_config import RawConfig

POOL, OTHERS = "global_pool", "other_roles"
STEPS, BATCH = "trainer.total_training_steps", "data.train_batch_size"
REFERENCE = "actor_rollout_ref.ref"


def translate_verl(tree: Mapping[str, Any], count_rows: Callable[[str], int]) -> RawConfig:
    """Return verl's tree in our keys, with the problems and notes found on the way.

    Args:
        tree: verl's keys, as read; interpolations are resolved here. Sections that only we have
            are kept, and beat the translation.
        count_rows: Returns the number of rows of a data file; may raise UserError.

    Raises:
        ConfigError: An interpolation cannot be resolved.
    """
    keys = Translation(tree)
    _convert(keys, count_rows)
    for key in RENAMED:
        keys.move(key)
    keys.sort_others()
    return keys.raw


def _convert(keys: Translation, count_rows: Callable[[str], int]) -> None:
    """Set our keys that depend on several of verl's, or on the data."""
    get, put, longest = keys.get, keys.put, "data.max_response_length"
    put("training.stage", "ray_ppo" if "critic" in keys.roles else "ray_grpo")
    put("training.model", "auto")
    put("training.seq_length", get("data.max_prompt_length") + get(longest))
    keys.raw.renamed["training.seq_length"] = f"data.max_prompt_length + {longest}"
    put("training.train_iters", _count_iterations(keys, count_rows), STEPS)
    names = [name for name in _as_list(get("trainer.logger")) if name != "console"]
    put("logging.trackers", ["jsonl", *names], "trainer.logger")
    _convert_batches(keys)
    convert_old_log_probs(keys)
    _convert_older_weights(keys)
    _convert_rejection(keys)
    _convert_lone_responses(keys)
    loss = f"{ACTOR}.policy_loss.loss_mode"
    if get(BYPASS) and get(loss) != "vanilla":
        rule = f"and {ref(BYPASS)}=true leave open the loss: from verl 0.7 on it is vanilla"
        keys.refuse(loss, rule, "use vanilla")
    if not keys.raw.sections["resource_pool"]:
        _make_pool(keys, POOL, "trainer")
        _split_pool(keys)
    convert_staleness(keys)
    convert_agents(keys)
    _fit_sizes(keys)
    model, own = "reward_model", "custom_reward_function"
    if get(f"{model}.enable") and get(f"{model}.enable_resource_pool"):
        _make_pool(keys, "reward_pool", model)
        pools = dict.fromkeys(("actor_rollout", "ref", *keys.roles.values()), POOL)
        for role, pool in {**pools, "reward": "reward_pool"}.items():
            put(f"placement.{role}", pool, f"{model}.enable_resource_pool")
    if get(f"{own}.path"):
        function = f"{get(f'{own}.path')}:{get(f'{own}.name')}"
        put("reward.function.function", function, f"{own}.path")
        if get(f"{model}.enable"):
            _choose_scorer(keys, f"{model}.enable", f"{own}.path")
    elif not get(f"{model}.enable"):
        reward = keys.raw.sections["reward"]
        reward["rules"] = {**TABLE["rules"], **(reward.get("rules") or {})}
    both = "algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss"
    if all(map(get, both)):
        rule = "must not stand together: one KL term is in the reward or in the loss"
        keys.refuse(both[0], f"and {ref(both[1])}=true {rule}", "keep one")
    if get(f"{ROLLOUT}.name") in ("sglang", "trtllm"):
        keys.note("vllm generates in its place", f"{ROLLOUT}.name")
    for section, role in keys.roles.items():
        _convert_optimizer(keys, section, role)
        _convert_chunks(keys, section, role)


def _convert_batches(keys: Translation) -> None:
    """Set the number of prompts of an iteration, and the limit of dynamic sampling."""
    get, generated = keys.get, "data.gen_batch_size"
    if is_fully_asynchronous(keys):
        keys.put("training.global_batch_size", find_batch_size(keys), UPDATES)
        keys.note("not read: an iteration is what is trained between two synchronisations", BATCH)
    if get("algorithm.filter_groups.enable"):
        if not (get("algorithm.filter_groups.max_num_gen_batches") or 0) > 0:
            keys.raw.sections["algorithm"].setdefault("max_num_gen_batches", None)
        if get(generated) != get("data.train_batch_size"):
            keys.note("the filter draws the prompts that are missing, batch by batch", generated)
    elif get(generated) is not None and not is_fully_asynchronous(keys):
        keys.put("training.global_batch_size", get(generated), generated)


def _convert_older_weights(keys: Translation) -> None:
    """Convert the importance weights of verl 0.6.0, whose keys stand in `algorithm`."""
    weighs, veto = "algorithm.rollout_is", "algorithm.rollout_is_veto_threshold"
    if weighs not in keys.written:
        return
    algorithm = keys.raw.sections["algorithm"]
    if not keys.get(weighs) or algorithm.get("rollout_is_threshold") is None:
        algorithm.pop("rollout_is_threshold", None)  # then verl only measures them
        return
    for key, supported in (("rollout_is_level", "token"), ("rollout_is_mode", "truncate")):
        if keys.get(f"algorithm.{key}") not in (None, supported):
            keys.refuse(f"algorithm.{key}", f"must be {supported}", "change it")
    if keys.get(veto) is not None:
        keys.values["algorithm.rollout_correction.rollout_token_veto_threshold"] = keys.get(veto)
        keys.note("in verl these responses count in the mean of the loss", veto)


def _convert_rejection(keys: Translation) -> None:
    """Set the bounds outside of which tokens and responses are rejected."""
    section = "algorithm.rollout_correction"
    statistics, limits = f"{section}.rollout_rs", f"{section}.rollout_rs_threshold"
    names = [name.strip() for name in str(keys.get(statistics) or "").split(",") if name.strip()]
    veto = keys.get(f"{section}.rollout_token_veto_threshold")
    if not names and veto is None:
        return
    if keys.get(BYPASS):
        rule = f"needs log-probs that are computed again, with {ref(BYPASS)}=false"
        keys.refuse(statistics, rule, "change that")
        return
    texts = [text.strip() for text in str(keys.get(limits)).split(",")]
    if len(texts) == 1:
        texts = texts * len(names)
    bounds = {}
    try:
        for name, text in zip(names, texts, strict=True):
            statistic = OLDER_REJECTIONS.get(name, name)
            numbers = [float(number) for number in text.split("_")]
            if statistic.endswith("k1") and len(numbers) == 1:
                least = keys.get(f"{limits}_lower")  # of versions whose ratio is training / rollout
                numbers = [1 / numbers[0], numbers[0] if least is None else 1 / float(least)]
            bounds[statistic] = numbers
        if veto is not None:
            bounds["seq_max_k1"] = [1e-9, 1 / float(veto)]
    except (ValueError, ZeroDivisionError):
        keys.refuse(limits, f"must have a number for each of {ref(statistics)}", "correct it")
        return
    keys.put("algorithm.rollout_rejection", bounds, statistics)
    if "critic" in keys.roles or str(keys.get("algorithm.adv_estimator")).startswith("reinforce"):
        meaning = "advantages are whitened, and the critic is trained, with rejected tokens too"
        keys.note(meaning, statistics)


def _convert_lone_responses(keys: Translation) -> None:
    """Convert estimators that compare responses for one response to a prompt.

    verl's baseline is then 0 and its standard deviation 1, so the advantage of each token is the
    score. A KL penalty in the reward would be summed over other tokens.
    """
    estimator = "algorithm.adv_estimator"
    whitened = {"grpo": "none", "rloo": "none", "opo": "none"}
    whitened["reinforce_plus_plus_baseline"] = "batch"
    tokens = whitened.get(str(keys.get(estimator)))
    in_reward = keys.get("algorithm.use_kl_in_reward")
    if keys.get(f"{ROLLOUT}.n") != 1 or tokens is None or in_reward:
        return
    keys.put(estimator, "reinforce_plus_plus", estimator)
    keys.put("algorithm.advantage_whiten", tokens, estimator)
    keys.note("the advantage is the score, as one response has no others to compare", estimator)


OLDER_REJECTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Statistic in verl 0.6 and 0.7 -> its name since."""


def _choose_scorer(keys: Translation, model: str, function: str) -> None:
    """Let the function score beside a reward model, as in verl 0.7 and later."""
    reward = keys.raw.sections["reward"]
    if keys.is_recent or keys.get("reward_model.use_reward_loop"):
        reward.setdefault("model_weight", 0.0)
        keys.note("the function alone scores; reward.model_weight=1 adds the model's", model)
    elif "model_weight" not in reward:
        rule = f"and {ref(function)} leave open which scores: up to verl 0.6 the model does, "
        remedy = f"remove {function}, or add reward.model_weight=0"
        keys.refuse(model, f"{rule}from 0.7 the function", remedy)


def _convert_chunks(keys: Translation, section: str, role: str) -> None:
    """Convert the number of chunks of a pipeline stage to their layers."""
    chunks = f"{section}.megatron.virtual_pipeline_model_parallel_size"
    stages = keys.get(f"{section}.megatron.pipeline_model_parallel_size") or 1
    number, path = keys.get(chunks), keys.get(f"{MODELS[section]}.path")
    if keys.idle == "megatron" or type(number) is not int or number < 2:
        return
    try:
        layers = read_hf_config(Path(str(find_model(path))).expanduser())["num_hidden_layers"]
    except (ValueError, KeyError) as error:
        keys.refuse(chunks, f"needs the number of layers of {path}: {error}", "correct it")
        return
    keys.put(f"{role}.num_layers_per_virtual_pipeline_stage", layers // (stages * number), chunks)


def _make_pool(keys: Translation, name: str, section: str) -> None:
    sizes = [keys.get(f"{section}.n_gpus_per_node")] * keys.get(f"{section}.nnodes")
    keys.put(f"resource_pool.{name}", sizes, f"{section}.n_gpus_per_node")


def _split_pool(keys: Translation) -> None:
    """Add the devices that only generate, as in verl's one-step-off trainer."""
    pool = keys.raw.sections["resource_pool"]
    for section in ("rollout", ROLLOUT):
        nodes, per_node = keys.get(f"{section}.nnodes"), keys.get(f"{section}.n_gpus_per_node")
        if not nodes or POOL not in pool:
            continue
        trains, generates = sum(pool[POOL]), nodes * (per_node or 8)
        pool[POOL] = [*pool[POOL], *[generates // nodes] * nodes]
        if keys.idle == "megatron":
            keys.note("with FSDP all devices train and generate", f"{section}.nnodes")
            for trained, role in keys.roles.items():
                _fit_micro_batches(keys, trained, role, trains + generates)
            continue
        fitting = _fit_replicas(keys, trains)
        generates += trains - fitting
        generates -= _place_others(keys, generates, section)
        keys.put("actor_rollout.num_gpus_for_train", fitting, "trainer.n_gpus_per_node")
        keys.put("actor_rollout.num_gpus_for_infer", generates, f"{section}.nnodes")


def _fit_replicas(keys: Translation, devices: int) -> int:
    """Return the training devices whose replicas divide the prompts; the others generate.

    verl divides the samples, so responses to one prompt are on several ranks.
    """
    size = _model_size(keys, ACTOR)
    prompts = find_batch_size(keys)
    replicas = devices // size
    while replicas > 1 and prompts % replicas:
        replicas -= 1
    if replicas < devices // size:
        meaning = f"{replicas * size} train, in replicas that divide {prompts} prompts"
        keys.note(meaning, "trainer.n_gpus_per_node")
        return replicas * size
    return devices


def _place_others(keys: Translation, generates: int, section: str) -> int:
    """Move devices from generation to a pool of the roles that do not fit a split pool.

    In verl they are on the training devices. Return the number; 0 if there are too few.
    """
    get, pool = keys.get, keys.raw.sections["resource_pool"]
    in_loss, in_reward = get(f"{ACTOR}.use_kl_loss"), get("algorithm.use_kl_in_reward")
    coefficient = get(f"{ACTOR}.kl_loss_coef") if in_loss else get("algorithm.kl_ctrl.kl_coef")
    adapters = get("actor_rollout_ref.model.lora_rank")
    others = {section: role for section, role in keys.roles.items() if section != ACTOR}
    if (in_loss or in_reward) and coefficient and not adapters:
        others[REFERENCE] = "ref"
    placed = [*others.values()]
    if not get("reward_model.enable_resource_pool"):
        placed.append("reward")
    if not placed:
        return 0
    experts = [get(f"{role}.megatron.expert_model_parallel_size") or 1 for role in others]
    server = get(f"{ROLLOUT}.tensor_model_parallel_size") or 1
    if get(f"{ROLLOUT}.name") is None:
        server = get(f"{ACTOR}.megatron.tensor_model_parallel_size") or 1
    size = math.lcm(*(_model_size(keys, role) for role in others), *experts, server)
    per_node = pool[POOL][-1]
    if size >= generates or (size > per_node and size % per_node):
        return 0
    nodes, rest = divmod(size, per_node)
    kept = pool[POOL][: len(pool[POOL]) - nodes]
    if rest:
        kept[-1] -= rest
    pool[POOL], pool[OTHERS] = kept, [per_node] * nodes or [rest]
    for role in ("actor_rollout", *placed):
        keys.put(f"placement.{role}", POOL if role == "actor_rollout" else OTHERS)
    meaning = f"{size} of these devices run {', '.join(placed)} instead, in a pool of their own"
    keys.note(meaning, f"{section}.nnodes")
    return size


def _model_size(keys: Translation, section: str) -> int:
    """Return the devices of a replica of a role with Megatron."""
    kinds = ("tensor_model", "pipeline_model", "context")
    return math.prod(keys.get(f"{section}.megatron.{kind}_parallel_size") or 1 for kind in kinds)


def _fit_sizes(keys: Translation) -> None:
    """Lower sizes that only place things, where ours are bound and verl's are not."""
    per_node, servers = keys.get("trainer.n_gpus_per_node"), f"{ROLLOUT}.tensor_model_parallel_size"
    asked, name = keys.get(servers), keys.get(f"{ROLLOUT}.name")
    if name in ("vllm", "sglang", "trtllm") and type(asked) is int and asked > per_node:
        keys.put("rollout.vllm.tensor_parallel_size", math.gcd(asked, per_node), servers)
        keys.note(f"{math.gcd(asked, per_node)}, as a server is on one node", servers)
    pool = keys.raw.sections["resource_pool"]
    trains = keys.raw.sections["actor_rollout"].get("num_gpus_for_train")
    for section, role in {**keys.roles, REFERENCE: "ref"}.items():
        devices = sum(pool.get(POOL, [])) if trains is None else trains
        if section != ACTOR and OTHERS in pool:
            devices = sum(pool[OTHERS])
        experts = f"{section}.megatron.expert_model_parallel_size"
        asked, replicas = keys.get(experts), devices // _model_size(keys, section)
        if keys.idle == "megatron" or type(asked) is not int or not replicas:
            continue
        fitting = math.gcd(asked, replicas)
        if fitting != asked:
            keys.raw.sections[role].setdefault("expert_model_parallel_size", fitting)
            keys.note(f"{fitting}, which divides the data-parallel size {replicas}", experts)


def _fit_micro_batches(keys: Translation, section: str, role: str, devices: int) -> None:
    """Divide the mini-batch of a device, which has fewer samples than in verl, evenly."""
    size = f"{section}.ppo_micro_batch_size_per_gpu"
    samples = keys.get(f"{section}.ppo_mini_batch_size") * keys.get(f"{ROLLOUT}.n")
    replicas = devices // keys.get(f"{section}.ulysses_sequence_parallel_size")
    batch_size = keys.get(size)
    if keys.get(f"{section}.use_dynamic_bsz") or type(batch_size) is not int or samples % replicas:
        return
    fitting = math.gcd(batch_size, samples // replicas)
    if fitting != batch_size:
        keys.put(f"{role}.micro_batch_size", fitting, size)
        keys.note(f"{fitting}, which divides the samples of more devices", size)


def _count_iterations(keys: Translation, count_rows: Callable[[str], int]) -> Any:
    if keys.get(STEPS) is not None or "train_iters" in keys.raw.sections["training"]:
        return keys.get(STEPS)
    batch = find_batch_size(keys)
    epochs = keys.get("rollout.total_epochs") or keys.get("trainer.total_epochs")
    try:
        files = [Path(name).expanduser() for name in _as_list(keys.get("data.train_files"))]
        rows = sum(count_rows(str(file)) for file in files)
    except (ValueError, TypeError) as error:
        rule = f"is required, as rows cannot be counted: {error}"
        keys.raw.problems.append(Problem(STEPS, rule, remedy=f"use {STEPS}=NUMBER"))
        return 1  # a legal value, as the problem is reported
    if batch > rows:
        rule = f"must be at most the {rows} rows of the files"
        keys.refuse(UPDATES if is_fully_asynchronous(keys) else BATCH, rule, "lower it")
    steps = rows // max(1, batch) * epochs
    samples = keys.get("rollout.total_rollout_steps")
    if samples is not None:
        steps = min(steps, samples // max(1, batch))
    counted = f"{epochs} epochs of {rows} rows, long prompts too, in whole batches of {batch}"
    keys.raw.note(counted, f"training.train_iters={steps}")
    return steps


def _convert_optimizer(keys: Translation, section: str, role: str) -> None:
    betas, warmup = f"{section}.optim.betas", f"{section}.optim.lr_warmup_steps"
    ratio, waits = f"{section}.optim.lr_warmup_steps_ratio", "trainer.critic_warmup"
    for number, beta in enumerate(keys.get(betas), 1):
        keys.put(f"{role}.adam_beta{number}", beta, betas)
    micro, by_device = (
        f"{section}.ppo_micro_batch_size",
        f"{section}.ppo_micro_batch_size_per_gpu",
    )
    if keys.get(micro) and not keys.get(by_device) and not keys.get(f"{section}.use_dynamic_bsz"):
        devices = sum(keys.raw.sections["resource_pool"].get(POOL, [1]))
        keys.put(f"{role}.micro_batch_size", max(1, keys.get(micro) // devices), micro)
    clips = [f"{section}.optim.clip_grad", f"{section}.grad_clip"]
    if keys.idle == "megatron" and keys.get("trainer.use_legacy_worker_impl") in LEGACY:
        clips.reverse()
    for clip in clips:
        keys.put(f"{role}.clip_grad", keys.get(clip), clip)
    iterations = keys.raw.sections["training"].get("train_iters")
    steps = -1 if keys.get(warmup) is None else keys.get(warmup)
    least = 1 if keys.idle == "fsdp_config" else 0  # with FSDP 0 beats the ratio too
    if section == ACTOR and "critic" in keys.roles and type(iterations) is int:
        if steps < least and keys.get(waits) > 0 and keys.get(ratio):
            steps, warmup = int(keys.get(ratio) * iterations), ratio  # of all iterations
        iterations -= keys.get(waits)
    if steps >= least and type(iterations) is int:
        share = steps / max(1, iterations)
        if int(share * iterations) < steps:  # which a schedule would round down
            share = math.nextafter(share, 1.0)
        keys.put(f"{role}.lr_warmup_fraction", min(share, 0.999), warmup)


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, str) and value.startswith("["):  # a list in quotes
        value = yaml.safe_load(value)
    return value if isinstance(value, list) else [] if value is None else [value]
