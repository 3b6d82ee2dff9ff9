# SPDX-License-Identifier: Apache-2.0
"""Timing of calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["bench", "bench_kineto"]


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], Any] | None = None,
) -> tuple[float, float, float]:
    """Seconds of a call: mean, least, most. On GPUs by events, on CPUs by the clock. post_fn: called behind each."""
    for _ in range(num_warmups):
        fn()
    times = []
    for _ in range(num_tests):
        times.append(_time_on_gpu(fn) if torch.cuda.is_initialized() else _time(fn))
        if post_fn is not None:
            post_fn()
    return statistics.fmean(times), min(times), max(times)


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | Sequence[str],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> Any:
    """Seconds of kernels whose names contain kernel_names, by torch's profiler: one number, or a tuple for several.

    With num_kernels_per_period above 1 each is a list: of every so-manieth kernel. Where no kernel has the name, as on
    CPUs, it is the time of a call. barrier_comm_profiling: ranks meet before each call, in barrier or the default
    group's. trace_path: where the trace is written.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else tuple(kernel_names)

    def call() -> None:
        if barrier_comm_profiling and barrier is not None:
            barrier()
        elif barrier_comm_profiling and dist.is_initialized():
            dist.barrier()
        fn()

    call()
    has_gpu = torch.cuda.is_initialized()
    activity = torch.profiler.ProfilerActivity.CUDA if has_gpu else torch.profiler.ProfilerActivity.CPU
    begin = time.perf_counter()
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(num_tests):
            call()
        if has_gpu:
            torch.cuda.synchronize()
    of_call = (time.perf_counter() - begin) / num_tests
    if trace_path is not None:
        profile.export_chrome_trace(trace_path)
    kernels = (profile.events() or []) if has_gpu else []
    found = [[event.device_time / 1e6 for event in kernels if name in event.name] or [of_call] for name in names]
    if num_kernels_per_period > 1:
        parts = range(num_kernels_per_period)
        periods = [[statistics.fmean(of[i :: len(parts)] or of) for i in parts] for of in found]
        return periods[0] if isinstance(kernel_names, str) else tuple(periods)
    means = tuple(map(statistics.fmean, found))
    return means[0] if isinstance(kernel_names, str) else means


def _time(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _time_on_gpu(function: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
