# SPDX-License-Identifier: Apache-2.0
"""python -m crossdock: every command runs, checks, and says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crossdock.__main__ import main

SMALL = ["--ranks", "2", "--hidden", "32", "--experts", "4", "--topk", "2"]


@pytest.mark.parametrize("world", ["threads", "processes"])
def test_demo_and_its_heat_map(world: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "demo.json"
    assert main(["demo", *SMALL, "--world", world, "--tokens", "8", "--steps", "3", "--json", str(report)]) == 0
    assert "PASS" in capsys.readouterr().out
    rows = json.loads(report.read_text())["rows_from_to"]
    assert sum(map(sum, rows)) == 2 * 3 * 8 * 2
    assert main(["plot", str(report), str(tmp_path / "demo.svg")]) == 0
    assert (tmp_path / "demo.svg").stat().st_size > 1000


def test_bench_and_its_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "bench.json"
    assert main(["bench", *SMALL, "--tokens", "1,8", "--iterations", "3", "--json", str(report)]) == 0
    assert "tokens a rank" in capsys.readouterr().out
    for file in (report, Path(__file__).parents[2] / "bench" / "results" / "ll-tokens-4xh200.json"):
        assert main(["plot", str(file), str(tmp_path / "bench.png")]) == 0
        assert (tmp_path / "bench.png").stat().st_size > 1000


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    found = capsys.readouterr().out
    assert "libnccl_ep.so" in found
    assert "CPU worlds        works" in found


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plot", "missing.json", "x.png"], "missing.json cannot be read"),
        (["demo", "--ranks", "3", "--experts", "4"], "num_experts is 4, allowed: positive multiples of the 3 ranks"),
        (["demo", "--ranks", "0"], "num_ranks is 0"),
        (["bench", "--topk", "99"], "num_topk is 99"),
    ],
)
def test_wrong_arguments(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err
