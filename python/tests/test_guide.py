# SPDX-License-Identifier: Apache-2.0
"""The Python programs in docs/guide.md and README.md run, and print what the documents show."""

from __future__ import annotations

import contextlib
import io
import re
import socket
from pathlib import Path
from typing import Any

import pytest

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
    # As torchrun does for one process.
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    names: dict[str, Any] = {}
    for code, expected in CELL.findall((ROOT / "docs" / "guide.md").read_text()):
        assert output_of(code, names) == expected


def test_the_readme() -> None:
    [(code, _)] = CELL.findall((ROOT / "README.md").read_text())
    assert output_of(code, {}) == "[1.75, 3.5]\n"
