# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks in Python share: the mean time of a call, and the spread of many times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

STATISTICS = ("median", "p99", "min", "max", "mean", "count")  # of a spread, as in bench/results


def mean_us(call: Callable[[], Any], calls: int) -> float:
    """Of calls that follow each other. On a GPU they only enqueue."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) * 1e6 / calls


def spread_of(samples: Sequence[float]) -> dict[str, float]:
    """p99: the smallest sample that at least 99 % of all samples do not exceed."""
    if not samples:
        raise ValueError("samples has 0 elements, allowed: 1 and more")
    ordered = sorted(samples)
    half = len(ordered) // 2
    median = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return dict(
        zip(
            STATISTICS,
            (median, p99, ordered[0], ordered[-1], sum(ordered) / len(ordered), len(ordered)),
            strict=True,
        )
    )
