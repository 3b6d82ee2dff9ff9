# SPDX-License-Identifier: Apache-2.0
"""Measures what A2SGD costs in accuracy: trains with dense averaging, A2SGD, Top-K, QSGD and without communication.

Prints a table for each task, and writes JSON and plots."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", default="digits,text", help="digits, text, or both (digits,text)")
    parser.add_argument("--workers", default="4,8", help="numbers of workers, a list (4,8)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (3)")
    parser.add_argument("--epochs", type=int, default=0, help="0: 30 for digits, 8 for text (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs in parallel (one per CPU)")
    parser.add_argument("--json", default="", help="folder for TASK.json")
    parser.add_argument("--plots", default="", help="folder for a2sgd_TASK.svg")
    parser.add_argument("--read", default="", help="folder with TASK.json of an earlier run: show it, train nothing")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _run_all(options: argparse.Namespace, task: str) -> dict[str, Any]:
    from rich.progress import Progress

    from crossdock.a2sgd.study.arms import ARMS
    from crossdock.a2sgd.study.training import Setting, run

    settings = [
        Setting(task, arm, workers, skewed, seed, options.epochs)
        for workers in map(int, options.workers.split(","))
        for skewed in (False, True)
        for arm in ARMS
        for seed in range(1, options.seeds + 1)
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool, Progress(transient=True) as progress:
        runs = pool.map(run, settings) if options.jobs > 1 else map(run, settings)
        results = list(progress.track(runs, total=len(settings), description=task))
    machine = {"cpu": _cpu(), "cpus": os.cpu_count(), "system": platform.release()}
    command = f"python -m crossdock a2sgd-study --tasks {task} --workers {options.workers} --seeds {options.seeds}"
    return {"command": command, "machine": machine, "results": results}


def main(options: argparse.Namespace) -> int:
    from crossdock.a2sgd.study.report import draw, table
    from crossdock.a2sgd.study.tasks import TASKS
    from crossdock.errors import InvalidArgument

    tasks = options.tasks.split(",")
    for task in tasks:
        if task not in TASKS:
            raise InvalidArgument(f"--tasks names '{task}', allowed: {', '.join(TASKS)}")
    workers = options.workers.split(",")
    if not all(number.isdecimal() and int(number) > 0 for number in workers):
        raise InvalidArgument(f"--workers is {options.workers}, allowed: a list of numbers from 1 on, such as 4,8")
    for name, least in ("seeds", 1), ("epochs", 0), ("jobs", 1):
        if getattr(options, name) < least:
            raise InvalidArgument(f"--{name} is {getattr(options, name)}, allowed: {least} and more")
    for folder in options.json, options.plots:  # not only when all has been trained
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
    for task in tasks:
        if options.read:
            path = Path(options.read) / f"{task}.json"
            study = json.loads(path.read_text())
            if not isinstance(study, dict) or "results" not in study:
                raise InvalidArgument(f"{path} holds no results, expected a file that --json has written")
        else:
            study = _run_all(options, task)
        if options.json:
            head = json.dumps({key: study[key] for key in ("command", "machine")}, indent=1)[:-2]
            runs = ",\n  ".join(json.dumps(result) for result in study["results"])
            (Path(options.json) / f"{task}.json").write_text(f'{head},\n "results": [\n  {runs}\n ]\n}}\n')
        print(f"{task}\n\n{table(study)}\n")
        if options.plots:
            draw(study, task, Path(options.plots) / f"a2sgd_{task}.svg")
    return 0
