# SPDX-License-Identifier: Apache-2.0
"""docs/guide.md and the program in docs/python.md run, and print what stands below their cells."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
CELL = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.DOTALL)


def test_the_guide() -> None:
    names: dict[str, Any] = {}
    for code, expected in CELL.findall((DOCS / "guide.md").read_text()):
        if "import torch" in code:
            pytest.importorskip("torch", reason="torch is not installed: the guide's end is skipped")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == expected


def test_the_first_program() -> None:
    code, _ = CELL.findall((DOCS / "python.md").read_text())[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert "1.75" in printed.getvalue()
    assert "3.5" in printed.getvalue()
