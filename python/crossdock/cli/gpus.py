# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine: whether a build has code for them, and how they are linked. nvidia-smi is asked."""

from __future__ import annotations

import re
import subprocess
from itertools import combinations

OLDEST = 80
# Between two GPUs, the fastest first: nvidia-smi's matrix in which it says OK, its name, and what Crossdock does.
LINKS = (
    ("n", "NVLink", "kernels store into the peer's memory, low latency in LL128 rows"),
    ("r", "PCIe peer access", "kernels store into the peer's memory, low latency in plain rows"),
)
NO_LINK = ("no peer access", "kernels send through NCCL's network, such as Crossdock's plugin")


def _ask(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


def code_for(capability: int, architectures: str) -> str:
    """What a build for `architectures` (as CMake lists them) has for a GPU: machine code, PTX, or nothing: empty."""
    found = ""
    for architecture in re.split(r"[;, ]+", architectures):
        parts = re.fullmatch(r"(?:\d+[af]?-for-)?(\d+)([af]?)(-virtual)?", architecture)
        if parts is None:
            continue
        number, kind, virtual = parts.groups()
        built = int(number)
        is_of_family = capability // 10 == built // 10 and capability >= built
        fits = capability == built if kind == "a" else is_of_family
        if virtual and not kind:
            fits = capability >= built
        if fits and not virtual:
            return f"machine code of sm_{number}{kind}"
        if fits:
            found = f"PTX of compute_{number}{kind}, which the driver compiles"
    return found


def verdict(capability: str, architectures: str | None) -> str:
    """architectures: None: the build has no GPU backend."""
    number = int(capability.replace(".", ""))
    if number < OLDEST:
        return f"too old: compute capability {OLDEST // 10}.{OLDEST % 10} or newer is needed"
    if architectures is None:
        return "this build of Crossdock has no GPU backend"
    if code := code_for(number, architectures):
        return f"ok: {code}"
    wanted = "100f" if number // 10 == 10 else number
    return f"no code in this build (it has {architectures}): build with CROSSDOCK_CUDA_ARCHITECTURES={wanted}"


def devices(architectures: str | None) -> list[tuple[str, str]]:
    """A line per GPU: its name, its compute capability, and what this build has for it."""
    try:
        listed = _ask("--query-gpu=index,name,compute_cap", "--format=csv,noheader")
    except (OSError, subprocess.SubprocessError) as error:
        return [("GPUs", f"unknown ({error})")]
    found = re.findall(r"^(\d+), (.*), (\d+\.\d+)$", listed, re.MULTILINE)
    return [
        (f"GPU {index}", f"{name}, compute capability {capability}: {verdict(capability, architectures)}")
        for index, name, capability in found
    ]


def _linked(matrix: str) -> tuple[set[int], set[tuple[int, int]]]:
    """All GPUs of a matrix of nvidia-smi, and the pairs in which it says OK both ways."""
    rows = re.findall(r"^\s*GPU(\d+)\s+((?:X|[A-Z]+)(?:\s+[A-Z]+)*)\s*$", matrix, re.MULTILINE)
    states = {(int(gpu), peer): state for gpu, row in rows for peer, state in enumerate(row.split())}
    numbers = {int(gpu) for gpu, _ in rows}
    pairs = {pair for pair in combinations(sorted(numbers), 2) if states.get(pair) == states.get(pair[::-1]) == "OK"}
    return numbers, pairs


def links() -> list[tuple[str, str]]:
    """A line per kind of link: the pairs of GPUs that have no faster one, and what is used between them."""
    try:
        matrices = [_linked(_ask("topo", "-p2p", option)) for option, _, _ in LINKS]
    except (OSError, subprocess.SubprocessError) as error:
        return [("links", f"unknown ({error})")]
    numbers = set().union(*(gpus for gpus, _ in matrices))
    if len(numbers) < 2:
        return [("links", "one GPU" if numbers else "unknown (nvidia-smi printed no matrix)")]
    left = list(combinations(sorted(numbers), 2))
    lines = []
    for (_, name, use), (_, pairs) in zip(LINKS, matrices, strict=True):
        lines.append((name, use, [pair for pair in left if pair in pairs]))
        left = [pair for pair in left if pair not in pairs]
    lines.append((*NO_LINK, left))

    def named(pairs: list[tuple[int, int]]) -> str:
        if len(pairs) == len(numbers) * (len(numbers) - 1) // 2:
            return f"all {len(numbers)} GPUs"
        return "GPUs " + ", ".join(f"{one}-{other}" for one, other in pairs)

    return [(name, f"{named(pairs)}: {use}") for name, use, pairs in lines if pairs]
