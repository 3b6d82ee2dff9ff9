# SPDX-License-Identifier: Apache-2.0
"""The tutorials (docs/tutorials) run as printed. A reader saves a block of code under the name that the text before it
has in backticks, applies the blocks of differences to the file named before them, and types the commands. What they
print must contain what the tutorial shows, in any order. "..." stands for anything, times may differ, and ranks may
write into one line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import crossdock
from patience import short_timeout_s

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
BUILD = Path(crossdock.__file__).parents[2]  # the package is in BUILD/python
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE_NAME = re.compile(r"`([a-z_]+\.(?:py|cpp|sh))`")
TIME = re.compile(r"\d+(\.\d+)? ms")


def make_commands(folder: Path) -> None:
    """python, torchrun and crossdock-run, as an installed package has them."""
    folder.mkdir()
    modules = {"python": "", "torchrun": "-m torch.distributed.run", "crossdock-run": "-m crossdock run"}
    for name, module in modules.items():
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        command.chmod(0o755)


def changed(text: str, difference: str) -> str:
    """Removes the lines that begin with -, and puts in their place those that begin with +."""
    old = "".join(line[1:] + "\n" for line in difference.splitlines() if not line.startswith("+"))
    new = "".join(line[1:] + "\n" for line in difference.splitlines() if not line.startswith("-"))
    assert text.count(old) == 1, f"the file must have this once:\n{old}"
    return text.replace(old, new)


def run(command: str, environment: dict[str, str], folder: Path) -> list[str]:
    """The lines that the command prints."""
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    return done.stdout.splitlines()


def with_timeouts(command: str, environment: dict[str, str]) -> tuple[str, dict[str, str]]:
    """In the tutorial both ranks have the same timeout, and either may give up first. Here it is the one whose message
    the tutorial shows: rank 0, but with NCCL_EP_DEBUG=1, which shows the messages of both, rank 1, so that it is not
    ended before."""
    short = short_timeout_s()
    of_rank = [8 * short, short] if "NCCL_EP_DEBUG" in command else [short, 8 * short]
    return command.replace("NCCL_EP_TIMEOUT_MS=2000 ", ""), environment | {"TIMEOUTS_S": " ".join(map(str, of_rank))}


def expect_output(command: str, expected: list[str], printed: list[str]) -> None:
    lines = [TIME.sub("N ms", line) for line in printed]
    for line in expected:
        pattern = re.compile(".*".join(re.escape(part) for part in TIME.sub("N ms", line).split("...")))
        shown = "\n".join(printed)
        assert any(pattern.search(other) for other in lines), f"{command} must print: {line}\nbut prints:\n{shown}"


def run_console(block: str, folder: Path, environment: dict[str, str]) -> None:
    commands: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], []))
        elif line.startswith("    "):  # continues the line above
            commands[-1][1][-1] += " " + line.strip()
        else:
            commands[-1][1].append(line)
    for command, expected in commands:
        if not command.startswith("./dev "):  # which has been run: the library is there
            expect_output(command, expected, run(*with_timeouts(command, environment), folder))


def run_tutorial(name: str, folder: Path, changes: dict[str, str], **variables: str) -> None:
    """changes: of the programs' text, for a machine that has less than the tutorial expects."""
    make_commands(folder / "bin")
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"} | variables
    environment.pop("NCCL_EP_TIMEOUT_MS", None)  # the programs and commands set their own
    text = (TUTORIALS / name).read_text()
    num_run = 0
    for found in BLOCK.finditer(text):
        kind, block = found.groups()
        names = FILE_NAME.findall(text[: found.start()])
        if kind == "console":
            run_console(block, folder, environment)
            num_run += 1
        elif kind == "diff":
            path = folder / names[-1]
            path.write_text(changed(path.read_text(), block))
        else:
            for old, new in changes.items():
                block = block.replace(old, new)
            (folder / names[-1]).write_text(block)
    assert num_run > 0


def test_a_moe_layer(tmp_path: Path) -> None:
    """On CPU ranks; test_gpu.py runs it on GPUs."""
    pytest.importorskip("torch", reason="torch is not installed: skipped")
    run_tutorial("moe_layer.md", tmp_path, {}, CUDA_VISIBLE_DEVICES="")


def test_a_hang(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: skipped")
    timeout = 'int(1e9 * float(__import__("os").environ["TIMEOUTS_S"].split()[comm.rank]))'
    as_argument = {"hidden=16,": f"hidden=16, timeout_ns={timeout},"}
    in_dictionary = {'"hidden": 16,': f'"hidden": 16, "timeout_ns": {timeout},'}
    run_tutorial("hang.md", tmp_path, as_argument | in_dictionary)


def test_a_device_kernel(tmp_path: Path) -> None:
    if shutil.which("g++") is None or not (BUILD / "src" / "libnccl_ep.so").exists():
        pytest.skip("no g++, or no build folder with the library: skipped")
    for shared in ("include", "examples"):
        (tmp_path / shared).symlink_to(ROOT / shared)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "cpu").symlink_to(BUILD)
    run_tutorial("device_kernel.md", tmp_path, {})


def test_all_tutorials_are_run() -> None:
    here = Path(__file__).read_text()
    for tutorial in TUTORIALS.glob("*.md"):
        assert f'run_tutorial("{tutorial.name}"' in here
