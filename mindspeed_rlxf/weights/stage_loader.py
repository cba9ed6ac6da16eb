"""Move weights between a Hugging Face folder and this rank's Megatron stage.

Both directions use the parameter map in `models.parameters`.
"""

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
    ) -> None:
        """Match the module's parameters with this rank's in the architecture.

        `module` is the stage, or a ModuleList with its chunks if there are several. `trust_files`
        is for source folders, see `open_weights`. `lora` describes its adapters, if it has any.
        """
        self.architecture, self.head = architecture, head
        self.tp_group, self.pp_group, self.ep_group = tp_group, pp_group, ep_group
        self.trust_files = trust_files
        self.tensors = dict(module.named_parameters())
        place = (pp_group.rank(), pp_group.size(), chunks, ep_group.rank(), ep_group.size())
        self.table = list(rank_parameters(architecture, head, *place))
        self.lora = lora or LoraConfig()
        self.adapters = self.adapters_of(self.table)
        self._adapters = {parameter.sources[0]: parameter for parameter in self.adapters}
        mapped = {p.name for p in (*self.table, *self.adapters)}
        assert mapped == set(self.tensors), f"map and module differ: {mapped ^ set(self.tensors)}"

    def adapters_of(self, table: Iterable[StageParameter]) -> list[StageParameter]:
        """Return the adapter parameters of these parameters' modules."""
        return list(adapter_parameters(table, self.architecture, self.lora))

    def trained_of(self, table: list[StageParameter]) -> list[StageParameter]:
        """Return what is trained of these parameters: adapters and a score head, or all."""
        if self.lora.rank == 0:
            return table
        return self.adapters_of(table) + [p for p in table if p.sources == SCORE_HEAD.sources]

    @property
    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole model's trained tensors by Hugging Face name."""
        whole = self.trained_of(list(stage_parameters(self.architecture, self.head)))
        return {s: p.hf_shape(s, self.architecture) for p in whole for s in p.sources}

    def is_adapted(self, parameter: StageParameter) -> bool:
        """Whether a source of the parameter has an adapter."""
        return bool(self.adapters_of([parameter]))

    def reset_adapters(self, seed: int) -> None:
        """Set the adapters to their first values, which add nothing (`initial_values`)."""
        ranks = self.tp_group.rank(), self.tp_group.size()
        for parameter in self.adapters:
            values = initial_values(parameter.sources[0], parameter.shape, seed)
            target = self.tensors[parameter.name].data
            for part in shard_chunks(parameter, self.architecture, *ranks):
                target[part.place.slices] = values[part.chunk.slices].to(target)

    def load(self, folder: StoredWeights) -> list[str]:
        """Overwrite the model's own parameters from the folder; read only this rank's slices.

        Returns:
            Names left unchanged: a score head, if the folder has a language model without one.
        """
        absent, ranks = [], (self.tp_group.rank(), self.tp_group.size())
        for parameter in self.table:
            if parameter.sources == SCORE_HEAD.sources and parameter.sources[0] not in folder:
                absent.append(parameter.name)
                continue
            target, rows = self.tensors[parameter.name].data, 0
            for part in shard_chunks(parameter, self.architecture, *ranks):
                target[part.place.slices] = folder[part.source].read(part.chunk)
                rows = part.place.stops[0]
            target[rows:].zero_()  # padding of the vocabulary
        return absent

    def gather_merged(self, parameter: StageParameter, keep: bool = True) -> dict[str, Tensor]:
        """Gather a parameter with its adapters merged; return copies by Hugging Face name.

        A collective over the tp group; arguments as in `gather`.
        """
        full = self.gather(parameter, keep)
        for source in parameter.sources:
            module = source.removesuffix("weight")
            pair = [self._adapters.get(f"{module}{part}.weight") for part in (A, B)]
            parts = [self.gather(each, keep) for each in pair if each is not None]
            if parts and keep:
                a, b = (tensor for part in parts for tensor in part.values())
                merge(full[source], a, b, self.lora.scale)
        return full

    def merged_shard(self, parameter: StageParameter) -> Tensor:
        """Return this rank's part of `gather_merged` on the host; a collective like it."""
        full, ranks = self.gather_merged(parameter), (self.tp_group.rank(), self.tp_group.size())
        shard = torch.empty_like(self.tensors[parameter.name], device="cpu")
        for part in shard_chunks(parameter, self.architecture, *ranks):
            shard[part.place.slices] = full[part.source][part.chunk.slices]
        return shard

    def gather(self, parameter: StageParameter, keep: bool = True) -> dict[str, Tensor]:
        """Gather a parameter from all tp ranks; return copies by Hugging Face name.

        A collective over the tp group. Shards arrive one after the other, so the device needs room
        for the tensors and two shards, not for a second copy.

        Args:
            parameter: the parameter to gather.
            keep: False = only participate, and return {}.
        """
        shard, tp, a = self.tensors[parameter.name].detach(), self.tp_group, self.architecture
        names = parameter.sources if keep else ()
        full = {name: shard.new_empty(parameter.hf_shape(name, a)) for name in names}
        for rank in range(tp.size()):
            piece = shard.contiguous() if rank == tp.rank() else torch.empty_like(shard)
            if tp.size() > 1:
                dist.broadcast(piece, dist.get_global_rank(tp, rank), tp)
            for part in shard_chunks(parameter, a, rank, tp.size()) if keep else ():
                full[part.source][part.chunk.slices] = piece[part.place.slices]
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
        pp, ep = self.pp_group, self.ep_group
        name = hf_file_name(pp.rank() * ep.size() + ep.rank(), pp.size() * ep.size())
        first = ep.rank() == 0
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
            keep = writes and (first or parameter.expert is not None)
            for hf_name, tensor in self.gather_merged(parameter, keep).items():
                tensors[hf_name] = tensor.cpu().to(dtypes.get(hf_name, tensor.dtype))
        planned = {hf_name: PlannedTensor.of(tensors[hf_name]) for hf_name in sorted(tensors)}
        files = [(name, {hf_name: t.num_bytes for hf_name, t in planned.items()})]
        for group in (ep, pp):
            parts: list[Any] = [[]] * group.size()
            dist.all_gather_object(parts, files, group=group)
            files = [file for part in parts for file in part]
        try:
            if writes and failed is None:
                target.mkdir(parents=True, exist_ok=True)
                write_safetensors(target / name, planned)
                if first and pp.rank() == 0:
                    write_index(target, dict(files))
                    copy_side_files(described or source, target, self.head)
        except Exception as error:
            failed = error
        return failed
