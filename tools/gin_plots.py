#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/gin_cpu.svg from bench/results/gin/cpu.json, which gin_bench --json wrote; needs matplotlib."""
import json
import statistics

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402 (the backend comes first)

import results  # noqa: E402

COLOURS = {"crossdock": "#1f6fb4", "hosts": "#3a9a5b", "ucx_perftest": "#c4501b", "tcp socket": "#777777"}
PANELS = (("half_round_trip_us", "half a round trip, us"), ("gigabytes_per_s", "GB/s"))
plt.rcParams.update({"svg.hashsalt": "crossdock", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
                     "axes.spines.right": False, "axes.grid": True, "grid.color": "#e0e0e0"})


def main():
    path = results.FOLDER / "gin" / "cpu.json"
    if not path.exists():
        return print(f"no {path}: docs/gin_cpu.svg is left as it is")
    document = json.loads(path.read_text())
    transports = list(dict.fromkeys(row["transport"] for row in document["rows"]))
    figure, grid = plt.subplots(len(transports), len(PANELS), figsize=(9.2, 3.2 * len(transports)), squeeze=False)
    for transport, line in zip(transports, grid):
        for (metric, label), axes in zip(PANELS, line):
            for way, colour in COLOURS.items():
                points = sorted((row["bytes"], statistics.median(row[metric])) for row in document["rows"]
                                if row["transport"] == transport and row["way"] == way)
                if points:
                    axes.plot(*zip(*points), "o-", color=colour, markersize=3.5, label=way)
            axes.set(title=transport, xlabel="bytes of a put", ylabel=label, xscale="log", yscale="log")
        line[-1].legend(frameon=False, fontsize=7.5)
    figure.tight_layout()
    figure.savefig(results.ROOT / "docs" / "gin_cpu.svg",
                   metadata={"Date": None, "Creator": None, "Title": "Put and signal between two processes"})
    print("drew docs/gin_cpu.svg")


main()
