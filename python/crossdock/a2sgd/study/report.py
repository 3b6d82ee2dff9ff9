# SPDX-License-Identifier: Apache-2.0
"""A study's table and its plots."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

from crossdock.a2sgd.study.arms import ARMS

# What is shown as an arm: (name, of which runs, which curves). Replicas that differ can be averaged once, at the end.
SHOWN = [(arm, arm, "") for arm in ARMS] + [
    ("a2sgd, averaged", "a2sgd", "final_"),
    ("none, averaged", "none", "final_"),
]


def _runs(study: dict[str, Any], arm: str, workers: int, skewed: bool) -> list[dict[str, Any]]:
    return [
        run for run in study["results"] if run["arm"] == arm and run["workers"] == workers and run["skewed"] == skewed
    ]


def _cases(study: dict[str, Any]) -> list[tuple[int, bool]]:
    return sorted({(run["workers"], run["skewed"]) for run in study["results"]})


def case_name(workers: int, skewed: bool) -> str:
    return f"{workers} workers, {'skewed' if skewed else 'i.i.d.'}"


def _spread(values: list[float], digits: int) -> str:
    apart = stdev(values) if len(values) > 1 else 0.0
    return f"{mean(values):.{digits}f} ± {apart:.{digits}f}"


def _bits(run: dict[str, Any], is_averaged: bool) -> float:
    extra = run["bits_of_final_averaging"] if is_averaged else 0
    return float(run["bits_per_worker_and_step"] * run["steps"] + extra)


def _of_size(bits: float) -> str:
    size = bits / 8
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def table(study: dict[str, Any]) -> str:
    """Accuracy at the end in percent, and loss, on held-out data: mean and deviation over the seeds."""
    cases = _cases(study)
    head = "| | sent, at most | " + " | ".join(case_name(*case) for case in cases) + " |"
    rows = [head, "|---" * (len(cases) + 2) + "|"]
    for name, arm, prefix in SHOWN:
        size = _of_size(max(_bits(run, bool(prefix)) for case in cases for run in _runs(study, arm, *case)))
        cells = []
        for case in cases:
            curves = [run["curves"] for run in _runs(study, arm, *case)]
            accuracy = _spread([100 * curve[f"{prefix}accuracy"][-1] for curve in curves], 1)
            loss = mean(curve[f"{prefix}loss"][-1] for curve in curves)
            cells.append(f"{accuracy} % ({loss:.2f})")
        rows.append(f"| {name} | {size} | " + " | ".join(cells) + " |")
    rows.append("")
    drifts = []
    for arm in ("a2sgd", "none"):
        values = [_spread([100 * r["curves"]["drift"][-1] for r in _runs(study, arm, *case)], 1) for case in cases]
        drifts.append(f"| {arm} | " + " | ".join(f"{value} %" for value in values) + " |")
    rows += ["| drift | " + " | ".join(case_name(*case) for case in cases) + " |", "|---" * (len(cases) + 1) + "|"]
    return "\n".join(rows + drifts)


# Lines that others cover are wider.
WIDTHS = {"dense": 3.0, "a2sgd": 3.0}
COLORS = {"dense": "#222222", "a2sgd": "#c0392b", "top-k": "#2a6fb0", "qsgd": "#2e8b57", "none": "#e39a2d"}


def draw(study: dict[str, Any], task: str, path: Path) -> None:
    """A row of pictures for accuracy (digits) or loss (text), one for drift; a column per case. Bands: least to
    most."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "crossdock", "font.size": 8})
    cases = _cases(study)
    quantity, title, factor = ("accuracy", "accuracy, %", 100.0) if task == "digits" else ("loss", "loss, nats", 1.0)
    figure, axes = pyplot.subplots(2, len(cases), figsize=(3 * len(cases), 5.2), squeeze=False, sharex=True)
    for column, case in enumerate(cases):
        top, bottom = axes[0][column], axes[1][column]
        for name, arm, prefix in SHOWN:
            curves = [[factor * v for v in run["curves"][prefix + quantity]] for run in _runs(study, arm, *case)]
            style = {"color": COLORS[arm], "linestyle": "--" if prefix else "-", "linewidth": WIDTHS.get(arm, 1.1)}
            _band(top, curves, name, style)
        for arm in ("a2sgd", "none"):
            curves = [[100 * v for v in run["curves"]["drift"]] for run in _runs(study, arm, *case)]
            _band(bottom, curves, arm, {"color": COLORS[arm], "linewidth": WIDTHS.get(arm, 1.1)})
        top.set_title(case_name(*case))
        bottom.set_xlabel("epoch")
        for axis in (top, bottom):
            axis.grid(alpha=0.25, linewidth=0.5)
            axis.spines[["top", "right"]].set_visible(False)
        bottom.set_ylim(bottom=0)
    top_limits = [axis.get_ylim() for axis in axes[0]]
    for axis in axes[0]:
        axis.set_ylim(min(low for low, _ in top_limits), max(high for _, high in top_limits))
    axes[0][0].set_ylabel(title)
    axes[1][0].set_ylabel("drift, % of the parameters' norm")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=4, frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _band(axis: Any, curves: list[list[float]], name: str, style: dict[str, Any]) -> None:
    epochs = range(1, len(curves[0]) + 1)
    points = list(zip(*curves, strict=True))
    axis.plot(epochs, [mean(point) for point in points], label=name, **style)
    low, high = [min(point) for point in points], [max(point) for point in points]
    axis.fill_between(epochs, low, high, color=style["color"], alpha=0.12, linewidth=0)
