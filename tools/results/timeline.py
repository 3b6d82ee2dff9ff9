# SPDX-License-Identifier: Apache-2.0
"""What the warps of a kernel did when, from the timestamps of a build with CROSSDOCK_TIMELINE.

Each line of FILE is a JSON object: {"rank": 0, "kernel": "dispatch", "block": 3, "warp": 1, "step": "send", "ns": 123}
says when that warp began a step; the step lasts until the warp's next one. Times count from the first record of the
kernel on that rank, since GPUs' clocks differ. Prints a table of the steps; with OUT.svg also draws a picture: one
column per rank, one row per block (a strip per warp), one colour per step. Only the picture needs matplotlib (./dev
timeline installs it).
"""

import argparse
import collections
import json
import statistics
import sys

Record = collections.namedtuple("Record", "rank kernel block warp step us")
Span = collections.namedtuple("Span", "block warp step start end")  # us


def load(path, kernels, ranks):
    """Records by kernel and rank, us from the first one of both, in order."""
    found = collections.defaultdict(list)
    try:
        file = open(path, encoding="utf-8")
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}")
    with file as lines:
        for line in filter(str.strip, lines):
            try:
                fields = json.loads(line)
                record = Record(*(fields[key] for key in ("rank", "kernel", "block", "warp", "step", "ns")))
            except (ValueError, LookupError, TypeError):
                sys.exit(f"{path}: no timeline: a line is {line.strip()[:60]!r}")
            if (not kernels or record.kernel in kernels) and (not ranks or record.rank in ranks):
                found[record.kernel, record.rank].append(record)
    aligned = {}
    kernels = list(dict.fromkeys(kernel for kernel, _ in found))  # in the file's order
    for key, records in sorted(found.items(), key=lambda item: (kernels.index(item[0][0]), item[0][1])):
        first = min(record.us for record in records)
        records = [record._replace(us=(record.us - first) / 1000) for record in records]
        aligned[key] = sorted(records, key=lambda record: (record.block, record.warp, record.us))
    return aligned


def spans(records):
    """Steps with their ends; a warp's last one ends where it begins."""
    for record, after in zip(records, [*records[1:], None], strict=True):
        continues = after is not None and (after.block, after.warp) == (record.block, record.warp)
        yield Span(record.block, record.warp, record.step, record.us, after.us if continues else record.us)


def steps_in_order(all_spans):
    """By the median of their starts."""
    starts = collections.defaultdict(list)
    for span in all_spans:
        starts[span.step].append(span.start)
    return sorted(starts, key=lambda step: statistics.median(starts[step]))


def summary(aligned):
    def figures(values):
        return " ".join(f"{value:8.2f}" for value in (statistics.median(values), min(values), max(values)))

    for kernel in dict.fromkeys(kernel for kernel, _ in aligned):
        of_ranks = [records for (each, _), records in aligned.items() if each == kernel]
        of_all = [span for records in of_ranks for span in spans(records)]
        yield f"{kernel}: {len(of_ranks)} ranks, us"
        yield f"  {'step':20} {'times':>6}   {'begins':>8} {'min':>8} {'max':>8}   {'lasts':>8} {'min':>8} {'max':>8}"
        for step in steps_in_order(of_all):
            chosen = [span for span in of_all if span.step == step]
            yield (
                f"  {step:20.20} {len(chosen):6}   {figures([span.start for span in chosen])}   "
                f"{figures([span.end - span.start for span in chosen])}"
            )


def draw(aligned, path):
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    plt.rcParams.update(
        {
            "svg.hashsalt": "crossdock",
            "svg.fonttype": "none",
            "font.size": 8,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    of_key = {key: list(spans(records)) for key, records in aligned.items()}
    kernels = list(dict.fromkeys(kernel for kernel, _ in aligned))
    ranks = sorted({rank for _, rank in aligned})
    figure, grid = plt.subplots(
        len(kernels),
        len(ranks),
        squeeze=False,
        sharex="row",
        sharey="row",
        figsize=(1.2 + 3.4 * len(ranks), 0.6 + 4.2 * len(kernels)),
    )
    for kernel, panels in zip(kernels, grid, strict=True):
        of_kernel = [span for (each, _), found in of_key.items() if each == kernel for span in found]
        steps = steps_in_order(of_kernel)
        colours = {step: plt.get_cmap("tab10" if len(steps) <= 10 else "tab20")(i) for i, step in enumerate(steps)}
        end = max(span.end for span in of_kernel)
        for rank, axes in zip(ranks, panels, strict=True):
            found = of_key.get((kernel, rank), [])
            warps = sorted({span.warp for span in found})
            strip = {warp: (i / len(warps), (i + 1) / len(warps)) for i, warp in enumerate(warps)}
            shown = [span for span in found if span.end > span.start]
            # Many thousands of shapes make a picture that no browser likes; as pixels they stay small.
            axes.add_collection(
                PolyCollection(
                    [
                        [
                            (x, span.block + y)
                            for x, y in (
                                (span.start, strip[span.warp][0]),
                                (span.end, strip[span.warp][0]),
                                (span.end, strip[span.warp][1]),
                                (span.start, strip[span.warp][1]),
                            )
                        ]
                        for span in shown
                    ],
                    facecolors=[colours[span.step] for span in shown],
                    linewidths=0,
                    rasterized=len(shown) > 2000,
                )
            )
            axes.set(
                title=f"{kernel}, rank {rank}",
                xlabel="us",
                xlim=(0, end * 1.02),
                ylim=(max(span.block for span in of_kernel) + 1, 0),
            )
        panels[0].set_ylabel("block")
        panels[-1].legend(
            handles=[
                Patch(color=colours[step], label=step)
                for step in steps
                if any(span.step == step and span.end > span.start for span in of_kernel)
            ],
            loc="upper left",
            bbox_to_anchor=(1, 1),
            frameon=False,
        )
    figure.savefig(path, bbox_inches="tight", dpi=200, metadata={"Date": None, "Creator": None})


def main(words):
    parser = argparse.ArgumentParser(
        prog="timeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("out", metavar="OUT.svg", nargs="?")
    parser.add_argument("--kernels", metavar="LIST", help="only these", type=lambda text: text.split(","))
    parser.add_argument(
        "--ranks", metavar="LIST", help="only these", type=lambda text: [int(rank) for rank in text.split(",")]
    )
    arguments = parser.parse_args(words)
    aligned = load(arguments.file, arguments.kernels, arguments.ranks)
    if not aligned:
        parser.error(f"{arguments.file} has no records of what was asked for")
    print("\n".join(summary(aligned)))
    if arguments.out:
        draw(aligned, arguments.out)
