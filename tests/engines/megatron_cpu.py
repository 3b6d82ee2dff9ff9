# SPDX-License-Identifier: Apache-2.0
"""Lets Megatron-Core's code for GPUs run on CPUs: no option of it keeps out its CUDA calls.

They are in the all-to-all dispatcher, the optimizer, gradient buffers, random numbers and checkpoints. Megatron is
unchanged; what it asks of torch.cuda is answered by the CPU.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class _CpuForCuda(TorchFunctionMode):
    """device="cuda" makes CPU tensors. Tensor.type, which Megatron's optimizer asks, says that they are on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **options)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def stand_in_for_cuda() -> None:
    """For the rest of the process. A CPU is its own and only stream."""
    from megatron.core.tensor_parallel import random

    stream = mock.MagicMock()
    calls = {
        "Stream": lambda *_, **__: stream,
        "current_stream": lambda *_: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda *_: None,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *_: torch.get_rng_state(),
    }
    mock.patch.multiple("torch.cuda", **calls).start()
    mock.patch.object(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()).start()
    mock.patch.object(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)).start()
    real = dist.all_to_all_single

    def with_lists(output: Any, rows: Any, *sizes: Any, **options: Any) -> Any:
        """Megatron makes lists of sizes where they are on a GPU, and leaves tensors on a CPU as they are."""
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(options.get(name), torch.Tensor):
                options[name] = options[name].tolist()
        return real(output, rows, *sizes, **options)

    mock.patch("torch.distributed.all_to_all_single", with_lists).start()
    _CpuForCuda().__enter__()
