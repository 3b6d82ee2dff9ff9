# SPDX-License-Identifier: Apache-2.0
"""The parts of engines_gpu.py and gpu.py, without a GPU."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

import engines_gpu
import gpu


def test_parts_of_gpu_are_chosen_by_words_between_commas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "listed", lambda root, program: ["a case"])
    chosen = [part.program for part in gpu.parts_of(tmp_path, "flashinfer,transformer_engine,gpu_megatron.py")]
    assert chosen == ["gpu_flashinfer.py", "gpu_transformer_engine.py", "gpu_megatron.py"]
    assert [part.program for part in gpu.parts_of(tmp_path, "megatron_gpt")] == ["gpu_megatron_gpt.py"]


def test_a_part_has_a_word_and_the_table_that_it_wrote(tmp_path: Path) -> None:
    program = "from pathlib import Path; Path({!r}).write_text('its table'); raise SystemExit({})"
    outcomes = []
    for code in (0, 1):
        logs = tmp_path / str(code)
        command = [sys.executable, "-S", "-c", program.format(str(logs / "table.txt"), code)]
        outcomes.append(engines_gpu.run_part("vllm", command, logs))
    assert [(one.word, one.table) for one in outcomes] == [("ok", "its table"), ("FAILED", "its table")]


def test_a_part_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    outcome = engines_gpu.run_part("vllm", [sys.executable, "-S", "-c", "while True: pass"], tmp_path, limit_s=0.2)
    assert outcome.word == "no end within 0 s" and "output.txt" in outcome.table


def test_the_report_has_all_tables_and_a_line_for_each_part() -> None:
    outcomes = [
        engines_gpu.Outcome("vllm", "ok", 250.0, "its table"),
        engines_gpu.Outcome("megatron-gpt", "skipped: no GPU"),
    ]
    assert engines_gpu.report(outcomes).splitlines() == [
        "=== vllm",
        "its table",
        "",
        "vllm          ok, 250 s",
        "megatron-gpt  skipped: no GPU",
    ]


def test_what_is_no_wheel_for_the_other_machine_is_refused(tmp_path: Path) -> None:
    other, without = tmp_path / "crossdock-0.3-cp311-abi.whl", tmp_path / "crossdock-0.3-cp312-abi.whl"
    other.touch()
    with zipfile.ZipFile(without, "w") as archive:
        archive.writestr("crossdock/__init__.py", "")
    for wheel, message in ((other, "expected: Crossdock's wheel for Python 3.12"), (without, "has no crossdock/lib/")):
        options = engines_gpu.parser().parse_args(["pack", str(wheel), str(tmp_path / "out")])
        with pytest.raises(ValueError, match="WHEEL is") as caught:
            engines_gpu.pack(options)
        assert message in str(caught.value)
    assert not (tmp_path / "out").exists()
