"""The stage that compares our log-probs of labels with a library's fused linear cross-entropy."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from .engines import seconds
from .settings import Figures, Settings


def head(settings: Settings, shape: str) -> Figures:
    """Measure log-probs of an update's responses, forward alone and with backward, bf16.

    `liger` has the same of Liger's operator and its largest difference, or why it has none. It has
    no entropy, so an update could not use it where the entropy is reported.
    """
    import torch

    from mindspeed_rlxf import device
    from mindspeed_rlxf.config.enums import DeviceKind
    from mindspeed_rlxf.models.heads import token_log_probs

    where = device.setup(DeviceKind(settings.device), settings.threads, megatron=False)
    sizes = settings.sizes.shapes[shape]
    num_tokens = settings.sizes.update[0] * settings.sizes.update[2]
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, sizes["hidden_size"], device=where).bfloat16()
    weight = torch.randn(sizes["vocab_size"], sizes["hidden_size"], device=where).bfloat16() * 0.02
    labels = torch.randint(sizes["vocab_size"], (num_tokens,), device=where)
    alone: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)

    def ours(hidden: Any, weight: Any) -> Any:
        with_entropy = torch.is_grad_enabled()
        rest = labels, sizes["vocab_size"], alone
        return token_log_probs(hidden, weight, *rest, with_entropy=with_entropy)[0]

    def liger(hidden: Any, weight: Any) -> Any:
        functional: Any = importlib.import_module("liger_kernel.transformers.functional")
        loss = functional.liger_fused_linear_cross_entropy(hidden, weight, labels, reduction="none")
        return -(loss[0] if isinstance(loss, tuple) else loss)

    figures: Figures = {"tokens": num_tokens, "ours": measure(ours, hidden, weight, settings)}
    try:
        figures["liger"] = measure(liger, hidden, weight, settings)
        with torch.no_grad():
            difference = (liger(hidden, weight) - ours(hidden, weight)).abs().max()
        figures["liger"]["off_by"] = float(difference)
    except Exception as error:  # whatever a library of the device raises
        figures["liger"] = {"error": f"{type(error).__name__}: {error}"[:200]}
    return figures


def measure(
    log_probs: Callable[[Any, Any], Any], hidden: Any, weight: Any, settings: Settings
) -> Figures:
    """Return the median seconds of log-probs without gradients, and with a backward pass."""
    import torch

    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()

    def forward() -> None:
        with torch.no_grad():
            log_probs(hidden, weight)

    def update() -> None:
        hidden.grad = weight.grad = None
        log_probs(hidden, weight).sum().backward()

    figures = {}
    for name, run in {"forward_s": forward, "update_s": update}.items():
        run()  # warm up
        times = [seconds(run) for _ in range(settings.sizes.repeats)]
        figures[name] = round(statistics.median(times), 5)
    return figures
