# SPDX-License-Identifier: Apache-2.0
"""How far servers' answers are from the reference's, and a table of all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sglang_e2e.client import PASSES
from sglang_e2e.configurations import CLIENTS
from vllm_e2e.control import ROUNDING
from vllm_e2e.report import ROUNDINGS, Difference, difference, grid, pair

Result = dict[str, Any]
Scores = list[list[float | None]]


def numbers(scores: Scores) -> list[list[float]]:
    return [[math.nan if value is None else value for value in one] for one in scores]


def score_limit(calibration: Result) -> Difference:
    """For scores of two servers: as many times what one rounding more changes as vllm_e2e allows."""
    return Difference(*(ROUNDINGS * value for value in calibration["changes"][ROUNDING]))


def least_fault(calibration: Result) -> Difference:
    """What the planted fault changes that changes least."""
    found = [change for name, change in calibration["changes"].items() if name != ROUNDING]
    return Difference(*(min(values) for values in zip(*found, strict=True)))


def same_tokens(own: list[list[int]], others: list[list[int]]) -> tuple[int, int]:
    """How many generated tokens agree, and of how many."""
    pairs = [pair for mine, theirs in zip(own, others, strict=True) for pair in zip(mine, theirs, strict=True)]
    return sum(mine == theirs for mine, theirs in pairs), len(pairs)


@dataclass
class Row:
    result: Result
    limit: Difference
    tokens: tuple[int, int] | None = None
    scores: Difference | None = None
    failures: list[str] = field(default_factory=list)

    def compare(self, reference: Result) -> None:
        self.tokens = same_tokens(self.result["tokens"], reference["tokens"])
        self.scores = difference(numbers(self.result["scores"]), numbers(reference["scores"]))

    def judge(self) -> None:
        if self.result["word"] != "ok":
            self.failures.append(self.result["word"])
            return
        if self.tokens is None or self.scores is None:
            self.failures.append("there is no reference to compare it with")
            return
        if self.tokens[0] != self.tokens[1]:
            self.failures.append(
                f"{self.tokens[1] - self.tokens[0]} of {self.tokens[1]} tokens are not the reference's"
            )
        if not (self.scores.mean <= self.limit.mean and self.scores.most <= self.limit.most):
            found = f"{self.scores.mean:.4f} on average and up to {self.scores.most:.3f}"
            limit = f"above {self.limit.mean:.4f} and {self.limit.most:.3f}"
            self.failures.append(f"log-probabilities differ from the reference's by {found}, {limit}")


def rows_of(results: Iterable[Result], reference: Result | None, calibration: Result) -> list[Row]:
    rows = [Row(result, score_limit(calibration)) for result in results]
    for row in rows:
        if reference is not None and row.result["word"] == "ok":
            row.compare(reference)
        row.judge()
    return rows


HEADER = ["configuration", "result", "tokens equal", "scores: mean / max", "from plain torch", "ready s", "warm s"]
HEADER += ["tokens/s, 1", str(CLIENTS)]
LEGEND = """
tokens equal: greedy tokens, with the reference's
scores: |log-probability - the reference's| of the tokens of fixed texts; limit: {limit}, {factor:.1f} times \
what one rounding more in each MoE layer changes ({rounding}); the planted fault that changes least, in one row of a \
text in each MoE layer: {fault}
from plain torch: the same from plain loops in torch, not judged
ready s, warm s: until the server answers, and until the first requests have compiled its kernels
tokens/s: with 1 and {clients} requests at once, the best of {passes} passes
"""


def cells(row: Row, calibration: Result) -> list[str]:
    result = row.result
    found = [result["run"], "FAILED" if row.failures else "ok"]
    found.append(f"{row.tokens[0]} of {row.tokens[1]}" if row.tokens is not None else "")
    found.append(pair(row.scores) if row.scores is not None else "")
    is_complete = result["word"] == "ok"
    found.append(pair(difference(numbers(result["scores"]), calibration["scores"])) if is_complete else "")
    found += [f"{result[name]:.0f}" if name in result else "" for name in ("ready_s", "warm_s")]
    speeds = result.get("tokens_per_s", {})
    return found + [f"{speeds[count]:.0f}" if count in speeds else "" for count in ("1", str(CLIENTS))]


def table(rows: list[Row], calibration: Result) -> str:
    limit, rounding = score_limit(calibration), Difference(*calibration["changes"][ROUNDING])
    named = {
        "limit": pair(limit),
        "rounding": pair(rounding),
        "fault": pair(least_fault(calibration)),
        "factor": ROUNDINGS,
        "clients": CLIENTS,
        "passes": PASSES,
    }
    lines = grid(HEADER, [cells(row, calibration) for row in rows])
    lines += ["", *LEGEND.format(**named).strip().splitlines()]
    if least_fault(calibration).most <= limit.most:
        lines.append("with this model not every planted fault is above the limit")
    for row in rows:
        if row.failures:
            lines.append(f"FAILED {row.result['run']}: {'; '.join(row.failures)}")
            lines += [f"    | {line}" for line in row.result.get("telling", [])]
    said: dict[str, list[str]] = {}
    for row in rows:
        for line in row.result.get("launcher", []):
            said.setdefault(line, []).append(row.result["run"])
    lines += [f"crossdock run, {' '.join(names)}: {line}" for line, names in said.items()]
    return "\n".join(lines)
