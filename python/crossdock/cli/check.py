# SPDX-License-Identifier: Apache-2.0
"""What each installed engine would use, from package metadata, without importing any of them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from crossdock.cli.table import aligned
from crossdock.errors import Error
from crossdock.launcher import engine_notes
from crossdock.launcher.as_deep_ep import deep_ep_message, distributions, other_deep_ep
from crossdock.launcher.program import Program, prepare
from crossdock.launcher.take_over import NCCL_EP_PACKAGES


def check(as_deep_ep: bool, plugin: str) -> int:
    """Prints a table; returns 0 unless something would be refused."""
    try:
        program = prepare(as_deep_ep, plugin)
    except Error as error:
        print(f"crossdock: {error}")
        return 2
    print(f"crossdock: {program.message()}\n")
    rows = [("engine", "installed", "would use")]
    for engine, packages, uses in ENGINES:
        found = _distribution(*packages) if packages else next(iter(distributions()), None)
        rows.append((engine, f"{found.name} {found.version}" if found else "no", uses(program, found) if found else ""))
    print("\n".join(aligned(rows)))
    return 1 if program.nccl and program.nccl.problem else 0


def _distribution(*names: str) -> Distribution | None:
    for name in names:
        try:
            return distribution(name)
        except PackageNotFoundError:
            pass
    return None


def _files(package: Distribution, name: str) -> list[Path]:
    return [Path(str(file.locate())) for file in package.files or [] if file.name == name]


def _contains(file: Path, text: bytes) -> bool:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0


def _nccl_ep(program: Program, _: Distribution) -> str:
    return program.nccl_ep_note() or f"{program.library}, whose functions the process has before nccl.ep opens its own"


def _flashinfer(program: Program, package: Distribution) -> str:
    if not any("moe_ep" in file.parts for file in package.files or []):
        return "nothing of it: this version has no moe_ep"
    if _distribution("nccl-extensions") is None:
        return "nothing of it: moe_ep's nccl_ep backend needs nccl.ep (pip install nccl-extensions)"
    return "moe_ep's backend nccl_ep: nccl.ep"


def _transformer_engine(program: Program, package: Distribution) -> str:
    own = [file for file in _files(package, "libtransformer_engine.so") if file.exists()]
    if not own or not _contains(own[0], b"NCCL_EP_HOME"):
        return "nothing of it: this version does not look for libnccl_ep.so"
    if not program.home_library:
        return "its own library: this build of Crossdock has no nccl_ep_home"
    bundled = [str(file) for file in _files(package, "libnccl_ep.so") if file.exists()]
    instead = f", by NCCL_EP_HOME; without, {bundled[0]}" if bundled else ", by NCCL_EP_HOME"
    return f"{program.library}{instead}"


def _megatron(_: Program, __: Distribution) -> str:
    return f"dispatcher flex: {_deep_ep()}; ncclep: TransformerEngine"


def _deep_ep_caller(_: Program, __: Distribution) -> str:
    return _deep_ep()


def _sglang(_: Program, __: Distribution) -> str:
    value = os.environ.get(engine_notes.CUMEM[0])
    if value is None:
        return f"{_deep_ep()}; it sets {engine_notes.CUMEM_NOTE}"
    effect = f", so {engine_notes.NO_NVLINK}" if value == "0" else ""
    return f"{_deep_ep()}; {engine_notes.CUMEM[0]} is {value}{effect}"


def _deep_ep() -> str:
    without = "that one" if other_deep_ep() else "there is none"
    return f"with --as-deep-ep {deep_ep_message()}; without, {without}"


ENGINES: tuple[tuple[str, tuple[str, ...], Callable[[Program, Distribution], str]], ...] = (
    ("nccl.ep", NCCL_EP_PACKAGES, _nccl_ep),
    ("FlashInfer", ("flashinfer-python",), _flashinfer),
    ("TransformerEngine", ("transformer-engine-cu13", "transformer-engine-cu12"), _transformer_engine),
    ("Megatron-Core", ("megatron-core",), _megatron),
    ("vLLM", ("vllm",), _deep_ep_caller),
    ("SGLang", ("sglang",), _sglang),
    ("torchtitan", ("torchtitan",), _deep_ep_caller),
    ("DeepEP", (), _deep_ep_caller),  # whichever distribution has the module
)
