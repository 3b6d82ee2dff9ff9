# SPDX-License-Identifier: Apache-2.0
"""pip install finds a CUDA toolkit that it can use, does without, and fails with a message where it was told to."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The build backend on a machine without toolkit and NCCL."""
    pytest.importorskip("scikit_build_core")
    monkeypatch.syspath_prepend(ROOT / "python" / "backend")
    module = importlib.import_module("crossdock_build")
    said: list[str] = []
    monkeypatch.setattr(module, "said", said, raising=False)
    monkeypatch.setattr(module.progress, "say", said.append)
    for name in ("CROSSDOCK_CUDA", "CROSSDOCK_CUDA_ARCHITECTURES", "CROSSDOCK_NCCL_INCLUDE", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: "/nowhere")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(module.core, "get_requires_for_build_wheel", lambda settings: ["ninja"])
    find = module.find_nvcc
    monkeypatch.setattr(module, "find_nvcc", lambda: ("", 0) if find()[0].startswith("/usr") else find())
    return module


def make_nvcc(folder: Path, version: int) -> None:
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}.1, V{version}.1.2'\n")
    nvcc.chmod(0o755)


def make_nccl(include: Path, code: int) -> None:
    include.mkdir(parents=True)
    (include / "nccl.h").write_text(f"#define NCCL_VERSION_CODE {code}\n")
    (include / "nccl_device.h").touch()


def make_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch, capability: str = "9.0") -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{capability}\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin")


def test_a_machine_without_toolkit(backend: ModuleType) -> None:
    assert backend.get_requires_for_build_wheel() == ["ninja"]
    assert backend.resolved(None) == {"cmake.define.CROSSDOCK_CUDA": "OFF"}
    with pytest.raises(SystemExit, match="ON, which needs CUDA toolkit 13 or newer, and there is no nvcc"):
        backend.resolved({"cmake.define.CROSSDOCK_CUDA": "ON"})
    with pytest.raises(SystemExit, match="CROSSDOCK_CUDA is MAYBE, allowed: ON, OFF, AUTO"):
        backend.get_requires_for_build_wheel({"cmake.define.CROSSDOCK_CUDA": "maybe"})


def test_a_toolkit_that_is_too_old(backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_nvcc(tmp_path, 12)
    assert backend.resolved({})["cmake.define.CROSSDOCK_CUDA"] == "OFF"
    monkeypatch.setenv("CROSSDOCK_CUDA", "ON")
    with pytest.raises(SystemExit, match=r"and .*/bin/nvcc is of CUDA toolkit 12"):
        backend.get_requires_for_build_wheel()


def test_a_toolkit_without_a_gpu(backend: ModuleType, tmp_path: Path) -> None:
    """GPU code takes long to compile, and what has no GPU hardly wants it: only if it is asked for."""
    make_nvcc(tmp_path, 13)
    assert backend.get_requires_for_build_wheel() == ["ninja"]
    assert backend.resolved(None) == {"cmake.define.CROSSDOCK_CUDA": "OFF"}
    assert "CPU backends only: there is no GPU; with it: -C cmake.define.CROSSDOCK_CUDA=ON" in backend.said[-1]
    asked = backend.resolved({"cmake.define.CROSSDOCK_CUDA": "ON"})
    assert asked["cmake.define.CROSSDOCK_CUDA_ARCHITECTURES"] == "90"
    assert "for sm_90 (no GPU is here)" in backend.said[-1]


def test_an_older_python(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is refused before pip brings anything for the build."""
    monkeypatch.setattr(backend.sys, "version_info", (3, 10, 12))
    with pytest.raises(SystemExit, match=r"crossdock needs Python 3\.11 or newer, not "):
        backend.get_requires_for_build_wheel()


def test_a_toolkit(backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_nvcc(tmp_path, 13)
    make_gpu(tmp_path, monkeypatch)
    assert backend.get_requires_for_build_wheel() == ["ninja", "nvidia-nccl-cu13==2.30.7"]
    assert backend.get_requires_for_build_wheel({"cmake.define.CROSSDOCK_CUDA": "OFF"}) == ["ninja"]
    include = tmp_path / "nvidia" / "nccl" / "include"
    make_nccl(include, 23007)
    assert backend.get_requires_for_build_wheel() == ["ninja"]
    found = backend.resolved({"cmake.build-type": "Debug"})
    assert found == {
        "cmake.build-type": "Debug",
        "cmake.define.CROSSDOCK_CUDA": "ON",
        "cmake.define.CMAKE_CUDA_COMPILER": str(tmp_path / "bin" / "nvcc"),
        "cmake.define.CROSSDOCK_CUDA_ARCHITECTURES": "90;90-virtual",
        "cmake.define.CROSSDOCK_NCCL_INCLUDE": str(include),
    }
    monkeypatch.setenv("CROSSDOCK_NCCL_INCLUDE", "/elsewhere")
    assert backend.resolved(None)["cmake.define.CROSSDOCK_NCCL_INCLUDE"] == "/elsewhere"
    monkeypatch.setenv("CROSSDOCK_CUDA", "off")
    assert backend.resolved(None) == {"cmake.define.CROSSDOCK_CUDA": "OFF"}


@pytest.mark.parametrize("code", [22809, 23203])
def test_headers_that_do_not_fit(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    make_nvcc(tmp_path, 14)
    make_gpu(tmp_path, monkeypatch)
    make_nccl(tmp_path / "nvidia" / "nccl" / "include", code)
    assert backend.get_requires_for_build_wheel() == ["ninja", "nvidia-nccl-cu13==2.30.7"]


@pytest.mark.parametrize(
    ("capability", "architectures", "names", "reason"),
    [
        ("9.0", "90;90-virtual", "sm_90, PTX of compute_90", "GPUs here: compute capability 9.0"),
        ("10.3\\n10.0", "100f;103-virtual", "sm_100f, PTX of compute_103", "GPUs here: compute capability 10.0, 10.3"),
        ("12.0\\n8.6\\n8.6", "86;120;120-virtual", "sm_86, sm_120, PTX of compute_120", "capability 8.6, 12.0"),
        ("7.5\\n8.9", "89;89-virtual", "sm_89, PTX of compute_89", "capability 7.5, 8.9"),
        ("7.5", "90", "sm_90", "compute capability 7.5, too old: 8.0 or newer is needed"),
    ],
)
def test_architectures_of_the_gpus_here(
    backend: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capability: str,
    architectures: str,
    names: str,
    reason: str,
) -> None:
    """And PTX for newer ones, unless others are asked for; both are reported."""
    make_nvcc(tmp_path, 13)
    make_gpu(tmp_path, monkeypatch, capability)
    assert backend.resolved(None)["cmake.define.CROSSDOCK_CUDA_ARCHITECTURES"] == architectures
    assert f"for {names} (" in backend.said[-1]
    assert f"{reason}), with {tmp_path}/bin/nvcc of CUDA 13" in backend.said[-1]
    asked = {"cmake.define.CROSSDOCK_CUDA_ARCHITECTURES": "90;100f"}
    assert backend.resolved(asked)["cmake.define.CROSSDOCK_CUDA_ARCHITECTURES"] == "90;100f"
    assert "for sm_90, sm_100f (CROSSDOCK_CUDA_ARCHITECTURES)" in backend.said[-1]


def test_a_build_leaves_no_folder(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the checkout nor elsewhere, unless one was named."""
    used: list[str] = []

    def build(folder: str, settings: dict[str, str], metadata: str | None) -> str:
        used.append(settings["build-dir"])
        assert metadata is None and folder == "dist"
        return "name.whl"

    monkeypatch.setattr(backend.core, "build_wheel", build)
    assert backend.build_wheel("dist") == "name.whl"
    assert ROOT not in Path(used[0]).parents and not Path(used[0]).exists()
    backend.build_wheel("dist", {"build-dir": "build/mine-{wheel_tag}"})
    assert used[1] == "build/mine-{wheel_tag}"
    assert "build-dir" not in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("is_file", [False, True])
def test_lines_reach_whoever_runs_pip(tmp_path: Path, is_file: bool) -> None:
    """pip captures what a build prints; its own standard error, where that is no file, shows the line nevertheless."""
    build = "import crossdock_build_progress as progress; progress.say('3 of 9 files compiled')"
    pip = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {build!r}], capture_output=True, check=True)"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python" / "backend")}
    with (tmp_path / "log").open("w+") as log:
        to = log if is_file else subprocess.PIPE
        done = subprocess.run([sys.executable, "-c", pip], env=environment, text=True, stderr=to, timeout=60)
        log.seek(0)
        said = log.read() if is_file else done.stderr
    assert done.returncode == 0
    assert said == ("" if is_file else "crossdock: 3 of 9 files compiled\n")


def test_progress_counts_what_is_compiled(backend: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "py3"
    folder.mkdir()
    assert backend.progress.count(tmp_path) == (0, 0)
    (folder / "build.ninja").write_text(
        "build a.o: CXX_COMPILER__core_Release a.cpp\nbuild b.o: CUDA_COMPILER__core_Release b.cu\n"
        "build core.so: CXX_SHARED_LIBRARY_LINKER__core_Release a.o b.o\nbuild all: phony core.so\n"
    )
    assert backend.progress.count(tmp_path) == (0, 2)
    (folder / ".ninja_log").write_text("# ninja log v5\n0\t9\t1\ta.o\tabc\n9\t10\t1\tcore.so\tdef\n")
    assert backend.progress.count(tmp_path) == (1, 2)
    assert backend.progress.count(folder) == (1, 2)
