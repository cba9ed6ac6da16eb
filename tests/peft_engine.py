"""`PlainEngine` with PEFT's adapters, which tests compare with those of this package."""

import copy

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from mindspeed_rlxf.config import lora
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import LearningConfig, RunConfig
from tests.adapter_noise import noise
from tests.plain_engine import PlainEngine


def peft_config(keys: lora.LoraConfig) -> LoraConfig:
    """Return PEFT's configuration of the same adapters."""
    names = {
        name: value if isinstance(value, str) else list(value) or None
        for name, value in (("target", keys.target_modules), ("exclude", keys.exclude_modules))
    }
    return LoraConfig(
        r=keys.rank,
        lora_alpha=keys.alpha,
        target_modules=names["target"],
        exclude_modules=names["exclude"],
        task_type="CAUSAL_LM",
    )


class PeftEngine(PlainEngine):
    """Trains adapters that start as `noise`, and a score head."""

    def __init__(self, config: RunConfig, role: Role) -> None:
        super().__init__(config, role)
        section = config.role(role)
        assert isinstance(section, LearningConfig)
        self.peft = get_peft_model(self.model, peft_config(section.lora))
        self.adapters = {
            name.replace(".default.", "."): parameter
            for name, parameter in self.model.named_parameters()
            if "lora_" in name
        }
        for name, parameter in self.adapters.items():
            parameter.data.copy_(noise(name, tuple(parameter.shape)))
        self.parameters = [*self.adapters.values()]
        if self.head is not None:
            self.parameters.append(self.head)
        keys = section.optimizer
        self.adam = torch.optim.AdamW(
            self.parameters, keys.lr, eps=keys.adam_eps, weight_decay=keys.weight_decay
        )

    def file_tensors(self) -> dict[str, Tensor]:
        """Return the merged weights, of copies."""
        model, self.model = self.model, copy.deepcopy(self.peft).merge_and_unload()
        found = super().file_tensors()
        self.model = model
        return found

    def trained(self) -> dict[str, Tensor]:
        """Return copies of what is trained by Hugging Face name."""
        found = {name: parameter.detach().clone() for name, parameter in self.adapters.items()}
        head = {} if self.head is None else {"score.weight": self.head.detach().clone()}
        return found | head
