# SPDX-License-Identifier: Apache-2.0
"""All engines on GPUs: ./dev engines-gpu packs a folder, whose program run runs its parts and prints their tables.

    python tests/engines/engines_gpu.py pack WHEEL FOLDER
    FOLDER/run [--ranks N] [PART...]

It has what gpu.py and vllm_e2e pack and run. A part takes at most nine minutes, for machines that end longer commands.
The machine needs Python 3.12 with torch for CUDA 13 and NumPy: for vLLM torch 2.11 and transformers, for FlashInfer
cuda-bindings. It needs no network.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT_S = 540
PYTHON = "3.12"
TORCH_OF_VLLM = "2.11."
RUN = """#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
exec python3 "$(dirname "$0")/engines/tests/engines_gpu.py" run "$@"
"""
PARTS = {  # the words for vllm_e2e or gpu.py
    "vllm": "--plan first",
    "vllm-fp8": "--plan fp8,variants",
    "vllm-prefill": "--plan prefill",
    "vllm-serve": "--plan serve",
    "vllm-kill": "--plan kill",
    "vllm-deep": "--plan deep",
    "megatron-gpt": "--only megatron_gpt",
    "others": "--only flashinfer,transformer_engine,gpu_megatron.py,deep_ep_gpu",
}


def pack(options: argparse.Namespace) -> int:
    wheel, folder = options.wheel.resolve(), options.folder.resolve()
    if not wheel.is_file() or "-cp312-" not in wheel.name:
        raise ValueError(f"WHEEL is {options.wheel}, expected: Crossdock's wheel for Python {PYTHON} (cp312)")
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch)
        package = Path(scratch, "crossdock")
        library = package / "lib" / "libnccl_ep.so.0"
        if not library.exists():
            raise ValueError(f"WHEEL is {options.wheel}, which has no crossdock/lib/{library.name}")
        folder.mkdir(parents=True, exist_ok=True)
        for words in (
            ["gpu.py", "pack", str(folder / "engines"), "--library", str(library), "--package", str(package)],
            ["vllm_e2e", "pack", str(folder / "vllm"), "--crossdock", str(package)],
        ):
            done = subprocess.run([sys.executable, str(HERE / words[0]), *words[1:]])
            if done.returncode != 0:
                return done.returncode
    shutil.rmtree(folder / "vllm" / "archives")
    (folder / "run").write_text(RUN)
    (folder / "run").chmod(0o755)
    print(f"copy {folder} to a machine with GPUs, and there call its program run")
    return 0


@dataclass
class Outcome:
    part: str
    word: str  # ok, FAILED, no end within ..., skipped: ...
    seconds: float = 0.0
    table: str = ""


def reason_to_skip(part: str, gpus: int) -> str:
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed"
    if gpus == 0:
        return "no GPU"
    if part.startswith("vllm") and not torch.startswith(TORCH_OF_VLLM):
        return f"vLLM needs torch {TORCH_OF_VLLM[:-1]}, and this is {torch}"
    return ""


def command_of(part: str, root: Path, num_ranks: int, gpus: int, logs: Path) -> list[str]:
    own = [*PARTS[part].split(), "--ranks", str(num_ranks), "--logs", str(logs)]
    if part.startswith("vllm"):
        own += ["--gpus", str(gpus), "--total", str(LIMIT_S - 40)]
        return [sys.executable, str(root / "vllm" / "home" / "programs" / "vllm_e2e"), "run", *own]
    return [sys.executable, str(root / "engines" / "tests" / "gpu.py"), "run", *own, "--timeout", str(LIMIT_S - 40)]


def unpack_vllm(root: Path) -> None:
    home, parts = root / "vllm" / "home", sorted((root / "vllm").glob("part[0-9]*"))
    if not (home / "programs").is_dir():
        subprocess.run([sys.executable, str(parts[0] / "unpack.py"), str(home), *map(str, parts)], check=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """First by Ctrl-C: a part that is interrupted ends what it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_part(part: str, command: list[str], logs: Path, limit_s: float = LIMIT_S) -> Outcome:
    """Its output goes to logs/output.txt; the table is what it wrote to logs/table.txt."""
    logs.mkdir(parents=True, exist_ok=True)
    table = logs / "table.txt"
    table.unlink(missing_ok=True)
    begin = time.monotonic()
    with (logs / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            word = "ok" if process.wait(limit_s) == 0 else "FAILED"
        except subprocess.TimeoutExpired:
            word = f"no end within {limit_s:.0f} s"
        finally:
            end(process)
    found = table.read_text().rstrip() if table.exists() else ""
    return Outcome(part, word, time.monotonic() - begin, found or "    no table: see " + str(logs / "output.txt"))


def report(outcomes: list[Outcome]) -> str:
    width = max(len(one.part) for one in outcomes)
    text = []
    for one in outcomes:
        if one.table:
            text += [f"=== {one.part}", one.table, ""]
    text += [f"{one.part:{width}}  {one.word}" + (f", {one.seconds:.0f} s" if one.table else "") for one in outcomes]
    return "\n".join(text)


def at_least_two(text: str) -> int:
    if not text.isdigit() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"is {text!r}, allowed: whole numbers of at least 2")
    return int(text)


def num_gpus() -> int:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except FileNotFoundError:
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def run(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    root, outcomes, gpus = HERE.parents[1], [], num_gpus()
    ranks = options.ranks or max(2, gpus)
    if 0 < gpus < ranks:
        print(f"{ranks} ranks share {gpus} GPU(s): times say nothing", flush=True)
    for part in options.parts or PARTS:
        reason = reason_to_skip(part, gpus)
        if reason:
            outcomes.append(Outcome(part, f"skipped: {reason}"))
        else:
            if part.startswith("vllm"):
                unpack_vllm(root)
            logs = options.logs.resolve() / part
            outcomes.append(run_part(part, command_of(part, root, ranks, gpus, logs), logs))
        print(f"{part}: {outcomes[-1].word}", flush=True)
    print("\n" + report(outcomes), flush=True)
    return 1 if any(one.word == "FAILED" or one.word.startswith("no end") for one in outcomes) else 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = result.add_subparsers(required=True)
    packing = commands.add_parser("pack", help="make a folder for a machine with GPUs")
    packing.add_argument("wheel", type=Path, metavar="WHEEL", help=f"Crossdock's, for GPUs and Python {PYTHON}")
    packing.add_argument("folder", type=Path, metavar="FOLDER")
    packing.set_defaults(do=pack)
    running = commands.add_parser("run", help="run parts of this folder here")
    running.add_argument("parts", nargs="*", metavar="PART", help=f"all of {', '.join(PARTS)} without it")
    running.add_argument("--ranks", type=at_least_two, default=0, help="one for each GPU, at least 2, without it")
    running.add_argument("--logs", type=Path, default=Path("logs"), help="where logs go (logs)")
    running.set_defaults(do=run)
    return result


def main() -> int:
    options = parser().parse_args()
    unknown = [part for part in getattr(options, "parts", []) if part not in PARTS]
    if unknown:
        parser().error(f"PART is {unknown[0]!r}, allowed: {', '.join(PARTS)}")
    try:
        return int(options.do(options))
    except ValueError as error:
        parser().error(str(error))


if __name__ == "__main__":
    sys.exit(main())
