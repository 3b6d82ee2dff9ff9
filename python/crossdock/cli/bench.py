# SPDX-License-Identifier: Apache-2.0
"""Times dispatch and combine against the number of tokens, beside memcpy of the delivered bytes.

The JSON has the form of ep_bench's, the benchmark in C++, which measures more.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import crossdock as ep
from crossdock.cli.layer import Layer, add_backend_arguments, at_least, run_ranks
from crossdock.cli.table import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_backend_arguments(parser, ranks=4, hidden=1024, experts=32, topk=4)
    usual = "1,4,16,64,128"
    parser.add_argument("--tokens", type=_counts, default=usual, help=f"tokens per rank, a list with commas ({usual})")
    parser.add_argument("--iterations", type=at_least(1), default=30, help="timed calls per number of tokens (30)")


def _counts(text: str) -> list[int]:
    return [at_least(1)(number) for number in text.split(",")]


def _timed(comm: ep.Communicator, call: Any, iterations: int) -> list[float]:
    times = []
    for _ in range(iterations):
        comm.barrier()
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return times


def run_rank(comm: ep.Communicator, options: argparse.Namespace, tokens: list[int]) -> list[dict[str, list[float]]]:
    found = []
    layer = Layer(comm, options, max(tokens))
    source, target = np.ones_like(layer.received), np.zeros_like(layer.received)
    for num_tokens in tokens:
        layer.route(0, num_tokens)
        layer.dispatch()
        layer.combine()
        rows = int(layer.counts.sum())
        flat_source, flat_target = source.reshape(-1, options.hidden)[:rows], target.reshape(-1, options.hidden)[:rows]
        dispatch, combine = [], []
        for _ in range(options.iterations):
            dispatch += _timed(comm, layer.dispatch, 1)
            combine += _timed(comm, layer.combine, 1)
        bound = _timed(comm, lambda: np.copyto(flat_target, flat_source), options.iterations)  # noqa: B023
        found.append({"dispatch": dispatch, "combine": combine, "bound": bound})
    layer.close()
    return found


def main(options: argparse.Namespace) -> int:
    tokens: list[int] = options.tokens
    ranks = run_ranks(options, run_rank, tokens)
    results: list[dict[str, Any]] = []
    for index, num_tokens in enumerate(tokens):
        us = {name: median(time for rank in ranks for time in rank[index][name]) for name in ranks[0][index]}
        timed = {name: {"time_us": {"median": us[name]}} for name in ("dispatch", "combine")}
        timed["pair"] = {"time_us": {"median": us["dispatch"] + us["combine"]}}
        bound = {name: {"time_us": {"median": us["bound"] * (1 + (name == "pair"))}} for name in timed}
        library: dict[str, Any] = {"name": "crossdock", "version": ep.get_version(), **timed}
        results.append({"tokens": num_tokens, "bound": bound, "libraries": [library]})
    case = {"mode": "ll", "backend": options.backend, "ranks": options.ranks, "layout": "expert-major", "dtype": "fp32"}
    case |= {"hidden": options.hidden, "experts": options.experts, "topk": options.topk}
    report = {"machine": {"system": platform.system()}, "case": case, "results": results}
    if options.json == "-":
        print(json.dumps(report))
        return 0
    if options.json:
        Path(options.json).write_text(json.dumps(report))
    rows = []
    for result in results:
        library = result["libraries"][0]
        cells = [library["dispatch"], library["combine"], result["bound"]["dispatch"]]
        rows.append((str(result["tokens"]), *(f"{cell['time_us']['median']:.1f}" for cell in cells)))
    print_table(
        f"{options.ranks} {options.backend}, hidden {options.hidden} fp32, medians in us",
        ("tokens per rank", "dispatch", "combine", "memcpy of the rows"),
        rows,
    )
    return 0
