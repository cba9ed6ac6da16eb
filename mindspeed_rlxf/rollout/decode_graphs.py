"""Decode steps as graphs: the host launches one graph in place of hundreds of kernels.

A graph is one step: decoder, logits, draw, and the token that is appended. It has no results of its
own, so that all graphs share the memory of their intermediate tensors. It is captured at the first
step with a number of rows and the rows' settings, and replayed at the following ones.

- Static, with addresses that graphs keep: weights, adapters, KV cache, `RowStates`, EOS ids.
- Different in each step, therefore read from `RowStates` on the device: last tokens, positions,
  counts, random numbers, and which rows have ended.
- A cache that is resized has other addresses and another capacity: its graphs are dropped. Weights
  are only replaced between two generations, and each generation has its own graphs.
- Rows are rounded up (`padded_rows`), so that a row that leaves needs no new graph. The padding is
  behind the batch: rows that have ended, each of which writes to position 0 of its own cache row.
  As no row reads another one, it changes the batch by rounding at most: a GEMM's kernel may depend
  on the number of rows.
- Without graphs: a batch with several settings, whose groups differ with each row that leaves;
  tensor parallelism, whose collectives would be captured; experts; and deterministic operators,
  some of which copy from pageable memory.
"""

from collections.abc import Callable

from mindspeed_rlxf.device.graphs import GraphPool
from mindspeed_rlxf.rollout.kv_cache import KvCache
from mindspeed_rlxf.rollout.sampling import SamplingSettings


def padded_rows(rows: int, most: int) -> int:
    """Round a number of rows up, to at most `most`.

    To a power of two up to 8, to a multiple of 8 up to 64, then to one of 16 up to 128, and so on.
    """
    power_of_two = 1 << (rows - 1).bit_length()
    multiple = power_of_two if rows <= 8 else max(8, power_of_two // 8)
    return min(-(-rows // multiple) * multiple, most)


class DecodeGraphs:
    """The graphs of a generation."""

    def __init__(self) -> None:
        self._drop(num_resizes=0)

    def _drop(self, num_resizes: int) -> None:
        self._pool = GraphPool()
        self._num_resizes = num_resizes  # of the cache before the graphs were captured
        self._replays: dict[tuple[int, SamplingSettings], Callable[[], None]] = {}

    def run(
        self, step: Callable[[], None], rows: int, settings: SamplingSettings, cache: KvCache
    ) -> None:
        """Run a decode step: replay its graph, or run and capture it.

        Args:
            step: Computes the cache's first rows; does the same for equal `rows` and `settings`.
            rows: How many, padding included.
            settings: Those of all rows.
            cache: The generation's.
        """
        if self._num_resizes != cache.num_resizes:
            self._drop(cache.num_resizes)
        replay = self._replays.get((rows, settings))
        if replay is None:
            self._replays[rows, settings] = self._pool.run_and_capture(step)
        else:
            replay()
