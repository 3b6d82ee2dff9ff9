# SPDX-License-Identifier: Apache-2.0
"""What runs found: how far layers are from plain loops, how far runs are from each other, and figures, in one table."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_e2e import models, runs
from vllm_e2e.control import ROUNDING
from vllm_e2e.reference import STAGES

# Scores of two runs may differ by so many times what one rounding more per MoE layer changes: each run's layers round
# reference.STAGES times, and roundings are independent.
ROUNDINGS = (2 * STAGES) ** 0.5


Results = list[dict[str, Any]]  # of the ranks, in order


def load(folder: Path) -> Results:
    """The ranks' results, in order."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]


def checks(folder: Path) -> list[dict[str, Any]]:
    lines = [line for file in sorted(folder.glob("check-rank*.jsonl")) for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]


@dataclass
class Layers:
    """What the comparison of layers says."""

    worst: float = 0.0
    by_layer: dict[int, float] = field(default_factory=dict)
    limit: float = 0.0
    compared: int = 0  # rows
    wrong: int = 0  # rows over the limit
    problems: list[str] = field(default_factory=list)
    caught: dict[str, int] = field(default_factory=dict)  # fault: rows over the limit while it was planted
    graphs: int = 0  # comparisons of captured steps

    @property
    def is_right(self) -> bool:
        return self.compared > 0 and self.wrong == 0 and not self.problems


def layers_of(lines: Iterable[dict[str, Any]]) -> Layers:
    found = Layers()
    for line in lines:
        if "problem" in line:
            found.problems.append(f"layer {line['layer']}: {line['problem']}")
        elif line["fault"]:
            found.caught[line["fault"]] = found.caught.get(line["fault"], 0) + line["wrong"]
        else:
            found.compared += line["tokens"]
            found.wrong += line["wrong"]
            found.limit = line["limit"]
            found.graphs += line["graph"]
            found.worst = max(found.worst, line["worst"])
            found.by_layer[line["layer"]] = max(found.by_layer.get(line["layer"], 0.0), line["worst"])
    return found


@dataclass(frozen=True)
class Difference:
    """Of log-probabilities of one text, absolute."""

    mean: float
    most: float


def difference(own: Iterable[list[float]], others: Iterable[list[float]]) -> Difference:
    """Each: of all ranks. A score that is not a number is as different as can be."""
    values = []
    for mine, theirs in zip(own, others, strict=True):
        values += [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
    values = [math.inf if math.isnan(value) else value for value in values]
    return Difference(statistics.fmean(values or [0.0]), max(values, default=0.0))


def changes(results: Results) -> dict[str, Difference]:
    """What faults, and one rounding more per layer, change of a run's own scores."""
    if not results or any("scores_with" not in one for one in results):
        return {}
    plain = [one["scores"] for one in results]
    names = set.intersection(*(set(one["scores_with"]) for one in results))
    return {name: difference([one["scores_with"][name] for one in results], plain) for name in names}


def same_tokens(own: Results, others: Results) -> tuple[int, int]:
    """How many generated tokens agree, and of how many."""
    same = total = 0
    for mine, theirs in zip(own, others, strict=True):
        for a, b in zip(mine["tokens"], theirs["tokens"], strict=True):
            same += sum(x == y for x, y in zip(a, b, strict=True))
            total += len(a)
    return same, total


@dataclass
class Row:
    run: runs.Run
    word: str
    results: Results
    layers: Layers
    scores: Difference | None = None  # from those of the first run of its kin
    limit: Difference | None = None  # for scores; None: no run of its kin says what roundings change
    tokens: tuple[int, int] | None = None
    failures: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """What is wrong with it, in words."""
        if not self.word.startswith("ok"):
            self.failures.append(self.word)
        if self.word.startswith("ok") and self.run.needs_control and not self.layers.is_right:
            wrong, compared = self.layers.wrong, self.layers.compared
            self.failures.append(f"{wrong} of {compared} rows are wrong" if compared else "no layer was compared")
            self.failures += self.layers.problems[:3]
        if self.word.startswith("ok") and "faults" in self.run.flags:
            missed = [fault for fault in runs.FAULTS if not self.layers.caught.get(fault)]
            self.failures += [f"the planted fault '{fault}' was not found" for fault in missed]
        if self.tokens is not None and self.tokens[0] != self.tokens[1]:
            self.failures.append(
                f"{self.tokens[1] - self.tokens[0]} of {self.tokens[1]} tokens are not the first run's"
            )
        self.judge_scores()

    def judge_scores(self) -> None:
        if self.limit is None:
            return
        limit = f"above {self.limit.mean:.4f} and {self.limit.most:.3f}"
        if self.scores is not None and not (
            self.scores.mean <= self.limit.mean and self.scores.most <= self.limit.most
        ):
            found = f"{self.scores.mean:.4f} on average and up to {self.scores.most:.3f}"
            self.failures.append(f"scores differ from the first run's by {found}, {limit}")
        if "fp8" in self.run.flags:
            return  # the limit is about what a fault changes: only the layers find faults
        for fault, change in sorted(changes(self.results).items()):
            if fault in runs.FAULTS and change.most <= self.limit.most:
                self.failures.append(
                    f"scores change by {change.most:.3f} with the planted fault '{fault}', not {limit}"
                )


def score_limit(rows: Iterable[Row]) -> Difference | None:
    """For runs of one kin."""
    found = [change for row in rows for name, change in changes(row.results).items() if name == ROUNDING]
    if not found:
        return None
    return Difference(ROUNDINGS * max(of.mean for of in found), ROUNDINGS * max(of.most for of in found))


def rows_of(logs: Path, texts: Iterable[str]) -> list[Row]:
    rows = []
    for text in texts:
        run = runs.parse(text, models.MODELS)
        folder = logs / run.name
        outcome = folder / "outcome.json"
        word = json.loads(outcome.read_text())["word"] if outcome.exists() else "not run"
        rows.append(Row(run, word, load(folder), layers_of(checks(folder))))
    for kin in dict.fromkeys(row.run.kin for row in rows):
        compare_scores([row for row in rows if row.run.kin == kin])
    for row in rows:
        row.judge()
    return rows


def compare_scores(kindred: list[Row]) -> None:
    """With the first run that has scores."""
    limit, first = score_limit(kindred), None
    for row in kindred:
        row.limit = limit
        if not row.results or any("scores" not in one for one in row.results):
            continue
        if first is None:
            first = row
        elif len(row.results) == len(first.results):
            row.scores = difference([one["scores"] for one in row.results], [one["scores"] for one in first.results])
            if all("tokens" in one for one in [*row.results, *first.results]):
                row.tokens = same_tokens(row.results, first.results)


def layer_cells(layers: Layers) -> list[str]:
    if not layers.compared:
        return ["", ""]
    faults = f"{sum(bool(layers.caught.get(fault)) for fault in runs.FAULTS)} of {len(runs.FAULTS)}"
    return [f"{layers.worst:.4f} of {layers.limit:.4f}", faults if layers.caught else ""]


def score_cells(row: Row) -> list[str]:
    """Difference, its limit, what one rounding changes, the smallest change by a fault, equal tokens."""
    found = changes(row.results)
    faults = [found[fault].most for fault in runs.FAULTS if fault in found]
    is_first = row.scores is None and any("scores" in one for one in row.results)
    return [
        pair(row.scores) if row.scores is not None else "(first)" if is_first else "",
        (pair(row.limit) if row.limit is not None else "none, not judged") if row.scores is not None else "",
        pair(found[ROUNDING]) if ROUNDING in found else "",
        f"{min(faults):.3f}" if faults else "",
        f"{row.tokens[0]} of {row.tokens[1]}" if row.tokens is not None else "",
    ]


def pair(found: Difference) -> str:
    return f"{found.mean:.4f} / {found.most:.3f}"


def decode_lines(row: Row) -> list[list[str]]:
    """For each number of sequences: the run, the number, and the figures; the slowest rank counts."""
    lines = []
    for batch in sorted({key for one in row.results for key in one.get("decode", {})}, key=int):
        found = [one["decode"][batch] for one in row.results if batch in one.get("decode", {})]
        worst = {key: max(one[key] for one in found) for key in ("gap_p50_ms", "gap_p99_ms", "first_p50_ms")}
        rate = sum(one["tokens_per_s"] for one in found)
        times = [f"{worst['gap_p50_ms']:.2f}", f"{worst['gap_p99_ms']:.2f}", f"{worst['first_p50_ms']:.0f}"]
        lines.append([row.run.text, batch, f"{rate:.0f}", *times])
    return lines


def prefill_cell(results: list[dict[str, Any]]) -> str:
    found = [one["prefill"]["tokens_per_s"] for one in results if "prefill" in one]
    return f"{sum(found):.0f}" if found else ""


def share_cell(results: list[dict[str, Any]]) -> str:
    found = [one["kernels"]["crossdock_share"] for one in results if "kernels" in one]
    return f"{100 * max(found):.0f} %" if found else ""


def serve_lines(row: Row) -> list[str]:
    """What clients of a server saw."""
    lines = []
    for one in row.results:
        if "serve" in one:
            found = one["serve"]
            lines.append(f"{row.run.text}: {found['requests']} requests, {found['failed']} failed")
            if found["requests"]:
                gaps = f"{found['gap_p50_ms']:.2f}/{found['gap_p99_ms']:.2f} ms p50/p99 per token"
                lines[-1] += f", {found['tokens_per_s']:.0f} tokens/s, {gaps}, first {found['first_p50_ms']:.0f} ms"
            lines += [f"    {error}" for error in found["errors"]]
        if "kill" in one:
            found = dict(one["kill"])
            errors = found.pop("errors", [])
            lines.append("    killed: " + ", ".join(f"{name} {value}" for name, value in found.items()))
            lines += [f"    {error}" for error in errors]
    return lines


def grid(header: list[str], lines: list[list[str]]) -> list[str]:
    """Without columns that are empty."""
    kept = [column for column in range(len(header)) if any(line[column] for line in lines)]
    cells = [[line[column] for column in kept] for line in [header, *lines]]
    widths = [max(len(line[column]) for line in cells) for column in range(len(kept))]
    text = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    text.insert(1, "-+-".join("-" * width for width in widths))
    return text


RESULTS = ["run", "result", "layers: worst error", "faults found", "scores: mean / max", "limit", "one rounding"]
RESULTS += ["least fault: max", "tokens equal", "prefill tokens/s", "Crossdock's kernels", "ready after s"]
LEGEND = """
layers: relative error of a row of a MoE layer's output, from plain loops in fp32
scores: |log-probability - that of the first run| of a fixed text; one rounding: what one rounding more in each MoE \
layer changes; limit: {factor:.1f} of these; least fault: the largest change by the planted fault that changes least
Crossdock's kernels: their share of the GPU's busy time in decode steps with 32 sequences, waiting for late ranks \
included
decode: of all ranks together tokens/s; of the slowest rank ms per token and until the first token
"""


def table(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        cells = [row.run.text, "ok" if not row.failures else "FAILED", *layer_cells(row.layers), *score_cells(row)]
        ready = [one["ready_s"] for one in row.results if "ready_s" in one]
        cells += [prefill_cell(row.results), share_cell(row.results), f"{max(ready):.0f}" if ready else ""]
        lines.append(cells)
    text = grid(RESULTS, lines)
    figures = [line for row in rows for line in decode_lines(row)]
    if figures:
        text += ["", *grid(["decode", "sequences per rank", "tokens/s", "ms p50", "p99", "first"], figures)]
    text += ["", *LEGEND.format(factor=ROUNDINGS).strip().splitlines()]
    text += [line for row in rows for line in serve_lines(row)]
    text += [f"FAILED {row.run.text}: {'; '.join(row.failures)}" for row in rows if row.failures]
    return "\n".join(text)


KEYS = ("Error", "error:", "Traceback", "crossdock", "assert", "Exception")


def excerpt(folder: Path, most_lines: int = 20) -> str:
    """What the logs of a failed run say, in few lines."""
    found = []
    for log in sorted(folder.glob("rank*.log")):
        lines = log.read_text(errors="replace").splitlines()
        errors = [line[:240] for line in lines if any(key in line for key in KEYS)]
        number = most_lines if log.name == "rank0.log" else most_lines // 4
        found.append(f"--- {log.parent.name}/{log.name}: {len(lines)} lines")
        found += ["    " + line for line in errors[: number // 2] + errors[number // 2 :][-number // 2 :]]
    first = folder / "rank0.log"
    if first.exists():
        found += ["--- its end", *("    " + line[:240] for line in first.read_text(errors="replace").splitlines()[-8:])]
    for stacks in sorted(folder.glob("stacks-rank0-*.txt")):
        lines = stacks.read_text(errors="replace").splitlines()
        found += [f"--- {stacks.name}", *("    " + line for line in lines[-most_lines:])] if lines else []
    return "\n".join(found)
