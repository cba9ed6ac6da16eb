"""What is rehearsed through Ray, beside the same command on CPU."""

from __future__ import annotations

from dataclasses import dataclass, field

ROLES = ("actor_rollout", "ref", "critic")
NOSET = {"RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"}
REWARD = "REWARD"  # in settings: the folder of a reward model that is made for the run


@dataclass(frozen=True)
class Case:
    settings: tuple[str, ...] = ()  # added to the command
    variables: dict[str, str] = field(default_factory=dict)
    pools: tuple[int, ...] = (2,)  # devices of each pool, all of one host
    devices: tuple[str, ...] = ("device 0 of 0", "device 0 of 1")  # as the workers see them
    uncalled: tuple[str, ...] = ()  # operators that not every worker calls
    stopped: bool = False  # on NPU by SIGTERM in the second iteration; the same command goes on


def each(setting: str) -> tuple[str, ...]:
    return tuple(f"{role}.{setting}" for role in ROLES)


CASES = {
    "dp2": Case(),
    "tp2": Case(each("tensor_model_parallel_size=2")),
    "pp2": Case(each("pipeline_model_parallel_size=2")),
    "all devices visible": Case(
        variables=NOSET, devices=("device 0 of all", "device 1 of all")
    ),
    # Actor and reference on two devices, critic and reward model on a third. A tenth of the usual
    # rate for the critic: Adam's first steps are as long where a gradient is rounding alone, and
    # with scores of a model 9.6e-6 of that was seen.
    "reward model": Case(
        (
            "reward.kind=model", "reward.model=auto", f"reward.load={REWARD}",
            "reward.micro_batch_size=2", "+resource_pool.scores=1", "placement.critic=scores",
            "placement.reward=scores", "critic.lr=1e-4",
        ),
        pools=(2, 1),
        devices=("device 0 of 0", "device 0 of 1", "device 0 of 2"),
    ),
    "split": Case(  # one device trains, another generates
        ("actor_rollout.num_gpus_for_train=1", "actor_rollout.num_gpus_for_infer=1",
         "+resource_pool.others=1", "placement.ref=others", "placement.critic=others",
         "placement.reward=others"),
        pools=(2, 1),
        devices=("device 0 of 0", "device 0 of 1", "device 0 of 2"),
        uncalled=("optimizer",),
    ),
    "stopped": Case(devices=("device 0 of 0",) * 2 + ("device 0 of 1",) * 2, stopped=True),
}  # fmt: skip
