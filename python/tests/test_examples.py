# SPDX-License-Identifier: Apache-2.0
"""The examples do what they say; the training example in few steps, in both modes, and gone on from a checkpoint.

As programs they are run by ./dev wheel; here the ranks of all trainings are the same two processes, since most of the
time goes into starting them.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import crossdock as ep

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 6


def train_thrice(comm: ep.Communicator, saved: str) -> list[list[float]]:
    """Losses of low latency, of high throughput, and of the latter once stopped and gone on."""
    sys.path.insert(0, str(EXAMPLES / "moe_lm"))
    from training import Settings, train_rank  # type: ignore[import-not-found,unused-ignore]

    whole = Settings(steps=STEPS)
    variants = [dataclasses.replace(whole, mode="ll"), whole, dataclasses.replace(whole, checkpoint=saved)]
    runs = [train_rank(comm, settings).losses for settings in variants[:2]]
    train_rank(comm, dataclasses.replace(variants[2], steps=STEPS // 2))
    return [*runs, train_rank(comm, variants[2]).losses]


def test_training_goes_on_and_equals_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed: skipped")
    monkeypatch.syspath_prepend(EXAMPLES / "moe_lm")
    import train  # type: ignore[import-not-found,unused-ignore]
    from training import Run, Settings, train_alone

    [found, _] = ep.run_processes(2, train_thrice, str(tmp_path / "saved"))
    low_latency, high_throughput, gone_on = found
    alone = train_alone(Settings(steps=STEPS))
    assert alone.losses[0] == pytest.approx(5.76, abs=0.05)  # the text is that of this Python
    assert high_throughput == gone_on
    for losses in (low_latency, high_throughput):
        assert losses == pytest.approx(alone.losses, abs=1e-5)
    assert high_throughput[-1] < high_throughput[0]

    curves = tmp_path / "curves.svg"
    train.plot(Run(high_throughput, 1.0), alone, 2, str(curves))
    assert curves.stat().st_size > 1000


@pytest.mark.parametrize(
    ("program", "arguments", "message"),
    [
        ("decode.py", ["--ranks", "1"], "--ranks is 1, --steps is 30, allowed for both: 2 and more"),
        ("decode.py", ["--device", "gpu"], "argument --device: invalid choice: 'gpu'"),
        ("moe_lm/train.py", ["--steps", "0"], "--ranks is 4, --steps is 0, allowed for both: 1 and more"),
    ],
)
def test_wrong_options(program: str, arguments: list[str], message: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed: skipped")
    command = [sys.executable, str(EXAMPLES / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and message in done.stderr, done.stderr


def test_decoding_goes_on_without_a_killed_rank(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: skipped")
    report, picture = tmp_path / "times.json", tmp_path / "times.svg"
    command: list[Any] = [sys.executable, EXAMPLES / "decode.py", "--ranks", 3, "--steps", 12]
    command += ["--json", report, "--plot", picture]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout
    assert done.stdout.count("masked ranks [2]") == 2
    assert sorted(json.loads(report.read_text())["step_ms"]) == ["0", "1"]
    assert picture.stat().st_size > 1000
