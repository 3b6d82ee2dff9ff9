# SPDX-License-Identifier: Apache-2.0
"""What the program that started a run wants from its engines right now: one file, read before each step.

Its words: "check" compares layers' outputs, "fault=NAME" plants a fault of runs.FAULTS or ROUNDING. Without it engines
run as usual.
"""

from __future__ import annotations

import os
from pathlib import Path

# Environment variables of a run's processes.
VARIABLE = "E2E_CONTROL"  # the file; not set in runs that need none
FOLDER = "E2E_LOGS"
MODEL = "E2E_MODEL"  # a name of models.MODELS, with "-fp8" for FP8 weights
V2_FIX = "E2E_V2_FIX"
SHARED_GPUS = "E2E_SHARED_GPUS"  # their number; set where ranks share them
TURN = "turn"  # a file: the ranks of this run, whose engines are ready, may go on
ROUNDING = "rounding"  # no fault: each MoE layer's output is rounded once more
LOAD_FORMAT = "vllm_e2e_random"


class Control:
    def __init__(self, path: Path) -> None:
        self.path, self.is_checking, self.fault = path, False, ""

    def refresh(self) -> None:
        try:
            words = self.path.read_text().split()
        except FileNotFoundError:
            return
        self.is_checking = "check" in words
        self.fault = next((word.removeprefix("fault=") for word in words if word.startswith("fault=")), "")


def write(path: Path, words: str) -> None:
    """At once: a reader sees the old words or the new ones."""
    made = path.with_suffix(".new")
    made.write_text(words)
    os.replace(made, path)
