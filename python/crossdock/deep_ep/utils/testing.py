# SPDX-License-Identifier: Apache-2.0
"""Timing of calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["bench"]


def bench(function: Callable[[], Any], num_warmups: int = 50, num_tests: int = 50) -> tuple[float, float, float]:
    """Seconds of a call: mean, least, most. On GPUs by events, on CPUs by the clock."""
    for _ in range(num_warmups):
        function()
    times = [_time_on_gpu(function) if torch.cuda.is_initialized() else _time(function) for _ in range(num_tests)]
    return statistics.fmean(times), min(times), max(times)


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
