"""Adapters as a folder in PEFT's format."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from mindspeed_rlxf.config.lora import LoraConfig
from mindspeed_rlxf.models.adapter_parameters import A
from mindspeed_rlxf.models.parameters import SCORE_HEAD, Head
from mindspeed_rlxf.weights.atomic import replace_file
from mindspeed_rlxf.weights.chunks import PlannedTensor
from mindspeed_rlxf.weights.hf_folder import write_safetensors

PREFIX = "base_model.model."  # PEFT's, before the names of the model


def write_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    lora: LoraConfig,
    linears: Iterable[str],
    head: Head,
    base: str,
) -> None:
    """Write adapters, and the score head if they have one, for `PeftModel.from_pretrained`.

    Args:
        folder: Where to write.
        tensors: All of them on the host, by the model's names.
        lora: Their configuration.
        linears: Names of all modules of the model that could have adapters.
        head: Its head.
        base: Folder of the weights that the adapters belong to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    planned = {PREFIX + name: PlannedTensor.of(tensor) for name, tensor in tensors.items()}
    write_safetensors(folder / "adapter_model.safetensors", planned)
    has_score_head = head is Head.SCORE
    content = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_score_head else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": _targets(tensors, linears),
        "modules_to_save": [SCORE_HEAD.sources[0].split(".")[0]] if has_score_head else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    replace_file(folder / "adapter_config.json", json.dumps(content, indent=2) + "\n")


def _targets(tensors: Mapping[str, Tensor], linears: Iterable[str]) -> list[str]:
    """Return the adapted modules by the ends of their names, if these select no others."""
    end = f".{A}.weight"
    adapted = [name.removesuffix(end) for name in tensors if name.endswith(end)]
    ends = sorted({module.rpartition(".")[2] for module in adapted})
    selected = [name for name in linears if name.rpartition(".")[2] in ends]
    return ends if len(selected) == len(adapted) else adapted
