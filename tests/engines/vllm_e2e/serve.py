# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with clients that ask it over HTTP at the same time, and what they see when an engine is killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_e2e import launch, models, rank, runs, tokenizer

HOST = "127.0.0.1"
CLIENTS, REQUESTS = 16, 3  # requests of each client, one after the other
PROMPT, ANSWER = 32, 48  # tokens
KILLED = 1  # the data parallel rank whose engine is killed
KILL_AFTER_S = 3.0  # with all clients served
KILLED_ANSWER = 1800
KILL_TIMEOUT_MS = 5000


def command_line(run: runs.Run, machine: launch.Machine, folder: Path, model: Path, port: int) -> list[str]:
    """The engine's arguments of `rank`, as options."""
    arguments = rank.engine_arguments(run, machine.ranks, str(model), folder / "traces")
    for name in ("model", "tokenizer", "skip_tokenizer_init", "distributed_executor_backend", "disable_log_stats"):
        del arguments[name]
    words = launch.command_of("-m", "vllm.entrypoints.cli.main", "serve", str(model))
    words += ["--data-parallel-size", str(machine.ranks), "--host", HOST, "--port", str(port)]
    for name, value in arguments.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            words += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


@dataclass
class Answer:
    """One request: when its tokens came, in seconds since it was sent, or what went wrong."""

    times: list[float] = field(default_factory=list)
    error: str = ""
    ended: float = 0.0  # by time.monotonic()


def ask(port: int, prompt: list[int], max_tokens: int, answer: Answer) -> None:
    """A streamed completion."""
    begin = time.monotonic()
    body = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection(HOST, port, timeout=120)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            answer.error = f"HTTP {response.status}: {response.read(300).decode(errors='replace')}"
            return
        for line in response:
            if not line.startswith(b"data: ") or b"[DONE]" in line:
                continue
            piece = json.loads(line[6:])
            if "error" in piece:
                answer.error = json.dumps(piece["error"])[:300]
            elif piece.get("choices"):
                answer.times.append(time.monotonic() - begin)
        if not answer.error and len(answer.times) < 2:
            answer.error = f"the answer ended after {len(answer.times)} pieces"
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        answer.ended = time.monotonic()
        connection.close()


def client(port: int, number: int, count: int, max_tokens: int, answers: list[Answer]) -> None:
    for prompt in rank.prompts_of(number, count, PROMPT, "serve"):
        answers.append(Answer())
        ask(port, prompt, max_tokens, answers[-1])


def start_clients(port: int, count: int, max_tokens: int) -> tuple[list[threading.Thread], list[list[Answer]]]:
    answers: list[list[Answer]] = [[] for _ in range(CLIENTS)]
    threads = [
        threading.Thread(target=client, args=(port, number, count, max_tokens, answers[number]), daemon=True)
        for number in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    return threads, answers


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def engine_process(folder: Path, data_parallel_rank: int) -> int:
    """Its process number; 0: there is none. vLLM names its processes."""
    name = f"EngineCore_DP{data_parallel_rank}"
    for process in launch.own_processes(folder):
        with contextlib.suppress(OSError):
            if name in Path(f"/proc/{process}/cmdline").read_text():
                return process
    return 0


def figures(answers: list[Answer], took_s: float) -> dict[str, Any]:
    good = [answer for answer in answers if not answer.error]
    gaps = [after - before for one in good for before, after in zip(one.times[1:], one.times[2:], strict=False)]
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "errors": sorted({answer.error for answer in answers if answer.error})[:4],
        "tokens_per_s": sum(len(one.times) for one in good) / took_s,
        "gap_p50_ms": 1e3 * rank.percentile(gaps, 0.5),
        "gap_p99_ms": 1e3 * rank.percentile(gaps, 0.99),
        "first_p50_ms": 1e3 * statistics.median([one.times[0] for one in good] or [0.0]),
    }


def serve_clients(port: int, deadline: float) -> dict[str, Any]:
    for count in (1, REQUESTS):  # the first compiles kernels
        begin = time.monotonic()
        threads, answers = start_clients(port, count, ANSWER)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        took = time.monotonic() - begin
        if any(thread.is_alive() for thread in threads):
            return {"requests": 0, "failed": 1, "errors": ["clients had no answer in time"]}
    return figures([answer for own in answers for answer in own], took)


def kill_engine(port: int, folder: Path, server: subprocess.Popen[Any], deadline: float) -> dict[str, Any]:
    """What clients of all engines see, and when, after one engine has ended without a word."""
    threads, answers = start_clients(port, 1, KILLED_ANSWER)
    time.sleep(KILL_AFTER_S)
    victim = engine_process(folder, KILLED)
    if victim == 0:
        return {"problem": f"no process is named EngineCore_DP{KILLED}"}
    os.kill(victim, signal.SIGKILL)
    begin = time.monotonic()
    while time.monotonic() < deadline and (server.poll() is None or any(thread.is_alive() for thread in threads)):
        time.sleep(0.05)
    ends = [answer.ended - begin for own in answers for answer in own if answer.ended]
    return {
        "clients": CLIENTS,
        "had_tokens": sum(bool(own and own[0].times) for own in answers),
        "ended": len(ends),
        "first_end_s": min(ends, default=-1.0),
        "last_end_s": max(ends, default=-1.0),
        "errors": sorted({answer.error for own in answers for answer in own if answer.error})[:6],
        "server_end_s": time.monotonic() - begin if server.poll() is not None else -1.0,
        "server_code": server.poll(),
    }


def run_server(run: runs.Run, machine: launch.Machine, folder: Path, start_s: float, run_s: float) -> str:
    """The word for the table; results are in rank0.json."""
    begin, port = time.monotonic(), launch.free_port()
    model = models.write(machine.work, run.model, "fp8" in run.flags)
    tokenizer.write(model)
    words = [*command_line(run, machine, folder, model, port), "--served-model-name", "model"]
    base = launch.environment(run, machine, folder)
    result: dict[str, Any] = {"run": run.text, "rank": 0}
    server = launch.start_one(words, base, folder, "rank0.log")
    try:
        while not is_ready(port):
            if server.poll() is not None:
                return f"the server ended with code {server.poll()}"
            if time.monotonic() > begin + start_s:
                return f"the server was not ready within {start_s:.0f} s"
            time.sleep(0.2)
        deadline = time.monotonic() + run_s
        result["ready_s"] = time.monotonic() - begin
        result["serve"] = serve_clients(port, deadline)
        if "kill" in run.flags and not result["serve"]["failed"]:
            result["kill"] = kill_engine(port, folder, server, deadline - 5)
        elif server.poll() is None:
            stop_begin = time.monotonic()
            server.send_signal(signal.SIGINT)
            try:
                result["stop_code"] = server.wait(20)
                result["stop_s"] = time.monotonic() - stop_begin
            except subprocess.TimeoutExpired:
                return "the server did not end within 20 s of SIGINT"
        result["done"] = True
        return "ok" if not result["serve"]["failed"] else f"{result['serve']['failed']} requests failed"
    finally:
        launch.end([server], folder)
        (folder / "rank0.json").write_text(json.dumps(result))
