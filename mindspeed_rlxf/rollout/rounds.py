"""Keep the ranks that share experts in step while they generate.

Replicas run different numbers of passes, of different sizes (a pack of prompts, one decode step, a
pack to score). A layer with shared experts needs all ranks of the expert-parallel group, so each
pass is a round: before the pass every rank announces its number of tokens, on the host. A rank that
has finished announces 0 and computes its experts for the tokens of other ranks, until all ranks
announce 0.

As each pass of the slowest rank begins with an announcement, no rank waits longer than for one
pass. A rank that fails announces nothing more: the other ranks then wait until the deadline of the
process group, or until the run ends them.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from mindspeed_rlxf.models.shared_experts import Exchange, SharedExperts


class Rounds:
    """Announces the passes of one rank. Without shared experts each method returns at once."""

    def __init__(
        self, layers: Sequence[SharedExperts], exchange: Exchange, host: dist.ProcessGroup
    ) -> None:
        """Take the shared layers of one module; none if its experts are not shared.

        host: gloo group of the expert-parallel ranks of `exchange`
        """
        self.layers, self.exchange, self.host = layers, exchange, host

    def begin(self) -> None:
        """Take views of the shared layers' weights, which must not be moved until `finish`."""
        for layer in self.layers:
            layer.bind()

    def announce(self, tokens: int) -> None:
        """Announce this rank's next pass, and wait until all ranks have announced theirs.

        tokens: of this rank's pass, at least 1, else AssertionError
        """
        assert tokens > 0, "a pass has tokens; 0 is announced by a rank that has finished"
        if self.layers:
            self._exchange_sizes(tokens)

    def finish(self) -> int:
        """Compute this rank's experts for other ranks' passes until all ranks have finished.

        Then forgets where the weights are, so that they can be freed. Returns the number of these
        passes.
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
        """Set the token count of each rank for the next pass; return whether any is above 0.

        A collective: waits until all ranks have called it.
        """
        sizes = [torch.zeros((), dtype=torch.int64) for _ in range(self.host.size())]
        dist.all_gather(sizes, torch.tensor(tokens), group=self.host)
        self.exchange.sizes = [int(size) for size in sizes]
        return any(self.exchange.sizes)
