"""A training engine without Megatron: a transformers model, plain autograd and torch's AdamW.

It runs in one process, in fp32, and computes one sequence at a time. Tests compare roles that use
it with roles that use Megatron: roles need no more than `TrainEngine`, and their results do not
depend on the engine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mindspeed_rlxf.algorithms.losses import LossOutput
from mindspeed_rlxf.algorithms.slots import readable_slots
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import ActorConfig, CriticConfig, RunConfig
from mindspeed_rlxf.data.batch import LogProbs, LogProbsWithKl, Rollouts, Scores, Values
from mindspeed_rlxf.engine.train_engine import MemoryKind, PolicyStep, TokenLogProbs, ValueStep


class PlainEngine:
    """Implement `TrainEngine` but for run checkpoints.

    Loads the Hugging Face folder of the role; a folder with `score.weight` gets a score head. Roles
    that learn get an AdamW optimizer.
    """

    is_leader = True

    def offload(self) -> None:
        """Do nothing: this engine uses host memory only."""

    def onload(self) -> None:
        """Do nothing, as `offload` moves nothing."""

    def holding(self, *kinds: MemoryKind) -> AbstractContextManager[None]:
        """Return a context that does nothing, as all parts are always loaded."""
        return nullcontext()

    def without_adapters(self) -> AbstractContextManager[None]:
        """Return a context that does nothing: there are no adapters."""
        return nullcontext()

    def __init__(self, config: RunConfig, role: Role) -> None:
        section = config.role(role)
        assert section.load is not None
        self.micro_batch_size, self.folder = section.micro_batch_size, Path(section.load)
        self.model = AutoModelForCausalLM.from_pretrained(section.load).float()
        # transformers would drop the gradient of token 0
        self.model.get_input_embeddings().padding_idx = None
        weights = load_file(self.folder / "model.safetensors")
        parameters = list(self.model.parameters())
        self.head = None
        if "score.weight" in weights:
            self.head = torch.nn.Parameter(weights["score.weight"].float())
            parameters = [*self.model.model.parameters(), self.head]
        if isinstance(section, (ActorConfig, CriticConfig)):
            keys = section.optimizer
            betas = keys.adam_beta1, keys.adam_beta2
            self.parameters, self.clip_grad = parameters, keys.clip_grad or float("inf")
            named = self.model.named_parameters()
            exempt = {id(p) for n, p in named if p.dim() == 1 or n.endswith("bias")}
            groups = [
                {"params": [p for p in parameters if (id(p) not in exempt) == decays],
                 "weight_decay": keys.weight_decay * decays}
                for decays in (True, False)
            ]  # fmt: skip
            self.adam = torch.optim.AdamW(groups, keys.lr, betas, keys.adam_eps)

    def _hidden(self, rollouts: Rollouts, row: int) -> Tensor:
        """Return [response + 1, hidden]: the state that predicts each token of a response, and the
        state after its last token."""
        prompt = rollouts.prompt_ids[row, : rollouts.prompt_lengths[row]]
        response = rollouts.response_ids[row, : int(rollouts.response_lengths[row])]
        states = self.model.model(torch.cat((prompt, response))[None]).last_hidden_state[0]
        return states[len(prompt) - 1 :]

    def _log_probs(
        self, rollouts: Rollouts, rows: Sequence[int], temperature: float
    ) -> TokenLogProbs:
        """Return log-probs and entropies of the trained tokens of these rows, one after another."""
        log_probs, entropies = [], []
        for row in rows:
            trained = rollouts.trained_mask[row].nonzero().squeeze(1)
            logits = self.model.lm_head(self._hidden(rollouts, row)[trained]).float()
            if cap := getattr(self.model.config, "final_logit_softcapping", None):
                logits = torch.tanh(logits / cap) * cap
            logits = logits / temperature
            logs = logits.log_softmax(-1)
            tokens = rollouts.response_ids[row, trained][:, None]
            log_probs.append(logs.gather(-1, tokens).squeeze(-1))
            entropies.append(-(logs.exp() * logs).sum(-1))
        return TokenLogProbs(torch.cat(log_probs), torch.cat(entropies))

    def _values(self, rollouts: Rollouts, rows: Sequence[int], slots: Tensor) -> Tensor:
        """Return the values of these rows where `slots` [batch, response + 1] is True, flat."""
        assert self.head is not None
        parts = []
        for row in rows:
            states = self._hidden(rollouts, row)[slots[row].nonzero().squeeze(1)]
            parts.append((states @ self.head.T).squeeze(-1))
        return torch.cat(parts)

    @torch.no_grad()
    def log_probs(self, rollouts: Rollouts, temperature: float) -> LogProbs:
        out = torch.zeros(rollouts.response_ids.shape)
        every = range(rollouts.num_rows)
        out[rollouts.trained_mask] = self._log_probs(rollouts, every, temperature).log_probs
        return LogProbs(out)

    def log_probs_with_kl(
        self, rollouts: Rollouts, temperature: float, policy: PlainEngine
    ) -> LogProbsWithKl:
        raise ValueError("PlainEngine does not compute the KL over the vocabulary")

    @torch.no_grad()
    def values(self, rollouts: Rollouts) -> Values:
        slots = readable_slots(rollouts.trained_mask, rollouts.response_mask)
        out = torch.zeros(slots.shape)
        out[slots] = self._values(rollouts, range(rollouts.num_rows), slots)
        return Values(out)

    @torch.no_grad()
    def scores(self, rollouts: Rollouts) -> Scores:
        assert self.head is not None
        last = [self._hidden(rollouts, row)[-1] for row in range(rollouts.num_rows)]
        return Scores((torch.stack(last) @ self.head.T).squeeze(-1))

    def micro_batches(
        self, rollouts: Rollouts, rows: Sequence[int]
    ) -> list[tuple[Rollouts, list[int]]]:
        size = self.micro_batch_size
        return [(rollouts, list(rows[i : i + size])) for i in range(0, len(rows), size)]

    def train_step(
        self,
        micro_batches: Sequence[tuple[Rollouts, list[int]]],
        step: PolicyStep | ValueStep,
    ) -> dict[str, float]:
        """Do one AdamW step; return the gradient norm and the mean of each metric.

        The gradient is the sum over all micro-batches divided by the sum of their weights.
        """
        self.adam.zero_grad()
        outputs: list[LossOutput] = []
        for rollouts, rows in micro_batches:
            if isinstance(step, PolicyStep):
                output = step.loss(rows, self._log_probs(rollouts, rows, step.temperature))
            else:
                output = step.loss(rows, self._values(rollouts, rows, step.slots))
            output.loss.backward()
            outputs.append(output)
        weight = sum(output.weight for output in outputs)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad /= weight
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_grad)
        self.adam.step()
        metrics = {"grad_norm": float(norm)}
        for name in outputs[0].metrics:
            means = [output.metrics[name] for output in outputs]
            metrics[name] = float(sum(m.total for m in means)) / sum(m.weight for m in means)
        return metrics

    def end_iteration(self) -> float:
        return float(self.adam.param_groups[0]["lr"])

    def sum_over_replicas(self, tensor: Tensor) -> Tensor:
        return tensor

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, p.detach()) for name, p in self.model.named_parameters())

    def file_tensors(self) -> dict[str, Tensor]:
        """Return the weights as transformers writes them to a file, with the score head's."""
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            found = load_file(Path(folder) / "model.safetensors")
        if self.head is not None:
            found.pop("lm_head.weight", None)
            found["score.weight"] = self.head.detach().clone()
        return found

    def export(self, hf_folder: Path | None, megatron_folder: Path | None) -> None:
        assert hf_folder is not None and megatron_folder is None
        hf_folder.mkdir()
        save_file(dict(self.hf_tensors()), hf_folder / "model.safetensors")
