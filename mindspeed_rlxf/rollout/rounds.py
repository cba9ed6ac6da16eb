"""Keep the ranks that share experts in step while they generate.

Replicas run different numbers of passes, of different sizes (a pack of prompts, one decode step, a
pack to score). A layer with shared experts needs all ranks of the expert-parallel group, so each
pass is a round: before it every rank announces its number of tokens, on the host. A rank that has
finished announces 0 and computes its experts for the others, until all announce 0.

As each pass of the slowest rank is an announcement, no rank waits longer than for one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from mindspeed_rlxf.models.shared_experts import Exchange, SharedExperts


class Rounds:
    """The rounds of one rank. Without shared experts each call returns at once."""

    def __init__(
        self, layers: Sequence[SharedExperts], exchange: Exchange, host: dist.ProcessGroup
    ) -> None:
        """layers: of one module; host: gloo group of the ranks of `exchange`"""
        self.layers, self.exchange, self.host = layers, exchange, host

    def begin(self) -> None:
        """Prepare for the passes of one call; the weights stay where they are until `finish`."""
        for layer in self.layers:
            layer.bind()

    def announce(self, tokens: int) -> None:
        """Wait until all ranks have announced their next pass.

        tokens: of this rank's pass, at least 1
        """
        assert tokens > 0, "a pass has tokens; 0 is the word of a rank that has finished"
        if self.layers:
            self._exchange_sizes(tokens)

    def finish(self) -> int:
        """Take part in the others' passes until all ranks have finished; count these passes."""
        passes = 0
        while self.layers and self._exchange_sizes(0):
            parameter = next(self.layers[0].parameters())
            nothing = parameter.new_empty(0, 1, self.layers[0].router.config.hidden_size)
            for layer in self.layers:
                layer(nothing)
            passes += 1
        return passes

    def _exchange_sizes(self, tokens: int) -> bool:
        """Set the tokens of each rank for the next pass; return whether any rank has some."""
        sizes = [torch.zeros((), dtype=torch.int64) for _ in range(self.host.size())]
        dist.all_gather(sizes, torch.tensor(tokens), group=self.host)
        self.exchange.sizes = [int(size) for size in sizes]
        return any(self.exchange.sizes)
