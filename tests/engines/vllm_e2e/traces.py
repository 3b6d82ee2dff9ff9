# SPDX-License-Identifier: Apache-2.0
"""Which kernels took the GPU's time, from a trace of torch's profiler."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

# Names of kernels contain their namespaces.
OWN = ("crossdock",)
EXPERTS = ("fused_moe", "batched_triton", "deep_gemm", "moe_gemm", "fused_experts", "_grouped")
COLLECTIVES = ("ncclDevKernel", "ncclKernel")
# Of a MoE layer, whose router has one kernel.
ROUTER = "topkGating"
PARTS = {
    "routing": (ROUTER, "moe_align", "count_routing"),
    "dispatch": ("_dispatch", "AllGather"),
    "experts": (*EXPERTS, "act_and_mul"),
    "combine": ("_combine", "ReduceScatter"),
}


def kernels(trace: Path) -> list[dict[str, Any]]:
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as file:
        events = json.load(file)["traceEvents"]
    return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event]


def kind_of(name: str) -> str:
    for kind, words in (("crossdock", OWN), ("experts", EXPERTS), ("collectives", COLLECTIVES)):
        if any(word in name for word in words):
            return kind
    return "other"


def layer_us(found: list[dict[str, Any]]) -> dict[str, float]:
    """By part: a MoE layer's time. Empty if no router is known."""
    layers = sum(ROUTER in event["name"] for event in found)
    return {
        part: sum(event["dur"] for event in found if any(word in event["name"] for word in words)) / layers
        for part, words in PARTS.items()
        if layers
    }


def summary(trace: Path, most: int = 12) -> dict[str, Any]:
    """Times in ms: of each kind, and of the kernels that took most."""
    found = kernels(trace)
    if not found:
        return {}
    by_name: dict[str, list[float]] = defaultdict(list)
    by_kind: dict[str, float] = defaultdict(float)
    for event in found:
        by_name[event["name"]].append(event["dur"])
        by_kind[kind_of(event["name"])] += event["dur"] / 1e3
    busy = sum(by_kind.values())
    span = (max(event["ts"] + event["dur"] for event in found) - min(event["ts"] for event in found)) / 1e3
    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:most]
    return {
        "span_ms": span,
        "busy_ms": busy,
        "by_kind_ms": dict(by_kind),
        "layer_us": layer_us(found),
        "crossdock_share": by_kind["crossdock"] / busy,
        "top": [
            {"name": name[:120], "ms": sum(times) / 1e3, "calls": len(times), "mean_us": sum(times) / len(times)}
            for name, times in top
        ],
    }


def find(folder: Path) -> list[Path]:
    return sorted([*folder.rglob("*.json.gz"), *folder.rglob("*.pt.trace.json")])


def text(found: dict[str, Any]) -> str:
    kinds = ", ".join(f"{kind} {ms:.1f}" for kind, ms in sorted(found["by_kind_ms"].items(), key=lambda item: -item[1]))
    lines = [f"span {found['span_ms']:.1f} ms, busy {found['busy_ms']:.1f} ms: {kinds}"]
    if found["layer_us"]:
        lines.append("a MoE layer, us: " + ", ".join(f"{part} {us:.1f}" for part, us in found["layer_us"].items()))
    for one in found["top"]:
        lines.append(f"{one['ms']:9.2f} ms {one['calls']:6d} x {one['mean_us']:8.1f} us  {one['name']}")
    return "\n".join(lines)
