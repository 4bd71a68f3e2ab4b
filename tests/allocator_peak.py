"""What torch's allocator holds at its highest during a call, copies that kernels make for themselves included."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def allocator_peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes above those at the start, of this thread on the CPU; what `work` returns is still held."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = work()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    del kept
    return peak
