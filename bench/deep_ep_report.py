# SPDX-License-Identifier: Apache-2.0
"""What deep_ep_bench.py writes: a document, lines of a table, and documents side by side. Needs no torch."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "deep_ep.jsonl"

# Metrics of a result, each a spread in us, and what they are called.
METRICS = {
    "device_us": "graph",  # an operation in a CUDA graph
    "queued_us": "queued",  # one call, its host's time not counted
    "time_us": "latency",  # one call on an idle stream
    "eager_us": "eager",  # a call among calls that follow each other
    "span_us": "span",  # of earlier measurements of DeepEP: from the first kernel's start to the last one's end
    "kernel_us": "kernel",  # the same: kernels' own time
}
Document = dict[str, Any]


class Unfit(Exception):
    """A file that does not fit what is asked for."""


def cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def new_document(library: str, version: str, commit: str, command: str, gpu: str, case: dict[str, Any]) -> Document:
    """gpu: model and software, or "" on CPUs; case: the settings of the whole run."""
    machine = {"system": platform.system(), "cpu": cpu_name(), "cpus": os.cpu_count()}
    return {
        "benchmark": "deep_ep",
        "library": {"name": library, "version": version},
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "command": command,
        "machine": machine | ({"gpu": gpu} if gpu else {}),
        "case": case,
        "results": [],
    }


def read_document(path: Path) -> Document:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Unfit(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("benchmark") != "deep_ep":
        raise Unfit(f"{path} is no document of deep_ep_bench.py --json")
    return document


def go_on(path: Path, fresh: Document) -> None:
    """Takes over the results of the file, if there is one, which must be of the same library, machine and settings."""
    if not path.exists():
        return
    there = read_document(path)
    for key in ("library", "commit", "machine", "case"):
        if there[key] != fresh[key]:
            raise Unfit(f"{path} has {key} {there[key]}, this run {fresh[key]}: name another file")
    fresh["results"] = there["results"]


def write_document(path: Path, document: Document) -> None:
    """Whole, or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(path)


def line_of(case: str, operation: str, metric: str, spread: dict[str, float]) -> str:
    numbers = "".join(f"{spread[name]:10.1f}" for name in ("median", "min", "p99"))
    return f"{case:28} {operation:16} {METRICS[metric]:8}{numbers}"


def heading(document: Document) -> str:
    library, case, gpu = document["library"], document["case"], document["machine"].get("gpu", "CPU")
    count = f"{case['repetitions']} repetitions"
    return (
        f"{library['name']} {library['version']}, {case['ranks']} ranks, {gpu}; hidden {case['hidden']}, "
        f"top-{case['topk']} of {case['experts']} experts\n"
        f"us, of {count} the slowest rank's:{'':{30 - len(count)}}    median       min       p99"
    )


def stored(name: str) -> Document:
    """A run of bench/results/deep_ep.jsonl as a document."""
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    heads = {line["run"]: line for line in lines if line.get("benchmark") == "deep_ep"}
    if name not in heads:
        known = ", ".join(heads)
        raise Unfit(f"{name} is neither a file nor a run of {RESULTS.name}, whose runs are: {known}")
    return heads[name] | {"results": [line for line in lines if line["run"] == name and "operation" in line]}


def median_of(value: Any) -> float:
    """Of a spread as documents or as lines of bench/results have it."""
    return float(value["median"] if isinstance(value, dict) else value[0] if isinstance(value, list) else value)


def compared(names: list[str]) -> list[str]:
    """The lines of a table of these documents: medians, the ways in which they were timed, and ratios to the first."""
    documents = [read_document(Path(name)) if Path(name).exists() else stored(name) for name in names]
    cells: dict[tuple[str, str, bool], dict[int, tuple[str, float]]] = {}
    for column, document in enumerate(documents):
        for result in document["results"]:
            for metric in METRICS.keys() & result.keys():
                key = result["case"], result["operation"], metric == "eager_us"
                cells.setdefault(key, {})[column] = METRICS[metric], median_of(result[metric])
    lines = []
    for column, (name, document) in enumerate(zip(names, documents, strict=True)):
        library, commit = document["library"], document.get("commit")
        of_commit = f" ({commit})" if commit else ""
        lines.append(f"[{column}] {name}: {library['name']} {library['version']}{of_commit}, {document['date']}")
    lines.append(f"{'us, medians':45}" + "".join(f"{f'[{column}]':>25}" for column in range(len(names))))
    for (case, operation, _), found in cells.items():
        line = f"{case:28} {operation:16}"
        for column in range(len(names)):
            if column not in found:
                line += f"{'-':>25}"
                continue
            way, us = found[column]
            ratio = f" x{us / found[0][1]:.2f}" if column > 0 and 0 in found else ""
            line += f"{f'{way} {us:.1f}{ratio}':>25}"
        lines.append(line)
    return lines
