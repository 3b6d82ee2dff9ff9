# SPDX-License-Identifier: Apache-2.0
"""The model of docs/scaling.md: what operations send between nodes, on paper and, in low latency, as counted.

scaling                     rewrites the tables between the document's marks, and docs/ll_scale.svg
scaling --check             fails if that would change them, or if a count is far from the model
scaling --measure LL_SCALE  first runs that program (build/cpu/bench/ll_scale) over many numbers of ranks into
                            bench/results/ll_scale.jsonl
"""

import json
import math
import subprocess
import sys

from tools.results.data import ROOT
from tools.results.markdown import replaced, table
from tools.results.svg import Chart, Curve, Panel

RESULTS = ROOT / "bench/results/ll_scale.jsonl"
DOCUMENT = ROOT / "docs/scaling.md"
PICTURE = ROOT / "docs/ll_scale.svg"
MEASURED_RANKS = (16, 32, 64, 128, 256, 512, 1024)
SHOWN_RANKS = (16, 64, 256, 1024)  # in the table; the picture has all
MODELLED_NODES = (2, 4, 8, 32)

SIGNAL_BYTES = 8
ENTRY_BYTES = 16
CELL_BYTES = 16  # before a returned row
NIC_BYTES_PER_US = 50_000  # 400 Gb/s


def distinct_ranks(ranks, experts, topk):
    """Expected number of different ranks among a token's experts, all different and uniform."""
    local = experts // ranks
    missed = math.prod((experts - local - i) / (experts - i) for i in range(topk))
    return ranks * (1 - missed)


class Operation:
    """What one rank sends to other nodes, expected. entries: number of peers; signals: those behind other puts."""

    def __init__(self, rows, row_bytes, puts, put_bytes, signals, entries):
        self.rows, self.puts = rows, puts + entries
        self.bytes = rows * row_bytes + put_bytes + signals * SIGNAL_BYTES + entries * (ENTRY_BYTES + SIGNAL_BYTES)


def dispatch(ranks, lsa_team, tokens, topk, experts, row_bytes, distinct, with_rows):
    """with_rows: the share of GIN peers that get any row."""
    remote = ranks - lsa_team
    rows = tokens * distinct * remote / ranks
    header_bytes = 16 * (2 + topk)
    count_bytes = 8 * (with_rows * (1 + experts // ranks) + (1 - with_rows))
    return Operation(rows, row_bytes + header_bytes, remote * (1 + with_rows), remote * count_bytes, remote, remote)


def combine(ranks, lsa_team, tokens, rows_of_token, row_bytes, with_rows):
    remote = ranks - lsa_team
    rows = tokens * rows_of_token * remote / ranks
    row_bytes += CELL_BYTES
    return Operation(rows, row_bytes, 2 * remote * with_rows, remote * with_rows * 8, remote * with_rows, remote)


def counted_model(run):
    """As ll_scale runs it: one expert per rank, choices drawn one by one; the mean of a dispatch and a combine."""
    ranks, tokens, topk = run["ranks"], run["tokens"], run["topk"]
    distinct = ranks * (1 - (1 - 1 / ranks) ** topk)
    with_rows = 1 - (1 - 1 / ranks) ** (topk * tokens)
    there = dispatch(ranks, run["lsa_team"], tokens, topk, ranks, run["row_bytes"], distinct, with_rows)
    back = combine(ranks, run["lsa_team"], tokens, topk, run["row_bytes"], with_rows)
    return {name: (getattr(there, name) + getattr(back, name)) / 2 for name in ("rows", "puts", "bytes")}


def counted_table(runs):
    rows = []
    for run in runs:
        model = counted_model(run)
        for name, value in model.items():
            if abs(run[name] - value) > 0.05 * value:
                sys.exit(f"{run['ranks']} ranks: {run[name]} {name} counted, {value:.1f} in the model")
        if run["ranks"] in SHOWN_RANKS:
            rows.append(
                (
                    run["ranks"],
                    f"{model['puts']:.1f}",
                    f"{run['puts']:.1f}",
                    f"{model['bytes']:.0f}",
                    f"{run['bytes']:.0f}",
                    f"{run['symmetric_bytes'] / 1024:.0f}",
                    f"{run['seconds'] / (2 * run['trips']) * 1e3:.1f}",
                    run["peak_mib"],
                )
            )
    headings = ("ranks:", "puts:", "counted:", "bytes:", "counted:", "arena KiB:", "ms:", "peak MiB:")
    return table(headings, rows)


def model_table():
    """DeepSeek-V3's shape on nodes of 8."""
    lsa_team, tokens, topk, experts, row_bytes = 8, 128, 8, 256, 14336
    rows = []
    for nodes in MODELLED_NODES:
        ranks = lsa_team * nodes
        distinct = distinct_ranks(ranks, experts, topk)
        there = dispatch(ranks, lsa_team, tokens, topk, experts, row_bytes, distinct, 1)
        exact = combine(ranks, lsa_team, tokens, topk, row_bytes, 1)
        sums = combine(ranks, lsa_team, tokens, distinct, row_bytes, 1)
        remote = ranks - lsa_team
        sums.puts += remote  # weights, with a signal of their own
        sums.bytes += remote * (tokens * 16 * topk / 2 + SIGNAL_BYTES)
        cells = [nodes, ranks]
        for operation in (there, exact, sums):
            cells += [
                f"{operation.bytes / 1e6:.2f}",
                f"{operation.puts:.0f}",
                f"{operation.bytes / NIC_BYTES_PER_US:.0f}",
            ]
        rows.append(cells)
    return table(
        (
            "nodes:",
            "ranks:",
            "dispatch MB:",
            "puts:",
            "µs:",
            "exact combine MB:",
            "puts:",
            "µs:",
            "sender's sums MB:",
            "puts:",
            "µs:",
        ),
        rows,
    )


def ht_table():
    """The same model with 4096 tokens in high throughput: a token crosses once per node, in both directions."""
    lsa_team, tokens, topk, experts, row_bytes = 8, 4096, 8, 256, 14336
    rows = []
    for nodes in MODELLED_NODES:
        ranks = lsa_team * nodes
        remote = ranks - lsa_team
        chunks = tokens // 32
        crossing = tokens * distinct_ranks(nodes, experts, topk) * (nodes - 1) / nodes
        by_rank = tokens * distinct_ranks(ranks, experts, topk) * remote / ranks
        weights = by_rank * 4 * (min(topk, experts // ranks) + 3) // 4 * 4
        # A credit is for half a ring, and a put of rows is for as much at most: src/core/ht/arena.h, with the most SMs
        # that an operation takes by default.
        row_slots = max(4, min(16, (64 << 20) // (2 * nodes * 32 * row_bytes))) // 2 * 2
        puts = crossing / (row_slots // 2) + chunks * remote  # each carries a signal
        weight_slots = min(64, 16384 // (32 * 4 * ((min(topk, experts // ranks) + 3) // 4 * 4)))
        signals = crossing / (row_slots // 2) + chunks * remote / (weight_slots // 2) + remote
        there = crossing * row_bytes + weights + (puts + signals) * SIGNAL_BYTES
        rows.append(
            (
                nodes,
                ranks,
                f"{crossing:.0f}",
                f"{there / 1e6:.1f}",
                f"{puts:.0f}",
                f"{signals:.0f}",
                f"{there / NIC_BYTES_PER_US:.0f}",
                f"{by_rank * row_bytes / NIC_BYTES_PER_US:.0f}",
            )
        )
    return table(("nodes:", "ranks:", "rows:", "MB:", "puts:", "signals:", "µs:", "µs, one row per rank:"), rows)


def measure(program):
    lines = ""
    for ranks in MEASURED_RANKS:
        trips = max(2, 2048 // ranks)  # few ranks draw too few tokens for a mean
        done = subprocess.run(
            [program, "--ranks", str(ranks), "--trips", str(trips)], capture_output=True, text=True, check=True
        )
        print(done.stdout, end="")
        lines += done.stdout
    RESULTS.write_text(lines)


def picture(runs):
    ranks = [run["ranks"] for run in runs]
    puts = [(run["ranks"], run["puts"] / (run["ranks"] - run["lsa_team"])) for run in runs]
    counted, model = (
        [(run["ranks"], value(run)) for run in runs]
        for value in (lambda run: run["bytes"], lambda run: counted_model(run)["bytes"])
    )
    return Chart(
        "Low latency between nodes against ranks",
        [
            [
                Panel(
                    "puts per inter-node peer and operation",
                    "ranks",
                    "puts",
                    [Curve("puts", puts, 0)],
                    ranks,
                    0,
                    y_log=False,
                ),
                Panel(
                    "bytes per rank and operation",
                    "ranks",
                    "bytes",
                    [Curve("counted", counted, 0), Curve("model", model, 1, "dashed")],
                    ranks,
                ),
            ]
        ],
        share_y=False,
    ).text()


def main(arguments):
    if arguments[:1] == ["--measure"] and len(arguments) == 2:
        measure(arguments[1])
    elif arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    runs = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    text = DOCUMENT.read_text()
    for name, lines in (("model", model_table()), ("ht", ht_table()), ("counted", counted_table(runs))):
        text = replaced(text, name, lines)
    for path, fresh in ((DOCUMENT, text), (PICTURE, picture(runs))):
        if arguments == ["--check"] and path.read_text() != fresh:
            sys.exit(
                f"{path.relative_to(ROOT)}: not as {RESULTS.relative_to(ROOT)} has it; "
                "python3 -m tools.results scaling updates it"
            )
        path.write_text(fresh)
