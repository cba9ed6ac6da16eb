"""The classes of verl's tutorial, by the name that scripts import: see `compat.verl.library`."""

from mindspeed_rlxf.compat.verl.library import (
    ActorRolloutRefWorker,
    CriticWorker,
    DataProto,
    NVMegatronRayWorkerGroup,
    RayPPOTrainer,
    RayWorkerGroup,
    ResourcePoolManager,
    RewardManager,
    RewardModelWorker,
    RLHFDataset,
    Role,
    collate_fn,
    gsm8k,
    math,
)

__all__ = [
    "ActorRolloutRefWorker", "CriticWorker", "DataProto", "NVMegatronRayWorkerGroup",
    "RLHFDataset", "RayPPOTrainer", "RayWorkerGroup", "ResourcePoolManager", "RewardManager",
    "RewardModelWorker", "Role", "collate_fn", "gsm8k", "math",
]  # fmt: skip
