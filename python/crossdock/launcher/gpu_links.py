# SPDX-License-Identifier: Apache-2.0
"""How the GPUs of this machine are linked, as nvidia-smi says it. tools/doctor.sh imports this without the package."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from itertools import combinations

# Between two GPUs, the fastest first: nvidia-smi's matrix in which it says OK, its name, and what Crossdock does.
LINKS = (
    ("n", "NVLink", "kernels store into the peer's memory, low latency in LL128 rows"),
    ("r", "PCIe peer access", "kernels store into the peer's memory, low latency in plain rows"),
)
NO_LINK = ("no peer access", "all ranks share the host's memory")
PCIE_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # GB/s each way, by generation


def ask(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


def _linked(matrix: str) -> tuple[set[int], set[tuple[int, int]]]:
    """All GPUs of a matrix of nvidia-smi, and the pairs in which it says OK both ways."""
    rows = re.findall(r"^\s*GPU(\d+)\s+((?:X|[A-Z]+)(?:\s+[A-Z]+)*)\s*$", matrix, re.MULTILINE)
    states = {(int(gpu), peer): state for gpu, row in rows for peer, state in enumerate(row.split())}
    numbers = {int(gpu) for gpu, _ in rows}
    pairs = {pair for pair in combinations(sorted(numbers), 2) if states.get(pair) == states.get(pair[::-1]) == "OK"}
    return numbers, pairs


def linked_pairs() -> tuple[set[int], list[set[tuple[int, int]]]]:
    """The machine's GPUs, and the pairs that have each of LINKS. OSError, SubprocessError: nvidia-smi does not say."""
    matrices = [_linked(ask("topo", "-p2p", option)) for option, _, _ in LINKS]
    return set().union(*(gpus for gpus, _ in matrices)), [pairs for _, pairs in matrices]


@cache
def all_reach_each_other() -> bool:
    """Whether all pairs of GPUs have NVLink or PCIe peer access. True if there are none, or nothing is known."""
    try:
        numbers, linked = linked_pairs()
    except (OSError, subprocess.SubprocessError):
        return True
    return set().union(*linked) >= set(combinations(sorted(numbers), 2))


def _least_bandwidth(is_nvlink: bool, numbers: set[int]) -> str:
    """Of these GPUs' NVLinks or PCIe slots, as nvidia-smi says it; empty if it does not."""
    found: dict[int, float] = {}
    try:
        if is_nvlink:
            for number, text in re.findall(
                r"^GPU (\d+):.*\n((?:\s+Link.*\n?)*)", ask("nvlink", "--status"), re.MULTILINE
            ):
                found[int(number)] = sum(map(float, re.findall(r"Link \d+: ([\d.]+) GB/s", text)))
        else:
            slots = ask("--query-gpu=index,pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader")
            for number, generation, lanes in re.findall(r"^(\d+), (\d+), (\d+)$", slots, re.MULTILINE):
                found[int(number)] = PCIE_LANE.get(int(generation), 0) * int(lanes)
    except (OSError, subprocess.SubprocessError):
        return ""
    least = min(found.get(number, 0.0) for number in numbers)
    return f", at most {least:.0f} GB/s each way" if least > 0 else ""


def links() -> list[tuple[str, str]]:
    """A line per kind of link: the pairs of GPUs that have no faster one, what is used between them, and its speed."""
    try:
        numbers, linked = linked_pairs()
    except (OSError, subprocess.SubprocessError) as error:
        return [("links", f"unknown ({error})")]
    if len(numbers) < 2:
        return [("links", "one GPU" if numbers else "unknown (nvidia-smi printed no matrix)")]
    left = list(combinations(sorted(numbers), 2))
    lines = []
    for (_, name, use), pairs in zip(LINKS, linked, strict=True):
        lines.append((name, use, [pair for pair in left if pair in pairs]))
        left = [pair for pair in left if pair not in pairs]
    lines.append((*NO_LINK, left))

    def named(pairs: list[tuple[int, int]]) -> str:
        if len(pairs) == len(numbers) * (len(numbers) - 1) // 2:
            return f"all {len(numbers)} GPUs"
        return "GPUs " + ", ".join(f"{one}-{other}" for one, other in pairs)

    def speed(name: str, pairs: list[tuple[int, int]]) -> str:
        return _least_bandwidth(name == LINKS[0][1], {number for pair in pairs for number in pair})

    return [(name, f"{named(pairs)}: {use}{speed(name, pairs)}") for name, use, pairs in lines if pairs]
