"""Moves weights between a Hugging Face folder and the Megatron stage of this rank.

Both directions walk the parameter map of `models.parameters`, so what is written is what was read.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.files.safe import replace_file
from mindspeed_rlxf.models.parameters import (
    OUTPUT_LAYER,
    SCORE_HEAD,
    Head,
    StageParameter,
    hf_shape,
    rank_parameters,
    shard_slices,
)
from mindspeed_rlxf.weights.folders import copy_side_files, open_weights
from mindspeed_rlxf.weights.formats import INDEX, SINGLE
from mindspeed_rlxf.weights.reader import WeightReader

Files = list[tuple[str, dict[str, int]]]
"""Name of each file, and the bytes of each tensor in it."""


class StageWeights:
    """The parameters of one pipeline rank, as a table from the map to the module's tensors."""

    def __init__(
        self,
        module: torch.nn.Module,
        architecture: ArchitectureConfig,
        head: Head,
        tp_group: dist.ProcessGroup,
        pp_group: dist.ProcessGroup,
        ep_group: dist.ProcessGroup,
        chunks: int = 1,
    ) -> None:
        """module: the stage, or the list of its chunks where there are several."""
        self.architecture, self.head = architecture, head
        self.tp_group, self.pp_group, self.ep_group = tp_group, pp_group, ep_group
        self.tensors = dict(module.named_parameters())
        place = (pp_group.rank(), pp_group.size(), chunks, ep_group.rank(), ep_group.size())
        self.table = list(rank_parameters(architecture, head, *place))
        mapped = {p.name for p in self.table}
        assert mapped == set(self.tensors), f"map and module differ: {mapped ^ set(self.tensors)}"

    def load(self, folder: WeightReader) -> list[str]:
        """Fill every parameter from the folder, reading this rank's slices only.

        A score head that the folder lacks (a language model was given) is left as it is; its name
        is in the returned list.
        """
        absent = []
        for parameter in self.table:
            if parameter.sources == SCORE_HEAD.sources and parameter.sources[0] not in folder:
                absent.append(parameter.name)
            else:
                self._fill(parameter, folder)
        return absent

    def _fill(self, parameter: StageParameter, folder: WeightReader) -> None:
        target = self.tensors[parameter.name].data
        slices = shard_slices(
            parameter, self.architecture, self.tp_group.rank(), self.tp_group.size()
        )
        shard = torch.cat([folder.read(part) for part in slices], dim=slices[0].dim)
        if shard.size(0) < target.size(0):  # vocabulary padding
            target[shard.size(0) :].zero_()
            target = target[: shard.size(0)]
        target.copy_(shard)

    def hf_tensors(self, parameter: StageParameter, keep: bool = True) -> dict[str, Tensor]:
        """The Hugging Face tensors of one parameter, on the CPU; a collective over the tp group.

        keep: False on ranks that only take part, which get nothing.
        """
        shard = self.tensors[parameter.name].detach()
        shards = [torch.empty_like(shard) for _ in range(self.tp_group.size())]
        dist.all_gather(shards, shard.contiguous(), group=self.tp_group)
        if not keep:
            return {}
        shapes = {name: hf_shape(name, self.architecture) for name in parameter.sources}
        full = {name: torch.empty(shapes[name], dtype=shard.dtype) for name in parameter.sources}
        for rank, piece in enumerate(shards):
            offset = 0
            for part in shard_slices(parameter, self.architecture, rank, len(shards)):
                target = full[part.source].narrow(part.dim, part.start, part.size)
                target.copy_(piece.narrow(part.dim, offset, part.size))
                offset += part.size
        return full

    def export(
        self, target: Path, source: Path, writes: bool, described: Path | None = None
    ) -> None:
        """Write the folder `target`: each pipeline stage its own file, the first one the index.

        With experts on several ranks each of these writes a file: the first one of a stage its own
        experts and all else, the others their experts.

        source: the folder the weights came from; gives the dtype per tensor.
        described: the folder of config.json and the tokenizer; None = `source`
        writes: True on the ranks that write (tp rank 0 of the first `ep` replicas).
        A collective over the tensor-, pipeline- and expert-parallel groups; only ranks that write
        hold their tensors on the host.
        """
        name = self._file_name()
        first = self.ep_group.rank() == 0
        original = open_weights(source, self.architecture)
        tensors: dict[str, Tensor] = {}
        for parameter in self.table:
            if parameter.name.endswith(OUTPUT_LAYER.name) and self._tied:
                continue  # the first stage writes the embedding
            keep = writes and (first or parameter.expert is not None)
            for hf_name, tensor in self.hf_tensors(parameter, keep).items():
                dtype = original.dtype(hf_name) if hf_name in original else tensor.dtype
                tensors[hf_name] = tensor.to(dtype)
        if writes:
            target.mkdir(parents=True, exist_ok=True)
            (target / name).unlink(missing_ok=True)  # the library writes through a link
            save_file(tensors, target / name, metadata={"format": "pt"})
        sizes = {hf_name: t.numel() * t.element_size() for hf_name, t in tensors.items()}
        gathered = _gather(_gather([(name, sizes)], self.ep_group), self.pp_group)
        if writes and first and self.pp_group.rank() == 0:
            self._write_side_files(target, described or source, gathered)

    def _file_name(self) -> str:
        parts = self.pp_group.size() * self.ep_group.size()
        part = self.pp_group.rank() * self.ep_group.size() + self.ep_group.rank()
        return SINGLE if parts == 1 else f"model-{part + 1:05d}-of-{parts:05d}.safetensors"

    @property
    def _tied(self) -> bool:
        lm = self.head is Head.LANGUAGE_MODEL
        return lm and not self.architecture.untie_embeddings_and_output_weights

    def _write_side_files(self, target: Path, source: Path, files: Files) -> None:
        if len(files) > 1:
            weight_map = {name: file for file, sizes in files for name in sorted(sizes)}
            total = sum(size for _, sizes in files for size in sizes.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            replace_file(target / INDEX, json.dumps(index, indent=2))
        copy_side_files(source, target, self.head)


def _gather(files: Files, group: dist.ProcessGroup) -> Files:
    """The lists of all ranks of the group, one after the other."""
    gathered: list[Files] = [[]] * group.size()
    dist.all_gather_object(gathered, files, group=group)
    return [file for part in gathered for file in part]
