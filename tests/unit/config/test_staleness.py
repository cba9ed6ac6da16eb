"""Rules and derived values of `rollout.max_staleness`."""

import pytest

from mindspeed_rlxf.config.load import resolve

SPLIT = {
    "resource_pool.other": 8, "placement.ref": "other", "placement.critic": "other",
    "placement.reward": "other", "actor_rollout.num_gpus_for_train": 4,
    "actor_rollout.num_gpus_for_infer": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "lead"),
    [
        ({}, 0),
        (SPLIT, 0),
        ({"rollout.max_staleness": 3}, 0),
        ({**SPLIT, "rollout.max_staleness": 1}, 1),
        ({**SPLIT, "rollout.max_staleness": 3}, 1),
        ({**SPLIT, "rollout.max_staleness": 3, "rollout.lead": 0}, 0),
        ({"rollout.max_staleness": 3, "rollout.lead": 1}, 1),
    ],
)
def test_generation_leads_in_disaggregated_placement(make_tree, changes, lead):
    assert resolve(make_tree(changes), "test").lead == lead
