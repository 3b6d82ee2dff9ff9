# SPDX-License-Identifier: Apache-2.0
"""What a build reports while it runs. pip, build and uv show a build's own output only at -v or when it fails, so lines
also go to the standard error of the program that runs the build: a terminal, or a pipe of a CI job.

If that is a file, nothing is added: the program's next line would overwrite it. `pip install -v` fills such logs."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OUTPUT = f"/proc/{os.getppid()}/fd/2"  # of the program that started this process
SECONDS = 15.0  # between lines


def say(text: str) -> None:
    line = f"crossdock: {text}"
    print(line, flush=True)
    try:
        if not stat.S_ISREG(os.stat(OUTPUT).st_mode):
            with open(OUTPUT, "w") as output:
                output.write(f"\r{line}\n" if output.isatty() else f"{line}\n")
    except OSError:  # it has none, or belongs to somebody else
        pass


def count(folder: Path) -> tuple[int, int]:
    """How many files are compiled and how many there are, of the latest of Ninja's builds in folder or right below."""
    plans = sorted([*folder.glob("build.ninja"), *folder.glob("*/build.ninja")], key=lambda path: path.stat().st_mtime)
    if not plans:
        return 0, 0
    outputs = set()
    for line in plans[-1].read_text().splitlines():
        name, is_rule, rule = line.removeprefix("build ").partition(": ")
        if line.startswith("build ") and is_rule and "_COMPILER__" in rule.split()[0]:
            outputs.add(name)
    log = plans[-1].with_name(".ninja_log")
    lines = log.read_text().splitlines() if log.exists() else []
    return len(outputs & {fields[3] for line in lines if len(fields := line.split("\t")) > 3}), len(outputs)


@contextmanager
def shown(folder: Path) -> Iterator[None]:
    """Says every SECONDS how far the build below folder is, until it ends."""
    ended = threading.Event()

    def watch() -> None:
        start = time.monotonic()
        while not ended.wait(SECONDS):
            done, total = count(folder)
            if total:
                say(f"{done} of {total} files compiled after {time.monotonic() - start:.0f} s")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
