# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a run, gives them their time, and ends whatever they leave behind."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_e2e import control, models, runs
from vllm_e2e.control import MODEL, SHARED_GPUS, V2_FIX

MARK = "E2E_RUN"  # in the environment of each process of a run
GRACE_S = 10  # after a rank failed, the others have this long to say why
STACKS_S = 1  # to write where threads are
# Of a run: its engines take the first ones in turn, and the store has the last. They are below those that the system
# hands out to the connections of other runs.
FIRST_PORT, PORTS = 21000, 40


@dataclass(frozen=True)
class Machine:
    """Where things lie on this machine, and what a run gets of it."""

    home: Path  # what unpack.py wrote: site, nccl, programs
    work: Path  # caches and models
    logs: Path
    ranks: int
    timeout_ms: int = 40000
    gpus: int = 0  # 0: one for each rank

    @property
    def is_shared(self) -> bool:
        return 0 < self.gpus < self.ranks


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def are_free(ports: range) -> bool:
    for port in ports:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


def free_ports(taken: set[int]) -> range:
    """Adds the first of them to `taken`."""
    for first in range(FIRST_PORT, 32768 - PORTS, PORTS):
        ports = range(first, first + PORTS)
        if first not in taken and are_free(ports):
            taken.add(first)
            return ports
    raise ValueError(f"there are no {PORTS} free ports in a row between {FIRST_PORT} and 32768")


TAKEN: set[int] = set()  # by runs that may not have opened their ports yet


def library_folders() -> list[str]:
    """Where NVIDIA's wheels have the libraries that vLLM's extensions name, without their NCCL."""
    found = importlib.util.find_spec("nvidia")
    homes = found.submodule_search_locations if found is not None and found.submodule_search_locations else []
    folders = [folder for home in homes for folder in sorted(Path(home).glob("*/lib"))]
    return [str(folder) for folder in folders if folder.parent.name != "nccl"]


def joined(*parts: str | None) -> str:
    return os.pathsep.join(part for part in parts if part)


def machine_environment(machine: Machine) -> dict[str, str]:
    home, work, nccl = machine.home, machine.work, machine.home / "nccl"
    shared = {SHARED_GPUS: str(machine.gpus), "NCCL_MULTI_RANK_GPU_ENABLE": "1"} if machine.is_shared else {}
    return shared | {
        "PYTHONPATH": joined(str(home / "programs"), str(home / "site"), os.environ.get("PYTHONPATH")),
        "LD_LIBRARY_PATH": joined(str(nccl), *library_folders(), os.environ.get("LD_LIBRARY_PATH")),
        "CROSSDOCK_NCCL_LIBRARY": str(nccl / "libnccl.so.2"),
        "VLLM_NCCL_SO_PATH": str(nccl / "libnccl.so.2"),
        # Multicast needs a fabric that not every host gives to its guests.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "EP_DISABLE_GIN": "1",
        "NCCL_EP_TIMEOUT_MS": str(machine.timeout_ms),
        "CROSSDOCK_JOIN_TIMEOUT_MS": "60000",
        "TRITON_CACHE_DIR": str(work / "triton"),
        "VLLM_CACHE_ROOT": str(work / "vllm"),
        "XDG_CACHE_HOME": str(work / "cache"),
        "DG_JIT_CACHE_DIR": str(work / "deep_gemm"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
        "OMP_NUM_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
        "TORCHDYNAMO_DISABLE": "1",  # vLLM would compile small helpers for seconds
    }


def run_environment(run: runs.Run, folder: Path) -> dict[str, str]:
    uses_deep_gemm = "1" if "deepgemm" in run.flags else "0"
    found = {
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_PLUGINS": "vllm_e2e",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_USE_DEEP_GEMM": uses_deep_gemm,
        "VLLM_MOE_USE_DEEP_GEMM": uses_deep_gemm,
        "VLLM_USE_DEEP_GEMM_E8M0": "0",  # scales stay as they are in the model
        "VLLM_DEEP_GEMM_WARMUP": "skip",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if "inproc" in run.flags else "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork" if "fork" in run.flags else "spawn",
        MODEL: f"{run.model}-fp8" if "fp8" in run.flags else run.model,
        V2_FIX: "1" if "v2fix" in run.flags else "0",
        control.FOLDER: str(folder),
        MARK: str(folder),
    }
    if run.needs_control:
        found[control.VARIABLE] = str(folder / "control")
    return found


def environment(run: runs.Run, machine: Machine, folder: Path) -> dict[str, str]:
    """Of all processes of a run."""
    return os.environ | machine_environment(machine) | run_environment(run, folder)


def command_of(*words: str) -> list[str]:
    """As a user would start it: crossdock run sets up the process, which then is the program's own."""
    return [sys.executable, "-m", "crossdock", "run", "--as-deep-ep", sys.executable, *words]


def start_one(command: list[str], base: dict[str, str], folder: Path, log_name: str) -> Any:
    with (folder / log_name).open("wb") as log:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        return subprocess.Popen(command, env=base, cwd=folder, start_new_session=True, **pipes)


def start(run: runs.Run, machine: Machine, folder: Path) -> list[Any]:
    """The ranks, or the one process that starts them. Ranks that have started wait for their turn."""
    model = models.write(machine.work, run.model, "fp8" in run.flags)
    base = environment(run, machine, folder)
    ports = free_ports(TAKEN)
    words = ["-m", "vllm_e2e", "rank", "--line", run.text, "--ranks", str(machine.ranks), "--out", str(folder)]
    words += ["--model", str(model), "--store-port", str(ports[-1])]
    if "torchrun" in run.flags:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(machine.ranks), "--master-port"]
        return [start_one(command_of(*launcher, str(free_port()), *words), base, folder, "rank0.log")]
    common = {"VLLM_DP_SIZE": str(machine.ranks), "VLLM_DP_MASTER_IP": "127.0.0.1"}
    common["VLLM_DP_MASTER_PORT"] = str(ports[0])
    processes = []
    for rank in range(machine.ranks):
        own = {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)}
        command = command_of(*words, "--rank", str(rank))
        processes.append(start_one(command, base | common | own, folder, f"rank{rank}.log"))
    return processes


def failed_rank(processes: list[Any]) -> int | None:
    return next((rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)), None)


def wait(processes: list[Any], limit_s: float) -> str:
    """Until all ranks have ended or their time is over; returns "ok" or what went wrong."""
    word, deadline = "ok", time.monotonic() + limit_s
    while any(process.poll() is None for process in processes):
        failed = failed_rank(processes)
        if failed is not None and word == "ok":
            word = f"rank {failed} failed"
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            return word if word != "ok" else f"no end within {limit_s:.0f} s"
        time.sleep(0.05)
    failed = failed_rank(processes)
    return f"rank {failed} failed" if failed is not None and word == "ok" else word


def own_processes(folder: Path) -> list[int]:
    """Those of the run with this folder, by their environment."""
    mark, found = f"{MARK}={folder}".encode(), []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def ask_for_stacks(folder: Path) -> None:
    """Of a run whose time is over: its processes write where their threads are (plugin.py)."""
    for process in own_processes(folder):
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGUSR1)
    time.sleep(STACKS_S)


def end(processes: list[Any], folder: Path) -> None:
    """The sessions of the ranks, and their processes elsewhere."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for process in own_processes(folder):
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)
