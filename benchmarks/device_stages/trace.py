"""The stage that traces an update: its longest kernels, and gaps in which no kernel runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .engines import build_actor, joined, seconds
from .settings import Figures, Settings

LONGEST_KERNELS, LONGEST_GAPS, LEAST_GAP_US, NAME_LENGTH = 10, 5, 100.0, 80


class Span(NamedTuple):
    """A kernel's run, or an operator's on the CPU; microseconds."""

    name: str
    start: float
    end: float


def read_spans(events: Iterable[Any], on_cpu: bool) -> list[Span]:
    """Return the kernels among the events of torch's profiler; on CPU the innermost operators."""
    from torch.autograd import DeviceType

    spans = []
    for event in events:
        is_host = event.device_type == DeviceType.CPU
        if is_host != on_cpu or event.is_user_annotation or (on_cpu and event.cpu_children):
            continue
        spans.append(Span(event.name, event.time_range.start, event.time_range.end))
    return spans


def summarize(spans: Sequence[Span]) -> dict[str, Any]:
    """Return times of the spans: those of the longest kernels, and gaps over LEAST_GAP_US."""
    assert spans, "the trace has no kernels"
    window_us = max(span.end for span in spans) - min(span.start for span in spans)
    gaps = find_gaps(spans)
    longest = [
        {"us": round(gap_us, 1), "after": before, "before": after}
        for gap_us, before, after in sorted(gaps, reverse=True)[:LONGEST_GAPS]
    ]
    return {
        "window_ms": round(window_us / 1e3, 3),
        "kernels": sum_kernels(spans)[:LONGEST_KERNELS],
        "gaps_over_us": LEAST_GAP_US,
        "gaps": len(gaps),
        "gaps_ms": round(sum(gap for gap, _, _ in gaps) / 1e3, 3),
        "longest_gaps": longest,
    }


def sum_kernels(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """Return name, calls and milliseconds of each kernel, the longest sum first."""
    times: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        times[span.name[:NAME_LENGTH]].append(span.end - span.start)
    kernels = [
        {"name": name, "calls": len(all_us), "ms": round(sum(all_us) / 1e3, 3)}
        for name, all_us in times.items()
    ]
    return sorted(kernels, key=lambda kernel: -kernel["ms"])


def find_gaps(spans: Iterable[Span]) -> list[tuple[float, str, str]]:
    """Return (microseconds, kernel before, kernel after) of gaps longer than LEAST_GAP_US.

    In a gap no kernel runs, on any stream.
    """
    gaps = []
    last: Span | None = None  # the kernel that ends last
    for span in sorted(spans, key=lambda span: span.start):
        if last is not None and span.start - last.end > LEAST_GAP_US:
            names = last.name[:NAME_LENGTH], span.name[:NAME_LENGTH]
            gaps.append((span.start - last.end, *names))
        if last is None or span.end > last.end:
            last = span
    return gaps


def trace(settings: Settings, shape: str) -> Figures:
    """Trace one update with Megatron's engine: its longest kernels, and gaps between kernels.

    The figures are of a trace of kernels alone, which costs the host little. On a device another
    update is traced before it with the operators of the host, into `trace.json.gz`.
    """
    from torch.profiler import ProfilerActivity, profile

    if settings.device == "npu":
        return {"skipped": "torch.profiler does not see the kernels of an NPU"}
    on_cpu = settings.device == "cpu"
    kernels = ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA
    with joined(settings):
        actor, _ = build_actor(settings, shape, "megatron")
        actor.update()
        if not on_cpu:
            with profile(activities=[ProfilerActivity.CPU, kernels]) as traced:
                seconds(actor.update)
            traced.export_chrome_trace(str(settings.folder / "trace.json.gz"))
        with profile(activities=[kernels]) as traced:
            update_s = seconds(actor.update)
        figures = summarize(read_spans(traced.events(), on_cpu))
    return {"update_s": round(update_s, 4), **figures}
