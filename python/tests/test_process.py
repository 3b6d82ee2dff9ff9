# SPDX-License-Identifier: Apache-2.0
"""doctor --pid: which libraries a running process has, whose they are, and what is wrong with them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import crossdock
import stub_libraries
from crossdock.__main__ import main
from crossdock.launcher import take_over
from crossdock.launcher.program import HOME


@contextmanager
def running(code: str, *prefix: str, **environment: str) -> Iterator[int]:
    """A process that has run the code and waits until the block ends. prefix: of its command."""
    command = [*prefix, sys.executable, "-c", f"{code}\nprint(flush=True); input()"]
    with subprocess.Popen(
        command, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.stdin.write("\n")


def test_a_process_with_crossdock(capsys: pytest.CaptureFixture[str]) -> None:
    with running("import crossdock", NCCL_EP_HOME="/somewhere") as pid:
        assert main(["doctor", "--pid", str(pid)]) == 0
    found = capsys.readouterr().out
    assert f"{take_over.own_library()}, Crossdock {crossdock.__version__}" in found
    assert "NCCL          not loaded" in found
    assert "NCCL_EP_HOME  was /somewhere at its start" in found


def test_a_process_with_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An NCCL that is too old, two libraries of one name, a plugin, a DeepEP."""
    other = stub_libraries.foreign_nccl_ep(tmp_path / "bundled")
    old = stub_libraries.nccl(tmp_path, 22703)
    plugin = stub_libraries.library(stub_libraries.PLUGIN, tmp_path / "libnccl-rma-crossdock.so")
    deep_ep = stub_libraries.library(stub_libraries.PLUGIN, tmp_path / "deep_ep_cpp.so")
    load = "".join(f"ctypes.CDLL({str(file)!r}); " for file in (other, old, plugin, deep_ep))
    with running(f"import crossdock, ctypes; {load}") as pid:
        assert main(["doctor", "--pid", str(pid)]) == 1
    found = capsys.readouterr().out
    assert f"{other}, not Crossdock's, 0.1.0" in found
    assert f"{old}, 2.27.3" in found
    assert f"plugin      {plugin}" in found
    assert f"{deep_ep}, not Crossdock's" in found
    assert "Start the program with python -m crossdock run" in found
    both = take_over.own_library(), str(other)  # in the order of their addresses
    assert any(" and ".join(order) in found for order in (both, both[::-1]))
    assert f"crossdock: {old} is too old: GPUs need NCCL 2.30.4 or newer" in found


def test_a_process_with_another_installation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It started in another environment than this command: its folder for NCCL_EP_HOME is no second library either."""
    home = tmp_path / "crossdock" / "nccl_ep_home" / "lib"
    home.mkdir(parents=True)
    shutil.copy(HOME / "lib" / "libnccl_ep.so", home)
    folder = tmp_path / "crossdock" / "launcher" / "deep_ep_path"
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(folder)])
    load = f"import crossdock, ctypes; ctypes.CDLL({str(home / 'libnccl_ep.so')!r})"
    with running(load, PYTHONPATH=path) as pid:
        assert main(["doctor", "--pid", str(pid)]) == 0
    assert "import deep_ep finds crossdock.deep_ep" in capsys.readouterr().out


def test_a_process_that_was_started_by_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The remedy is not what has been done."""
    other = stub_libraries.foreign_nccl_ep(tmp_path / "bundled")
    run = [sys.executable, "-m", "crossdock", "run"]
    with running(f"import crossdock, ctypes; ctypes.CDLL({str(other)!r})", *run) as pid:
        assert main(["doctor", "--pid", str(pid)]) == 1
    found = capsys.readouterr().out
    assert "crossdock run started it, so it opens one of them by its path" in found and "Start the" not in found


def test_a_second_nccl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside a preloaded one it is no problem, though it is older. Without that it is."""
    new, old = stub_libraries.nccl(tmp_path / "new", 23007), stub_libraries.nccl(tmp_path / "old", 22809)
    link = tmp_path / "link.so"
    link.symlink_to(new)
    load = f"import ctypes; ctypes.CDLL({str(old)!r})"
    with running(load, LD_PRELOAD=f"{link} {os.environ.get('LD_PRELOAD', '')}") as pid:
        assert main(["doctor", "--pid", str(pid)]) == 0
    found = capsys.readouterr().out
    assert f"{new}, 2.30.7\n" in found
    assert f"{old}, 2.28.9, beside the preloaded one: for whoever has opened it by its path" in found
    with running(f"{load}; ctypes.CDLL({str(new)!r})") as pid:
        assert main(["doctor", "--pid", str(pid)]) == 1
    found = capsys.readouterr().out
    assert "are of the same name" in found and f"{old} is too old" in found


def test_a_process_in_a_container(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its files are looked at, not those that have their names here."""
    here, there = stub_libraries.nccl(tmp_path, 22703), stub_libraries.nccl(tmp_path / "there", 23007)
    enter = ["unshare", "--mount", "sh", "-c", f'mount --bind {there} {here} && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], capture_output=True).returncode != 0:
        pytest.skip("unshare --mount is not allowed here: skipped")
    with running(f"import ctypes; ctypes.CDLL({str(here)!r})", *enter) as pid:
        assert main(["doctor", "--pid", str(pid)]) == 0
    assert f"{here}, 2.30.7" in capsys.readouterr().out


@pytest.mark.parametrize("pid", ["0", "-3", "4194305"])
def test_no_such_process(pid: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--pid", pid]) == 2
    assert f"--pid is {pid}, and there is no such process" in capsys.readouterr().err
