"""Roles of one layout share their process groups and nothing else."""

from typing import Any

import torch
from megatron.core import parallel_state

from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.data.batch import RoleOutput
from mindspeed_rlxf.engine.parallel import ParallelGroups, process_groups
from tests.distributed.groups import build_group


class GroupsProbe:
    """Makes groups as several roles would."""

    def timeouts(self) -> RoleOutput:
        """Seconds, of every group that Megatron made."""
        found = process_groups(ParallelGroups(2, 1, 5)._state)
        backends = [group._get_backend(torch.device("cpu")) for group in found]
        return RoleOutput(report=[b.options._timeout.total_seconds() for b in backends])

    def same_and_other_layouts(self) -> RoleOutput:
        one, same, other = (ParallelGroups(*sizes) for sizes in ((2, 1, 1), (2, 1, 2), (1, 2, 1)))
        streams = [groups.random_states["model-parallel-rng"].tolist() for groups in (one, same)]
        shared = [one.tp is same.tp, one.dp_host is same.dp_host, one.tp is other.tp]
        sizes = [[g.tp.size(), g.pp.size(), g.dp.size()] for g in (one, same, other)]
        return RoleOutput(report=(shared, streams[0] == streams[1], sizes))

    def context_parallel(self) -> RoleOutput:
        groups = ParallelGroups(1, 1, 1, cp=2)
        of = groups.cp, groups.dp, groups.dp_cp, groups.dp_host
        return RoleOutput(report=[group.size() for group in of])

    def virtual_pipeline(self) -> RoleOutput:
        chunked, plain = ParallelGroups(1, 2, 1, chunks=2), ParallelGroups(1, 2, 1)
        seen = []
        with chunked.active():
            seen.append(parallel_state.get_virtual_pipeline_model_parallel_world_size())
            vars(parallel_state)["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = 1
        with plain.active():
            seen.append(parallel_state.get_virtual_pipeline_model_parallel_world_size())
            seen.append(parallel_state.get_virtual_pipeline_model_parallel_rank())
        with chunked.active():
            seen.append(parallel_state.get_virtual_pipeline_model_parallel_rank())
        return RoleOutput(report=seen)


def test_roles_of_one_layout_share_groups_and_keep_their_own_state(warm_runtime: Any) -> None:
    probe = build_group(warm_runtime, ParallelLayout(2, 2), GroupsProbe)
    shared, same_stream, sizes = probe.call(GroupsProbe.same_and_other_layouts).result()[0]
    assert shared == [True, True, False]
    assert not same_stream
    assert sizes == [[2, 1, 1], [2, 1, 1], [1, 2, 1]]
    # The deadline of a call, 300 s, is the longest of the session; 60 s more in whole minutes.
    timeouts = probe.call(GroupsProbe.timeouts).result()[0]
    assert len(timeouts) > 10 and set(timeouts) == {360.0}
    # Gradients are summed over all ranks, what is counted on the host over replicas.
    assert probe.call(GroupsProbe.context_parallel).result()[0] == [2, 1, 2, 1]
    assert probe.call(GroupsProbe.virtual_pipeline).result()[0] == [2, None, None, 1]
