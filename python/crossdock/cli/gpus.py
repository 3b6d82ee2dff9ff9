# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine: whether a build has code for them. nvidia-smi is asked."""

from __future__ import annotations

import re
import subprocess

from crossdock.launcher import gpu_links

OLDEST = 80


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
        listed = gpu_links.ask("--query-gpu=index,name,compute_cap", "--format=csv,noheader")
    except (OSError, subprocess.SubprocessError) as error:
        return [("GPUs", f"unknown ({error})")]
    found = re.findall(r"^(\d+), (.*), (\d+\.\d+)$", listed, re.MULTILINE)
    return [
        (f"GPU {index}", f"{name}, compute capability {capability}: {verdict(capability, architectures)}")
        for index, name, capability in found
    ]
