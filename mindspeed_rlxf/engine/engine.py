"""A Megatron model with its schedule and, if trained, its optimizer.

`TrainEngine` documents the interface methods.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.schema import (
    OptimizerConfig,
    RoleConfig,
)
from mindspeed_rlxf.data.batch import Rollouts
from mindspeed_rlxf.device import megatron_versions
from mindspeed_rlxf.engine import flop_counter
from mindspeed_rlxf.engine.adam_state import single_optimizers
from mindspeed_rlxf.engine.build import (
    build_chunks,
    build_optimizer,
    build_scheduler,
    connect_schedule,
    measure_in_rows,
    set_gather_in_forward,
    wrap,
)
from mindspeed_rlxf.engine.collective_errors import gather_all
from mindspeed_rlxf.engine.common import CommonEngine
from mindspeed_rlxf.engine.export import export_adapters, export_hf, export_megatron
from mindspeed_rlxf.engine.hf_stream import adapter_tensors, hf_tensors
from mindspeed_rlxf.engine.micro_batch import (
    MicroBatch,
    bring_together,
    group_rows,
    make_micro_batches,
    number_prompts,
    saved_tokens,
)
from mindspeed_rlxf.engine.offload import tensors_of
from mindspeed_rlxf.engine.outputs import begin_reading_totals
from mindspeed_rlxf.engine.parallel import ParallelGroups
from mindspeed_rlxf.engine.schedule import Read, run_schedule
from mindspeed_rlxf.engine.step_guard import GuardedOptimizer, SkippedSteps
from mindspeed_rlxf.engine.train_engine import MemoryKind, PolicyStep, ValueStep
from mindspeed_rlxf.engine.train_state import TrainState, load_state
from mindspeed_rlxf.models.adapter_parameters import switched_off
from mindspeed_rlxf.models.adapters import LinearAdapters
from mindspeed_rlxf.models.attention import shares_prompts
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.weights.folders import copy_side_files, find_description, open_weights
from mindspeed_rlxf.weights.stage_loader import StageWeights
from mindspeed_rlxf.weights.state_files import Loaded

logger = logging.getLogger(__name__)


class MegatronEngine(CommonEngine):
    """One role's model on this rank: a pipeline stage in a tensor-parallel replica.

    With a virtual pipeline the stage has several model chunks.
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
        tokenizer: str | None = None,
        brings_together: bool = True,
    ) -> None:
        """Build the model, load its weights, and move offloaded memory away; a collective.

        Seeds the process, by seed and rank. Raises ValueError if weights are missing or damaged.

        Args:
            role: Role configuration.
            head: Model head.
            seed: Base seed.
            optimizer: Optimizer settings; None freezes the model.
            train_iters: Length of the learning-rate schedule.
            skipped: Counts skipped steps and decides if the run goes on; None raises at once.
            deterministic: See `device.set_deterministic`; holds for the whole process.
            tokenizer: Tokenizer folder, for side files that `load` lacks; None exports nothing.
            brings_together: Whether updates may make the rows of a shared prompt neighbours.
        """
        assert role.architecture is not None and role.load is not None, "checked beforehand"
        megatron_versions.apply_patches()
        device.set_deterministic(deterministic)
        device.seed_all(seed + dist.get_rank())  # else Python and numpy draw seeds from the system
        self.role = role
        self.head = head
        self.source = find_description(role.load, tokenizer) if tokenizer else Path(role.load)
        self.skipped = skipped or SkippedSteps("raise", 0, role.model)
        self._mini_batch = 0  # steps of this iteration
        self.groups = ParallelGroups(
            role.tensor_model_parallel_size,
            role.pipeline_model_parallel_size,
            seed,
            role.model_chunks,
            role.expert_model_parallel_size,
            role.context_parallel_size,
        )
        self.dtype = torch.bfloat16 if role.bf16 else torch.float32
        self.lora = role.adapters
        with self.groups.active():
            self.chunks = build_chunks(role, head, self.groups, self.dtype)
            self.weights = StageWeights(
                self.module,
                role.architecture,
                head,
                self.groups.tp,
                self.groups.pp,
                self.groups.ep,
                role.model_chunks,
                role.trust_files,
                self.lora,
                role.freezes_attention,
            )
            self._load_weights(seed)
            self.weights.reset_adapters(seed)
            self.optimizer: MegatronOptimizer | None = None
            self.scheduler: OptimizerParamScheduler | None = None
            self.models: list[Any]  # the chunks, wrapped for data parallelism where they learn
            if optimizer is None:
                self.models = [chunk.requires_grad_(False) for chunk in self.chunks]
            else:
                self._build_training(optimizer, train_iters)
            self._shares = self._agree_on_sharing()
        self._brings_together = brings_together
        optimizers: list[Any] = single_optimizers(self.optimizer) if self.optimizer else []
        adams = [single.optimizer for single in optimizers]
        self._offload = self._make_offload(tensors_of(self.module, self.models, adams))

    def _build_training(self, optimizer: OptimizerConfig, train_iters: int) -> None:
        """Wrap the chunks for data parallelism, and build optimizer, schedule and their state."""
        self.models = [wrap(chunk, optimizer) for chunk in self.chunks]
        measure_in_rows()
        self.optimizer = build_optimizer(optimizer, self.models, self.dtype)
        self._guarded = GuardedOptimizer(self.optimizer)
        self.scheduler = build_scheduler(optimizer, self.optimizer, train_iters)
        connect_schedule(self.config, self.models, self.optimizer)
        self.state = TrainState(
            self.weights,
            self.groups,
            self.optimizer,
            self.scheduler,
            self.skipped,
            self.role.model_chunks,
            self.describe,
            lambda *elements: self._offload.read(*elements),
        )

    def _agree_on_sharing(self) -> bool:
        if not (self.role.share_prompts and self.role.packed_sequences):
            return False
        attention = self.chunks[0].decoder.layers[0].self_attention.core_attention
        is_able = all(gather_all([shares_prompts(attention)]))
        if not is_able:
            logger.warning("%s: prompts are not shared, no operator does it here", self.role.model)
        return is_able

    @property
    def module(self) -> torch.nn.Module:
        """The module with all this rank's parameters, named as in `models.parameters`."""
        return self.chunks[0] if len(self.chunks) == 1 else torch.nn.ModuleList(self.chunks)

    @property
    def output_weight(self) -> Tensor | None:
        """This rank's rows of the output layer; None before the last pipeline stage."""
        chunk = self.chunks[-1]
        return chunk.output_weight if chunk.post_process else None

    @property
    def config(self) -> TransformerConfig:
        """Megatron's transformer configuration."""
        return self.chunks[0].config

    def _load_weights(self, seed: int) -> None:
        assert self.role.load is not None, "checked beforehand"
        folder = open_weights(self.role.load, self.role.architecture, self.role.trust_files)
        absent = self.weights.load(folder)
        if absent:
            generator = torch.Generator().manual_seed(seed)
            head = self.chunks[-1].score.weight
            noise = torch.randn(head.shape, generator=generator)
            head.data.copy_(noise * self.role.architecture.init_method_std)

    def micro_batches(
        self, rollouts: Rollouts, rows: Sequence[int], in_order: bool = False
    ) -> list[MicroBatch]:
        """Make micro-batches from the given rows, packed or padded as this role computes.

        A collective over the data-parallel ranks, which must pass equally many rows. With
        `in_order` each micro-batch has consecutive rows, even with `balance_by_length`.
        """
        lengths = rollouts.prompt_lengths + rollouts.response_lengths
        balances = self.role.architecture is not None and self.role.architecture.balances_experts
        prompts = saved = None
        if self._shares and (in_order or not balances):  # which counts the tokens of each expert
            prompts = number_prompts(rollouts)
            if self._brings_together and not in_order:
                rows = bring_together(rows, prompts)
            saved = saved_tokens(rows, prompts, rollouts.prompt_lengths.tolist())
        groups = group_rows(self.role, rows, lengths.tolist(), in_order, self.groups.dp_host, saved)
        cp = self.groups.cp
        splits = self.groups.tp.size() if self.config.sequence_parallel else 1
        return make_micro_batches(
            rollouts,
            groups,
            self.role.packed_sequences,
            splits * cp.size(),
            device.current_device(),
            prompts,
            cp if cp.size() > 1 else None,
        )

    @property
    def is_leader(self) -> bool:
        """Whether this rank's results are used for its replica."""
        return self.groups.is_leader

    def without_adapters(self) -> AbstractContextManager[None]:
        """Return a context in which this engine computes with the loaded weights alone."""
        return switched_off(m for m in self.module.modules() if isinstance(m, LinearAdapters))

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[MicroBatch], read: Read) -> list[Tensor]:
        """Run the forward passes without gradients; return `read`'s result per micro-batch.

        Needs at least one micro-batch. Empty on all pipeline stages but the last. Leaves the model
        in evaluation mode.
        """
        for model in self.models:
            model.eval()
        # The schedule needs a multiple of this number, so the last micro-batch runs again.
        fill = [micro_batches[-1]] * (-len(micro_batches) % self.role.micro_batch_multiple)
        with self.holding(MemoryKind.WEIGHTS), self.groups.active():
            outputs = run_schedule(
                self.models, self.chunks[-1], [*micro_batches, *fill], read, forward_only=True
            )
        self._count(micro_batches, flop_counter.FORWARD)
        return outputs[: len(micro_batches)]

    def train_step(
        self, micro_batches: Sequence[MicroBatch], step: PolicyStep | ValueStep
    ) -> dict[str, float]:
        """Take an optimizer step on one mini-batch, or skip it if a number is not finite.

        Moves offloaded memory to the device; other engines' movable memory makes room. Returns loss
        metrics averaged over the mini-batch on all data-parallel ranks (last stage only),
        `grad_norm`, and with `nan_policy: skip` `skipped_steps`, 0 or 1. Raises FloatingPointError,
        before any weight changes, as `SkippedSteps.judge` decides.
        """
        self._mini_batch += 1
        with self.holding(*MemoryKind, later=MemoryKind.OPTIMIZER), self.groups.active():
            set_gather_in_forward(self.models, True)
            for model in self.models:
                model.train()
                model.zero_grad_buffer()
            self.state.optimizer.zero_grad()
            read = partial(self._loss, step)
            outputs = run_schedule(self.models, self.chunks[-1], micro_batches, read)
            self._offload.mark_changed(MemoryKind.WEIGHTS, MemoryKind.OPTIMIZER)
            self._offload.await_copies(MemoryKind.OPTIMIZER)
            totals = begin_reading_totals(outputs)
            result = self._guarded.step([output.loss.detach() for output in outputs])
            self.skipped.judge(result, self.state.scheduler.num_steps + 1, self._mini_batch)
            return self._step_metrics(micro_batches, outputs, totals, result)

    def end_iteration(self) -> float:
        """Advance the learning-rate schedule; return the ending iteration's rate."""
        assert self.optimizer is not None and self.scheduler is not None
        set_gather_in_forward(self.models, False)
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.scheduler.step(increment=1)
        self._mini_batch = 0
        return rate

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight but adapters as (Hugging Face name, whole device tensor)."""
        with self.holding(MemoryKind.WEIGHTS):
            yield from hf_tensors(self.weights, self.groups, self.role.model_chunks)

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each adapter's A and B like `hf_tensors`."""
        with self.holding(MemoryKind.WEIGHTS):
            yield from adapter_tensors(self.weights, self.groups, self.role.model_chunks)

    def held_weights(self) -> Iterable[Tensor]:
        """Return this rank's parameters, each once."""
        return {id(p): p.data for p in self.weights.tensors.values()}.values()

    def export(
        self,
        hf_folder: Path | None,
        megatron_folder: Path | None,
        adapter_folder: Path | None = None,
    ) -> None:
        """Write the weights in these formats (see `engine.export`); a collective."""
        # With `runtime: local` the first rank has just removed the files of an earlier export.
        dist.barrier()
        load = self.role.load
        assert load is not None, "it was loaded from there"
        with self.holding(MemoryKind.WEIGHTS), self.groups.active():
            if hf_folder is not None:
                export_hf(self.weights, self.groups, hf_folder, load, self.source)
            if adapter_folder is not None:
                chunks = self.role.model_chunks
                export_adapters(self.weights, self.groups, chunks, adapter_folder, load)
            if megatron_folder is not None:
                export_megatron(self.weights, self.chunks, megatron_folder, self.describe)

    def describe(self, folder: Path) -> list[Path]:
        """Write config.json, with training head and dtype, and the tokenizer files."""
        return copy_side_files(self.source, folder, self.head, self.dtype)

    def load_state(self, folder: Path) -> Loaded:
        """Load a training state; see `train_state.load_state`."""
        with self.holding(MemoryKind.WEIGHTS, MemoryKind.OPTIMIZER):
            self._offload.mark_changed(MemoryKind.WEIGHTS, MemoryKind.OPTIMIZER)
            return load_state(self.state, folder)
