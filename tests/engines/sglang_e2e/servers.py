# SPDX-License-Identifier: Apache-2.0
"""Servers from their start to their end: each has its time, and all its processes end with it."""

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
from collections.abc import Iterator, Sequence
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
    """A configuration's server and its result, whose word is "" until it is "ok" or what went wrong."""

    def __init__(self, run: Configuration, model: Path, ranks: int, logs: Path) -> None:
        self.folder, self.begin = logs / run.text.replace("+", "-"), time.monotonic()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.result: dict[str, Any] = {"run": run.text, "model": str(model), "word": ""}
        ports = launch.free_ports(launch.TAKEN)
        words = configurations.command(run, model, ranks, ports)
        (self.folder / "command.txt").write_text(" ".join(words) + "\n")
        self.port, self.log = ports[0], self.folder / "server.log"
        self.process = launch.start_one(words, configurations.environment(run, self.folder), self.folder, self.log.name)

    def wait(self, limit_s: float) -> None:
        """Until it answers. RuntimeError: it ended. TimeoutError."""
        while not client.is_ready(self.port):
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with code {self.process.poll()}")
            if time.monotonic() > self.begin + limit_s:
                raise TimeoutError(f"the server was not ready within {limit_s:.0f} s")
            time.sleep(0.2)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """An error of the step is the result's word, and ends the server."""
        try:
            yield
        except (OSError, RuntimeError, ValueError, KeyError, http.client.HTTPException) as error:
            word = f"at {name}: {type(error).__name__}: {str(error)[:200]}"
            if self.process.poll() is not None and self.result.get("ready_s"):
                word += f"; the server ended with code {self.process.poll()}"
            if isinstance(error, TimeoutError):
                ask_for_stacks(self.folder)
            self.finish(word)

    def warm_up(self, limit_s: float) -> None:
        with self.step("its start"):
            self.wait(limit_s)
            self.result["ready_s"] = time.monotonic() - self.begin
        if not self.result["word"]:
            with self.step("the first requests"):
                client.warm_up(client.Client(self.port, self.begin + limit_s))
                self.result["warm_s"] = time.monotonic() - self.begin

    def measure(self, limit_s: float) -> None:
        if not self.result["word"]:
            with self.step("the requests"):
                self.result |= client.measure(client.Client(self.port, time.monotonic() + limit_s))
        if not self.result["word"]:
            self.finish("ok")

    def finish(self, word: str) -> None:
        """Ends the server. The result is also in its folder."""
        end(self.process, self.folder)
        self.result |= {"word": word, "launcher": launcher_lines(self.log)}
        if word != "ok":
            self.result["telling"] = telling(self.log)
        (self.folder / "result.json").write_text(json.dumps(self.result))


def run_group(
    group: Sequence[Configuration], model: Path, ranks: int, logs: Path, limits: Limits
) -> list[dict[str, Any]]:
    """The results. Servers start at once. When all are warm or have failed, they are measured one after the other."""
    started: list[Server] = []
    try:
        for run in group:
            started.append(Server(run, model, ranks, logs))
        client.at_once(lambda server: server.warm_up(limits.start_s), started)
        for server in started:
            server.measure(limits.run_s)
    finally:
        for server in started:
            if not server.result["word"]:
                end(server.process, server.folder)
    return [server.result for server in started]
