# SPDX-License-Identifier: Apache-2.0
"""The engines' files: wheels that pip downloads once, of which only what a check needs is kept.

They lie in ~/.cache/crossdock/engines (XDG_CACHE_HOME counts). pip's own settings hold: PIP_FIND_LINKS names a folder
with wheels, PIP_INDEX_URL another index. Wheels above CROSSDOCK_ENGINES_MIB (100) are not downloaded; 0 is no limit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

SKIPPED = 77  # what ctest takes for a skipped test


class Skip(Exception):
    """A check cannot run here; the message says why."""


@dataclass(frozen=True)
class Wheel:
    """parts: what is kept, as a regular expression that file names begin with; python: for another one than this."""

    name: str
    version: str
    mib: int
    parts: str = ""
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


# Wheels for Python 3.12 alone; the files that are used run with 3.11 as well.
MEGATRON = Wheel("megatron-core", "0.19.2", 3, python="3.12")
SGLANG = Wheel("sglang", "0.5.23", 38, r"sglang/srt/layers/moe/token_dispatcher/")
TORCHTITAN = Wheel("torchtitan", "0.3.0", 2, r"torchtitan/distributed/deepep/deepep\.py")
VLLM_PARTS = (
    r"vllm/model_executor/layers/fused_moe/prepare_finalize/|"
    r"vllm/distributed/device_communicators/(all2all|base_device_communicator)\.py"
)
VLLM = Wheel("vllm", "0.33.0", 321, VLLM_PARTS)
VLLM_OLDER = Wheel("vllm", "0.26.0", 290, VLLM_PARTS)
FLASHINFER = Wheel("flashinfer-python", "0.7.2.post1", 60, r"flashinfer/moe_ep/(core|backends/split|\w+\.py)")
TRANSFORMER_ENGINE = Wheel("transformer-engine-cu13", "2.20.2", 264, r"transformer_engine/wheel_lib/libtransformer")
TRANSFORMER_ENGINE_EP = Wheel("transformer-engine", "2.20.2", 2, r"transformer_engine/pytorch/ep\.py")
NCCL = Wheel("nvidia-nccl-cu13", "2.30.7", 210, r"nvidia/nccl/lib/")


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "crossdock" / "engines"


def download(wheel: Wheel, into: Path) -> Path:
    """The wheel's file, from pip. Skip: pip cannot bring it."""
    limit = int(os.environ.get("CROSSDOCK_ENGINES_MIB", "100"))
    if 0 < limit < wheel.mib:
        raise Skip(f"{wheel}'s wheel has {wheel.mib} MiB, and CROSSDOCK_ENGINES_MIB is {limit}")
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", wheel.python, "--timeout", "15", "--retries", "1"]
    done = subprocess.run([*command, "-d", into, f"{wheel.name}=={wheel.version}"], capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise Skip(f"pip cannot download {wheel}: {lines[-1]}")
    [file] = into.glob("*.whl")
    return file


def folder(wheel: Wheel) -> Path:
    """A folder for sys.path with the wheel's parts. Skip: they are not here and cannot be brought."""
    home = cache()
    parts = f"-{zlib.crc32(wheel.parts.encode()):08x}" if wheel.parts else ""
    found = home / f"{wheel.name}-{wheel.version}-py{wheel.python}{parts}"
    if found.is_dir():
        return found
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        file = download(wheel, Path(scratch))
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if re.match(wheel.parts, name)]
            if not names:
                raise Skip(f"{file.name} has nothing that begins with {wheel.parts}")
            archive.extractall(Path(scratch, "parts"), names)
        try:
            Path(scratch, "parts").rename(found)
        except OSError:  # another check was faster
            if not found.is_dir():
                raise
    return found
