"""A model of transformers, sharded over all ranks of its role, with its optimizer.

`TrainEngine` documents the interface methods.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.algorithms.losses import LossOutput
from mindspeed_rlxf.config.hf_config import read_hf_config, read_text_config
from mindspeed_rlxf.config.schema import OptimizerConfig, RoleConfig
from mindspeed_rlxf.data.batch import Rollouts
from mindspeed_rlxf.engine import flop_counter, offload
from mindspeed_rlxf.engine.collective_errors import fail_together
from mindspeed_rlxf.engine.common import CommonEngine
from mindspeed_rlxf.engine.fsdp import attention, weights
from mindspeed_rlxf.engine.fsdp.model import Groups, build, packs, runs_rows_alone, shard
from mindspeed_rlxf.engine.fsdp.optimizer import ShardedAdam
from mindspeed_rlxf.engine.fsdp.output_head import ShardedOutputHead
from mindspeed_rlxf.engine.fsdp.probe import probe
from mindspeed_rlxf.engine.fsdp.state import ShardedState
from mindspeed_rlxf.engine.micro_batch import MicroBatch, group_rows, make_micro_batches
from mindspeed_rlxf.engine.offload import Offload
from mindspeed_rlxf.engine.outputs import begin_reading_totals
from mindspeed_rlxf.engine.step_guard import SkippedSteps
from mindspeed_rlxf.engine.train_engine import MemoryKind, PolicyStep, ValueStep
from mindspeed_rlxf.models import hf_adapters as adapters
from mindspeed_rlxf.models.adapter_parameters import switched_off
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.weights.folders import copy_side_files
from mindspeed_rlxf.weights.hf_folder import open_hf_folder, write_stream
from mindspeed_rlxf.weights.peft_folder import write_adapter
from mindspeed_rlxf.weights.state_files import Loaded

logger = logging.getLogger(__name__)

Read = Callable[[ShardedOutputHead, MicroBatch, Tensor], Any]
"""(the model's head, micro-batch, last hidden states of this rank's tokens) -> its result."""


class FsdpEngine(CommonEngine):
    """One role's model on this rank, which has a part of every parameter.

    A replica is a context-parallel group: its ranks compute the same rows.
    """

    def __init__(
        self,
        role: RoleConfig,
        head: Head,
        seed: int,
        optimizer: OptimizerConfig | None = None,
        train_iters: int = 1,
        skipped: SkippedSteps | None = None,
        deterministic: bool | None = None,
        longest_row: int = sys.maxsize,
    ) -> None:
        """Build the model, load its weights, probe it, and move offloaded memory; a collective.

        Takes the arguments of `MegatronEngine`, and the tokens of the longest row that may come.
        Seeds the process, by seed and rank. Raises ValueError if weights are missing or damaged, or
        the model does not pass the probe.
        """
        assert role.load is not None, "checked beforehand"
        device.set_deterministic(deterministic)
        device.seed_all(seed + dist.get_rank())
        self.role = role
        self.head = head
        self.skipped = skipped or SkippedSteps("raise", 0, "")
        self.groups = Groups.of(role.context_parallel_size)
        self.dtype = torch.bfloat16 if role.bf16 else torch.float32
        self._mini_batch = 0  # steps of this iteration
        self.lora = role.adapters
        weight_dtype = self.dtype if optimizer is None else torch.float32  # main weights are fp32
        if self.lora.rank:
            weight_dtype = adapters.frozen_dtype(self.dtype)
        self.model = build(role.load, head, weight_dtype)
        self.packed = role.packed_sequences and packs(self.model)
        if self.groups.cp is not None and not packs(self.model):
            raise ValueError(
                f"{type(self.model).__name__} has layers that need all tokens; use "
                "context_parallel_size=1"
            )
        self.output_head = ShardedOutputHead(self.model, role.has_fp32_logits)
        self._pieces = weights.pieces_of(self.model, head)
        self._shapes = weights.file_shapes(self.model, self._pieces)
        self._linears = adapters.linear_modules(self.model)
        if self.lora.rank:
            adapters.inject(self.model, self.lora)
            if head is Head.SCORE:
                self.model.lm_head.float()  # trained too, so its main weights are fp32
        self._trained = adapters.trained_names(self.model, self.lora, head) if optimizer else []
        shard(self.model, role, self._trained, self.groups)
        self._load_weights(role.load, seed)
        self._offload: Offload = Offload({}, ())  # nothing moves before the model is probed
        self.windows: set[int | None] = set()  # of the calls of attention until now
        probe(self, longest_row)
        # Only now: the first pass makes the shards anew.
        self.shards = weights.local_shards(self.model)
        self.optimizer: ShardedAdam | None = None
        if optimizer is not None:
            parameters = []
            for name, parameter in self.model.named_parameters():
                parameters.append((adapters.plain_name(name), parameter))
            self.optimizer = ShardedAdam(optimizer, parameters, train_iters)
            self.state = ShardedState(
                {shard.name: shard for shard in self.shards},
                self.optimizer,
                self.skipped,
                self.groups,
                self.describe,
                self._copy,
            )
        moved: dict[MemoryKind, offload.Tensors] = {MemoryKind.WEIGHTS: self.held_weights}
        if self.optimizer is not None:
            moved[MemoryKind.OPTIMIZER] = self.optimizer.tensors
        self._offload = self._make_offload(moved)

    def _copy(self, rows: Tensor) -> Tensor:
        return self._offload.read(rows, 0, rows.numel()).view(rows.shape)

    def _load_weights(self, load: str, seed: int) -> None:
        folder = open_hf_folder(load, self.role.trust_files)
        shards = weights.local_shards(self.model)
        weights.reset_adapters(shards, seed)
        absent = weights.load_rows(shards, self._pieces, folder)
        if self.head is Head.SCORE and "score.bias" in folder:  # of token classification
            logger.warning("%s: score.bias is left out, values have no constant part", load)
        if self.head is Head.SCORE and weights.SCORE in absent:
            absent.remove(weights.SCORE)
            (score,) = (shard for shard in shards if shard.name == weights.OUTPUT)
            noise = torch.randn(score.shape, generator=torch.Generator().manual_seed(seed))
            rows = slice(score.start, score.start + len(score.local))
            score.local.copy_(noise[rows] * self.role.architecture.init_method_std)
        if absent:
            raise ValueError(f"{load} lacks {absent[0]}; give the folder of a whole model")

    @property
    def is_leader(self) -> bool:
        """Whether this rank's results are used for its replica."""
        return self.groups.cp is None or self.groups.cp.rank() == 0

    def micro_batches(
        self, rollouts: Rollouts, rows: Sequence[int], in_order: bool = False
    ) -> list[MicroBatch]:
        """Make micro-batches from the given rows, packed if the model can be.

        A collective over the data-parallel ranks, which must pass equally many rows. With
        `in_order` each micro-batch has consecutive rows, even with `balance_by_length`.
        """
        lengths = (rollouts.prompt_lengths + rollouts.response_lengths).tolist()
        host = self.groups.dp_host
        groups = group_rows(self.role, rows, lengths, in_order, host, padded=not self.packed)
        if runs_rows_alone(self.model):
            groups = [[row] for row in chain(*groups)]
        return self.as_micro_batches(rollouts, groups)

    def as_micro_batches(
        self, rollouts: Rollouts, groups: Sequence[Sequence[int]]
    ) -> list[MicroBatch]:
        """Make one micro-batch per row group."""
        cp = self.groups.cp
        cp_size = cp.size() if cp else 1
        target = device.current_device()
        return make_micro_batches(rollouts, groups, self.packed, cp_size, target, cp=cp)

    def run(self, batch: MicroBatch, read: Callable[[Tensor], Any]) -> Any:
        """Run the model on this rank's tokens, then `read` on their last hidden states.

        With gradients, `read` returns a tensor, or a tuple with one, whose gradient is wanted.
        """
        positions = torch.atleast_2d(batch.own_positions)
        flash = device.tries_flash_attention() and self.role.bf16
        layout = attention.Layout(batch.lengths, batch.cp, flash, self.windows)
        return self.model.rlxf_run(batch.own_token_ids, positions, layout, read)

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[MicroBatch], read: Read) -> list[Tensor]:
        """Run the passes without gradients; return `read`'s result per micro-batch."""
        self.model.eval()
        with self.holding(MemoryKind.WEIGHTS):
            outputs = []
            for batch in micro_batches:
                outputs.append(self.run(batch, partial(read, self.output_head, batch)))
            self.model.reshard()
        self._count(micro_batches, flop_counter.FORWARD)
        return outputs

    @property
    def output_weight(self) -> Tensor:
        """The whole output layer, or the embedding that it is tied to; a collective."""
        weight = self.model.lm_head.weight
        (name, *_) = [name for name, tensor in self.model.named_parameters() if tensor is weight]
        (shard,) = [shard for shard in self.shards if shard.name == name]
        return shard.gather().to(self.dtype)

    def train_step(
        self, micro_batches: Sequence[MicroBatch], step: PolicyStep | ValueStep
    ) -> dict[str, float]:
        """Take an optimizer step on one mini-batch, or skip it if a number is not finite.

        Returns and raises as `MegatronEngine.train_step`; every rank has the metrics.
        """
        assert self.optimizer is not None, "the role is trained"
        self._mini_batch += 1
        each_is_reduced = self.optimizer.config.reduce_each_micro_batch
        outputs: list[LossOutput] = []
        self.model.train()
        with self.holding(*MemoryKind):
            for number, batch in enumerate(micro_batches, start=1):
                is_reduced = each_is_reduced or number == len(micro_batches)
                self.model.set_requires_gradient_sync(is_reduced)
                outputs.append(self.run(batch, partial(self._loss, step, self.output_head, batch)))
                outputs[-1].loss.backward()
            weight = torch.tensor(float(sum(output.weight for output in outputs)))
            losses = [output.loss.detach() for output in outputs]
            totals = begin_reading_totals(outputs)
            step_result = self.optimizer.step(losses, float(self.sum_over_replicas(weight)))
            self._offload.mark_changed(MemoryKind.WEIGHTS, MemoryKind.OPTIMIZER)
        self.skipped.judge(step_result, self.optimizer.scheduler_steps + 1, self._mini_batch)
        return self._step_metrics(micro_batches, outputs, totals, step_result)

    def end_iteration(self) -> float:
        """Advance the learning-rate schedule; return the ending iteration's rate."""
        assert self.optimizer is not None, "the role is trained"
        self._mini_batch = 0
        rate = self.optimizer.rate
        self.optimizer.advance(1)
        return rate

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight but adapters as (Hugging Face name, whole device tensor)."""
        with self.holding(MemoryKind.WEIGHTS), torch.no_grad():
            yield from weights.stream(self.shards, self._pieces, self.dtype)

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each adapter's A and B like `hf_tensors`."""
        with self.holding(MemoryKind.WEIGHTS), torch.no_grad():
            yield from weights.adapter_stream(self.shards, self.dtype)

    def _merged_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight like `hf_tensors`, with adapters merged."""
        scale = self.lora.scale if self.lora.rank else None
        with self.holding(MemoryKind.WEIGHTS), torch.no_grad():
            yield from weights.stream(self.shards, self._pieces, self.dtype, scale)

    def held_weights(self) -> Iterable[Tensor]:
        """Return this rank's rows of every weight."""
        return [shard.local for shard in self.shards]

    def without_adapters(self) -> AbstractContextManager[None]:
        """Return a context in which this engine computes with the loaded weights alone."""
        return switched_off(m for m in self.model.modules() if hasattr(m, "lora_A"))

    def export(
        self,
        hf_folder: Path | None,
        megatron_folder: Path | None,
        adapter_folder: Path | None = None,
    ) -> None:
        """Write a Hugging Face folder, and adapters; this engine writes no Megatron checkpoint.

        A collective. If a rank cannot write, all ranks raise OSError.
        """
        # With `runtime: local` the first rank has just removed the files of an earlier export.
        dist.barrier()
        if adapter_folder is not None:
            trained = {adapters.plain_name(name) for name in self._trained}
            with self.holding(MemoryKind.WEIGHTS):
                tensors = weights.gather_on_first_rank(
                    shard for shard in self.shards if shard.name in trained
                )
            base_folder = str(self.role.load)
            with fail_together(adapter_folder):
                if dist.get_rank() == 0:
                    write_adapter(
                        adapter_folder, tensors, self.lora, self._linears, self.head, base_folder
                    )
        if hf_folder is None:
            return
        writes = dist.get_rank() == 0
        itemsize = self.dtype.itemsize
        error = write_stream(self._merged_tensors(), self._shapes, itemsize, hf_folder, writes)
        with fail_together(hf_folder):
            if error is not None:
                raise error
            if writes:
                self.describe(hf_folder)

    def describe(self, folder: Path) -> list[Path]:
        """Write config.json, with training head and dtype, and the tokenizer files."""
        assert self.role.load is not None, "it was loaded from there"
        source = Path(self.role.load)
        config = None
        if read_hf_config(source).get("model_type") != self.model.config.model_type:  # wrapped
            config = read_text_config(source).to_dict()
            config["architectures"] = [type(self.model).__name__.removeprefix("FSDP")]
        return copy_side_files(source, folder, self.head, self.dtype, config)

    def load_state(self, folder: Path) -> Loaded:
        """Load a training state; see `load_checked`."""
        with self.holding(MemoryKind.WEIGHTS, MemoryKind.OPTIMIZER):
            self._offload.mark_changed(MemoryKind.WEIGHTS, MemoryKind.OPTIMIZER)
            return self.state.load(folder)
