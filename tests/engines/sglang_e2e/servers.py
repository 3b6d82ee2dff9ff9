# SPDX-License-Identifier: Apache-2.0
"""A server from its start to its end: it has its time, and all its processes end with it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_e2e import client, configurations
from sglang_e2e.configurations import Configuration
from vllm_e2e import launch

TERM_S = 5  # to end by itself
STACKS_S = 2  # to write where threads are
MEMORY_S = 10  # of the GPU, until the next server may take it
LAUNCHER = "crossdock: "  # begins lines of crossdock run
TELLING = re.compile(r"Error|error:|Exception|assert|what\(\)|NCCL WARN|undefined symbol|Killed|timed out|rossdock")
# Lines with such words that do not tell why a server failed.
NOISE = re.compile(
    rf"^{LAUNCHER}|Warning|warnings\.warn|[sS]erver_?[aA]rgs|^\s*\^+\s*$|Ignore import error|sigquit|"
    r"kill_process_tree|^  File "
)


@dataclass(frozen=True)
class Limits:
    """In seconds: until a server is ready and warm, and for what is measured after that."""

    start_s: float
    run_s: float


def telling(log: Path, most: int = 6) -> list[str]:
    """The last lines of a log that name an error, each once; the last lines of all if there is none."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip() and not NOISE.search(line)]
    short = [re.sub(r"^\[[^\]]*\]\s*", "", line)[:240] for line in lines]
    found = dict.fromkeys(line for line in reversed(short) if TELLING.search(line))
    return list(reversed(list(found)[:most])) or short[-most:]


def launcher_lines(log: Path) -> list[str]:
    """What crossdock run said before the server started."""
    lines = log.read_text(errors="replace").splitlines()
    return [line.removeprefix(LAUNCHER) for line in lines if line.startswith(LAUNCHER)]


def ask_for_stacks(folder: Path) -> None:
    """Its processes with GPUs write where their threads are, and end (PYTHONFAULTHANDLER)."""
    for process in launch.own_processes(folder):
        with contextlib.suppress(OSError):
            if b"scheduler" in Path(f"/proc/{process}/cmdline").read_bytes():
                os.kill(process, signal.SIGABRT)
    time.sleep(STACKS_S)


def end(server: Any, folder: Path) -> None:
    """Returns when the server's processes are gone, and their memory with them."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(TERM_S)
    deadline = time.monotonic() + MEMORY_S
    launch.end([server], folder)
    while launch.own_processes(folder) and time.monotonic() < deadline:
        time.sleep(0.1)


class Server:
    def __init__(self, run: Configuration, model: Path, ranks: int, folder: Path) -> None:
        self.folder, self.begin = folder, time.monotonic()
        ports = launch.free_ports(launch.TAKEN)
        words = configurations.command(run, model, ranks, ports)
        (folder / "command.txt").write_text(" ".join(words) + "\n")
        self.port, self.log = ports[0], folder / "server.log"
        self.process = launch.start_one(words, configurations.environment(run, folder), folder, self.log.name)

    def wait(self, limit_s: float) -> None:
        """Until it answers. RuntimeError: it ended. TimeoutError."""
        while not client.is_ready(self.port):
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with code {self.process.poll()}")
            if time.monotonic() > self.begin + limit_s:
                raise TimeoutError(f"the server was not ready within {limit_s:.0f} s")
            time.sleep(0.2)

    def measure(self, limits: Limits, result: dict[str, Any]) -> None:
        self.wait(limits.start_s)
        result["ready_s"] = time.monotonic() - self.begin
        result["at"] = "the first requests"
        client.warm_up(client.Client(self.port, self.begin + limits.start_s))
        result["warm_s"] = time.monotonic() - self.begin
        result["at"] = "the requests"
        result |= client.measure(client.Client(self.port, time.monotonic() + limits.run_s))
        del result["at"]


def run_one(run: Configuration, model: Path, ranks: int, logs: Path, limits: Limits) -> dict[str, Any]:
    """The result, which is also in the run's folder. Its word is "ok" or what went wrong."""
    folder = logs / run.text.replace("+", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    result: dict[str, Any] = {"run": run.text, "model": str(model), "at": "its start"}
    server = Server(run, model, ranks, folder)
    try:
        server.measure(limits, result)
        result["word"] = "ok"
    except (OSError, RuntimeError, ValueError, KeyError, http.client.HTTPException) as error:
        result["word"] = f"at {result.pop('at')}: {type(error).__name__}: {str(error)[:200]}"
        if server.process.poll() is not None and result.get("ready_s"):
            result["word"] += f"; the server ended with code {server.process.poll()}"
        if isinstance(error, TimeoutError):
            ask_for_stacks(folder)
    finally:
        end(server.process, folder)
    result["launcher"] = launcher_lines(server.log)
    if result["word"] != "ok":
        result["telling"] = telling(server.log)
    (folder / "result.json").write_text(json.dumps(result))
    return result
