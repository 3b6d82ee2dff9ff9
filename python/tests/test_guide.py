# SPDX-License-Identifier: Apache-2.0
"""The Python programs in docs/guide.md and README.md run, and print what the documents show; of docs/engines.md
those that need no engine."""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patience import short_timeout_ms

ROOT = Path(__file__).parents[2]
CELL = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.DOTALL)


def output_of(code: str, names: dict[str, Any]) -> str:
    if "import torch" in code:
        pytest.importorskip("torch", reason="torch is not installed: cells from here on are skipped")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def test_the_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("NCCL_EP_TIMEOUT_MS", short_timeout_ms())
    # As torchrun does for one process.
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    names: dict[str, Any] = {}
    for code, expected in CELL.findall((ROOT / "docs" / "guide.md").read_text()):
        assert output_of(code, names) == expected


def test_the_readme() -> None:
    [_, (code, _)] = CELL.findall((ROOT / "README.md").read_text())
    assert output_of(code, {}) == "[1.75, 3.5]\n"


def run_first_program(folder: Path, change: tuple[str, str] = ("", ""), **environment: str) -> str:
    """What README's first program prints, run by the command that stands below it."""
    text = (ROOT / "README.md").read_text()
    code = CELL.findall(text)[0][0]
    [(num_ranks, name)] = re.findall(r"^crossdock-run torchrun --nproc-per-node (\d+) (\S+)$", text, re.MULTILINE)
    (folder / name).write_text(code.replace(*change) if change[0] else code)
    command = [sys.executable, "-m", "crossdock", "run"]
    command += [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", num_ranks, name]
    variables = os.environ | environment
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_readme_s_first_program(tmp_path: Path) -> None:
    """On CPU ranks; test_gpu.py runs it on GPUs."""
    pytest.importorskip("torch", reason="torch is not installed: skipped")
    printed = run_first_program(tmp_path, CUDA_VISIBLE_DEVICES="")
    for rank in range(2):
        assert f"rank {rank}: (64, 1024) on cpu, gradient (64, 1024)" in printed


def test_the_engines(tmp_path: Path) -> None:
    """The program over DeepEP's classes runs; the others, which need engines and GPUs, compile."""
    pytest.importorskip("torch", reason="torch is not installed: skipped")
    cells = [code for code, _ in CELL.findall((ROOT / "docs" / "engines.md").read_text())]
    for code in cells:
        compile(code, "docs/engines.md", "exec")
    [program] = [code for code in cells if "from deep_ep import" in code]
    (tmp_path / "layer.py").write_text(program)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "crossdock", "run", "--as-deep-ep", str(tmp_path / "layer.py")]
    ranks = [subprocess.Popen(command, env=common | {"RANK": str(rank)}, stderr=subprocess.PIPE) for rank in range(2)]
    for process in ranks:
        errors = process.communicate(timeout=600)[1]
        assert process.returncode == 0, errors.decode()
