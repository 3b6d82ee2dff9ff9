# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel communication for Mixture-of-Experts models, on CPUs and GPUs.

    comms = crossdock.Communicator.create_threads(4)            # one per rank; see also join and adopt
    with crossdock.Group(comm, num_experts=8, max_dispatch_tokens_per_rank=16, max_token_bytes=256) as group:
        handle = group.create_handle(crossdock.Layout.EXPERT_MAJOR, topk_idx)
        handle.dispatch(tokens, received, layout_info=crossdock.LayoutInfo(expert_counters=counts))
        ...                                                     # the experts
        handle.combine(received, crossdock.CombineOutputs(tokens=result, topk_weights=weights))

The classes and their fields are those of the C API (include/nccl_ep.h). If nccl.ep has a name for something, it is the
same here. crossdock.torch has dispatch and combine as operators with gradients, and a whole layer as a module.
"""

from __future__ import annotations

import crossdock.launcher.own_library as _own_library  # before _core, whose ImportError would say less
from crossdock._core import (
    A2sgd,
    A2sgdReport,
    Algorithm,
    AllocConfig,
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    CombineQuantizationRecipe,
    Communicator,
    Diagnosis,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    DispatchQuantizationRecipe,
    ExpertIdKind,
    Group,
    GroupConfig,
    Handle,
    HandleConfig,
    Layout,
    LayoutInfo,
    Memory,
    MemoryUse,
    OverflowPolicy,
    PassDir,
    Sums,
    Tensor,
    Traffic,
    Window,
    ZeroCopyMode,
    get_version,
    has_cuda,
)
from crossdock.allocator import AllocFn, FreeFn, address_of
from crossdock.copies import install as _install_copies
from crossdock.errors import (
    Error,
    InternalError,
    InvalidArgument,
    InvalidUsage,
    NotCopyable,
    RemoteError,
    SystemFailure,
    UnhandledCudaError,
)
from crossdock.launcher.as_deep_ep import install_as_deep_ep
from crossdock.launcher.take_over import take_over_nccl_ep
from crossdock.paths import get_cmake_dir, get_include, get_lib_path
from crossdock.run_ranks import run_processes, run_threads

__version__ = _own_library.version()
_install_copies()


def get_lib_version() -> str:
    """The version of NVIDIA's interface, as nccl.ep formats it: major.minor.patch."""
    code = get_version()
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


__all__ = [
    "A2sgd",
    "A2sgdReport",
    "Algorithm",
    "AllocConfig",
    "AllocFn",
    "CombineConfig",
    "CombineInputs",
    "CombineOutputs",
    "CombineQuantizationRecipe",
    "Communicator",
    "Diagnosis",
    "DispatchConfig",
    "DispatchInputs",
    "DispatchOutputs",
    "DispatchQuantizationRecipe",
    "Error",
    "ExpertIdKind",
    "FreeFn",
    "Group",
    "GroupConfig",
    "Handle",
    "HandleConfig",
    "InternalError",
    "InvalidArgument",
    "InvalidUsage",
    "Layout",
    "LayoutInfo",
    "Memory",
    "MemoryUse",
    "NotCopyable",
    "OverflowPolicy",
    "PassDir",
    "RemoteError",
    "Sums",
    "SystemFailure",
    "Tensor",
    "Traffic",
    "UnhandledCudaError",
    "Window",
    "ZeroCopyMode",
    "address_of",
    "get_cmake_dir",
    "get_include",
    "get_lib_path",
    "get_lib_version",
    "get_version",
    "has_cuda",
    "install_as_deep_ep",
    "run_processes",
    "run_threads",
    "take_over_nccl_ep",
]
