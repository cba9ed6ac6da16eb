"""Rules for runs whose samples are conversations led by agents."""

from collections.abc import Iterator

from mindspeed_rlxf.config.problems import Problem, ref
from mindspeed_rlxf.config.schema import RunConfig

STALENESS = "rollout.max_staleness"


def check_agents(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each key that does not go with agents.

    Coroutines are not saved, so no conversation may be unfinished between two iterations.
    """
    if not config.rollout.runs_agents:
        return
    staleness, given = config.rollout.max_staleness, ref("rollout.agent")
    if staleness > config.lead:
        rule = f"must be at most {config.lead} with {given}, as conversations are not saved"
        remedy = "use 0, or 1 in disaggregated placement (actor_rollout.num_gpus_for_infer)"
        yield Problem(STALENESS, rule, staleness, remedy)
    if config.actor_rollout.fixed_responses is not None:
        key, value = "actor_rollout.fixed_responses", config.actor_rollout.fixed_responses
        yield Problem(key, f"must not be given with {given}", value, "remove one of them")
