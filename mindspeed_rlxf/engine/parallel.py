"""One role's Megatron parallel groups, so that roles with different layouts share a process.

Megatron keeps its groups in module globals. `ParallelGroups` remembers one role's globals and puts
them back while the role runs (`active`). Roles with the same layout share their process groups: a
group costs two threads on a CPU and a communicator's buffers on a device.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from mindspeed_rlxf.device import worlds


def _globals() -> dict[str, Any]:
    state = {}
    for name, value in vars(parallel_state).items():
        is_constant = name.startswith("_") and name.upper() == name and not name.startswith("__")
        if is_constant or name == "_global_process_group_list":
            state[name] = value
    return state


_PRISTINE = _globals()
EP_HOST = "expert-parallel host group"  # among the globals that are kept of a layout


def _random_states() -> dict[str, Any]:
    return dict(tensor_parallel.get_cuda_rng_tracker().get_states())


def _set_globals(state: dict[str, Any], random_states: dict[str, Any]) -> None:
    vars(parallel_state).update(state)
    tensor_parallel.get_cuda_rng_tracker().set_states(random_states)


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    outer_state = _globals()
    outer_random_states = _random_states()
    try:
        yield
    finally:
        _set_globals(outer_state, outer_random_states)


class ParallelGroups:
    """One role's tensor, context, pipeline, data and expert parallel groups over the world.

    Rank = tp_rank + tp * (cp_rank + cp * (dp_rank + dp * pp_rank)). The `cp` ranks share the tokens
    of a micro-batch and have equal weights, so `dp_cp`, their groups and the data-parallel ranks
    together, sums gradients. Each expert is split over tp like a dense MLP. A layer's experts are
    distributed over `ep` neighbouring ranks of `dp_cp`: expert rank = dp_cp rank % ep. An expert's
    gradients are summed over the dp_cp / ep ranks that hold it. `random_states` has the role's
    Megatron random streams, by name, while it is not active.
    """

    def __init__(
        self, tp: int, pp: int, seed: int, chunks: int = 1, ep: int = 1, cp: int = 1
    ) -> None:
        """Make or reuse a layout's groups; a collective over all processes in the world.

        Does not activate them: leaves Megatron's globals and random streams as they are. Side
        effect: seeds the device generator, on a CPU torch's own, with `seed`, which also seeds the
        role's Megatron random streams. `chunks` counts model chunks on a pipeline rank.
        """
        replicas, num_spare_ranks = divmod(dist.get_world_size(), tp * pp * cp)
        assert num_spare_ranks == 0, "the world holds no whole replicas"
        assert replicas * cp % ep == 0, "the replicas cannot share the experts equally"
        with _restored():
            make = partial(_make_groups, tp, pp, ep, cp)
            state = worlds.groups_of_layout((tp, pp, ep, cp), make)
            # For words between the expert-parallel ranks without a wait for the device.
            self.ep_host: dist.ProcessGroup = state.pop(EP_HOST)
            vars(parallel_state).update(state)
            if chunks > 1:
                vars(parallel_state).update(
                    _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK=0,
                    _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE=chunks,
                )
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
            self._state = _globals()
            self.random_states = _random_states()
            self.tp = parallel_state.get_tensor_model_parallel_group()
            self.pp = parallel_state.get_pipeline_model_parallel_group()
            self.dp = parallel_state.get_data_parallel_group()
            self.cp = parallel_state.get_context_parallel_group()
            self.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
            self.ep = parallel_state.get_expert_model_parallel_group()
            # For sums in fp64 on the host, which not every device's collectives can do. Without
            # context parallelism, whose ranks have the same rows.
            self.dp_host = parallel_state.get_data_parallel_group_gloo()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Give Megatron these groups and random streams in the block, and restore the outer ones.

        Keeps their state at the block's end for the next block.
        """
        with _restored():
            _set_globals(self._state, self.random_states)
            try:
                yield
            finally:
                self._state = _globals()
                self.random_states = _random_states()

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank is in the first pipeline stage."""
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is in the last pipeline stage."""
        return self.pp.rank() == self.pp.size() - 1

    @property
    def is_leader(self) -> bool:
        """Whether this rank's results are used: last stage, first tp and cp rank of a replica."""
        return self.is_last_stage and self.tp.rank() == 0 and self.cp.rank() == 0


def _make_groups(tp: int, pp: int, ep: int, cp: int) -> dict[str, Any]:
    """Make Megatron's groups for this layout; return its globals, which hold them, and EP_HOST.

    A collective over the world. Leaves the new groups in Megatron's globals, for the caller to
    undo, and sets each group's timeout.
    """
    vars(parallel_state).update(_PRISTINE)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        context_parallel_size=cp,
        expert_tensor_parallel_size=tp,
        distributed_timeout_minutes=worlds.timeout_minutes(),
    )
    state = _globals()
    state[EP_HOST] = _ep_host_group(tp, ep)
    worlds.set_timeout(process_groups(state))
    return state


def _ep_host_group(tp: int, ep: int) -> dist.ProcessGroup:
    """Return a gloo group with this rank's expert-parallel ranks.

    This is the expert-parallel group itself if it uses gloo or has one rank; otherwise all ranks in
    the world must call together, because new groups are made.
    """
    ep_group = parallel_state.get_expert_model_parallel_group()
    if ep == 1 or dist.get_backend(ep_group) == "gloo":
        return ep_group
    host_group = ep_group
    for first_rank in range(0, dist.get_world_size(), tp * ep):
        for tp_rank in range(tp):
            ranks = list(range(first_rank + tp_rank, first_rank + tp * ep, tp))
            group = dist.new_group(ranks, backend="gloo")
            if dist.get_rank() in ranks:
                assert ranks == dist.get_process_group_ranks(ep_group), "Megatron's order of ranks"
                host_group = group
    return host_group


def process_groups(state: dict[str, Any]) -> Iterator[dist.ProcessGroup]:
    """Yield the process groups among Megatron's globals, some more than once.

    megatron-core 0.12 has no group list.
    """
    for value in state.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dist.ProcessGroup):
                yield item
