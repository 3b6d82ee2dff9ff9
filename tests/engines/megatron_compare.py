# SPDX-License-Identifier: Apache-2.0
"""How far two trainings are from each other: losses, and gradients. It needs no Megatron."""

from __future__ import annotations

import math
import re

import torch

EXPERT = re.compile(r"\blocal_experts\.\d+\.")
SMALLEST = 1e-6  # of a scale, relative to the largest one
NOISE = 0.1  # of a tolerance: what two runs of one dispatcher may differ by, so that a comparison says anything


# Of a parameter's gradient. Sums in another order round otherwise, which is within bf16's 0.004 for each matrix product
# on the way; a planted fault gives 0.5 and more.
GRADIENT_LIMIT = 0.05


def worst(values: list[float]) -> float:
    """The largest; one that is not a number is as large as can be."""
    return max((math.inf if math.isnan(value) else value for value in values), default=0.0)


def largest_difference(one: list[list[float]], other: list[list[float]]) -> tuple[float, float]:
    """Of losses [step][rank], relative, at the worst step: of the means over ranks, and of single ranks."""
    means, ranks = [], []
    for ours, theirs in zip(one, other, strict=True):
        means.append(abs(sum(ours) - sum(theirs)) / sum(theirs))
        ranks += [abs(mine - its) / its for mine, its in zip(ours, theirs, strict=True)]
    return worst(means), worst(ranks)


def mismatches(found: dict[str, float], tolerance: float) -> str:
    """What is wrong with differences, or "". The first is that of a run from itself, and has to be far smaller."""
    itself, *_ = found
    if not found[itself] <= NOISE * tolerance:
        return f"{itself}: {found[itself]:.1e} is above {NOISE * tolerance:.1e}, so the others say nothing"
    above = [f"{what}: {value:.1e} is above {tolerance}" for what, value in found.items() if not value <= tolerance]
    return "; ".join(above)


def gradient_errors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """For each parameter |found - expected| by a scale: the largest norm of that parameter among a layer's experts.

    A parameter's own norm is no scale: an expert without tokens has a gradient of 0.
    """
    norms = {name: float(part.float().norm()) for name, part in expected.items()}
    scales: dict[str, float] = {}
    for name, norm in norms.items():
        kind = EXPERT.sub("local_experts.", name)
        scales[kind] = max(scales.get(kind, 0.0), norm)
    least = SMALLEST * max(scales.values(), default=0.0) or 1.0
    errors = {}
    for name, part in expected.items():
        distance = float((found[name].float() - part.float()).norm())
        error = distance / max(scales[EXPERT.sub("local_experts.", name)], least)
        errors[name] = math.inf if math.isnan(error) else error
    return errors


def milliseconds(seconds: list[float]) -> tuple[float, float]:
    """Median and p99 (by nearest rank)."""
    ordered = sorted(seconds)
    return 1e3 * ordered[len(ordered) // 2], 1e3 * ordered[max(0, -(-99 * len(ordered) // 100) - 1)]


def table(rows: dict[str, dict[str, str]]) -> list[str]:
    """One line per row; "" where a row lacks a column."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [["dispatcher", *names], *([key, *(row.get(name, "") for name in names)] for key, row in rows.items())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names) + 1)]
    return ["  ".join(word.rjust(width) for word, width in zip(line, widths, strict=True)) for line in lines]
