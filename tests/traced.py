"""Measure the memory that a call allocates, by torch's profiler."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def traced_peak(call: Callable[[], object]) -> int:
    """Return the peak of the bytes that a call allocates, without what was allocated before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        call()
    assert traced.profiler is not None and traced.profiler.kineto_results is not None
    events = [e for e in traced.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        allocated += event.nbytes()
        most = max(most, allocated)
    return most
