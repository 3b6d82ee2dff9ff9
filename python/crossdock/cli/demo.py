# SPDX-License-Identifier: Apache-2.0
"""Runs one Mixture-of-Experts layer over ranks of this machine, and checks all results."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

import crossdock as ep
from crossdock.cli.layer import Layer, add_backend_arguments, at_least, run_ranks
from crossdock.cli.table import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_backend_arguments(parser, ranks=8, hidden=256, experts=16, topk=4)
    parser.add_argument("--tokens", type=at_least(1), default=64, help="tokens per rank and step (64)")
    parser.add_argument("--steps", type=at_least(1), default=10, help="batches, one after the other (10)")


def _factor(expert: Any) -> Any:
    """The factor that an expert multiplies by."""
    return 1.0 + expert * 0.25


def run_rank(comm: ep.Communicator, options: argparse.Namespace) -> dict[str, Any]:
    layer = Layer(comm, options, options.tokens)
    rows_from = np.zeros(comm.num_ranks, np.int64)
    worst = 0.0
    seconds = {"dispatch": 0.0, "experts": 0.0, "combine": 0.0}
    for step in range(options.steps):
        layer.route(step, options.tokens)
        times = [time.perf_counter()]
        layer.dispatch()
        times.append(time.perf_counter())
        for local, count in enumerate(layer.counts):
            layer.received[local, :count] *= _factor(comm.rank * layer.num_local + local)
        times.append(time.perf_counter())
        layer.combine()
        times.append(time.perf_counter())
        for name, start, end in zip(seconds, times[:-1], times[1:], strict=True):
            seconds[name] += end - start
        factors = (layer.weights * _factor(layer.topk_idx)).sum(axis=1, keepdims=True)
        expected = layer.tokens * factors
        worst = max(worst, float(np.abs(layer.result - expected).max(initial=0) / np.abs(expected).max(initial=1e-9)))
        for source in range(comm.num_ranks):
            _, chosen, _ = layer.problem(source, step, options.tokens)
            rows_from[source] += int((chosen // layer.num_local == comm.rank).sum())
    layer.close()
    return {"rows_from": rows_from.tolist(), "rows": int(rows_from.sum()), "worst": worst, "seconds": seconds}


def main(options: argparse.Namespace) -> int:
    ranks = run_ranks(options, run_rank)
    passed = all(rank["worst"] < 1e-5 for rank in ranks)
    report = {
        "passed": passed,
        "mode": "ll",
        "backend": options.backend,
        "ranks": options.ranks,
        "tokens": options.tokens * options.steps * options.ranks,
        "largest_relative_error": max(rank["worst"] for rank in ranks),
        "rows_from_to": np.array([rank["rows_from"] for rank in ranks]).T.tolist(),
        "per_rank": [{"rows_in": rank["rows"], **rank["seconds"]} for rank in ranks],
    }
    if options.json == "-":
        print(json.dumps(report))
        return 0 if passed else 1
    if options.json:
        Path(options.json).write_text(json.dumps(report))
    print_table(
        f"{options.steps} steps of {options.tokens} tokens per rank, top-{options.topk} of {options.experts}",
        ("rank", "rows in", "dispatch, ms", "experts, ms", "combine, ms", "largest error"),
        [
            (
                str(number),
                str(rank["rows"]),
                *(f"{1000 * value / options.steps:.2f}" for value in rank["seconds"].values()),
                f"{rank['worst']:.1e}",
            )
            for number, rank in enumerate(ranks)
        ],
    )
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1
