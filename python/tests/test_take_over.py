# SPDX-License-Identifier: Apache-2.0
"""Unchanged programs that use the real nccl.ep run on Crossdock; needs the wheel nccl-extensions."""

from __future__ import annotations

import importlib.util
import mmap
import subprocess
import sys
from pathlib import Path

import pytest

import crossdock as ep
from crossdock.loaded import loaded_files

HERE = Path(__file__).parent


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def has_nccl_ep() -> bool:
    return importlib.util.find_spec("nccl") is not None and importlib.util.find_spec("nccl.ep") is not None


def test_the_sentence() -> None:
    done = python("-c", "import crossdock; print(crossdock.take_over_nccl_ep()); crossdock.take_over_nccl_ep()")
    assert done.stdout.startswith(f"nccl.ep uses Crossdock {ep.__version__}, /"), done.stderr


@pytest.mark.skipif(not has_nccl_ep(), reason="nccl.ep is not installed: skipped")
def test_an_unchanged_program() -> None:
    done = python("-m", "crossdock", "run", HERE / "nccl_ep_program.py", "--flag")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "nccl.ep 0.2.0"
    assert "nccl.ep uses Crossdock" in done.stderr


def test_the_same_program_with_an_edited_import(tmp_path: Path) -> None:
    """Only the import differs: names, fields and calls are those of nccl.ep."""
    pytest.importorskip("torch", reason="torch is not installed: skipped")
    edited = tmp_path / "program.py"
    program = (HERE / "nccl_ep_program.py").read_text()
    edited.write_text(program.replace("import nccl.ep as ep", "import crossdock as ep"))
    done = python(edited, "--flag")
    assert done.stdout.strip() == f"nccl.ep {ep.__version__}", done.stderr


def test_it_refuses_where_another_library_came_first(tmp_path: Path) -> None:
    source, other = tmp_path / "other.c", tmp_path / "libother.so"
    source.write_text("int ncclEpGetVersion(int* version) { *version = 1; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", other], check=True)
    program = f"import ctypes; ctypes.CDLL({str(other)!r}, mode=ctypes.RTLD_GLOBAL)\n"
    done = python("-c", program + "import crossdock; crossdock.take_over_nccl_ep()")
    assert done.returncode != 0
    assert "ncclEpGetVersion of another library is loaded globally already" in done.stderr


def test_loaded_files_may_have_spaces_in_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "two  words"
    folder.mkdir()
    (folder / "libexample.so").write_bytes(b"bytes")
    with (folder / "libexample.so").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert loaded_files("libexample.so") == [str(folder / "libexample.so")]
