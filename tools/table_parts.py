# SPDX-License-Identifier: Apache-2.0
"""Pieces of the documents' tables."""

# By what a time is measured, and what ep_bench's JSON calls it.
PERIOD, KERNEL, LAUNCH = "period", "kernel", "launch to end"
METRICS = {PERIOD: "device_us", KERNEL: "kernel_us", LAUNCH: "time_us"}


def us(value):
    """Three significant figures, up to whole microseconds."""
    return "-" if value is None else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def table(headings, rows):
    """Lines of a table; a heading that ends in `:` is of numbers."""
    line = lambda cells: "| " + " | ".join(str(cell) for cell in cells) + " |"
    rule = "|" + "|".join("---:" if heading.endswith(":") else "---" for heading in headings) + "|"
    return [line(heading.rstrip(":") for heading in headings), rule, *map(line, rows), ""]


def wrap(text, width=118):
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return lines + [""]


def shape(run):
    hidden, topk, experts = (run.setting(run.cases()[0], key) for key in ("hidden", "topk", "experts"))
    return f"hidden {hidden}, top-{topk} of {experts} experts"
