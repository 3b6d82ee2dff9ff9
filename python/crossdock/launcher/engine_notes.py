# SPDX-License-Identifier: Apache-2.0
"""Which options of an engine's command line make it pass Crossdock by in silence, and which variables an engine needs.
Options in files, and programs over an engine's Python classes, are not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

VARIABLE = "VLLM_ALL2ALL_BACKEND"
USABLE = ("deepep_low_latency", "deepep_high_throughput", "deepep_v2")
REMOVED = ("naive", "pplx")
PARALLEL = ("--data-parallel-size", "-dp"), ("--prefill-context-parallel-size", "-pcp")

# SGLang's server sets it to 0 unless it is set, and NCCL then makes no symmetric memory.
CUMEM = ("NCCL_CUMEM_ENABLE", "1")
NO_NVLINK = "ranks do not use NVLink"
CUMEM_NOTE = f"{'='.join(CUMEM)}, without which SGLang sets it to 0 and {NO_NVLINK}"


def variables(words: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables to add for a program with its arguments; those that are set stay as they are."""
    name, value = CUMEM
    return {name: value} if _is_of(words, "sglang") and name not in environment else {}


def notes(words: Sequence[str], environment: Mapping[str, str], as_deep_ep: bool) -> list[str]:
    """A line for each, for a program with its arguments and the environment before `variables` are added; none for
    other programs."""
    if _is_of(words, "vllm"):
        return [f"vLLM: {note}" for note in _of_vllm(words, environment, as_deep_ep)]
    if _is_of(words, "sglang"):
        return [f"SGLang: {note}" for note in _of_sglang(words, environment, as_deep_ep)]
    return []


def _is_of(words: Sequence[str], engine: str) -> bool:
    """The engine's command, or a module of it."""
    pairs = zip(words, words[1:], strict=False)
    is_module = any(before == "-m" and word.partition(".")[0] == engine for before, word in pairs)
    return Path(words[0]).name == engine or words[0].startswith(f"{engine}.") or is_module


def _value(words: Sequence[str], *names: str) -> str | None:
    """What follows the last of an option's names, as --option value or --option=value; "" for an option alone."""
    found = None
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else "" if after.startswith("-") else after
    return found


def _of_vllm(words: Sequence[str], environment: Mapping[str, str], as_deep_ep: bool) -> list[str]:
    backend, usable = _value(words, "--all2all-backend"), f"pass --all2all-backend {' or '.join(USABLE)}"
    found = []
    if VARIABLE in environment:
        found.append(f"{VARIABLE} is {environment[VARIABLE]}, which vLLM has not read since 0.15: {usable}")
    if _value(words, "--config") is not None:
        return found
    if backend in REMOVED:
        found.append(f"--all2all-backend is {backend}, which was removed, so allgather_reducescatter is used: {usable}")
    elif backend not in USABLE:
        if as_deep_ep:
            used = backend or "allgather_reducescatter"
            found.append(f"--all2all-backend is {used}, which calls no deep_ep: {usable}")
    elif not as_deep_ep:
        found.append(f"--all2all-backend is {backend}, and deep_ep is not Crossdock's without --as-deep-ep")
    elif _value(words, "--enable-expert-parallel", "-ep") is None:
        found.append(f"without --enable-expert-parallel, {backend} is not called")
    elif all((_value(words, *names) or "1") == "1" for names in PARALLEL):
        found.append(f"--data-parallel-size is 1, where {backend} is not called")
    return found


def _of_sglang(words: Sequence[str], environment: Mapping[str, str], as_deep_ep: bool) -> list[str]:
    backend, name = _value(words, "--moe-a2a-backend"), CUMEM[0]
    found = []
    if name not in environment:
        found.append(CUMEM_NOTE)
    elif environment[name] == "0":
        found.append(f"{name} is 0, so NCCL makes no symmetric memory: {NO_NVLINK} but share the host's memory")
    if backend in ("deepep", "deepep_v2"):
        if not as_deep_ep:
            found.append(f"--moe-a2a-backend is {backend}, and deep_ep is not Crossdock's without --as-deep-ep")
    elif as_deep_ep and _value(words, "--config") is None:
        used = backend or "none"
        found.append(f"--moe-a2a-backend is {used}, which calls no deep_ep: pass deepep or deepep_v2")
    return found
