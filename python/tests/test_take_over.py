# SPDX-License-Identifier: Apache-2.0
"""Unchanged programs that use the real nccl.ep run on Crossdock; needs the wheel nccl-extensions."""

from __future__ import annotations

import importlib.util
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

import crossdock as ep
import stub_libraries
from crossdock.launcher.loaded import loaded_files

HERE = Path(__file__).parent
SPAWNING = """
import ctypes, multiprocessing

def show():
    import nccl.ep
    is_ours = hasattr(ctypes.CDLL(None), "crossdockGetLastError")
    print(f"nccl.ep {nccl.ep.get_lib_version()} of {'Crossdock' if is_ours else 'somebody else'}", flush=True)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=show)
    child.start()
    child.join()
"""


def python(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=600)


def has_nccl_ep() -> bool:
    return importlib.util.find_spec("nccl") is not None and importlib.util.find_spec("nccl.ep") is not None


def test_the_message() -> None:
    done = python("-c", "import crossdock; print(crossdock.take_over_nccl_ep()); crossdock.take_over_nccl_ep()")
    assert done.stdout.startswith(f"nccl.ep uses Crossdock {ep.__version__}, /"), done.stderr


@pytest.mark.skipif(not has_nccl_ep(), reason="nccl.ep is not installed: skipped")
def test_an_unchanged_program() -> None:
    done = python("-m", "crossdock", "run", HERE / "nccl_ep_program.py", "--flag")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "nccl.ep 0.2.0"
    assert "nccl.ep and TransformerEngine use Crossdock" in done.stderr


@pytest.mark.skipif(not has_nccl_ep(), reason="nccl.ep is not installed: skipped")
def test_processes_that_it_spawns(tmp_path: Path) -> None:
    """They start with nothing of their parent but the environment."""
    script = tmp_path / "program.py"
    script.write_text(SPAWNING)
    done = python("-m", "crossdock", "run", script)
    assert done.stdout == "nccl.ep 0.2.0 of Crossdock\n", done.stderr


LOADER = """
import ctypes, os
process, own = ctypes.CDLL(None), os.path.join(os.path.dirname(__file__), "lib", "cu13", "libnccl_ep.so.0")
library = process if ASKS_FIRST and hasattr(process, "ncclEpGetVersion") else ctypes.CDLL(own)

def get_lib_version():
    version = ctypes.c_int()
    library.ncclEpGetVersion(ctypes.byref(version))
    return version.value
"""


@pytest.mark.parametrize("asks_globals_first", [True, False])
def test_libraries_in_folders_for_versions_of_cuda(asks_globals_first: bool, tmp_path: Path) -> None:
    """As nccl-extensions 0.2.0 has them, built by hand. Crossdock's is used if nccl.ep asks for the process's functions
    first; if it only opens its file, it is not, and the command says so."""
    site = tmp_path / "site"
    theirs = stub_libraries.library(
        stub_libraries.NCCL_EP, site / "nccl" / "ep" / "lib" / "cu13" / "libnccl_ep.so.0", "libnccl_ep.so.0"
    )
    (site / "nccl" / "ep" / "__init__.py").write_text(LOADER.replace("ASKS_FIRST", str(asks_globals_first)))
    info = site / "nccl_extensions-0.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nccl-extensions\nVersion: 0.2.0\n")
    (info / "RECORD").write_text("nccl/ep/lib/cu13/libnccl_ep.so.0,,\n")
    script = tmp_path / "program.py"
    script.write_text("import nccl.ep; print(nccl.ep.get_lib_version())\n")
    path = os.pathsep.join([str(site), os.environ["PYTHONPATH"]])
    says = f"nccl.ep opens {theirs} by its path, so it does not use Crossdock"
    for command in ([script], [sys.executable, script]):
        done = python("-m", "crossdock", "run", *command, PYTHONPATH=path)
        assert done.stdout == ("200\n" if asks_globals_first else "100\n"), done.stderr
        assert (says in done.stderr) != asks_globals_first and done.stderr.count("\n") == 1
        assert ("nccl.ep and TransformerEngine use Crossdock" in done.stderr) == asks_globals_first
    done = python("-c", "import crossdock; print(crossdock.take_over_nccl_ep())", PYTHONPATH=path)
    assert ("nccl.ep uses Crossdock" in done.stdout) == asks_globals_first
    assert (says in done.stderr) != asks_globals_first
    done = python("-m", "crossdock", "run", "--check", PYTHONPATH=path)
    [row] = [line for line in done.stdout.splitlines() if line.startswith("nccl.ep ")]
    assert (says in row) != asks_globals_first and "nccl-extensions 0.2.0" in row


def test_the_same_program_with_an_edited_import(tmp_path: Path) -> None:
    """Only the import differs: names, fields and calls are those of nccl.ep."""
    pytest.importorskip("torch", reason="torch is not installed: skipped")
    edited = tmp_path / "program.py"
    program = (HERE / "nccl_ep_program.py").read_text()
    edited.write_text(program.replace("import nccl.ep as ep", "import crossdock as ep"))
    done = python(edited, "--flag")
    assert done.stdout.strip() == f"nccl.ep {ep.get_lib_version()}", done.stderr


def test_loaded_files_may_have_spaces_in_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "two  words"
    folder.mkdir()
    (folder / "libexample.so").write_bytes(b"bytes")
    with (folder / "libexample.so").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert loaded_files("libexample.so") == [str(folder / "libexample.so")]
