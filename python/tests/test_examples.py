# SPDX-License-Identifier: Apache-2.0
"""The examples do what they say; the training example in few steps, in both modes, and gone on from a checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*arguments: object) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_training_goes_on_and_equals_one_process(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: skipped")
    script, saved, curves = EXAMPLES / "moe_lm" / "train.py", tmp_path / "saved", tmp_path / "curves.svg"
    first = run(script, "--ranks", 2, "--steps", 5, "--checkpoint", saved, "--mode", "ll")
    assert "2 processes: loss 5.77" in first
    whole = tmp_path / "whole.json"
    second = run(
        script, "--ranks", 2, "--steps", 8, "--checkpoint", saved, "--compare", "--json", whole, "--plot", curves
    )
    assert "PASS" in second
    assert curves.stat().st_size > 1000
    results = json.loads(whole.read_text())
    assert len(results["parallel"]["losses"]) == 8
    assert results["difference"] < 1e-5


def test_decoding_goes_on_without_a_killed_rank() -> None:
    pytest.importorskip("torch", reason="torch is not installed: skipped")
    found = run(EXAMPLES / "decode.py", "--ranks", 3, "--steps", 12)
    assert "PASS" in found
    assert found.count("masked ranks [2]") == 2
