"""A role for tests that reports what its engine computes: logits, scores, weights."""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mindspeed_rlxf.algorithms.losses import LossOutput, normalised_loss
from mindspeed_rlxf.config.enums import LossNormalizer
from mindspeed_rlxf.config.schema import RoleConfig
from mindspeed_rlxf.data.batch import RoleOutput, Rollouts
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.engine.micro_batch import MicroBatch
from mindspeed_rlxf.engine.train_engine import PolicyStep, TokenLogProbs
from mindspeed_rlxf.models.heads import full_logits
from mindspeed_rlxf.models.parameters import Head, hf_shapes
from mindspeed_rlxf.models.transformer import TransformerModel
from mindspeed_rlxf.weights.hf_folder import open_hf_folder
from tests.unit.weights.folders_of import sizes_read


class EngineProbe:
    """A role with one MegatronEngine of the given head."""

    def __init__(self, role: RoleConfig, head: Head) -> None:
        self.engine = MegatronEngine(role, head, seed=1)

    def logits(self, rollouts: Rollouts) -> RoleOutput:
        """Report the logits that predict each trained token: a list per token, samples in order."""

        def read(model: TransformerModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
            places = batch.prediction_places(batch.trained_mask)
            chosen = model.full_hidden(hidden, partial_gradient=True)[places]
            vocab = model.architecture.vocab_size
            return full_logits(chosen, model.output_weight, vocab, model.tp_group)

        return self._flat(rollouts, read)

    def scores(self, rollouts: Rollouts) -> RoleOutput:
        """Report the output of the score head at every trained token, samples in order."""

        def read(model: TransformerModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
            places = batch.prediction_places(batch.trained_mask)
            return model.score(model.full_hidden(hidden, partial_gradient=False)[places])

        return self._flat(rollouts, read)

    def _flat(self, rollouts: Rollouts, read: Any) -> RoleOutput:
        """Report what `read` returns for all micro-batches, joined; None where that is nothing."""
        batches = self.engine.micro_batches(rollouts, range(rollouts.num_rows))
        flat = self.engine.forward(batches, read)
        return RoleOutput(report=torch.cat(flat).tolist() if flat else None)

    def stream(self, folder: Path, rank: int) -> RoleOutput:
        """Gather the Hugging Face tensors on all ranks; let one rank write them as safetensors."""
        tensors = {name: tensor.clone() for name, tensor in self.engine.hf_tensors()}
        assert list(tensors) == list(hf_shapes(self.engine.role.architecture, self.engine.head))
        if torch.distributed.get_rank() == rank:
            folder.mkdir()
            save_file(tensors, folder / "model.safetensors")
        return RoleOutput()

    def bytes_of_a_load(self) -> RoleOutput:
        """Load the weights again; report the bytes read and the bytes of this rank's parameters."""
        with sizes_read() as sizes:
            self.engine.weights.load(open_hf_folder(self.engine.source))
        shard = sum(t.numel() * t.element_size() for t in self.engine.weights.tensors.values())
        return RoleOutput(report=(sum(sizes), shard))

    def trackers(self) -> RoleOutput:
        """Report which tracker packages this process has imported."""
        return RoleOutput(report=sorted({"tensorboard", "wandb"} & set(sys.modules)))


def likelihood_step(rollouts: Rollouts, factor: float = 1.0) -> PolicyStep:
    """A step on `factor` times the mean negative log-likelihood of the responses."""

    def loss_of(rows: list[int], tokens: TokenLogProbs) -> LossOutput:
        loss, mean = -factor * tokens.log_probs, LossNormalizer.MINIBATCH_TOKENS
        lengths = rollouts.response_lengths[rows]
        return normalised_loss(loss, lengths, mean, 1, {"loss": loss}, {})

    return PolicyStep(loss_of, 1.0)
