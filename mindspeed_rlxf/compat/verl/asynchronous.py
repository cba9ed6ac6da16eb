"""verl's asynchronous trainers: one step off-policy, fully asynchronous, and two modes of V1.

All become `rollout.max_staleness`. There, a share of the samples or a number of batches is ahead,
and samples may be dropped for their age. Here, each token is at most so many updates old, and no
sample is dropped.
"""

import math

from mindspeed_rlxf.compat.verl.table import ACTOR, ROLLOUT
from mindspeed_rlxf.compat.verl.translation import Translation

FULLY = "async_training"
SHARE, PARTIAL = f"{FULLY}.staleness_threshold", f"{FULLY}.partial_rollout"
UPDATES, FETCHED = f"{FULLY}.trigger_parameter_sync_step", f"{FULLY}.require_batches"
MODE = "trainer.v1.trainer_mode"
BYPASS = "algorithm.rollout_correction.bypass_mode"
WHOLE_RESPONSES = ("hf", "transformers")
"""Engines whose responses cannot pause for new weights."""
MODES = ("sync", "colocate_async", "separate_async")


def is_fully_asynchronous(keys: Translation) -> bool:
    """Return whether the file is of verl's fully asynchronous trainer."""
    return any(key.startswith(f"{FULLY}.") for key in keys.written)


def find_batch_size(keys: Translation) -> int:
    """Return the prompts of an iteration.

    In a fully asynchronous run, which does not read `data.train_batch_size`, those between two
    times at which generation gets new weights.
    """
    get = keys.get
    if is_fully_asynchronous(keys):
        return int(get(UPDATES) * get(FETCHED) * get(f"{ACTOR}.ppo_mini_batch_size"))
    size = get("data.train_batch_size")
    if not get("algorithm.filter_groups.enable"):
        size = get("data.gen_batch_size") or size
    return int(size)


def convert_old_log_probs(keys: Translation) -> None:
    """Set verl's default of `bypass_mode`, which its asynchronous trainers have on.

    In verl 0.6.1 and 0.7.0 the fully asynchronous one has keys of its own in its place.
    """
    get, written = keys.get, keys.written
    recomputes, reads = f"{FULLY}.compute_prox_log_prob", f"{FULLY}.use_rollout_log_probs"
    if written.get(BYPASS) is not None:
        return
    if is_fully_asynchronous(keys):
        bypasses = get(reads) and not get(recomputes)
        meaning = "log-probs of generation are the old ones, as verl's trainer has it"
    else:
        bypasses = bool(get("rollout.nnodes"))
        meaning = "log-probs of generation are the old ones, as in verl 0.7 and later"
    if bypasses:
        keys.values[BYPASS] = True
        keys.raw.note(meaning, f"{BYPASS}=true")


def convert_staleness(keys: Translation) -> None:
    """Set `rollout.max_staleness`; comes after the pools, on which it depends."""
    source, staleness = _find_staleness(keys)
    if staleness == 0:
        return
    most, why = _largest_staleness(keys)
    if most is not None and staleness > most:
        keys.note(f"{why}: rollout.max_staleness={most}", source)
        staleness = most
    else:
        keys.note(
            f"tokens are at most {staleness} updates old, and none is dropped for its age "
            f"(rollout.max_staleness={staleness})",
            source,
        )
    keys.put("rollout.max_staleness", staleness, source)
    corrections = (
        BYPASS,
        "algorithm.rollout_correction.rollout_is",
        f"{ACTOR}.tis_imp_ratio_cap",
    )
    if staleness and not any(map(keys.get, corrections)):
        keys.note("algorithm.rollout_is_threshold=2.0 corrects for older weights", source)


def _find_staleness(keys: Translation) -> tuple[str, int]:
    """Return verl's key that says how far generation runs ahead, and how many updates that are."""
    get, mode = keys.get, keys.get(MODE)
    if is_fully_asynchronous(keys):
        # 1 + share iterations' worth are generated between two updates. What is begun, and is
        # interrupted by the update, is beside a whole batch.
        batches = math.ceil(get(SHARE) or 0)
        return SHARE, batches + 1 if batches and get(PARTIAL) else batches
    if mode not in (None, *MODES):
        keys.refuse(MODE, f"must be one of {', '.join(MODES)}", "use one of them")
    elif mode in MODES[1:] and get("trainer.use_v1") is not False:
        batches = get(f"trainer.v1.{mode}.num_warmup_batches")
        return MODE, max(1, min(batches, get("trainer.v1.sampler.max_off_policy_threshold")))
    elif get("rollout.nnodes"):
        return "rollout.nnodes", 1
    return MODE, 0


def _largest_staleness(keys: Translation) -> tuple[int | None, str]:
    """Return the largest `max_staleness` of the run's engines and the reason; None = no limit."""
    is_split = "num_gpus_for_infer" in keys.raw.sections["actor_rollout"]
    engine = keys.raw.sections["rollout"].get("engine") or keys.get(f"{ROLLOUT}.name")
    if keys.idle == "megatron":
        return 0, "with FSDP all devices train and generate in turn"
    if engine in WHOLE_RESPONSES:
        return int(is_split), "transformers answers with whole responses"
    return None, ""
