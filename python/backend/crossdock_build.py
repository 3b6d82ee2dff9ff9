# SPDX-License-Identifier: Apache-2.0
"""The package's build backend: scikit-build-core, and the choice whether the GPU backend is built, too.

CROSSDOCK_CUDA, in the environment or as -C cmake.define.CROSSDOCK_CUDA, is ON, OFF or AUTO (also when it is not set).
AUTO builds it where there is a GPU and CUDA toolkit 13 or newer, and otherwise leaves it out. ON builds it without a
GPU, too, and fails without the toolkit. NCCL's headers are those of CROSSDOCK_NCCL_INCLUDE, or of the nvidia-nccl-cu13
that is installed, or of one that pip is asked to bring for the build. CROSSDOCK_CUDA_ARCHITECTURES, given in the same
two ways, is a list with semicolons ("86;90;100f"; "90-virtual" is PTX); without it, code is compiled for the GPUs that
are here and, as PTX, for newer ones, or without a GPU for sm_90.

The build's folder is a temporary one, unless -C build-dir names another. pip shows a build's output only with -v or
when it fails, so crossdock_build_progress.py also reports to pip's own output.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scikit_build_core import build as core
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

import crossdock_build_progress as progress

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

MIN_PYTHON = (3, 11)  # pyproject.toml's, which pip looks at after it has brought what the build needs
MIN_TOOLKIT = 13
# Headers of NCCL 2.30.4 to 2.30.x; later ones declare some things elsewhere. What is built runs with later libraries.
MIN_NCCL, NEXT_NCCL = 23004, 23100
NCCL_PACKAGE = "nvidia-nccl-cu13==2.30.7"

CUDA_SETTING = "cmake.define.CROSSDOCK_CUDA"

Settings = dict[str, Any] | None


def setting(name: str, settings: Settings) -> str:
    """Of -C cmake.define.NAME, or of the environment, or empty."""
    return str((settings or {}).get(f"cmake.define.{name}") or os.environ.get(name) or "")


def find_nvcc() -> tuple[str, int]:
    """The compiler and its toolkit's major version, or ("", 0)."""
    folders = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    candidates = [shutil.which("nvcc"), *(f"{folder}/bin/nvcc" for folder in folders if folder)]
    for nvcc in filter(None, candidates):
        try:
            text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            continue
        if version := re.search(r"release (\d+)\.", text):
            return nvcc, int(version[1])
    return "", 0


def is_fitting(include: Path) -> bool:
    """Whether a folder has headers of NCCL that this version of Crossdock is built with."""
    try:
        code = re.search(r"^#define NCCL_VERSION_CODE +(\d+)$", (include / "nccl.h").read_text(), re.MULTILINE)
    except OSError:
        return False
    return code is not None and MIN_NCCL <= int(code[1]) < NEXT_NCCL and (include / "nccl_device.h").exists()


def find_nccl(settings: Settings) -> str:
    """NCCL's include folder: given, or of a package in the build's environment or in the interpreter's; or empty."""
    if given := setting("CROSSDOCK_NCCL_INCLUDE", settings):
        return given
    for folder in [*sys.path, sysconfig.get_path("platlib")]:
        if is_fitting(include := Path(folder) / "nvidia" / "nccl" / "include"):
            return str(include)
    return ""


def find_capabilities() -> list[str]:
    """The compute capabilities of the GPUs that are here, each once, ascending."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return sorted(
        set(re.findall(r"^\d+\.\d+$", text, re.MULTILINE)), key=lambda found: tuple(map(int, found.split(".")))
    )


def is_cuda_wanted(settings: Settings) -> tuple[bool, str]:
    """And why not. Raises SystemExit, whose text pip shows, if CROSSDOCK_CUDA is ON and cannot be had, or is something
    else."""
    choice = setting("CROSSDOCK_CUDA", settings).upper() or "AUTO"
    if choice in ("OFF", "0", "FALSE", "NO"):
        return False, "CROSSDOCK_CUDA is OFF"
    if choice not in ("ON", "1", "TRUE", "YES", "AUTO"):
        raise SystemExit(f"CROSSDOCK_CUDA is {choice}, allowed: ON, OFF, AUTO")
    nvcc, version = find_nvcc()
    if choice == "AUTO":
        if version < MIN_TOOLKIT:
            return False, f"there is no CUDA toolkit {MIN_TOOLKIT} or newer (CUDA_HOME)"
        if not find_capabilities():
            return False, f"there is no GPU; with it: -C {CUDA_SETTING}=ON"
    elif version < MIN_TOOLKIT:
        found = f"{nvcc} is of CUDA toolkit {version}" if nvcc else "there is no nvcc (set CUDA_HOME)"
        raise SystemExit(f"CROSSDOCK_CUDA is ON, which needs CUDA toolkit {MIN_TOOLKIT} or newer, and {found}")
    return True, ""


DEFAULT_ARCHITECTURE = "90"
OLDEST_MAJOR = 8


def find_architectures() -> tuple[str, str]:
    """What to compile for, and why: machine code for each GPU, and PTX of the newest. As cmake/cuda.cmake finds it."""
    capabilities = find_capabilities()
    if not capabilities:
        return DEFAULT_ARCHITECTURE, "no GPU is here"
    seen = f"GPUs here: compute capability {', '.join(capabilities)}"
    new_enough = [found for found in capabilities if int(found.partition(".")[0]) >= OLDEST_MAJOR]
    if not new_enough:
        return DEFAULT_ARCHITECTURE, f"{seen}, too old: {OLDEST_MAJOR}.0 or newer is needed"
    numbers = [found.replace(".", "") for found in new_enough]
    codes = ["100f" if found.startswith("10.") else number for found, number in zip(new_enough, numbers, strict=True)]
    return ";".join([*dict.fromkeys(codes), f"{numbers[-1]}-virtual"]), seen


def named(architecture: str) -> str:
    number = architecture.removesuffix("-virtual").rpartition("-for-")[2]
    return f"PTX of compute_{number}" if architecture.endswith("-virtual") else f"sm_{number}"


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return with_nccl(core.get_requires_for_build_wheel(config_settings), config_settings)


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return with_nccl(core.get_requires_for_build_editable(config_settings), config_settings)


def with_nccl(requires: list[str], config_settings: Settings) -> list[str]:
    if sys.version_info < MIN_PYTHON:
        raise SystemExit(
            f"crossdock needs Python {'.'.join(map(str, MIN_PYTHON))} or newer, not {sys.version.split()[0]}"
        )
    if is_cuda_wanted(config_settings)[0] and not find_nccl(config_settings):
        requires.append(NCCL_PACKAGE)
    return requires


def resolved(config_settings: Settings) -> dict[str, Any]:
    """The settings with what was found; says what is built."""
    settings = dict(config_settings or {})
    is_wanted, why_not = is_cuda_wanted(config_settings)
    settings[CUDA_SETTING] = "ON" if is_wanted else "OFF"
    if not is_wanted:
        progress.say(f"building the CPU backends only: {why_not}")
        return settings
    nvcc, version = find_nvcc()
    settings.setdefault("cmake.define.CMAKE_CUDA_COMPILER", nvcc)
    settings["cmake.define.CROSSDOCK_NCCL_INCLUDE"] = find_nccl(config_settings)
    architectures, reason = setting("CROSSDOCK_CUDA_ARCHITECTURES", config_settings), "CROSSDOCK_CUDA_ARCHITECTURES"
    if not architectures:
        architectures, reason = find_architectures()
    settings["cmake.define.CROSSDOCK_CUDA_ARCHITECTURES"] = architectures
    names = ", ".join(map(named, architectures.split(";")))
    progress.say(
        f"building the CPU backends and the GPU backend, for {names} ({reason}), with {nvcc} of CUDA {version}. "
        "Others: -C cmake.define.CROSSDOCK_CUDA_ARCHITECTURES='90;100f'; CPUs only, faster: "
        f"-C {CUDA_SETTING}=OFF"
    )
    return settings


@contextmanager
def building(config_settings: Settings) -> Iterator[dict[str, Any]]:
    """The settings of a build in a folder that is gone after it, unless one was named; reports how far it is."""
    settings = resolved(config_settings)
    with tempfile.TemporaryDirectory(prefix="crossdock-build-") as folder:
        # scikit-build-core replaces names in braces, such as {wheel_tag}: the folder that is watched is the one above.
        named = str(settings.setdefault("build-dir", folder))
        with progress.shown(Path(named.partition("{")[0] or ".")):
            yield settings


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    with building(config_settings) as settings:
        return core.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    with building(config_settings) as settings:
        return core.build_editable(wheel_directory, settings, metadata_directory)
