# SPDX-License-Identifier: Apache-2.0
"""What a configuration is, "BASE[+FLAG...]" as in `ll+graph`, and the server that it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_e2e import launch
from vllm_e2e.runs import one_of

BASES = {
    "ref": "the reference: no --moe-a2a-backend, Triton experts with tensor parallelism",
    "refdg": "as ref, with DeepGEMM's experts and expert parallelism",
    "ll": "deepep, low latency",
    "normal": "deepep, normal mode",
    "auto": "deepep: normal mode for prefill, low latency for decode",
    "v2": "deepep_v2",
}
FLAGS = {
    "graph": "CUDA graphs for decode",
    "dp": "data parallel attention (--attn-dp-size)",
    "nocumem": "NCCL_CUMEM_ENABLE=0: ranks share the host's memory, they do not use NVLink",
}
REFERENCES = ("ref", "refdg")  # without Crossdock
DEFAULT = ("ref", "ll", "normal", "auto", "v2", "ref+graph", "ll+graph")
DEEPEP_MODES = {"ll": "low_latency", "normal": "normal", "auto": "auto"}
CLIENTS = 32
# A rank's tokens per dispatch in low latency and with deepep_v2. A prefill must not have more.
MOST_TOKENS = 256
NORMAL_TOKENS = 2048  # of a prefill in the other configurations
# The first requests compile kernels. A rank that compiles lets the others wait in Crossdock.
FIRST_REQUESTS_MS = 600_000
DEFAULTS = {  # unless the user has set them
    "NCCL_EP_TIMEOUT_MS": str(FIRST_REQUESTS_MS),
    "CROSSDOCK_JOIN_TIMEOUT_MS": str(FIRST_REQUESTS_MS),
    "EP_DISABLE_GIN": "1",  # all ranks are on this host
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
}
ALWAYS = {
    "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": str(MOST_TOKENS),
    "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK": str(MOST_TOKENS),
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # servers that start at once take memory at different times
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health answers before the first kernels are compiled
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",  # a server whose time is over writes where its threads are
    "SPT_NOENV": "1",  # processes that name themselves keep their environment, by which they are found
}


@dataclass(frozen=True)
class Configuration:
    text: str
    base: str
    flags: frozenset[str]

    @property
    def is_reference(self) -> bool:
        return self.base in REFERENCES


def parse(text: str) -> Configuration:
    """ValueError: the message names the word, its value and what is allowed."""
    base, *flags = text.split("+")
    one_of(f"CONFIGURATION {text!r}: the base", base, BASES)
    for flag in flags:
        one_of(f"CONFIGURATION {text!r}: the flag", flag, FLAGS)
    refusals = {
        "SGLang has no CUDA graphs with --deepep-mode normal, allowed with graph: all other bases": base == "normal"
        and "graph" in flags,
        "the flag nocumem is about Crossdock, allowed: ll, normal, auto, v2": base in REFERENCES and "nocumem" in flags,
        "a flag is there twice": len(set(flags)) < len(flags),
    }
    for message, is_wrong in refusals.items():
        if is_wrong:
            raise ValueError(f"CONFIGURATION {text!r}: {message}")
    return Configuration(text, base, frozenset(flags))


def arguments(run: Configuration, model: Path, ranks: int, port: int, nccl_port: int) -> list[str]:
    """Of sglang.launch_server. Servers differ in their experts and the exchange alone."""
    found: list[object] = [
        *("--model-path", model, "--load-format", "safetensors", "--skip-tokenizer-init", "--tp", ranks),
        *("--host", "127.0.0.1", "--port", port, "--nccl-port", nccl_port),
        *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *("--mem-fraction-static", 0.3, "--max-total-tokens", 65536, "--context-length", 4096),
        *("--max-running-requests", CLIENTS, "--random-seed", 1),
        *("--chunked-prefill-size", MOST_TOKENS if run.base in ("ll", "auto", "v2") else NORMAL_TOKENS),
        *("--watchdog-timeout", FIRST_REQUESTS_MS // 1000, "--dist-timeout", FIRST_REQUESTS_MS // 1000),
        *("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"),
        *("--disable-radix-cache", "--skip-server-warmup", "--cuda-graph-backend-prefill", "disabled"),
    ]
    if "graph" in run.flags:
        found += ["--cuda-graph-max-bs-decode", CLIENTS]
    else:
        found += ["--cuda-graph-backend-decode", "disabled"]
    if "dp" in run.flags:
        found += ["--attn-dp-size", ranks]
    if run.base == "refdg":
        found += ["--moe-runner-backend", "deep_gemm", "--ep", ranks]
    elif run.base == "v2":
        found += ["--moe-a2a-backend", "deepep_v2"]
    elif not run.is_reference:
        found += ["--moe-a2a-backend", "deepep", "--deepep-mode", DEEPEP_MODES[run.base]]
    if not run.is_reference:
        found += ["--moe-runner-backend", "deep_gemm", "--deepep-dispatcher-output-dtype", "bf16"]
    return list(map(str, found))


def command(run: Configuration, model: Path, ranks: int, ports: range) -> list[str]:
    """Also the reference is started by crossdock run, so that all servers have the same NCCL."""
    return launch.command_of("-m", "sglang.launch_server", *arguments(run, model, ranks, ports[0], ports[1]))


def environment(run: Configuration, folder: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    found = DEFAULTS | dict(base) | ALWAYS | {launch.MARK: str(folder)}
    # SGLang compiles by tools beside this Python, such as ninja.
    found["PATH"] = launch.joined(str(Path(sys.executable).parent), base.get("PATH"))
    if "nocumem" in run.flags:
        found["NCCL_CUMEM_ENABLE"] = "0"
    return found
