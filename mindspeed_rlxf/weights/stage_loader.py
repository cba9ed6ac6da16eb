"""Move weights between a Hugging Face folder and this rank's Megatron stage.

Both directions use the parameter map in `models.parameters`.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf.config.lora import LoraConfig
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.adapter_parameters import A, B, adapter_parameters, initial_values, merge
from mindspeed_rlxf.models.parameters import (
    SCORE_HEAD,
    Head,
    StageParameter,
    rank_parameters,
    stage_parameters,
)
from mindspeed_rlxf.weights.chunks import PlannedTensor, StoredWeights, shard_chunks
from mindspeed_rlxf.weights.folders import copy_side_files, open_weights
from mindspeed_rlxf.weights.hf_folder import (
    hf_file_name,
    write_index,
    write_safetensors,
)


class StageWeights:
    """A pipeline rank's parameters, with their Hugging Face names and slices.

    Attributes:
        table: The model's own parameters.
        adapters: Parameters of low-rank adapters, if any.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        architecture: ArchitectureConfig,
        head: Head,
        tp_group: dist.ProcessGroup,
        pp_group: dist.ProcessGroup,
        ep_group: dist.ProcessGroup,
        chunks: int = 1,
        trust_files: bool = False,
        lora: LoraConfig | None = None,
        freezes_attention: bool = False,
    ) -> None:
        """Match the module's parameters with this rank's in the architecture.

        `module` is the stage, or a ModuleList with its chunks if there are several. `trust_files`
        is for source folders, see `open_weights`. `lora` describes its adapters, if it has any;
        `freezes_attention`: attention layers are not trained.
        """
        self.architecture = architecture
        self.head = head
        self.tp_group = tp_group
        self.pp_group = pp_group
        self.ep_group = ep_group
        self.trust_files = trust_files
        self.tensors = dict(module.named_parameters())
        position = (pp_group.rank(), pp_group.size(), chunks, ep_group.rank(), ep_group.size())
        self.table = list(rank_parameters(architecture, head, *position))
        self.lora = lora or LoraConfig()
        self.freezes_attention = freezes_attention
        self.adapters = self.adapters_of(self.table)
        self._adapters = {parameter.sources[0]: parameter for parameter in self.adapters}
        names = {p.name for p in (*self.table, *self.adapters)}
        assert names == set(self.tensors), f"map and module differ: {names ^ set(self.tensors)}"

    def adapters_of(self, table: Iterable[StageParameter]) -> list[StageParameter]:
        """Return the adapter parameters of these parameters' modules."""
        return list(adapter_parameters(table, self.architecture, self.lora))

    def trained_of(self, table: list[StageParameter]) -> list[StageParameter]:
        """Return what is trained of these parameters.

        Adapters and a score head, or all, without attention where that is frozen.
        """
        if self.freezes_attention:
            return [parameter for parameter in table if not parameter.is_of_attention]
        if self.lora.rank == 0:
            return table
        return self.adapters_of(table) + [p for p in table if p.sources == SCORE_HEAD.sources]

    @property
    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole model's trained tensors by Hugging Face name."""
        shapes = {}
        for parameter in self.trained_of(list(stage_parameters(self.architecture, self.head))):
            for source in parameter.sources:
                shapes[source] = parameter.hf_shape(source, self.architecture)
        return shapes

    def is_adapted(self, parameter: StageParameter) -> bool:
        """Whether a source of the parameter has an adapter."""
        return bool(self.adapters_of([parameter]))

    def reset_adapters(self, seed: int) -> None:
        """Set the adapters to their first values, which add nothing (`initial_values`)."""
        ranks = self.tp_group.rank(), self.tp_group.size()
        for parameter in self.adapters:
            values = initial_values(parameter.sources[0], parameter.shape, seed)
            target = self.tensors[parameter.name].data
            for shard_chunk in shard_chunks(parameter, self.architecture, *ranks):
                values_of_chunk = values[shard_chunk.chunk.slices]
                target[shard_chunk.place.slices] = values_of_chunk.to(target)

    def load(self, folder: StoredWeights) -> list[str]:
        """Overwrite the model's own parameters from the folder; read only this rank's slices.

        Returns:
            Names left unchanged: a score head, if the folder has a language model without one.
        """
        absent = []
        ranks = self.tp_group.rank(), self.tp_group.size()
        for parameter in self.table:
            if parameter.sources == SCORE_HEAD.sources and parameter.sources[0] not in folder:
                absent.append(parameter.name)
                continue
            target = self.tensors[parameter.name].data
            num_rows = 0
            for shard_chunk in shard_chunks(parameter, self.architecture, *ranks):
                stored = folder[shard_chunk.source]
                target[shard_chunk.place.slices] = stored.read(shard_chunk.chunk)
                num_rows = shard_chunk.place.stops[0]
            target[num_rows:].zero_()  # padding of the vocabulary
        return absent

    def gather_merged(self, parameter: StageParameter, keep: bool = True) -> dict[str, Tensor]:
        """Gather a parameter with its adapters merged; return copies by Hugging Face name.

        A collective over the tp group; arguments as in `gather`.
        """
        full = self.gather(parameter, keep)
        for source in parameter.sources:
            module = source.removesuffix("weight")
            a = self._adapters.get(f"{module}{A}.weight")
            b = self._adapters.get(f"{module}{B}.weight")
            if a is None or b is None:
                continue
            a_tensors = self.gather(a, keep)
            b_tensors = self.gather(b, keep)
            if keep:
                a_tensor = a_tensors[a.sources[0]]
                b_tensor = b_tensors[b.sources[0]]
                merge(full[source], a_tensor, b_tensor, self.lora.scale)
        return full

    def merged_shard(self, parameter: StageParameter) -> Tensor:
        """Return this rank's part of `gather_merged` on the host; a collective like it."""
        full = self.gather_merged(parameter)
        ranks = self.tp_group.rank(), self.tp_group.size()
        shard = torch.empty_like(self.tensors[parameter.name], device="cpu")
        for shard_chunk in shard_chunks(parameter, self.architecture, *ranks):
            source = full[shard_chunk.source]
            shard[shard_chunk.place.slices] = source[shard_chunk.chunk.slices]
        return shard

    def gather(self, parameter: StageParameter, keep: bool = True) -> dict[str, Tensor]:
        """Gather a parameter from all tp ranks; return copies by Hugging Face name.

        A collective over the tp group. Shards arrive one after the other, so the device needs room
        for the tensors and two shards, not for a second copy.

        Args:
            parameter: the parameter to gather.
            keep: False = only participate, and return {}.
        """
        own_shard = self.tensors[parameter.name].detach()
        tp = self.tp_group
        full: dict[str, Tensor] = {}
        if keep:
            for name in parameter.sources:
                full[name] = own_shard.new_empty(parameter.hf_shape(name, self.architecture))
        for rank in range(tp.size()):
            is_own = rank == tp.rank()
            shard = own_shard.contiguous() if is_own else torch.empty_like(own_shard)
            if tp.size() > 1:
                dist.broadcast(shard, dist.get_global_rank(tp, rank), tp)
            if not keep:
                continue
            for shard_chunk in shard_chunks(parameter, self.architecture, rank, tp.size()):
                source = full[shard_chunk.source]
                source[shard_chunk.chunk.slices] = shard[shard_chunk.place.slices]
        return full

    def export(
        self, target: Path, source: Path, writes: bool, described: Path | None = None
    ) -> Exception | None:
        """Write the merged weights as a Hugging Face folder, one file per pp and ep rank.

        The first rank also writes index, config.json and tokenizer. A collective over the tensor-,
        pipeline- and expert-parallel groups.

        Args:
            target: folder to write.
            source: folder the weights came from; tensors get their dtype there, else keep their
                own.
            writes: True on writing ranks (tp rank 0 in the first `ep` replicas); others only
                participate.
            described: folder with config.json and tokenizer; None = `source`.

        Returns:
            This rank's error, if any. Raised at once, it would leave other ranks waiting.
        """
        pp = self.pp_group
        ep = self.ep_group
        file_name = hf_file_name(pp.rank() * ep.size() + ep.rank(), pp.size() * ep.size())
        is_first_expert_rank = ep.rank() == 0
        failed: Exception | None = None
        dtypes: dict[str, torch.dtype] = {}
        try:
            if writes:
                original = open_weights(source, self.architecture, self.trust_files)
                names = [name for parameter in self.table for name in parameter.sources]
                dtypes = {name: original[name].dtype for name in names if name in original}
        except Exception as error:
            failed = error
        tensors: dict[str, Tensor] = {}
        for parameter in self.table:
            if parameter.is_tied_output_layer:
                continue  # the first stage writes the embedding
            keep = writes and (is_first_expert_rank or parameter.expert is not None)
            for hf_name, tensor in self.gather_merged(parameter, keep).items():
                tensors[hf_name] = tensor.cpu().to(dtypes.get(hf_name, tensor.dtype))
        planned = {hf_name: PlannedTensor.of(tensors[hf_name]) for hf_name in sorted(tensors)}
        files = [(file_name, {hf_name: t.num_bytes for hf_name, t in planned.items()})]
        for group in (ep, pp):
            files_of_rank: list[Any] = [[]] * group.size()
            dist.all_gather_object(files_of_rank, files, group=group)
            files = list(itertools.chain.from_iterable(files_of_rank))
        try:
            if writes and failed is None:
                target.mkdir(parents=True, exist_ok=True)
                write_safetensors(target / file_name, planned)
                if is_first_expert_rank and pp.rank() == 0:
                    write_index(target, dict(files))
                    copy_side_files(described or source, target, self.head)
        except Exception as error:
            failed = error
        return failed
