# SPDX-License-Identifier: Apache-2.0
"""What a machine with GPUs and without a network needs, in parts that are small enough to carry there.

    vllm        vLLM's wheel without the code of other GPUs and without what no run here uses
    site        packages that vLLM imports and the machine lacks
    nccl        NCCL, which has to be newer than torch's
    crossdock   the Python package with its library for GPUs (--crossdock)
    programs    this folder, its neighbours that it imports, and the plugin's entry point

Each is an archive. unpack() puts all archives that it finds under one folder.
"""

from __future__ import annotations

import argparse
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import slim
import wheels

HERE = Path(__file__).resolve().parent
PYTHON = "3.12"
VLLM = wheels.Wheel("vllm", "0.26.0", 290, python=PYTHON)
NCCL = wheels.Wheel("nvidia-nccl-cu13", "2.30.7", 210, r"nvidia/nccl/lib/", python=PYTHON)

# vLLM pins torch 2.11.0. These versions go with it, with Python 3.12 and with transformers 5.17.
PACKAGES = """
    annotated_types==0.8.0 apache_tvm_ffi==0.1.15.post2 astor==0.8.1 blake3==1.0.11 cachetools==8.0.2 cbor2==6.3.0
    compressed_tensors==0.17.0 depyf==0.20.0 dill==0.4.1 distro==1.9.0 fastapi==0.136.1 ijson==3.6.0 jiter==0.19.0
    jsonschema==4.26.0 jsonschema_specifications==2025.9.1 lark==1.2.2 llguidance==1.7.3 loguru==0.7.3 msgspec==0.22.0
    openai==2.29.0 openai_harmony==0.0.8 partial_json_parser==0.2.1.1.post7 pybase64==1.5.1 pydantic==2.14.4
    pydantic_core==2.50.5 python_json_logger==4.2.0 pyzmq==27.3.0 referencing==0.37.0 rpds_py==2026.9.1
    setproctitle==1.3.8 sniffio==1.3.1 starlette==1.10.0 typing_inspection==0.4.5 xgrammar==0.2.8
    jmespath==1.1.0 model_hosting_container_standards==0.1.16 prometheus_fastapi_instrumentator==8.1.0 uvicorn==0.54.0
    watchfiles==1.3.0
""".split()

# FA3 serves Hopper, so FA2 stays behind; the others are of other GPUs or other models. DeepGEMM is compiled for each
# Python; its headers are needed at run time.
LEFT_OUT = (
    "vllm/_flashmla",
    "vllm/_qutlass",
    "vllm/third_party/fmha_sm100/",
    "vllm/third_party/tml_fa4/",
    "vllm/vllm-rs",
    "vllm/vllm_flash_attn/_vllm_fa2_C",
    *(f"vllm/third_party/deep_gemm/_C.cpython-3{minor}-" for minor in (10, 11, 13, 14)),
)
NEIGHBOURS = ("slim.py", "wheels.py")
ENTRY_POINTS = "[vllm.general_plugins]\nvllm_e2e = vllm_e2e.plugin:register\n"


def platforms() -> list[str]:
    """pip matches names of platforms exactly."""
    names = [f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 18, 24, 26, 27, 28, 31, 34, 35)]
    return [*names, "manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]


def download(names: Sequence[str], into: Path) -> list[Path]:
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    command += [word for abi in ("cp312", "abi3", "none") for word in ("--abi", abi)]
    command += [word for platform in platforms() for word in ("--platform", platform)]
    subprocess.run([*command, "-d", str(into), *names], check=True)
    return sorted(into.glob("*.whl"))


def archive(folder: Path, out: Path) -> None:
    """The folder's content; one thread, since xz's memory grows with each."""
    with lzma.open(out, "wb", preset=6) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name, filter=lambda file: None if "__pycache__" in file.name else file)


def pack_vllm(scratch: Path, out: Path, architecture: int) -> None:
    [wheel] = download([f"{VLLM.name}=={VLLM.version}"], scratch / "wheel")
    tree = scratch / "tree"
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if not name.startswith(LEFT_OUT)]
        file.extractall(tree / "site", names)
    for library in tree.rglob("*.so"):
        slim.slim(library, architecture)
    archive(tree, out)


def pack_site(scratch: Path, out: Path, _: int) -> None:
    tree = scratch / "tree"
    for wheel in download(PACKAGES, scratch / "wheels"):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(tree / "site")
    archive(tree, out)


def pack_nccl(scratch: Path, out: Path, architecture: int) -> None:
    library = scratch / "tree" / "nccl" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    shutil.copy(next(wheels.folder(NCCL).rglob("libnccl.so.2")), library)
    if slim.slim(library, architecture) == 0:
        raise ValueError(f"{NCCL} has no device code for sm_{architecture}")
    archive(scratch / "tree", out)


def pack_programs(scratch: Path, out: Path, _: int) -> None:
    programs = scratch / "tree" / "programs"
    shutil.copytree(HERE, programs / "vllm_e2e", ignore=shutil.ignore_patterns("__pycache__", "test_*"))
    for name in NEIGHBOURS:
        shutil.copy(HERE.parent / name, programs)
    information = programs / "vllm_e2e-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-e2e\nVersion: 1\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    archive(scratch / "tree", out)


def pack_crossdock(package: Path, scratch: Path, out: Path) -> None:
    """From a wheel, or from a folder crossdock."""
    site = scratch / "tree" / "site"
    if package.is_file():
        with zipfile.ZipFile(package) as file:
            file.extractall(site)
    else:
        shutil.copytree(package, site / "crossdock", ignore=shutil.ignore_patterns("__pycache__", "*.pyi"))
    for library in site.rglob("*.so*"):
        if library.is_file() and not library.is_symlink():
            subprocess.run(["strip", "--strip-unneeded", library], check=True)
    archive(scratch / "tree", out)


PACKERS = {"vllm": pack_vllm, "site": pack_site, "nccl": pack_nccl, "programs": pack_programs}


def bins(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in as few parts as first fit needs, the largest first."""
    found: list[list[str]] = []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if sizes[name] > limit:
            raise ValueError(f"--part-mib is {limit / 2**20:.0f}, but {name} alone has {sizes[name] / 2**20:.1f} MiB")
        for part in found:
            if sum(sizes[other] for other in part) + sizes[name] <= limit:
                part.append(name)
                break
        else:
            found.append([name])
    return found


def pack(options: argparse.Namespace) -> int:
    os.environ["CROSSDOCK_ENGINES_MIB"] = "0"
    out: Path = options.folder
    kept: Path = options.keep or out / "archives"
    kept.mkdir(parents=True, exist_ok=True)
    for name, packer in PACKERS.items():
        target = kept / f"{name}.tar.xz"
        if name == "programs" or not target.exists():
            with tempfile.TemporaryDirectory() as scratch:
                packer(Path(scratch), target, options.architecture)
    if options.crossdock is not None:
        with tempfile.TemporaryDirectory() as scratch:
            pack_crossdock(options.crossdock, Path(scratch), kept / "crossdock.tar.xz")
    sizes = {file.name: file.stat().st_size for file in kept.glob("*.tar.xz")}
    for old in out.glob("part[0-9]*"):
        shutil.rmtree(old)
    for number, names in enumerate(bins(sizes, options.part_mib << 20), 1):
        part = out / f"part{number}"
        part.mkdir(parents=True)
        for name in names:
            shutil.copy(kept / name, part)
        shutil.copy(HERE / "unpack.py", part)
        total = sum(file.stat().st_size for file in part.iterdir())
        print(f"{total / 2**20:6.1f} MiB  {part}: " + ", ".join(f"{name} {sizes[name] / 2**20:.1f}" for name in names))
    if "crossdock.tar.xz" not in sizes:
        print("without Crossdock: pack again with --crossdock; what is packed already is kept")
    return 0
