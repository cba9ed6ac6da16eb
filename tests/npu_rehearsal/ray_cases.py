"""The cases that `ray_run` rehearses through Ray and compares with the same command on CPU."""

from __future__ import annotations

from dataclasses import dataclass, field

ROLES = ("actor_rollout", "ref", "critic")
NOSET = {"RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"}
REWARD = "REWARD"  # in settings: replaced by the folder of a reward model that is made for the run


@dataclass(frozen=True)
class Case:
    """One run of `ray_gpt.py`, on CPU and on rehearsed NPUs."""

    settings: tuple[str, ...] = ()  # further overrides
    variables: dict[str, str] = field(default_factory=dict)  # environment
    pools: tuple[int, ...] = (2,)  # number of devices of each pool, all on one host
    devices: tuple[str, ...] = ("device 0 of 0", "device 0 of 1")  # "device INDEX of VISIBLE"
    uncalled: tuple[str, ...] = ()  # operators that some workers do not call
    stopped: bool = False  # the NPU run gets SIGTERM in its second iteration, then resumes


def for_each_role(setting: str) -> tuple[str, ...]:
    """Return the override once for each of ROLES."""
    return tuple(f"{role}.{setting}" for role in ROLES)


CASES = {
    "dp2": Case(),
    "tp2": Case(for_each_role("tensor_model_parallel_size=2")),
    "pp2": Case(for_each_role("pipeline_model_parallel_size=2")),
    "all devices visible": Case(
        variables=NOSET, devices=("device 0 of all", "device 1 of all")
    ),
    # Actor and reference on two devices, critic and reward model on a third. The critic has a tenth
    # of the usual rate: the length of Adam's first steps does not depend on the gradient's size, so
    # a gradient of rounding errors moves a weight as far (9.6e-6 was seen with a reward model).
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
