"""The models and engines that stages measure."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .settings import GIB, TOY, Figures, Settings

FITTING_SHARE = 0.75  # of the device's memory that a plan may need, so that its error does no harm


def model_folder(settings: Settings, shape: str) -> Path:
    """Return a folder with a random model of a shape, bf16, made on the current device if missing.

    `policy`, `scorer` (the same, for plans) and `tokenizer` are in it.
    """
    import torch
    from iteration import write_inputs
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from mindspeed_rlxf import device

    folder = settings.scratch / shape
    if folder.exists():
        return folder
    unfinished = folder.with_name(f"{shape}.part-{os.getpid()}")
    sizes = settings.sizes.shapes[shape]
    config = Qwen2Config(
        **sizes, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0
    )
    torch.manual_seed(0)
    with device.current_device():
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(unfinished / "policy")
    (unfinished / "scorer").symlink_to("policy")
    write_inputs(unfinished, TOY["vocab_size"], settings.sizes.grpo[2])
    unfinished.rename(folder)
    del model
    if (library := device.active_library()) is not None:
        library.empty_cache()
    return folder


@contextmanager
def joined(settings: Settings, megatron: bool = True) -> Iterator[None]:
    """Set up the device and a world of one process, for an engine."""
    from mindspeed_rlxf import device
    from mindspeed_rlxf.cluster.local import LocalRuntime
    from mindspeed_rlxf.config.enums import DeviceKind

    kind = DeviceKind(settings.device)
    for name, value in device.shared_memory_environment(kind).items():
        os.environ.setdefault(name, value)  # as in a run with offload
    runtime = LocalRuntime(kind, settings.threads, 300.0, megatron)
    yield
    runtime.shutdown()


def build_actor(settings: Settings, shape: str, backend: str, **keys: Any) -> tuple[Any, Figures]:
    """Return the side `Ours` of `update.py` in bf16, and the plan of its peak.

    keys: further keys of `actor_rollout`
    """
    from update import Ours, actor_config, make_rollouts

    from mindspeed_rlxf import device
    from mindspeed_rlxf.config.enums import DeviceKind

    folder = model_folder(settings, shape)
    rows, prompt, response = settings.sizes.update
    arguments = Namespace(
        batch=rows, micro=1, prompts=0, samples=1, prompt=prompt, limit=response, bf16=True,
        threads=settings.threads, device=DeviceKind(settings.device),
    )  # fmt: skip
    rollouts = make_rollouts([response] * rows, arguments)
    limit = FITTING_SHARE * device.memory_total()
    for tokens in settings.sizes.micro_batches:
        keys["max_tokens_per_micro_batch"] = tokens
        config = actor_config(folder, arguments, backend, **keys)
        if planned_bytes(config) <= limit:
            break
    planned_gib = round(planned_bytes(config) / GIB, 2)
    return Ours(config, rollouts), {"micro_batch_tokens": tokens, "planned_gib": planned_gib}


def build_pair(settings: Settings, shape: str) -> Any:
    """Return the native engine and transformers' model of `rollout.py`, in bf16."""
    import torch
    from rollout import Pair
    from transformers import AutoModelForCausalLM

    from mindspeed_rlxf import device
    from mindspeed_rlxf.config.architecture import ArchitectureConfig
    from mindspeed_rlxf.config.hf_config import parse_architecture, read_hf_config

    policy = model_folder(settings, shape) / "policy"
    fields = parse_architecture(read_hf_config(policy))
    architecture = ArchitectureConfig(**{k: v for k, v in fields.items() if v is not None})
    peer: Any = AutoModelForCausalLM.from_pretrained(
        policy, attn_implementation="sdpa", dtype=torch.bfloat16
    ).to(device.current_device())
    peer.generation_config.eos_token_id = None
    pair = Pair(architecture, True, peer, torch.bfloat16, settings.sizes.decode[0])
    pair.threads = {"ours": settings.threads, "transformers": settings.threads}
    return pair


def planned_bytes(config: Any) -> int:
    """Return the peak that the plan has for an update of the actor."""
    from mindspeed_rlxf.config.enums import Role
    from mindspeed_rlxf.ops.planning.memory import role_memory

    planned = role_memory(config, Role.ACTOR_ROLLOUT, 0)
    phases = [phase for phase in planned.phases if phase.name in ("update", "optimizer step")]
    return max(sum(planned.on_device(phase)) + phase.total for phase in phases)


def seconds(run: Callable[[], Any]) -> float:
    """Return the seconds of a call, until the device has finished."""
    from mindspeed_rlxf import device

    started = time.perf_counter()
    run()
    device.synchronize()
    return time.perf_counter() - started
