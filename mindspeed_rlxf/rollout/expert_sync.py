"""Keep the ranks that share experts in step while they generate.

Replicas run different numbers of passes with different sizes (a prompt pack, one decode step, a
pack to score). A layer with shared experts needs all expert-parallel ranks, so each pass is a
round: first every rank announces its number of tokens, on the host. A finished rank announces 0 and
computes its experts for other ranks' tokens, until all ranks announce 0.

Each pass on the slowest rank begins with an announcement, so no rank waits longer than one pass. A
failed rank announces nothing more: the others then wait until the process group's deadline, or
until the run ends them.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from mindspeed_rlxf.models.shared_experts import Exchange, SharedExperts


class ExpertSync:
    """Announces one rank's passes. Without shared experts each method returns at once."""

    def __init__(
        self, layers: Sequence[SharedExperts], exchange: Exchange, host: dist.ProcessGroup
    ) -> None:
        """Take one module's shared layers (none if its experts are not shared) and a gloo group."""
        self.layers, self.exchange, self.host = layers, exchange, host

    def begin(self) -> None:
        """View the shared layers' weights, which must not move until `finish`."""
        for layer in self.layers:
            layer.bind()

    def announce(self, tokens: int) -> None:
        """Announce this rank's next pass with 1 or more tokens, and wait for all ranks' passes."""
        assert tokens > 0, "a pass has tokens; 0 is announced by a rank that has finished"
        if self.layers:
            self._exchange_sizes(tokens)

    def finish(self) -> int:
        """Compute this rank's experts for other ranks' passes until all ranks have finished.

        Then forgets where the weights are, so that they can be freed. Returns the number of passes.
        """
        passes = 0
        while self.layers and self._exchange_sizes(0):
            parameter = next(self.layers[0].parameters())
            nothing = parameter.new_empty(0, 1, self.layers[0].router.config.hidden_size)
            for layer in self.layers:
                layer(nothing)
            passes += 1
        for layer in self.layers:
            layer.release()
        return passes

    def _exchange_sizes(self, tokens: int) -> bool:
        """Set each rank's token count for the next pass; return whether any is above 0.

        A collective over `host`.
        """
        sizes = [torch.zeros((), dtype=torch.int64) for _ in range(self.host.size())]
        dist.all_gather(sizes, torch.tensor(tokens), group=self.host)
        self.exchange.sizes = [int(size) for size in sizes]
        return any(self.exchange.sizes)
