# SPDX-License-Identifier: Apache-2.0
"""Where an installed package has its C headers, its library and its CMake package."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def _existing(*parts: str) -> Path:
    path = _HERE.joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: only an installed package has it (pip install .)")
    return path


def get_include() -> str:
    """The folder for -I: nccl_ep.h, crossdock.h, and the parts and C++ classes in crossdock."""
    return str(_existing("include"))


def get_lib_path() -> str:
    """The shared library libnccl_ep.so.0."""
    return str(_existing("lib", "libnccl_ep.so.0"))


def get_cmake_dir() -> str:
    """The folder for CMake's crossdock_DIR, so that find_package(crossdock) finds this package."""
    return str(_existing("lib", "cmake", "crossdock"))
