# SPDX-License-Identifier: Apache-2.0
"""What surrounds the package: no torch, no NCCL, an NCCL that is too old."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from crossdock._core import has_cuda


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | environment)


def test_without_torch() -> None:
    """The NumPy part works, crossdock.torch says what it needs."""
    program = """
import sys
sys.modules["torch"] = None
import numpy as np
import crossdock as ep
[comm] = ep.Communicator.create_threads(1)
with comm, ep.Group(comm, num_experts=1, max_dispatch_tokens_per_rank=1, max_token_bytes=16) as group:
    with group.create_handle(ep.Layout.EXPERT_MAJOR, np.zeros((1, 1), np.int64)) as handle:
        rows, counts = np.zeros((1, 1, 4), np.float32), np.zeros(1, np.int32)
        handle.dispatch(np.ones((1, 4), np.float32), rows, layout_info=ep.LayoutInfo(expert_counters=counts))
        print(rows.sum(), counts)
import crossdock.torch
"""
    done = python(program)
    assert done.stdout == "4.0 [1]\n"
    assert "crossdock.torch needs PyTorch: pip install 'crossdock[torch]'" in done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def old_nccl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of NCCL's name that says it is 2.28.9, as the one that torch 2.11 brings."""
    folder = tmp_path_factory.mktemp("nccl")
    source, library = folder / "nccl.c", folder / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int* version) { *version = 22809; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library, "-Wl,-soname,libnccl.so.2"], check=True)
    return library


@pytest.mark.parametrize("scope", ["RTLD_GLOBAL", "RTLD_LOCAL"])
def test_an_older_nccl_that_is_loaded(scope: str, old_nccl: Path) -> None:
    """The message says which file was loaded and what to do, however it came into the process."""
    program = f"""
import ctypes
ctypes.CDLL({str(old_nccl)!r}, mode=ctypes.{scope})
from crossdock import nccl
print(nccl.version(), nccl.file())
nccl.unique_id()
"""
    done = python(program, CROSSDOCK_NCCL_LIBRARY="/a/newer/libnccl.so.2")
    assert done.stdout == f"2.28.9 {old_nccl}\n"
    message = done.stderr.splitlines()[-1]
    assert f"InvalidUsage: NCCL 2.28.9 ({old_nccl}) is too old, 2.30.4 or newer is needed" in message
    assert "start the program with python -m crossdock run, which loads that first" in message


def test_no_nccl() -> None:
    done = python("from crossdock import nccl; nccl.unique_id()", CROSSDOCK_NCCL_LIBRARY="/nowhere/libnccl.so.2")
    assert "InvalidUsage: NCCL cannot be loaded: /nowhere/libnccl.so.2" in done.stderr.splitlines()[-1]
    assert "set CROSSDOCK_NCCL_LIBRARY" in done.stderr


def test_doctor_names_the_nccl_that_is_loaded(old_nccl: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "crossdock", "doctor"],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"CROSSDOCK_NCCL_LIBRARY": str(old_nccl)},
    )
    assert done.returncode == 0, done.stderr
    judgement = (
        f"2.28.9 ({old_nccl}), too old" if has_cuda else f"({old_nccl}); this build of Crossdock does not use it"
    )
    assert judgement in done.stdout
