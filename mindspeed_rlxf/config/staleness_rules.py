"""Rules for `rollout.max_staleness`: generation that runs ahead of training."""

from collections.abc import Iterator

from mindspeed_rlxf.config.enums import HealthRule, OldLogProbs
from mindspeed_rlxf.config.problems import Problem, ref
from mindspeed_rlxf.config.schema import RunConfig

STALENESS = "rollout.max_staleness"
THRESHOLD = "algorithm.rollout_is_threshold"
WHOLE_RESPONSES = ("transformers",)
"""Engines that cannot stop after a number of decode steps, so each call ends every response."""


def check_staleness(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each key that does not go with samples of older weights."""
    staleness = config.rollout.max_staleness
    if staleness == 0:
        return
    yield from _check_engine(config)
    algorithm = config.algorithm
    condition = f"{ref(STALENESS)}={staleness}"
    recomputes = config.old_log_probs is OldLogProbs.RECOMPUTE
    if recomputes and algorithm.rollout_is_threshold is None and not config.compares_pairs:
        rule = (
            f"must be set with {condition} unless {ref('algorithm.old_log_probs')}=rollout: tokens "
        )
        rule += "are sampled by older weights"
        yield Problem(THRESHOLD, rule, remedy="use 2.0")
    if HealthRule.LOG_PROB_GAP in config.logging.stop_on:
        rule = f"must not have log_prob_gap with {condition}: log-probs of older weights differ"
        stop_on = [health_rule.value for health_rule in config.logging.stop_on]
        yield Problem("logging.stop_on", rule, stop_on, "remove it")


def _check_engine(config: RunConfig) -> Iterator[Problem]:
    engine = config.rollout.engine
    staleness = config.rollout.max_staleness
    if engine not in WHOLE_RESPONSES:
        return
    condition = f"{ref('rollout.engine')}={engine}, which cannot pause a response"
    if staleness > 1:
        remedy = f"use 1 in disaggregated placement, or {ref('rollout.engine')}=native"
        yield Problem(STALENESS, f"must be at most 1 with {condition}", staleness, remedy)
    elif config.train_rollout_split is None:
        rule = f"needs disaggregated placement with {condition}"
        remedy = "set actor_rollout.num_gpus_for_train and num_gpus_for_infer, or use 0"
        yield Problem(STALENESS, rule, staleness, remedy)
