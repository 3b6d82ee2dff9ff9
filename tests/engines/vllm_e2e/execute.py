# SPDX-License-Identifier: Apache-2.0
"""Runs from their start to what is left of them: logs and results, each in a folder of its name.

A start takes a minute, most of it in imports. So the engines of several runs start at once, each with its part of the
GPUs' memory, and then work one run after the other: nothing else runs while one is timed.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_e2e import control, launch, report, runs, serve, traces

LEAST_S = 20  # a run that has less time left does not begin


@dataclass(frozen=True)
class Limits:
    """In seconds: until engines are ready, for each run after that, and of time.monotonic() when all has to be over."""

    start_s: float
    run_s: float
    deadline: float

    def left_s(self) -> float:
        return self.deadline - time.monotonic()


@dataclass
class Started:
    run: runs.Run
    folder: Path
    processes: list[Any]
    word: str = ""  # "": still running


def prepare(run: runs.Run, machine: launch.Machine) -> Path:
    folder = machine.logs / run.name
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.json*"), *folder.glob("stacks-*"), folder / control.TURN]:
        old.unlink(missing_ok=True)
    if run.needs_control:
        control.write(folder / "control", "")
    return folder


def run_all(chosen: list[runs.Run], together: int, machine: launch.Machine, limits: Limits) -> None:
    """Runs that did not start beside others start once more, alone, after all others."""
    groups, later = runs.groups(chosen, together), list[runs.Run]()
    for group in groups:
        not_started = run_group(group, machine, limits)
        later += not_started if len(group) > 1 else []
    for run in later:
        run_group([run], machine, limits)


def run_group(group: list[runs.Run], machine: launch.Machine, limits: Limits) -> list[runs.Run]:
    """Prints a line for each run when it has ended; returns those that did not start."""
    [first, *_] = group
    if "serve" in first.flags:
        run_server(first, machine, limits)
        return []
    started: list[Started] = []
    try:
        for run in group:
            folder = prepare(run, machine)
            started.append(Started(run, folder, launch.start(run, machine, folder)))
        wait_until_ready(started, machine.ranks, min(limits.start_s, limits.left_s()))
        not_started = [one.run for one in started if one.word]
        for one in started:
            left_s = limits.left_s()
            if not one.word and left_s < LEAST_S:
                note_end(one, f"not run, {max(0, left_s):.0f} s were left", 0)
            elif not one.word:
                take_turn(one, machine.ranks, min(limits.run_s, left_s))
        return not_started
    finally:
        for one in started:
            launch.end(one.processes, one.folder)


def wait_until_ready(started: list[Started], num_ranks: int, limit_s: float) -> None:
    """Ends the runs whose engines do not start."""
    begin = time.monotonic()
    waiting = list(started)
    while waiting:
        is_late = time.monotonic() - begin > limit_s
        for one in list(waiting):
            failed = launch.failed_rank(one.processes)
            if failed is not None or is_late:
                if failed is not None:
                    launch.wait(one.processes, launch.GRACE_S)
                word = f"rank {failed} failed" if failed is not None else f"not ready within {limit_s:.0f} s"
                note_end(one, word, time.monotonic() - begin)
                waiting.remove(one)
            elif sum("ready_s" in result for result in report.load(one.folder)) == num_ranks:
                waiting.remove(one)
        time.sleep(0.1)
    ready = sum(not one.word for one in started)
    print(f"    {ready} of {len(started)} runs ready after {time.monotonic() - begin:.0f} s", flush=True)


def take_turn(one: Started, num_ranks: int, limit_s: float) -> None:
    begin = time.monotonic()
    (one.folder / control.TURN).touch()
    word = launch.wait(one.processes, limit_s)
    if word != "ok":
        results = report.load(one.folder)
        if len(results) == num_ranks and all(result.get("done") for result in results):
            word = f"ok, then {word}"  # while it shut down
    note_end(one, word, time.monotonic() - begin)


def note_end(one: Started, word: str, took_s: float) -> None:
    if "within" in word:  # its time was over
        launch.ask_for_stacks(one.folder)
    launch.end(one.processes, one.folder)
    one.word = word
    note(one.run, one.folder, word, took_s)


def run_server(run: runs.Run, machine: launch.Machine, limits: Limits) -> None:
    folder = prepare(run, machine)
    if "kill" in run.flags:
        machine = dataclasses.replace(machine, timeout_ms=serve.KILL_TIMEOUT_MS)
    begin = time.monotonic()
    if limits.left_s() < LEAST_S:
        word = f"not run, {max(0, limits.left_s()):.0f} s were left"
    else:
        start_s = min(limits.start_s, limits.left_s())
        word = serve.run_server(run, machine, folder, start_s, min(limits.run_s, limits.left_s()))
    note(run, folder, word, time.monotonic() - begin)


def note(run: runs.Run, folder: Path, word: str, took_s: float) -> None:
    note_kernels(folder)
    (folder / "outcome.json").write_text(json.dumps({"word": word, "took_s": took_s, "run": run.text}))
    print(f"=== {run.text}: {word} after {took_s:.0f} s", flush=True)
    if not word.startswith("ok"):
        print(report.excerpt(folder), flush=True)
    kernels = folder / "kernels.txt"
    if kernels.exists():
        print("\n".join("    " + line for line in kernels.read_text().splitlines()[:7]), flush=True)


def note_kernels(folder: Path) -> None:
    """Adds what the trace of one rank says to the result of rank 0."""
    found = traces.find(folder / "traces")
    if not found or not (folder / "rank0.json").exists():
        return
    kernels = traces.summary(found[0])
    if kernels:
        result = json.loads((folder / "rank0.json").read_text()) | {"kernels": kernels}
        (folder / "rank0.json").write_text(json.dumps(result))
        (folder / "kernels.txt").write_text(traces.text(kernels) + "\n")
