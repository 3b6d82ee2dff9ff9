# SPDX-License-Identifier: Apache-2.0
"""Plots a demo's JSON (a heat map of the traffic) or a benchmark's (time against tokens, with the lower bound)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from crossdock.errors import InvalidArgument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("json", help="what demo, bench, crossdock_demo or ep_bench wrote with --json")
    parser.add_argument("picture", help="file to write; its extension chooses the format (.svg, .png, .pdf)")


def _heat_map(report: dict[str, Any], axes: Any) -> None:
    rows = report["rows_from_to"]
    image = axes.imshow(rows, cmap="Blues", vmin=0)
    for source, row in enumerate(rows):
        for target, count in enumerate(row):
            dark = count > max(map(max, rows)) / 2
            axes.text(
                target, source, str(count), ha="center", va="center", fontsize=7, color="white" if dark else "black"
            )
    axes.set(xlabel="to rank", ylabel="from rank", title="rows dispatched")
    axes.set_xticks(range(len(rows)))
    axes.set_yticks(range(len(rows)))
    axes.figure.colorbar(image, shrink=0.8)


def _bound(result: dict[str, Any]) -> dict[str, Any]:
    """The lower bound's times; "floor" in reports of earlier versions."""
    return dict(result.get("bound") or result["floor"])


def _times(report: dict[str, Any], axes: Any) -> None:
    from matplotlib.ticker import LogLocator

    results = sorted(report["results"], key=lambda result: int(result["tokens"]))
    tokens = [result["tokens"] for result in results]
    for operation, color in (("dispatch", "#2a6fb0"), ("combine", "#c0702a")):
        times = [result["libraries"][0][operation]["time_us"]["median"] for result in results]
        bound = [_bound(result)[operation]["time_us"]["median"] for result in results]
        axes.loglog(tokens, times, "o-", color=color, label=operation)
        axes.loglog(tokens, bound, "--", color=color, linewidth=1, label=f"lower bound of {operation}")
    case = report["case"]
    axes.set(xlabel="tokens per rank", ylabel="median, us")
    backend = case.get("backend") or case["world"]  # as reports of earlier versions have it
    axes.set_title(f"{case['ranks']} ranks ({backend}), hidden {case.get('hidden')}, top-{case.get('topk')}")
    axes.set_xticks(tokens, [str(number) for number in tokens])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend(frameon=False)


def main(options: argparse.Namespace) -> int:
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "crossdock"
    from matplotlib import pyplot

    try:
        report = json.loads(Path(options.json).read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{options.json} cannot be read: {error}") from error
    figure, axes = pyplot.subplots(figsize=(6.5, 4.5))
    allowed = figure.canvas.get_supported_filetypes()
    if Path(options.picture).suffix[1:].lower() not in allowed:
        names = ", ".join(f".{name}" for name in sorted(allowed))
        raise InvalidArgument(f"picture is {options.picture}, allowed extensions: {names}")
    is_heat_map, is_times = (isinstance(report, dict) and key in report for key in ("rows_from_to", "results"))
    if not is_heat_map and not is_times:
        raise InvalidArgument(f"{options.json} has neither rows_from_to (a demo's) nor results (a benchmark's)")
    try:
        (_heat_map if is_heat_map else _times)(report, axes)
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{options.json} is not as demo or bench writes it: {error!r}") from error
    figure.tight_layout()
    figure.savefig(options.picture, metadata={"Date": None} if options.picture.endswith(".svg") else None)
    print(f"wrote {options.picture}")
    return 0
