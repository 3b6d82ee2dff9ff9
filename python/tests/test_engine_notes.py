# SPDX-License-Identifier: Apache-2.0
"""crossdock-run says, in one line, which options of an engine make it pass Crossdock by."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from crossdock.launcher.engine_notes import notes

USABLE = "pass --all2all-backend deepep_low_latency or deepep_high_throughput or deepep_v2"
SERVE = "vllm serve model"
EXPERTS = "--enable-expert-parallel"
WHOLE = f"{SERVE} --data-parallel-size 4 {EXPERTS} --all2all-backend"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"{WHOLE} deepep_low_latency", ""),
        (f"/venv/bin/{SERVE} -dp 4 -ep --all2all_backend=deepep_v2", ""),
        (f"python -m vllm.entrypoints.openai.api_server -dp 2 {EXPERTS} --all2all-backend deepep_v2", ""),
        (f"{SERVE} {EXPERTS} -pcp 2 --all2all-backend deepep_v2", ""),
        (f"{SERVE} --config file.yaml", ""),
        (f"{SERVE} {EXPERTS} --all2all-backend deepep_v2", "--data-parallel-size is 1, where deepep_v2 is not called"),
        (f"{SERVE} -dp 1 -ep --all2all-backend deepep_v2", "--data-parallel-size is 1, where deepep_v2 is not called"),
        (f"{SERVE} -dp 4 --all2all-backend deepep_v2", f"without {EXPERTS}, deepep_v2 is not called"),
        (f"{WHOLE} pplx", f"is pplx, which was removed, so allgather_reducescatter is used: {USABLE}"),
        (f"{WHOLE} mori_low_latency", f"--all2all-backend is mori_low_latency, which calls no deep_ep: {USABLE}"),
        (f"vllm.entrypoints.cli.main {EXPERTS}", f"is allgather_reducescatter, which calls no deep_ep: {USABLE}"),
        ("sglang serve --moe-a2a-backend deepep", ""),
        ("python -m sglang.launch_server --tp 4", "--moe-a2a-backend is none, which calls no deep_ep"),
        ("torchrun train.py --all2all-backend pplx", ""),
        ("./vllm_like --all2all-backend pplx", ""),
    ],
)
def test_options(line: str, expected: str) -> None:
    found = notes(line.split(), {}, as_deep_ep=True)
    assert len(found) == bool(expected), found
    assert not expected or found[0].endswith(expected) or expected in found[0]


def test_options_without_crossdock_s_deep_ep() -> None:
    """The engine is started with the command, but its deep_ep is another one, or there is none."""
    for line in f"{WHOLE} deepep_v2", "python -m sglang.launch_server --moe-a2a-backend deepep":
        [note] = notes(line.split(), {}, as_deep_ep=False)
        assert note.endswith("and deep_ep is not Crossdock's without --as-deep-ep")
    assert notes(f"{WHOLE} allgather_reducescatter".split(), {}, as_deep_ep=False) == []


@pytest.mark.parametrize("value", ["pplx", "naive", "deepep_low_latency"])
def test_the_variable_that_was_removed(value: str) -> None:
    found = notes(f"{WHOLE} deepep_v2".split(), {"VLLM_ALL2ALL_BACKEND": value}, as_deep_ep=True)
    assert found == [f"vLLM: VLLM_ALL2ALL_BACKEND is {value}, which vLLM has not read since 0.15: {USABLE}"]


def test_the_command_prints_them(tmp_path: Path) -> None:
    """Before the engine starts, and once for all ranks."""
    engine = tmp_path / "vllm"
    engine.write_text("#!/bin/sh\necho started\n")
    engine.chmod(0o755)
    command = [sys.executable, "-m", "crossdock", "run", "--as-deep-ep", *f"{SERVE} {EXPERTS} -dp 2".split()]
    for rank, lines in (0, 2), (1, 0):
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RANK": str(rank)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0 and done.stdout == "started\n"
        assert done.stderr.count("\n") == lines, done.stderr
        assert rank or "crossdock: vLLM: --all2all-backend is allgather_reducescatter, which" in done.stderr
