# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's nccl_ep backend on Crossdock, on CPUs: its own files over the real nccl.ep, four ranks as threads.

    python tests/engines/check_flashinfer.py [CASE...]

Nothing of FlashInfer and nccl.ep is changed; only what asks a GPU is answered for it: tensors on "cuda" are on the CPU.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
import traceback
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import crossdock
import ranks
import wheels
from flashinfer_cases import CASES, Refused, World, load_engine

NUM_RANKS = 4


class OnCpu(TorchFunctionMode):
    """A rank's thread in which "cuda" is the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        given = dict(kwargs or {})
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = "cpu"
        given.pop("pin_memory", None)
        return func(*args, **given)


class Communicators:
    """Sets of communicators of all ranks; the first rank that asks for its n-th makes the n-th set."""

    def __init__(self) -> None:
        self._lock, self._sets = threading.Lock(), {}  # type: ignore[var-annotated]
        self._asked = [0] * NUM_RANKS

    def next_of(self, rank: int) -> int:
        with self._lock:
            number = self._asked[rank]
            self._asked[rank] += 1
            if number not in self._sets:
                self._sets[number] = crossdock.Communicator.create_threads(NUM_RANKS)
            return int(self._sets[number][rank].ptr)


def run_case(engine: Any, name: str) -> list[str]:
    """What went wrong, by rank. Refused: the library does not do that yet."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    communicators, failures = Communicators(), [""] * NUM_RANKS
    refused: list[str] = []

    def run_rank(rank: int) -> None:
        world = World(
            engine,
            rank,
            NUM_RANKS,
            communicators.next_of(rank),
            store,
            "cpu",
            lambda _: communicators.next_of(rank),
        )
        try:
            with OnCpu():
                CASES[name](world)
        except Refused as reason:
            refused.append(str(reason))
        except BaseException:
            failures[rank] = traceback.format_exc()

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if refused and not any(failures):
        raise Refused(refused[0])
    return [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text]


def check() -> int:
    if importlib.util.find_spec("nccl") is None or importlib.util.find_spec("nccl.ep") is None:
        raise wheels.Skip("the wheels nccl-extensions and nccl4py are not installed")
    home = wheels.folder(wheels.FLASHINFER)
    print(crossdock.take_over_nccl_ep())
    torch.set_num_threads(1)
    mock.patch("torch.cuda.is_current_stream_capturing", lambda: False).start()
    mock.patch("torch.cuda.current_stream", lambda *_: SimpleNamespace(cuda_stream=0)).start()
    engine, names, num_failed, num_refused = load_engine(home), sys.argv[1:] or list(CASES), 0, 0
    for name in names:
        start = time.monotonic()
        try:
            failures = run_case(engine, name)
        except Refused as reason:
            num_refused += 1
            print(f"refused {name}: {reason}", flush=True)
            continue
        print(f"{'FAILED' if failures else 'ok':7} {name} ({time.monotonic() - start:.1f} s)", flush=True)
        num_failed += bool(failures)
        print("".join(failures), end="")
    num_passed = len(names) - num_failed - num_refused
    numbers = f"{num_passed} cases passed, {num_failed} failed, {num_refused} refused"
    print(f"FlashInfer {wheels.FLASHINFER.version}: {numbers}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    ranks.main("flashinfer", check)
