# SPDX-License-Identifier: Apache-2.0
"""On GPUs: four ranks as processes, on one GPU if there is but one; needs torch, and a package built for GPUs.

NCCL 2.30.4 or newer must be the one that the process loads first, see docs/guide.md. Without a GPU all is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: skipped")
if not torch.cuda.is_available():
    pytest.skip("no GPU: skipped", allow_module_level=True)

import crossdock as ep  # noqa: E402
import gpu_checks  # noqa: E402
from test_guide import run_first_program  # noqa: E402
from test_tutorials import run_tutorial  # noqa: E402

ROOT = Path(__file__).parents[2]
CHECKS = [check.__name__ for check in gpu_checks.CHECKS]

if not ep.has_cuda:
    pytest.skip("this build of crossdock has no GPU backend: skipped", allow_module_level=True)


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    return ep.run_processes(4, gpu_checks.run_all)


@pytest.mark.parametrize("name", CHECKS)
def test_on_gpus(name: str, found: list[dict[str, str]]) -> None:
    for rank, results in enumerate(found):
        if name not in results:
            pytest.fail(f"not run: {results.get('stopped')}")
        if results[name].startswith("skipped"):
            pytest.skip(results[name])
        assert not results[name], f"rank {rank}: {results[name]}"


def run(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | environment)


def test_the_readme_s_first_program(tmp_path: Path) -> None:
    """On a GPU per rank, or on one that both share."""
    change = ('int(os.environ["LOCAL_RANK"])', "0") if torch.cuda.device_count() < 2 else ("", "")
    printed = run_first_program(tmp_path, change)
    for rank in range(2):
        assert f"rank {rank}: (64, 1024) on cuda:{0 if change[0] else rank}, gradient (64, 1024)" in printed


def test_the_tutorial_of_a_moe_layer(tmp_path: Path) -> None:
    shared = {'int(os.environ["LOCAL_RANK"])': "0"} if torch.cuda.device_count() < 2 else {}
    run_tutorial("moe_layer.md", tmp_path, shared)


@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_training(mode: str) -> None:
    script = ROOT / "examples" / "moe_lm" / "train.py"
    done = run(script, "--device", "cuda", "--mode", mode, "--steps", 20, "--compare")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("loss", ["kill", "silence"])
def test_decoding(loss: str) -> None:
    done = run(ROOT / "examples" / "decode.py", "--device", "cuda", "--loss", loss)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("options", [[], ["--publish"], ["--fp8"], ["--fp8", "--publish"], ["--high-throughput"]])
def test_experts_beside_the_operations(options: list[str]) -> None:
    """One rank: ranks that share a GPU would wait for each other's SMs."""
    sizes = ["--tokens", 8, 128, "--hidden", 1024, "--inner", 256, "--experts", 8, "--topk", 4, "--repetitions", 2]
    script = ROOT / "examples" / "overlap" / "moe_layer.py"
    done = run("-m", "torch.distributed.run", "--nproc-per-node", 1, script, *sizes, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("yes") == 2
