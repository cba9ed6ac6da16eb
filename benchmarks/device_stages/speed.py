"""Stages that measure updates, generation and iterations."""

from __future__ import annotations

import json
import statistics
from argparse import Namespace

from .engines import build_actor, build_pair, joined, model_folder, seconds
from .settings import GIB, Figures, Settings


def update(settings: Settings, shape: str, engine: str) -> Figures:
    """Measure log-probs and updates of the actor: seconds, MFU and peak memory."""
    from mindspeed_rlxf import device
    from mindspeed_rlxf.device.peaks import find_peak
    from mindspeed_rlxf.engine import flop_counter

    with joined(settings, megatron=engine == "megatron"):
        actor, planned = build_actor(settings, shape, engine)
        tokens = settings.sizes.update[0] * sum(settings.sizes.update[1:])
        figures = {"dtype": "bf16", "tokens": tokens, **planned}
        actor.update()  # creates the optimizer's state
        peak_flops = find_peak(device.device_name())
        for name, run in {"update": actor.update, "log_probs": actor.forward}.items():
            device.synchronize()
            device.reset_peak_memory()
            flop_counter.take()
            times = [seconds(run) for _ in range(settings.sizes.repeats)]
            flops = flop_counter.take().flops / len(times) / statistics.median(times)
            figures |= {
                f"{name}_s": round(statistics.median(times), 4),
                f"{name}_tflops": round(flops / 1e12, 6),
                f"{name}_mfu": peak_flops and round(flops / peak_flops, 4),
            }
            if device.active_library() is not None:  # a CPU counts no memory of tensors
                figures[f"{name}_peak_gib"] = round(device.peak_memory() / GIB, 2)
    return figures


def decode(settings: Settings, shape: str) -> Figures:
    """Measure the native engine beside `transformers.generate` in this process."""
    with joined(settings):
        rows, new_tokens = settings.sizes.decode
        pair = build_pair(settings, shape)
        for generate in (pair.ours, pair.theirs):  # warm up
            generate([8] * rows)
        raced = pair.race([new_tokens] * rows, settings.sizes.repeats)
    return {
        "rows": rows,
        "new_tokens": new_tokens,
        "dtype": "bf16",
        "tokens_per_s": round(raced["tokens"] / raced["ours_s"], 1),
        "transformers_tokens_per_s": round(raced["tokens"] / raced["transformers_s"], 1),
        "ratio": raced["ratio"],
        "step_ms": round(1e3 * raced["ours_s"] / new_tokens, 2),
        "transformers_step_ms": round(1e3 * raced["transformers_s"] / new_tokens, 2),
    }


def grpo_arguments(settings: Settings, iterations: int) -> tuple[Namespace, list[int]]:
    """Return the arguments of `grpo_step.py`, and the forced lengths of responses."""
    from grpo_step import draw_lengths

    prompts, samples, prompt, response = settings.sizes.grpo
    arguments = Namespace(
        device=settings.device, dtype="bf16", prompts=prompts, samples=samples, prompt=prompt,
        response=response, iterations=iterations, threads=settings.threads, trl=settings.trl,
    )  # fmt: skip
    return arguments, draw_lengths(arguments)


def grpo_figures(times: list[float], arguments: Namespace, lengths: list[int]) -> Figures:
    """Return the figures of measured iterations."""
    keys = ("prompts", "samples", "prompt", "response", "dtype")
    return {
        **{key: getattr(arguments, key) for key in keys},
        "response_tokens": sum(lengths),
        "iteration_s": round(statistics.median(times), 3),
    }


def grpo(settings: Settings, shape: str) -> Figures:
    """Measure GRPO iterations of this package, without the first; `phases` are the last one's."""
    from grpo_step import our_seconds

    from mindspeed_rlxf import device
    from mindspeed_rlxf.config.enums import DeviceKind

    device.setup(DeviceKind(settings.device), settings.threads)
    folder = model_folder(settings, shape)
    arguments, lengths = grpo_arguments(settings, settings.sizes.repeats)
    times = our_seconds("shared", lengths, folder, arguments)[1:]
    newest = max(folder.glob("*/run/metrics.jsonl"), key=lambda file: file.stat().st_mtime)
    metrics = json.loads(newest.read_text(encoding="utf-8").splitlines()[-1])["metrics"]
    kept = {n: round(v, 3) for n, v in metrics.items() if n.startswith(("timing/", "memory/"))}
    return {**grpo_figures(times, arguments, lengths), "phases": kept}


def grpo_trl(settings: Settings, shape: str) -> Figures:
    """Measure such an iteration of TRL's GRPOTrainer, its second."""
    import grpo_step
    from ppo_step import child_seconds

    from mindspeed_rlxf import device
    from mindspeed_rlxf.config.enums import DeviceKind

    if settings.trl is None:
        return {"skipped": "no --trl FOLDER"}
    device.setup(DeviceKind(settings.device), settings.threads)
    folder = model_folder(settings, shape)
    arguments, lengths = grpo_arguments(settings, 1)
    times = child_seconds(grpo_step.__file__, grpo_step.KEYS, arguments, "trl", str(folder))
    return grpo_figures(times, arguments, lengths)
