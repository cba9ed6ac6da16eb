"""CUDA graphs: device work that is captured once and then replayed by a single launch.

A graph has the kernels with the addresses, shapes and numbers that they got in the capture. The
captured work must not wait for the device, read a tensor on the host, or copy from pageable memory.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


class GraphPool:
    """Graphs that share memory for their intermediate tensors.

    This is safe for work that leaves its results in tensors from outside, and is replayed in one
    stream. The last graph that is deleted frees the memory. Then no other may be captured: torch's
    allocator refuses a pool that has lost its graphs.
    """

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def run_and_capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` once, and capture it; return what replays it in the current stream.

        The run is a real one, whose results count. It is also the warm-up: when a stream first runs
        an operator, libraries allocate, compile and choose kernels, which cannot be captured. The
        capture itself computes nothing. `torch.cuda.graph` registers the generator of the device,
        so that work that draws from it would get new numbers in each replay.
        """
        current = torch.cuda.current_stream()
        side = _side_stream(torch.cuda.current_device())
        side.wait_stream(current)
        with torch.cuda.stream(side):
            work()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # A thread of NCCL may query events meanwhile: an error in the default mode, "global".
        mode = "thread_local"
        with torch.cuda.graph(graph, self._memory, side, capture_error_mode=mode):
            work()
        return graph.replay


@functools.cache
def _side_stream(index: int) -> Any:
    """Return the stream for all captures on a device: the default stream cannot capture.

    One for the process, since cuBLAS keeps a workspace for each stream that it has seen.
    """
    return torch.cuda.Stream(index)
