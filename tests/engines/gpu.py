# SPDX-License-Identifier: Apache-2.0
"""The engines that need a GPU: FlashInfer's nccl_ep backend, TransformerEngine's EP interface, Megatron-Core's ncclep
dispatcher, its training of a small MoE GPT over DeepEP's classes, and those classes.

Where there is a network, with a build of the library for GPUs and the Python package for the other machine's Python:

    python tests/engines/gpu.py pack FOLDER --library build/cuda/src/libnccl_ep.so.0 --package PACKAGE [--python 3.12]

makes a folder of less than 64 MiB. With --only megatron_gpt, the folder is for that program alone, and half as large.
Where there is a GPU, with Python, torch for CUDA 13, NumPy and cuda-bindings:

    python3 FOLDER/tests/gpu.py run [--ranks 4] [--only flashinfer] [--dry-run]

runs all cases, each on all ranks, which may share one GPU, and prints a table. --deep-ep-tests names the tests folder
of a checkout of DeepEP 2, whose own test programs then run, too, unchanged. --megatron-gpt "--hidden 2048 losses" is
for gpu_megatron_gpt.py.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import ranks
import slim
import wheels

HERE = Path(__file__).resolve().parent
LIMIT_MIB = 64
WORDS = ("ok", "refused", "FAILED")
# DeepEP's own tests in a checkout, with arguments. Where ranks share a GPU, the thousands of calls that they time take
# turns, and the times say nothing.
DEEP_EP_TESTS = {
    "legacy/test_low_latency.py": [],
    "legacy/test_intranode.py": ["--num-tokens", "512"],
    "elastic/test_ep.py": ["--num-tokens", "512", "--skip-perf-test"],
}


# --- pack


def wheel_for(wheel: wheels.Wheel, python: str) -> wheels.Wheel:
    return wheels.Wheel(wheel.name, wheel.version, wheel.mib, wheel.parts, python)


def pack(options: argparse.Namespace) -> int:
    """Collects everything; what is large is stripped of other GPUs' code."""
    os.environ["CROSSDOCK_ENGINES_MIB"] = "0"
    out: Path = options.folder
    shutil.rmtree(out, ignore_errors=True)
    for name in ("tests", "packed"):
        (out / name).mkdir(parents=True)
    for file in [*HERE.glob("*.py"), *HERE.parents[1].glob("python/tests/deep_ep_*.py")]:
        if not file.name.startswith("test_"):
            shutil.copy(file, out / "tests")
    is_all = not options.only
    with tempfile.TemporaryDirectory() as name:
        site = Path(name)
        # Separate folders: Megatron-Core must not find TransformerEngine on its path.
        only_python = shutil.ignore_patterns("*.so", "*.cpp", "*.dist-info")
        shutil.copytree(wheels.folder(wheels.MEGATRON), site / "megatron_core", ignore=only_python)
        if is_all:
            # The bindings of nccl.ep and nccl4py; NVIDIA's own library stays behind.
            for package, version in (("nccl-extensions", "0.1.0"), ("nccl4py", "0.6.0")):
                part = wheels.Wheel(package, version, 22, r"nccl/(?!ep/lib|ep/include|m2n)", options.python)
                shutil.copytree(wheels.folder(part), site, dirs_exist_ok=True)
            shutil.copytree(wheels.folder(wheels.FLASHINFER), site / "engines")
            shutil.copytree(wheels.folder(wheels.TRANSFORMER_ENGINE_EP), site / "transformer_engine_ep")
        if options.package is not None:
            copy_package(options.package, site)
        shutil.copy(options.library, site / "libnccl_ep.so.0")
        for library in site.rglob("*.so*"):
            subprocess.run(["strip", "--strip-unneeded", library], check=True)
        with tarfile.open(out / "packed" / "site.tar.xz", "w:xz") as archive:
            archive.add(site, "site", filter=lambda file: None if "__pycache__" in file.name else file)
    libraries = [(wheels.NCCL, "libnccl.so.2"), (wheels.TRANSFORMER_ENGINE, "libtransformer_engine.so")]
    for wheel, name in libraries if is_all else libraries[:1]:
        source = next(wheels.folder(wheel_for(wheel, options.python)).rglob(name))
        slim.pack(source, out / "packed" / f"{name}.xz", options.architecture)
    total = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    for file in sorted(out.rglob("*"), key=lambda file: -file.stat().st_size)[:8]:
        print(f"{file.stat().st_size / 2**20:6.1f} MiB  {file.relative_to(out)}")
    print(f"{total / 2**20:6.1f} MiB  {out}")
    if total > LIMIT_MIB << 20:
        print(f"gpu.py: more than {LIMIT_MIB} MiB")
        return 1
    return 0


def copy_package(package: Path, site: Path) -> None:
    """crossdock from a wheel, or from its unpacked or built folder; its library is packed on its own."""
    target = site / "crossdock"
    if package.is_file():
        with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(package) as archive:
            archive.extractall(scratch)
            shutil.copytree(Path(scratch, "crossdock"), target, ignore=shutil.ignore_patterns("lib", "include"))
    else:
        shutil.copytree(package, target, ignore=shutil.ignore_patterns("*.pyi", "lib", "include"))


# --- run


@dataclass
class Part:
    """A program that runs on all ranks; own: cases that each end their ranks."""

    engine: str
    program: str
    arguments: list[str]
    cases: list[str]
    own: list[str] = field(default_factory=list)
    loading: str = "EAGER"
    figures: list[str] = field(default_factory=list)  # that its ranks printed, for the table


def library_folders() -> list[str]:
    """Where NVIDIA's wheels have their libraries: TransformerEngine does not find them by itself."""
    found = importlib.util.find_spec("nvidia")
    homes = found.submodule_search_locations if found is not None and found.submodule_search_locations else []
    return [str(folder) for home in homes for folder in sorted(Path(home).glob("*/lib"))]


def environment(root: Path, part: Part) -> dict[str, str]:
    work = root / "work"
    folders = [str(work), *library_folders(), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {
        "PYTHONPATH": os.pathsep.join([str(root / "work" / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "LD_LIBRARY_PATH": ":".join(folders),
        "LD_PRELOAD": f"{work}/libnccl.so.2:{work}/libnccl_ep.so.0",
        "NCCL_EP_HOME": str(work / "home"),
        "NCCL_EP_JIT_BUILD_INCLUDE_DIR": str(work / "home"),  # for TransformerEngine, which looks for headers otherwise
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "CUDA_MODULE_LOADING": part.loading,
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def prepare(root: Path) -> None:
    """Unpacks the libraries into work, with the names that loaders and TransformerEngine look for."""
    work = root / "work"
    shutil.rmtree(work, ignore_errors=True)
    (work / "home" / "lib").mkdir(parents=True)
    for packed in (root / "packed").glob("*.so*.xz"):
        slim.unpack(packed, work / packed.stem)
    with tarfile.open(root / "packed" / "site.tar.xz") as archive:
        archive.extractall(work, filter="data")
    (work / "site" / "libnccl_ep.so.0").rename(work / "libnccl_ep.so.0")
    (work / "home" / "lib" / "libnccl_ep.so").symlink_to(work / "libnccl_ep.so.0")


def start(root: Path, part: Part, names: list[str], num_ranks: int, log: Path) -> list[ranks.Process]:
    command = [sys.executable, str(root / "tests" / part.program), *part.arguments, *names]
    with log.open("ab") as file:
        return ranks.start(command, num_ranks, os.environ | environment(root, part), stdout=file, stderr=file)


def wait(processes: list[ranks.Process], timeout_s: float, grace_s: float = 15) -> bool:
    """Until rank 0 has ended, or another failed; the rest have the grace, and are then ended. False: too long."""
    deadline = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in processes):
            now = time.monotonic()
            has_ended = processes[0].poll() is not None or any(process.poll() for process in processes)
            if has_ended:
                deadline = min(deadline, now + grace_s)
            if now > deadline:
                return has_ended
            time.sleep(0.1)
        return True
    finally:
        for process in processes:
            process.kill()
            process.wait()


def outcomes(log: Path) -> Iterator[tuple[str, str]]:
    """Each case with the word that the log has for it, in order; a case that only started has failed."""
    started = ""
    for line in log.read_text(errors="replace").splitlines():
        word, _, name = line.partition(" ")
        name = name.strip()
        if word == "start":
            started = name
        elif word in WORDS and name:
            yield name, word
            started = ""
    if started:
        yield started, "FAILED"


def run_part(root: Path, part: Part, options: argparse.Namespace, log: Path) -> dict[str, str]:
    """All cases of it. After one that failed, the others start again in new processes."""
    found: dict[str, str] = {}
    groups = [part.cases, *([name] for name in part.own)]
    for group in groups:
        left = list(group)
        while left:
            step = log.with_name(f"{log.stem}-{len(found)}.log")
            step.unlink(missing_ok=True)
            # The survivors of a rank that ends itself have work to do.
            grace_s = 60 if left[0] in part.own else 15
            is_over = wait(start(root, part, left, options.ranks, step), options.timeout, grace_s)
            before = len(found)
            found |= {name: word for name, word in outcomes(step) if name in left}
            if len(found) == before:
                found[left[0]] = "FAILED"
            if not is_over:
                print(f"{part.engine}: no end within {options.timeout} s, see {step}", flush=True)
            for name in list(left):
                if name in found:
                    left.remove(name)
                    if found[name] != "ok":
                        print(f"{part.engine:20} {found[name]:8} {name}", flush=True)
            if any(word == "FAILED" for name, word in found.items() if name in group):
                print(tail(step), flush=True)
    return found


def tail(log: Path, num_lines: int = 30) -> str:
    return "\n".join("    " + line for line in log.read_text(errors="replace").splitlines()[-num_lines:])


def run_deep_ep(root: Path, part: Part, options: argparse.Namespace, log: Path) -> dict[str, str]:
    """It starts its ranks itself."""
    command = [sys.executable, str(root / "tests" / part.program), "--ranks", str(options.ranks)]
    with log.open("wb") as file:
        base = os.environ | environment(root, part)
        try:
            done = subprocess.run(command, env=base, stdout=file, stderr=file, timeout=options.timeout).returncode == 0
        except subprocess.TimeoutExpired:
            done = False
    found = dict(outcomes(log))
    for name in part.cases:
        found.setdefault(name, "FAILED")
    if not done:
        print(tail(log), flush=True)
    return found


def run_deep_ep_tests(root: Path, part: Part, options: argparse.Namespace, log: Path) -> dict[str, str]:
    """Each starts its ranks itself, and fails if one of them does."""
    found: dict[str, str] = {}
    base = os.environ | environment(root, part)
    folder = root / "work" / "site" / "crossdock" / "launcher" / "deep_ep_path"
    base["PYTHONPATH"] = os.pathsep.join([str(folder), base["PYTHONPATH"]])
    for name, arguments in DEEP_EP_TESTS.items():
        step = log.with_name(f"{log.stem}-{Path(name).stem}.log")
        command = [sys.executable, str(options.deep_ep_tests / name), "--num-processes", str(options.ranks), *arguments]
        base["MASTER_PORT"] = str(ranks.free_port())
        with step.open("wb") as file:
            process = subprocess.Popen(command, env=base, stdout=file, stderr=file, start_new_session=True)
            try:
                process.wait(options.timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        found[name] = "ok" if process.wait() == 0 else "FAILED"
        if found[name] != "ok":
            print(tail(step), flush=True)
    return found


def run_megatron_gpt(root: Path, part: Part, options: argparse.Namespace, log: Path) -> dict[str, str]:
    """Under torchrun. After a case that ended its ranks, the others start again; its lines behind "|" are printed."""
    found: dict[str, str] = {}
    words = shlex.split(options.megatron_gpt)
    given = [word for word in words if word in part.cases]
    left = given or list(part.cases)
    while left:
        step = log.with_name(f"{log.stem}-{len(found)}.log")
        port, program = str(ranks.free_port()), str(root / "tests" / part.program)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks)]
        command += ["--master-addr", "127.0.0.1", "--master-port", port]
        command += ["-m", "crossdock", "run", "--as-deep-ep", program]
        command += [*(word for word in words if word not in given), *left]
        base = os.environ | environment(root, part)
        base["PYTHONPATH"] = os.pathsep.join([base["PYTHONPATH"], *part.arguments])
        with step.open("wb") as file:
            process = subprocess.Popen(command, env=base, stdout=file, stderr=file, start_new_session=True)
            try:
                process.wait(options.timeout)
            except subprocess.TimeoutExpired:
                print(f"{part.engine}: no end within {options.timeout} s, see {step}", flush=True)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        lines = step.read_text(errors="replace").splitlines()
        part.figures += [line for line in lines if line.startswith("| ")]
        print("\n".join(line for line in lines if line.startswith("| ")), flush=True)
        new = {name: word for name, word in outcomes(step) if name in left}
        if process.returncode != 0 and len(new) < len(left):
            own = itertools.takewhile(lambda line: "torch/distributed/elastic" not in line, lines)
            said = [f"    {line}" for line in own if not line.startswith("| ")]
            print("\n".join(said[-60:]), flush=True)
        found |= new or dict.fromkeys(left, "FAILED")  # without a case that started, none would
        left = [name for name in left if name not in found]
    return found


RUNNERS = {  # the others: run_part
    "deep_ep_gpu.py": run_deep_ep,
    "deep_ep_tests": run_deep_ep_tests,
    "gpu_megatron_gpt.py": run_megatron_gpt,
}


def listed(root: Path, program: str) -> list[str]:
    """The cases of a program, which knows them without a GPU."""
    command = [sys.executable, str(root / "tests" / program), "-", "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def parts_of(root: Path, only: str) -> list[Part]:
    """Those with `only`, or one of its words between commas, in their program's name."""

    def is_chosen(program: str) -> bool:
        return any(word in program for word in only.split(","))

    def cases(program: str) -> list[str]:
        return listed(root, program) if is_chosen(program) else []

    flashinfer = cases("gpu_flashinfer.py")
    killed = [name for name in flashinfer if name.startswith("killed")]
    site, transformer = root / "work" / "site", str(root / "work" / "libtransformer_engine.so")
    parts = [
        Part(
            "FlashInfer",
            "gpu_flashinfer.py",
            [str(site / "engines")],
            [name for name in flashinfer if name not in killed],
            killed,
        ),
        Part(
            "TransformerEngine",
            "gpu_transformer_engine.py",
            [transformer],
            cases("gpu_transformer_engine.py"),
            loading="LAZY",
        ),
        Part(
            "Megatron-Core",
            "gpu_megatron.py",
            [transformer, str(site / "megatron_core"), str(site / "transformer_engine_ep")],
            cases("gpu_megatron.py"),
            loading="LAZY",
        ),
        Part(
            "Megatron-Core's GPT",
            "gpu_megatron_gpt.py",
            [str(site / "megatron_core")],
            cases("gpu_megatron_gpt.py"),
            loading="LAZY",
        ),
        Part(
            "DeepEP's classes",
            "deep_ep_gpu.py",
            [],
            ["routing", "low_latency", "receive_tensors", "normal", "elastic"],
        ),
        Part("DeepEP's own tests", "deep_ep_tests", [], list(DEEP_EP_TESTS)),
    ]
    return [part for part in parts if is_chosen(part.program)]


def reason_to_skip(root: Path, part: Part, options: argparse.Namespace) -> str:
    if part.program == "deep_ep_tests" and options.deep_ep_tests is None:
        return "--deep-ep-tests is not given"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return "no GPU"
    needs_package = part.program.startswith(("deep_ep", "gpu_megatron_gpt"))
    if needs_package and not list((root / "work" / "site" / "crossdock").glob("_core*.so")):
        return "the folder was packed without --package"
    absent = next((Path(word).name for word in part.arguments if not Path(word).exists()), "")
    return f"the folder has no {absent}: pack it without --only, and copy all of it" if absent else ""


def run(options: argparse.Namespace) -> int:
    root = HERE.parent
    parts = parts_of(root, options.only)
    if not parts:
        print(f"gpu.py: no engine's program has '{options.only}' in its name")
        return 2
    prepare(root)
    if options.dry_run:
        for part in parts:
            number = len(part.cases) + len(part.own)
            print(f"{part.engine}: {number} cases, {reason_to_skip(root, part, options) or 'would run'}")
            for name, value in environment(root, part).items():
                print(f"    {name}={value}")
            print("\n".join(f"    {name}" for name in [*part.cases, *part.own]))
        return 0
    logs = Path(options.logs or root / "logs")
    logs.mkdir(parents=True, exist_ok=True)
    rows, has_failed = [], False
    for part in parts:
        reason, begin = reason_to_skip(root, part, options), time.monotonic()
        if reason:
            rows.append(f"{part.engine:20} skipped: {reason}")
            continue
        log = logs / f"{part.program}.log"
        found = RUNNERS.get(part.program, run_part)(root, part, options, log)
        numbers = [sum(word == of for word in found.values()) for of in WORDS]
        has_failed |= numbers[2] > 0
        took = time.monotonic() - begin
        rows.append(f"{part.engine:20} {numbers[0]} ok, {numbers[1]} refused, {numbers[2]} failed in {took:.0f} s")
        print(rows[-1], flush=True)
        print("\n".join(f"    {word:8} {name}" for name, word in found.items()), flush=True)
    table = "\n".join([f"{options.ranks} ranks", *rows, *(line for part in parts for line in part.figures)])
    (logs / "table.txt").write_text(table + "\n")
    print("\n".join(["", f"{options.ranks} ranks", *rows]))
    return 1 if has_failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    packing = commands.add_parser("pack", help="make a folder for a machine with a GPU")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--library", type=Path, required=True, help="libnccl_ep.so.0 of a build for GPUs")
    packing.add_argument("--package", type=Path, help="crossdock's wheel, or a build's python/crossdock, for --python")
    packing.add_argument("--only", choices=["megatron_gpt"], help="leave out what other programs need")
    packing.add_argument("--python", default="3.12", help="the other machine's Python (3.12)")
    packing.add_argument("--architecture", type=int, default=90, help="of the GPU (90)")
    packing.set_defaults(do=pack)
    running = commands.add_parser("run", help="run the cases of this folder here")
    running.add_argument("--ranks", type=int, default=4)
    running.add_argument(
        "--only",
        default="",
        help="some of flashinfer, transformer_engine, megatron, megatron_gpt, deep_ep_gpu, deep_ep_tests, with commas",
    )
    running.add_argument("--megatron-gpt", default="", metavar="WORDS", help="options and cases of gpu_megatron_gpt.py")
    running.add_argument(
        "--deep-ep-tests", type=Path, metavar="FOLDER", help="the tests folder of a checkout of DeepEP 2"
    )
    running.add_argument("--timeout", type=float, default=300, help="for one program's run, in seconds")
    running.add_argument("--logs", help="where logs go (FOLDER/logs)")
    running.add_argument("--dry-run", action="store_true", help="unpack, and show cases and environment")
    running.set_defaults(do=run)
    options = parser.parse_args()
    folder = getattr(options, "deep_ep_tests", None)
    missing = [name for name in DEEP_EP_TESTS if folder is not None and not (folder / name).exists()]
    if missing:
        parser.error(f"--deep-ep-tests is {folder}, which has no {missing[0]}: name the tests folder of DeepEP 2")
    return int(options.do(options))


if __name__ == "__main__":
    sys.exit(main())
