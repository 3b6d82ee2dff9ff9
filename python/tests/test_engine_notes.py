# SPDX-License-Identifier: Apache-2.0
"""crossdock-run says, in one line, which options of an engine make it pass Crossdock by, and what it sets for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from crossdock.cli import check
from crossdock.launcher.engine_notes import CUMEM, CUMEM_NOTE, notes, variables

USABLE = "pass --all2all-backend deepep_low_latency or deepep_high_throughput or deepep_v2"
SERVE = "vllm serve model"
EXPERTS = "--enable-expert-parallel"
LAUNCH = "python -m sglang.launch_server --moe-a2a-backend deepep"
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
    found = notes(line.split(), dict([CUMEM]), as_deep_ep=True)
    assert len(found) == bool(expected), found
    assert not expected or found[0].endswith(expected) or expected in found[0]


def test_options_without_crossdock_s_deep_ep() -> None:
    """The engine is started with the command, but its deep_ep is another one, or there is none."""
    for line in f"{WHOLE} deepep_v2", LAUNCH:
        [note] = notes(line.split(), dict([CUMEM]), as_deep_ep=False)
        assert note.endswith("and deep_ep is not Crossdock's without --as-deep-ep")
    assert notes(f"{WHOLE} allgather_reducescatter".split(), {}, as_deep_ep=False) == []


@pytest.mark.parametrize("value", ["pplx", "naive", "deepep_low_latency"])
def test_the_variable_that_was_removed(value: str) -> None:
    found = notes(f"{WHOLE} deepep_v2".split(), {"VLLM_ALL2ALL_BACKEND": value}, as_deep_ep=True)
    assert found == [f"vLLM: VLLM_ALL2ALL_BACKEND is {value}, which vLLM has not read since 0.15: {USABLE}"]


def test_symmetric_memory_of_sglang() -> None:
    """SGLang sets the variable to 0 unless it is set. Other programs, and what the user has set, stay as they are."""
    for line in LAUNCH, "sglang serve", "sglang.launch_server":
        assert variables(line.split(), {}) == {"NCCL_CUMEM_ENABLE": "1"}
        assert f"SGLang: {CUMEM_NOTE}" in notes(line.split(), {}, as_deep_ep=True)
    for line in WHOLE, "torchrun train.py", "python sglang.py":
        assert variables(line.split(), {}) == {}
    for value in "0", "1", "":
        assert variables(LAUNCH.split(), {"NCCL_CUMEM_ENABLE": value}) == {}
    assert notes(LAUNCH.split(), {"NCCL_CUMEM_ENABLE": "1"}, as_deep_ep=True) == []
    [note] = notes(LAUNCH.split(), {"NCCL_CUMEM_ENABLE": "0"}, as_deep_ep=True)
    assert note == (
        "SGLang: NCCL_CUMEM_ENABLE is 0, so NCCL makes no symmetric memory: ranks do not use NVLink but share the "
        "host's memory"
    )


def test_the_command_sets_it(tmp_path: Path) -> None:
    """For a command, and for a module in the command's own process."""
    (tmp_path / "sglang").write_text('#!/bin/sh\necho "$NCCL_CUMEM_ENABLE"\n')
    (tmp_path / "sglang").chmod(0o755)
    package = tmp_path / "modules" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text("import os; print(os.environ['NCCL_CUMEM_ENABLE'])")
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(package.parent)])
    base = {name: value for name, value in os.environ.items() if name != "NCCL_CUMEM_ENABLE"}
    base |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": path}
    for words in ["sglang", "serve"], ["-m", "sglang.launch_server"]:
        for own, value in ({}, "1"), ({"NCCL_CUMEM_ENABLE": "0"}, "0"):
            command = [sys.executable, "-m", "crossdock", "run", *words]
            done = subprocess.run(command, env=base | own, capture_output=True, text=True, timeout=600)
            assert done.stdout == f"{value}\n", done.stderr
            assert done.stderr.count("\n") == 2 and "crossdock: SGLang: NCCL_CUMEM_ENABLE" in done.stderr


def test_check_says_what_it_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = dict((engine, uses) for engine, _, uses in check.ENGINES)["SGLang"]
    nothing: Any = None
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    assert uses(nothing, nothing).endswith(f"; it sets {CUMEM_NOTE}")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    assert uses(nothing, nothing).endswith("; NCCL_CUMEM_ENABLE is 0, so ranks do not use NVLink")


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
