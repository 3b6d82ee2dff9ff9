#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the plots of docs/performance.md from bench/results/*.json; needs matplotlib (./dev tables brings it)."""
import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402 (the backend comes first)
from matplotlib.ticker import ScalarFormatter  # noqa: E402

import results  # noqa: E402

COLOURS = {"dispatch": "#1f6fb4", "combine": "#c4501b"}
plt.rcParams.update({"svg.hashsalt": "crossdock", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
                     "axes.spines.right": False, "axes.grid": True, "grid.color": "#e0e0e0"})


def draw(plot):
    figure, grid = plt.subplots(1, len(plot.panels), figsize=(4.6 * len(plot.panels), 3.6),
                                sharey=True, squeeze=False)
    panels = grid[0]
    for axes, (title, curves) in zip(panels, plot.panels):
        for operation, points in curves.items():
            x, time, floor, bound = zip(*sorted(points))
            colour = COLOURS[operation]
            axes.plot(x, time, "o-", color=colour, markersize=3.5, label=operation)
            if plot.has_bound:
                axes.plot(x, bound, ":", color=colour, linewidth=1, label=f"{operation}: 1.35 floors + 6 us")
            axes.plot(x, floor, "--", color=colour, linewidth=1, label=f"{operation}: floor")
        axes.set(title=title, xlabel=plot.x_label, xscale="log", yscale="log", xticks=x)
        axes.minorticks_off()
    for axes in panels:  # they share their y axis: after all curves
        if plot.mode == "ll":
            axes.set_ylim(bottom=1)
        low, high = axes.get_ylim()
        axes.set_yticks([y for y in (factor * 10**power for power in range(6) for factor in (1, 2, 5))
                         if low <= y <= high])
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ScalarFormatter())
    panels[0].set_ylabel(plot.y_label)
    panels[-1].legend(frameon=False, fontsize=7.5)
    figure.tight_layout()
    figure.savefig(results.ROOT / "docs" / plot.file,
                   metadata={"Date": None, "Creator": None, "Title": plot.title, "Description": plot.digest()})
    plt.close(figure)
    print(f"drew docs/{plot.file}")


for each in results.plots(results.load()):
    draw(each)
