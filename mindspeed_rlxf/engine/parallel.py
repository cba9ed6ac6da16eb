"""One role's Megatron parallel groups, so that roles of different layouts share a process.

Megatron keeps its groups in module globals. `ParallelGroups` remembers the globals of one role and
puts them back while the role runs (`active`). Roles of one layout share their process groups: a
group costs two threads on a CPU and the buffers of a communicator on a device.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from mindspeed_rlxf.device import worlds


def _globals() -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if name == "_global_process_group_list"
        or (name.startswith("_") and name.upper() == name and not name.startswith("__"))
    }


_PRISTINE = _globals()
EP_HOST = "expert-parallel host group"  # among the globals that are kept of a layout


def _random_states() -> dict[str, Any]:
    return dict(tensor_parallel.get_cuda_rng_tracker().get_states())


def _set_globals(state: dict[str, Any], random_states: dict[str, Any]) -> None:
    vars(parallel_state).update(state)
    tensor_parallel.get_cuda_rng_tracker().set_states(random_states)


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    outside, outside_random = _globals(), _random_states()
    try:
        yield
    finally:
        _set_globals(outside, outside_random)


class ParallelGroups:
    """Tensor, pipeline, data and expert parallel groups of one role over the process world.

    random_states: states of the role's Megatron random streams, by name, while it is not active

    Each expert is split over tp as a dense MLP is. The experts of a layer are distributed over
    `ep` neighbouring data-parallel ranks: expert rank = data-parallel rank % ep. The gradients of
    an expert are summed over the dp / ep ranks that hold it.
    """

    def __init__(self, tp: int, pp: int, seed: int, chunks: int = 1, ep: int = 1) -> None:
        """Make or reuse the groups of a layout; a collective of all processes of the world.

        Does not activate them: leaves Megatron's globals and random streams as they are. Side
        effect: seeds the generator of the device, on a CPU torch's own, with `seed`.
        Raises AssertionError if the world is no multiple of tp * pp * ep.

        seed:   seed from which those of the role's Megatron random streams derive
        chunks: chunks of the model on a pipeline rank
        """
        assert dist.get_world_size() % (tp * pp * ep) == 0, "the world holds no whole replicas"
        with _restored():
            make = partial(_make_groups, tp, pp, ep)
            state = worlds.groups_of_layout((tp, pp, ep), make)
            # For words between the expert-parallel ranks without a wait for the device.
            self.ep_host: dist.ProcessGroup = state.pop(EP_HOST)
            vars(parallel_state).update(state)
            if chunks > 1:
                vars(parallel_state).update(
                    _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK=0,
                    _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE=chunks,
                )
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
            self._state, self.random_states = _globals(), _random_states()
            self.tp = parallel_state.get_tensor_model_parallel_group()
            self.pp = parallel_state.get_pipeline_model_parallel_group()
            self.dp = parallel_state.get_data_parallel_group()
            self.ep = parallel_state.get_expert_model_parallel_group()
            # For sums in fp64 on the host, which not every device's collectives can do.
            self.dp_host = parallel_state.get_data_parallel_group_gloo()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Give Megatron these groups and random streams in the block, and restore the outer ones.

        The state of these at the end of the block is kept for the next block.
        """
        with _restored():
            _set_globals(self._state, self.random_states)
            try:
                yield
            finally:
                self._state, self.random_states = _globals(), _random_states()

    @property
    def is_first_stage(self) -> bool:
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    @property
    def is_leader(self) -> bool:
        """Whether results of this rank are used for its replica: last stage, first tp rank."""
        return self.is_last_stage and self.tp.rank() == 0


def _make_groups(tp: int, pp: int, ep: int) -> dict[str, Any]:
    """Make Megatron's groups of this layout; return its globals, which hold them, and EP_HOST.

    A collective of the world. Leaves the new groups in Megatron's globals, for the caller to undo,
    and sets the timeout of each.
    """
    vars(parallel_state).update(_PRISTINE)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp,
        distributed_timeout_minutes=worlds.timeout_minutes(),
    )
    made = _globals() | {EP_HOST: _ep_host_group(tp, ep)}
    worlds.set_timeout(process_groups(made))
    return made


def _ep_host_group(tp: int, ep: int) -> dist.ProcessGroup:
    """Return a gloo group of the ranks of this rank's expert-parallel group.

    It is the group itself if that is of gloo or has one rank; otherwise all ranks of the world
    must call together, as new groups are made.
    """
    own = parallel_state.get_expert_model_parallel_group()
    if ep == 1 or dist.get_backend(own) == "gloo":
        return own
    found = own
    for first in range(0, dist.get_world_size(), tp * ep):
        for tp_rank in range(tp):
            ranks = list(range(first + tp_rank, first + tp * ep, tp))
            group = dist.new_group(ranks, backend="gloo")
            if dist.get_rank() in ranks:
                assert ranks == dist.get_process_group_ranks(own), "Megatron's order of ranks"
                found = group
    return found


def process_groups(state: dict[str, Any]) -> Iterator[dist.ProcessGroup]:
    """Yield the process groups among the values of `state`, some more than once.

    state: globals of Megatron's `parallel_state`; megatron-core 0.12 has no list of its groups
    """
    for value in state.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dist.ProcessGroup):
                yield item
